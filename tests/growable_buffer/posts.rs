//! Operations on such memory: as on any other region, within a stripe and over several.

use crate::exchange::{LEN, lends, uses};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{Gpus, Kind, Went, heard, holds, over, receive, registered, send, told};
use crate::support::ranks::{Ranks, Role};
use crate::{STRIPE, buffer, stripes};
use carrack::alloc::GrowableBuffer;
use carrack::region::Region;
use carrack::{Rank, Tag};

/// gpu.md, VMM rule 2.
#[test]
fn it_is_sent_from_received_into_put_to_and_got_from_as_any_memory() {
    let _watchdog = Watchdog::over("posts");
    Ranks::start("posts", 2, &[]).succeed();
}

pub(crate) fn rank(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let mut all = buffer(&gpus, 4);
    all.grow_to(4 * STRIPE).unwrap();
    let one = &gpus.all[..1];
    let mut of_one = GrowableBuffer::reserve(one, 4 * STRIPE).stripe(STRIPE).build().unwrap();
    of_one.grow_to(4 * STRIPE).unwrap();
    let windows = [
        ("stripe of the first", stripes(&all)[0].subregion(77, LEN).unwrap()),
        ("stripe of the last", stripes(&all)[3].subregion(STRIPE - LEN, LEN).unwrap()),
        ("several", of_one.region(STRIPE - 99, LEN).unwrap()),
    ];
    for (name, window) in &windows {
        put_and_get(role, &gpus, &runtime, name, window);
        messages(role, &gpus, &runtime, window);
    }
    role.meet("over", &runtime, 0..2);
}

/// The peer maps it, also what lies over several stripes.
fn put_and_get(role: &Role, gpus: &Gpus, runtime: &carrack::Runtime, name: &str, window: &Region) {
    let kinds = [Kind::Host, Kind::Plain(1)];
    if role.rank == 0 {
        let mr = registered(role, runtime, name, window);
        assert!(mr.refused().iter().all(|(transport, _)| *transport != "cuda_ipc"), "{:?}", mr.refused());
        lends(role, runtime, (name, window), 1, &kinds);
        // A word of it, that the peer adds to.
        let word = window.slice(word_of(window.addr()), 8).unwrap();
        word.write(&5_u64.to_le_bytes()).unwrap();
        role.tells(&format!("{name} has a word"), &(word.offset() as u64).to_le_bytes());
        heard(role, runtime, &format!("{name} is added to"), 1);
        assert_eq!(word.to_vec().unwrap(), 65_u64.to_le_bytes());
        drop(mr);
    } else {
        let rmr = told(role, name, 0);
        heard(role, runtime, &format!("{name} is clear"), 0);
        for way in uses(role, runtime, gpus, (name, &rmr), &kinds) {
            assert_eq!(way, Went::Mapped, "{name}");
        }
        heard(role, runtime, &format!("{name} has a word"), 0);
        let at = u64::from_le_bytes(role.told(&format!("{name} has a word"), 0).try_into().unwrap());
        for _ in 0..20 {
            let add = over(runtime, |done| runtime.post_fetch_add(Rank(0), &rmr, at, 3).comp(done).call());
            assert_eq!(add.unwrap().ok().unwrap().size, 8);
        }
        role.says(&format!("{name} is added to"));
    }
    runtime.barrier().unwrap();
}

/// Where behind an address a word may be.
fn word_of(addr: usize) -> usize {
    addr.next_multiple_of(8) - addr + 800
}

/// From it and into it, with bytes around that stay as they are.
fn messages(role: &Role, gpus: &Gpus, runtime: &carrack::Runtime, window: &Region) {
    let kinds = [Kind::Host, Kind::Pinned, Kind::Plain(1), Kind::Shareable(0)];
    let mut turn = 0;
    for sender in 0..2 {
        for kind in kinds {
            for len in [1, 8193, 100_001, LEN - 100] {
                turn += 1;
                let (tag, to) = (Tag(turn), Rank(1 - role.rank));
                if role.rank == sender {
                    send(runtime, to, kind.full(gpus, len, turn), tag).unwrap().ok().unwrap();
                    let status = receive(runtime, to, kind.empty(gpus, len), tag).unwrap().ok().unwrap();
                    holds(&status.buffer, len, turn);
                } else {
                    window.whole().write(&[0xee; LEN]).unwrap();
                    let slice = window.slice(50, len).unwrap();
                    let status = receive(runtime, to, slice, tag).unwrap().ok().unwrap();
                    holds(&status.buffer, len, turn);
                    let bytes = window.whole().to_vec().unwrap();
                    let beside = bytes[..50].iter().chain(&bytes[50 + len..]);
                    assert!(beside.copied().all(|byte| byte == 0xee), "{kind:?} {len}");
                    send(runtime, to, window.slice(50, len).unwrap(), tag).unwrap().ok().unwrap();
                }
            }
        }
    }
    runtime.barrier().unwrap();
}
