//! Operations on such memory: as on any other region, within a stripe and over several.

use super::exchange::{LEN, lends, uses};
use super::{STRIPE, buffer, stripes};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{
    Gpus, Kind, Went, completed, filled, heard, holds, receive, registered, send, told,
};
use crate::support::ranks::{Ranks, Role};
use crate::support::words::are_all;
use carrack::alloc::GrowableBuffer;
use carrack::region::Region;
use carrack::{Piece, Rank, RemoteKey, Runtime, Strided, Tag};

/// Place in a window at which one GPU's stripes end and another's begin.
const BORDER: usize = 1_000_003;

/// gpu.md, VMM rule 2.
#[test]
fn it_is_sent_from_received_into_put_to_and_got_from_as_any_memory() {
    let _watchdog = Watchdog::over("posts");
    Ranks::start("growable_buffer::posts", 2, &[]).succeed();
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
        ("several of one GPU", of_one.region(STRIPE - 99, LEN).unwrap()),
        ("several of several GPUs", all.region(STRIPE - BORDER, LEN).unwrap()),
    ];
    for (name, window) in &windows {
        put_and_get(role, &gpus, &runtime, name, window);
        messages(role, &gpus, &runtime, window);
    }
    role.meet("over", &runtime, 0..2);
}

/// Checks puts and gets of the peer, which maps the window, also what lies over several stripes.
fn put_and_get(role: &Role, gpus: &Gpus, runtime: &Runtime, name: &str, window: &Region) {
    let kinds = [Kind::Host, Kind::Plain(1)];
    if role.rank == 0 {
        let mr = registered(role, runtime, name, window);
        assert!(
            mr.refused().iter().all(|(transport, _)| *transport != "cuda_ipc"),
            "{:?}",
            mr.refused()
        );
        lends(role, runtime, (name, window), 1, &kinds);
        // A word of it, that the peer adds to.
        let word = window.slice(word_of(window.addr()), 8).unwrap();
        word.write(&5_u64.to_le_bytes()).unwrap();
        role.tells(&format!("{name} has a word"), &(word.offset() as u64).to_le_bytes());
        heard(role, runtime, &format!("{name} is added to"), 1);
        assert_eq!(word.to_vec().unwrap(), 65_u64.to_le_bytes());
        role.says(&format!("{name} has been read"));
        heard(role, runtime, &format!("{name} is done with"), 1);
        drop(mr);
    } else {
        let rmr = told(role, name, 0);
        heard(role, runtime, &format!("{name} is clear"), 0);
        for way in uses(role, runtime, gpus, (name, &rmr), &kinds) {
            assert_eq!(way, Went::Mapped, "{name}");
        }
        heard(role, runtime, &format!("{name} has a word"), 0);
        let at =
            u64::from_le_bytes(role.told(&format!("{name} has a word"), 0).try_into().unwrap());
        for _ in 0..20 {
            let add = completed(runtime, |done| {
                runtime.post_fetch_add(Rank(0), &rmr, at, 3).comp(done).submit()
            });
            assert_eq!(add.unwrap().ok().unwrap().size, 8);
        }
        role.says(&format!("{name} is added to"));
        heard(role, runtime, &format!("{name} has been read"), 0);
        many(gpus, runtime, &rmr, window);
        role.says(&format!("{name} is done with"));
    }
    runtime.barrier().unwrap();
}

/// Puts pieces and a strided block, from memory of every sort, such memory among them, into memory
/// that the peer has mapped. One of each lies on the border of two GPUs' stripes, where there is
/// one. All of it is got back in one piece.
fn many(gpus: &Gpus, runtime: &Runtime, rmr: &RemoteKey, own: &Region) {
    let places = [(5, 64), (BORDER - 40, 100), (BORDER + 5000, 8), (2_000_001, 100_003)];
    let block = Strided { offset: BORDER - 900, count: [200, 10, 3], pitch: [1000, 20_000] };
    let rows = (0..30).map(|at| (block.offset + at % 10 * 1000 + at / 10 * 20_000, 200));
    let rows: Vec<(usize, usize)> = rows.collect();
    let stream = gpus.all[0].stream().unwrap();
    let locals = [Kind::Host, Kind::Pinned, Kind::Plain(0), Kind::Plain(1)]
        .map(|kind| kind.region(gpus, LEN));
    for (turn, local) in locals.iter().chain([own]).enumerate() {
        for is_strided in [false, true] {
            let (salt, poison) = ((2 * turn + usize::from(is_strided)) as u64, Region::host(LEN));
            poison.whole().write(&[0xee; LEN]).unwrap();
            local.whole().write(&filled(LEN, salt)).unwrap();
            completed(runtime, |done| {
                runtime.post_put(Rank(0), poison.whole(), rmr, 0).comp(done).submit()
            })
            .unwrap();
            let piece = |&(at, len): &(usize, usize)| Piece {
                local,
                range: at..at + len,
                rmr,
                offset: at as u64,
            };
            let pieces: Vec<Piece<'_>> = places.iter().map(piece).collect();
            let put = |done: &_| {
                let put = match is_strided {
                    true => runtime.post_put_strided(Rank(0), local, &block, rmr, &block),
                    false => runtime.post_put_batch(Rank(0), &pieces),
                };
                let put = if turn == 2 { put.on_stream(&stream) } else { put };
                put.comp(done).submit()
            };
            completed(runtime, put).unwrap().ok().unwrap();
            let mut wanted = vec![0xee; LEN];
            for &(at, len) in if is_strided { &rows[..] } else { &places } {
                wanted[at..at + len].copy_from_slice(&filled(LEN, salt)[at..at + len]);
            }
            // By pieces again where there were rows, and the other way round.
            local.whole().write(&[0xee; LEN]).unwrap();
            let get = |done: &_| runtime.post_get_batch(Rank(0), &pieces).comp(done).submit();
            let back =
                |done: &_| runtime.post_get(Rank(0), local.whole(), rmr, 0).comp(done).submit();
            completed(runtime, get).unwrap().ok().unwrap();
            let found = local.whole().to_vec().unwrap();
            for &(at, len) in &places {
                assert!(
                    found[at..at + len] == wanted[at..at + len],
                    "local memory {turn}, {at}+{len}"
                );
            }
            completed(runtime, back).unwrap().ok().unwrap();
            assert!(
                local.whole().to_vec().unwrap() == wanted,
                "local memory {turn}, strided: {is_strided}"
            );
        }
    }
}

/// Returns the offset of an aligned word behind an address.
fn word_of(addr: usize) -> usize {
    addr.next_multiple_of(8) - addr + 800
}

/// Sends from the window and receives into it, with bytes around that stay as they are.
fn messages(role: &Role, gpus: &Gpus, runtime: &Runtime, window: &Region) {
    let kinds = [Kind::Host, Kind::Pinned, Kind::Plain(1), Kind::Shareable(0)];
    let mut turn = 0;
    for sender in 0..2 {
        for kind in kinds {
            for len in [1, 8193, 100_001, LEN - 100] {
                turn += 1;
                let (tag, to) = (Tag(turn), Rank(1 - role.rank));
                if role.rank == sender {
                    send(runtime, to, kind.full(gpus, len, turn), tag).unwrap().ok().unwrap();
                    let status =
                        receive(runtime, to, kind.empty(gpus, len), tag).unwrap().ok().unwrap();
                    holds(&status.buffer, len, turn);
                } else {
                    window.whole().write(&[0xee; LEN]).unwrap();
                    let slice = window.slice(50, len).unwrap();
                    let status = receive(runtime, to, slice, tag).unwrap().ok().unwrap();
                    holds(&status.buffer, len, turn);
                    let bytes = window.whole().to_vec().unwrap();
                    let around = [&bytes[..50], &bytes[50 + len..]];
                    assert!(are_all(&around, 0xee), "{kind:?} {len}");
                    send(runtime, to, window.slice(50, len).unwrap(), tag).unwrap().ok().unwrap();
                }
            }
        }
    }
    runtime.barrier().unwrap();
}
