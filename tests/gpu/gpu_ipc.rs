//! GPU memory between processes: ranks that map each other's, with simulated GPUs here, and with
//! real ones where `TEST_GPU=cuda` says so.

use crate::support::gpu_ranks::{completed, filled, heard, registered, told};
use crate::support::gpus;
use crate::support::ranks::{Ranks, Role, die};
use crate::support::words::{are_all, wrong};
use crate::support::{Job, OverShm, Watchdog};
use carrack::buffer::{Region, RegionSlice};
use carrack::settings::{AutoChoice, SettingsBuilder};
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{
    Buffer, CompQueue, OpError, PostError, Rank, RemoteComp, RemoteKey, Runtime, Status, Tag,
};
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(100);
const FLAVOURS: [Flavour; 2] = [Flavour::Plain, Flavour::Shareable];
const LEN: usize = 3 << 20;

/// gpu.md, legacy IPC rule 1.
#[test]
fn every_pair_of_kinds_is_put_and_got_by_the_copy_engine() {
    let _watchdog = Watchdog::over("kinds");
    for flavour in 0..FLAVOURS.len() as u64 {
        Ranks::start("gpu_ipc::kinds", 2, &[flavour]).succeed();
    }
}

#[test]
fn messages_go_from_gpu_to_gpu_and_no_rank_keeps_their_memory() {
    let _watchdog = Watchdog::over("messages");
    for off in [0, 1] {
        Ranks::start("gpu_ipc::messages", 2, &[off]).succeed();
    }
}

/// gpu.md, legacy IPC rule 5.
#[test]
fn a_registration_that_has_ended_is_noticed_and_its_memory_freed_when_no_rank_has_it_mapped() {
    let _watchdog = Watchdog::over("ended");
    Ranks::start("gpu_ipc::ended", 2, &[]).succeed();
}

/// gpu.md, life and death rule 1.
#[test]
fn a_killed_importer_holds_nothing_up_and_a_killed_exporter_harms_no_other_rank() {
    let _watchdog = Watchdog::over("killed");
    for victim in 0..2 {
        Ranks::start("gpu_ipc::killed", 3, &[victim]).succeed_except(Rank(victim as u32));
    }
}

#[test]
fn without_ipc_the_reason_is_told_and_nothing_is_lost() {
    let _watchdog = Watchdog::over("off");
    Ranks::start("gpu_ipc::off", 2, &[]).succeed();
}

#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    match role.name.as_str() {
        "kinds" => kinds(&role),
        "ended" => ended(&role),
        "killed" => killed(&role),
        "messages" => messages(&role),
        _ => off(&role),
    }
}

fn settings() -> SettingsBuilder {
    OverShm::settings().gpu(gpus::choice())
}

fn is_allocated(runtime: &Runtime, addr: usize) -> bool {
    runtime.gpu_drivers().iter().any(|driver| driver.classify(addr).unwrap().is_some())
}

fn put(
    runtime: &Runtime,
    buffer: impl Into<Buffer>,
    rmr: &RemoteKey,
    at: u64,
) -> Result<Status, PostError> {
    let mut buffer = Some(buffer.into());
    completed(runtime, |done| {
        runtime.post_put(Rank(1), buffer.take().unwrap(), rmr, at).comp(done).submit()
    })
}

fn get(
    runtime: &Runtime,
    buffer: impl Into<Buffer>,
    rmr: &RemoteKey,
    at: u64,
) -> Result<Status, PostError> {
    let mut buffer = Some(buffer.into());
    completed(runtime, |done| {
        runtime.post_get(Rank(1), buffer.take().unwrap(), rmr, at).comp(done).submit()
    })
}

fn holds(slice: &RegionSlice, salt: u64) -> bool {
    wrong(&slice.to_vec().unwrap(), salt, 0).is_none()
}

// ---- roles --------------------------------------------------------------------------------------

const ODD: [(usize, usize); 5] =
    [(0, 1), (1, 8), (4097, 40), (12_345, 100_001), (7, (2 << 20) + 1)];

/// Runs the role: rank 0 puts to, and gets from, device memory of rank 1, from and to memory of all
/// kinds.
fn kinds(role: &Role) {
    let flavour = FLAVOURS[role.words[0] as usize];
    let runtime = role.runtime(settings());
    let gpus = gpus::of(&runtime);
    let told_of = CompQueue::new(64);
    let name = runtime.register_comp(&told_of).unwrap();
    if role.rank == 1 {
        let region = gpus[gpus.len() - 1].allocate(LEN, flavour).unwrap();
        region.whole().write(&vec![0xee; LEN]).unwrap();
        let mr = registered(role, &runtime, "memory", &region);
        // Each put is told of when its bytes are there; then they are checked, with what lies
        // around them.
        for (turn, _) in (0..KINDS).flat_map(|_| ODD).enumerate() {
            runtime.wait_for(PATIENCE, || !told_of.is_empty()).unwrap();
            let status = told_of.pop().unwrap().ok().unwrap();
            let (at, len) = (status.tag.0 as usize, status.size);
            assert!(holds(&region.slice(at, len).unwrap(), turn as u64), "{at}+{len}");
            let around = [(at.saturating_sub(64), at), (at + len, at + len + 64)];
            for (from, to) in around {
                let bytes = region.slice(from, to - from).unwrap().to_vec().unwrap();
                assert!(are_all(&[&bytes], 0xee), "around {at}+{len}");
            }
            region.whole().write(&vec![0xee; LEN]).unwrap();
            fill_part(&region, at, len, 1000 + turn as u64);
            role.says(&format!("checked {turn}"));
            heard(role, &runtime, &format!("got {turn}"), 0);
            region.whole().write(&vec![0xee; LEN]).unwrap();
            role.says(&format!("cleared {turn}"));
        }
        role.meet("over", &runtime, 0..2);
        drop(mr);
        return;
    }
    let rmr = told(role, "memory", 1);
    let mut turn = 0;
    for kind in 0..KINDS {
        for (at, len) in ODD {
            let place = |salt: Option<u64>| source(&gpus, kind, len, salt);
            let mut buffer = Some(place(Some(turn)));
            let status = completed(&runtime, |done| {
                let buffer = buffer.take().unwrap();
                let post = runtime.post_put(Rank(1), buffer, &rmr, at as u64).comp(done);
                post.tag(Tag(at as u64))
                    .remote_comp(name_of(name))
                    .require(carrack_transports::cuda_ipc::NAME)
                    .submit()
            });
            assert_eq!(status.unwrap().ok().unwrap().size, len);
            heard(role, &runtime, &format!("checked {turn}"), 1);
            let status = get(&runtime, place(None), &rmr, at as u64).unwrap().ok().unwrap();
            let bytes = status.buffer.to_vec().unwrap();
            assert_eq!(wrong(&bytes, 1000 + turn, 0), None, "kind {kind}, {at}+{len}");
            role.says(&format!("got {turn}"));
            heard(role, &runtime, &format!("cleared {turn}"), 1);
            turn += 1;
        }
    }
    let outside = put(&runtime, vec![1; 2], &rmr, LEN as u64 - 1);
    assert!(matches!(outside, Err(PostError::Outside { .. })), "{outside:?}");
    role.meet("over", &runtime, 0..2);
}

fn fill_part(region: &Region, at: usize, len: usize, salt: u64) {
    region.slice(at, len).unwrap().write(&filled(len, salt)).unwrap();
}

/// Host, pinned, and memory of each of two devices.
const KINDS: usize = 4;

fn source(gpus: &[Arc<dyn Gpu>], kind: usize, len: usize, salt: Option<u64>) -> Buffer {
    let region = match kind {
        0 => return salt.map_or_else(|| vec![0; len], |salt| filled(len, salt)).into(),
        1 => gpus[0].allocate(len, Flavour::Pinned),
        2 => gpus[0].allocate(len, Flavour::Plain),
        _ => gpus[gpus.len() - 1].allocate(len, Flavour::Shareable),
    };
    let slice = region.unwrap().slice(0, len).unwrap();
    if let Some(salt) = salt {
        slice.write(&filled(len, salt)).unwrap();
    }
    slice.into()
}

/// Returns the other rank's name of the object, which is the same: both ranks make their objects in
/// the same order.
fn name_of(name: RemoteComp) -> RemoteComp {
    name
}

fn ended(role: &Role) {
    let runtime = role.runtime(settings());
    let gpu = gpus::of(&runtime).remove(0);
    if role.rank == 1 {
        let region = gpu.allocate(LEN, Flavour::Plain).unwrap();
        fill_part(&region, 0, LEN, 1);
        let first = registered(role, &runtime, "first", &region);
        let part = registered(role, &runtime, "part", &region.subregion(1 << 20, 1000).unwrap());
        heard(role, &runtime, "read", 0);
        drop(first);
        // The other registration of the same allocation stands.
        role.says("first ended");
        heard(role, &runtime, "first refused", 0);
        let addr = region.addr();
        let third = registered(role, &runtime, "third", &region);
        heard(role, &runtime, "third read", 0);
        drop((part, third, region));
        // It is mapped over there, and stays here until it is not.
        runtime.progress().unwrap();
        assert!(is_allocated(&runtime, addr), "memory that is mapped elsewhere was freed");
        role.says("third ended");
        runtime.wait_for(PATIENCE, || !is_allocated(&runtime, addr)).expect("it is freed");
        role.says("freed");
        role.meet("over", &runtime, 0..2);
        return;
    }
    let (first, part) = (told(role, "first", 1), told(role, "part", 1));
    let bytes =
        get(&runtime, vec![0; LEN], &first, 0).unwrap().ok().unwrap().buffer.to_vec().unwrap();
    assert_eq!(wrong(&bytes, 1, 0), None);
    let bytes =
        get(&runtime, vec![0; 1000], &part, 0).unwrap().ok().unwrap().buffer.to_vec().unwrap();
    assert_eq!(wrong(&bytes, 1, (1 << 20) / 8), None);
    role.says("read");
    heard(role, &runtime, "first ended", 1);
    role.says("first refused");
    let third = told(role, "third", 1);
    assert!(get(&runtime, vec![0; LEN], &third, 0).unwrap().ok().is_ok());
    role.says("third read");
    heard(role, &runtime, "third ended", 1);
    for stale in [&first, &part, &third] {
        let refused = get(&runtime, vec![0; 10], stale, 0);
        assert!(matches!(refused, Err(PostError::Stale(Rank(1)))), "{refused:?}");
    }
    drop((first, part, third));
    heard(role, &runtime, "freed", 1);
    role.meet("over", &runtime, 0..2);
}

/// Runs the role: rank 1 exports, ranks 0 and 2 import, and rank 0 or 1 is killed meanwhile.
fn killed(role: &Role) {
    let victim = role.words[0] as u32;
    let runtime = role.runtime(settings());
    let gpu = gpus::of(&runtime).remove(0);
    let survivors: Vec<u32> = (0..3).filter(|&rank| rank != victim).collect();
    if role.rank == 1 {
        let region = gpu.allocate(LEN, Flavour::Plain).unwrap();
        let addr = region.addr();
        let mr = registered(role, &runtime, "memory", &region);
        for rank in [0, 2] {
            heard(role, &runtime, "began", rank);
        }
        if victim == 1 {
            die();
        }
        heard(role, &runtime, "done", 2);
        drop((mr, region));
        runtime
            .wait_for(PATIENCE, || !is_allocated(&runtime, addr))
            .expect("the dead hold nothing");
    } else {
        let rmr = told(role, "memory", 1);
        let mut buffer = gpu.allocate(LEN, Flavour::Plain).unwrap().slice(0, LEN).unwrap();
        for turn in 0.. {
            match put(&runtime, buffer, &rmr, 0) {
                Ok(status) => match status.buffer {
                    Buffer::Region(slice) => buffer = slice,
                    other => panic!("{other:?}"),
                },
                Err(PostError::PeerDown { rank: Rank(1), .. }) if victim == 1 => break,
                Err(error) => panic!("{error}"),
            }
            if turn == 3 {
                role.says("began");
                if victim == role.rank {
                    die();
                }
            }
            if victim != 1 && turn > 20 {
                break;
            }
        }
        // It goes on.
        let own = gpu.allocate(LEN, Flavour::Plain).unwrap();
        fill_part(&own, 0, LEN, 9);
        assert!(holds(&own.whole(), 9));
        drop(rmr);
        role.says("done");
    }
    role.meet("over", &runtime, survivors.into_iter());
}

/// Sends of all lengths between memory of all kinds, there and back. Without IPC at the receiving
/// rank, too: then they go part by part.
fn messages(role: &Role) {
    let off = role.words[0] == 1 && role.rank == 1;
    let choice = if off { AutoChoice::Off } else { AutoChoice::Auto };
    let runtime = role.runtime(settings().setting("gpu_ipc", choice));
    let gpus = gpus::of(&runtime);
    let other = Rank(1 - role.rank);
    let mut salt = 0;
    for from in 0..KINDS {
        for to in 0..KINDS {
            for len in [1, 8, 8193, 1_000_001] {
                salt += 1;
                if role.rank == 0 {
                    let mut buffer = Some(source(&gpus, from, len, Some(salt)));
                    let sent = completed(&runtime, |done| {
                        runtime
                            .post_send(other, buffer.take().unwrap(), Tag(salt))
                            .comp(done)
                            .submit()
                    });
                    assert_eq!(sent.unwrap().ok().unwrap().size, len, "{from} to {to}");
                } else {
                    let mut buffer = Some(source(&gpus, to, len + 7, None));
                    let got = completed(&runtime, |done| {
                        runtime
                            .post_recv(other, buffer.take().unwrap(), Tag(salt))
                            .comp(done)
                            .submit()
                    });
                    let status = got.unwrap().ok().unwrap();
                    let bytes = status.buffer.to_vec().unwrap();
                    assert_eq!(status.size, len);
                    assert_eq!(wrong(&bytes[..len], salt, 0), None, "{from} to {to}, {len} B");
                }
            }
        }
    }
    // Into a receive that is too small, ...
    let region = gpus[0].allocate(1000, Flavour::Plain).unwrap();
    if role.rank == 0 {
        let mut slice = region.slice(10, 100);
        let sent = completed(&runtime, |done| {
            runtime.post_send(other, slice.take().unwrap(), Tag(0)).comp(done).submit()
        });
        let error = sent.unwrap().error.expect("it was too long");
        assert!(matches!(*error, OpError::Truncated { message: 100, buffer: 99 }), "{error}");
    } else {
        let mut slice = region.slice(10, 99);
        let got = completed(&runtime, |done| {
            runtime.post_recv(other, slice.take().unwrap(), Tag(0)).comp(done).submit()
        });
        let error = got.unwrap().error.expect("it was too long");
        assert!(matches!(*error, OpError::Truncated { message: 100, buffer: 99 }), "{error}");
    }
    // ... and as large active messages.
    let told_of = CompQueue::new(4);
    let name = runtime.register_comp(&told_of).unwrap();
    if role.rank == 0 {
        let region = gpus[0].allocate(100_000, Flavour::Plain).unwrap();
        region.whole().write(&filled(100_000, 5)).unwrap();
        let addr = region.addr();
        // A part of it, known by the whole.
        let mut slice = Some(region.subregion(0, 100_000).unwrap().whole());
        drop(region);
        let sent = completed(&runtime, |done| {
            runtime.post_am(other, slice.take().unwrap(), name).comp(done).submit()
        });
        drop(sent.unwrap().ok().unwrap());
        role.says("sent");
        runtime
            .wait_for(PATIENCE, || !is_allocated(&runtime, addr))
            .expect("no rank keeps what was sent");
    } else {
        runtime.wait_for(PATIENCE, || !told_of.is_empty()).unwrap();
        let status = told_of.pop().unwrap().ok().unwrap();
        assert_eq!(wrong(&status.buffer.to_vec().unwrap(), 5, 0), None);
    }
    role.meet("over", &runtime, 0..2);
}

fn off(role: &Role) {
    let runtime = role.runtime(settings().setting("gpu_ipc", AutoChoice::Off));
    let gpu = gpus::of(&runtime).remove(0);
    if role.rank == 1 {
        let region = gpu.allocate(100, Flavour::Plain).unwrap();
        let _mr = registered(role, &runtime, "memory", &region);
        role.meet("over", &runtime, 0..2);
        return;
    }
    let rmr = told(role, "memory", 1);
    let slice = gpu.allocate(10, Flavour::Plain).unwrap().slice(0, 10).unwrap();
    let demanded = runtime
        .post_put(Rank(1), slice.clone(), &rmr, 0)
        .require(carrack_transports::cuda_ipc::NAME)
        .try_submit();
    let Err(PostError::Path { required: "cuda_ipc", why, .. }) = demanded else {
        panic!("{demanded:?}")
    };
    assert!(why.contains("its owner"), "the reason: {why}");
    slice.write(&filled(10, 3)).unwrap();
    assert_eq!(put(&runtime, slice, &rmr, 7).unwrap().ok().unwrap().size, 10);
    let got = get(&runtime, vec![0; 10], &rmr, 7).unwrap().ok().unwrap();
    assert_eq!(got.buffer.to_vec().unwrap(), filled(10, 3));
    role.meet("over", &runtime, 0..2);
}
