//! Operations that are staged, and do not come to a good end.

use super::{BLOCK, completed, device, received, sent, with_driver};
use crate::support::ranks::{Role, die};
use crate::support::words::{are_all, fill, wrong};
use carrack::transports::mem::{CopyError, Region};
use carrack::{
    Buffer, CompQueue, OpError, PostError, Rank, RemoteKey, Runtime, Status, Synchronizer, Tag,
};
use carrack_simulators::gpu::{FailAt, Which};
use std::time::Duration;

/// Rank 0 sends, receives, puts, gets; from and into memory of its GPU.
pub(crate) const WAYS: u64 = 4;
const LEN: usize = 48 << 20;
const SHORT: usize = 3 * BLOCK + 5;

fn post(
    runtime: &Runtime,
    way: u64,
    buffer: impl Into<Buffer>,
    rmr: Option<&RemoteKey>,
    done: &Synchronizer,
) -> Result<(), PostError> {
    let (to, buffer) = (Rank(1), buffer.into());
    match (way, rmr) {
        (0, _) => runtime.post_send(to, buffer, Tag(7)).comp(done).submit(),
        (1, _) => runtime.post_recv(to, buffer, Tag(7)).comp(done).submit(),
        (2, Some(rmr)) => runtime.post_put(to, buffer, rmr, 0).comp(done).submit(),
        (_, Some(rmr)) => runtime.post_get(to, buffer, rmr, 0).comp(done).submit(),
        _ => panic!("there is no region"),
    }
}

/// Returns the memory that rank 0 puts to and gets from, if this way uses any.
fn told(role: &Role, way: u64) -> Option<RemoteKey> {
    (way >= 2).then(|| RemoteKey::from_bytes(&role.told("memory", 1)).unwrap())
}

/// The other end of what rank 0 does: it goes on as long as progress is made.
struct OtherEnd {
    region: Region,
    _mr: carrack::region::Mr,
    done: Synchronizer,
}

impl OtherEnd {
    fn begin(role: &Role, runtime: &Runtime, way: u64) -> Self {
        let region = device(runtime, LEN);
        let mr = runtime.register_memory(&region).unwrap();
        role.tells("memory", &mr.remote_key().to_bytes());
        let (done, other) = (Synchronizer::new(1), Rank(0));
        let posted = match way {
            0 => runtime.post_recv(other, region.whole(), Tag(7)).comp(&done).submit(),
            1 => {
                let mut send = runtime.post_send(other, region.whole(), Tag(7)).comp(&done);
                send.submit()
            }
            _ => Ok(()),
        };
        posted.unwrap();
        Self { region, _mr: mr, done }
    }
}

/// Returns the transferred bytes of large messages, as `pending` tells.
fn moved(runtime: &Runtime) -> usize {
    let words = |text: &str| text.split(' ').find_map(|word| word.parse::<usize>().ok());
    runtime.pending().operations.iter().filter_map(|one| words(&one.waits_for)).max().unwrap_or(0)
}

#[track_caller]
fn is_down(status: &Status) {
    assert!(
        matches!(status.error.as_deref(), Some(OpError::PeerDown { rank: Rank(1), .. })),
        "{:?}",
        status.error
    );
}

pub(crate) fn killed(role: &Role) {
    let way = role.words[0];
    let (runtime, _) = with_driver(role, 256 << 20);
    if role.rank == 1 {
        let end = OtherEnd::begin(role, &runtime, way);
        while moved(&runtime) == 0 {
            runtime.progress().unwrap();
        }
        assert!(!end.done.test() && end.region.len() == LEN, "it is in the midst");
        die();
    }
    if role.rank == 0 {
        let rmr = told(role, way);
        let region = device(&runtime, LEN);
        let addr = region.addr();
        let mut slice = Some(region.whole());
        drop(region);
        let status = completed(&runtime, |done| {
            post(&runtime, way, slice.take().unwrap(), rmr.as_ref(), done)
        });
        let status = status.unwrap();
        is_down(&status);
        assert_eq!(status.buffer.len(), LEN, "the buffer comes back");
        assert!(runtime.pending().operations.is_empty(), "{}", runtime.pending());
        drop(status);
        let is_there =
            runtime.gpu_drivers().iter().any(|driver| driver.classify(addr).unwrap().is_some());
        assert!(!is_there, "the memory is still kept");
    }
    // The others go on, by the same blocks.
    exchange(&runtime, role.rank, 2 - role.rank, 3);
    role.meet("over", &runtime, [0, 2].into_iter());
}

/// Sends bytes there and back, from GPU to GPU.
fn exchange(runtime: &Runtime, me: u32, other: u32, salt: u64) {
    let region = device(runtime, SHORT);
    let mut bytes = vec![0; SHORT];
    fill(&mut bytes, salt, 0);
    for turn in 0..2 {
        if (me < other) == (turn == 0) {
            region.whole().write(&bytes).unwrap();
            assert!(sent(runtime, other, region.whole(), 99).unwrap().error.is_none());
        } else {
            region.whole().write(&vec![0; SHORT]).unwrap();
            assert!(received(runtime, other, region.whole(), 99).unwrap().error.is_none());
            assert_eq!(wrong(&region.whole().to_vec().unwrap(), salt, 0), None);
        }
    }
}

/// Runs the role: the peer dies while rank 0's engine copies a block, which takes any time.
pub(crate) fn held(role: &Role) {
    let way = role.words[0];
    let (runtime, driver) = with_driver(role, 256 << 20);
    if role.rank == 1 {
        let _end = OtherEnd::begin(role, &runtime, way);
        while !role.has_said("held", 0) {
            runtime.progress().unwrap();
        }
        die();
    }
    let (driver, rmr) = (driver.unwrap(), told(role, way));
    let region = device(&runtime, LEN);
    let before = driver.counters().copies;
    let engine = driver.faults().hold_copies();
    let done = Synchronizer::new(1);
    post(&runtime, way, region.whole(), rmr.as_ref(), &done).unwrap();
    while driver.counters().copies == before {
        runtime.progress().unwrap();
    }
    role.says("held");
    while runtime.peer_down(Rank(1)).is_none() {
        runtime.progress().unwrap();
    }
    for _ in 0..1000 {
        runtime.progress().unwrap();
    }
    assert!(!done.test(), "an engine is still at its buffer");
    drop(engine);
    runtime.wait_for(super::PATIENCE, || done.test()).unwrap();
    let mut statuses = done.take().unwrap();
    let status = statuses.remove(0);
    assert!(statuses.is_empty());
    is_down(&status);
    assert_eq!(status.buffer.len(), LEN);
    for _ in 0..1000 {
        runtime.progress().unwrap();
    }
    assert!(runtime.pending().operations.is_empty() && !done.test(), "it ends once");
}

fn is_the_engines(status: &Status) -> bool {
    matches!(
        status.error.as_deref(),
        Some(OpError::Copy(CopyError::Engine { cause, .. })) if cause.code == 700
    )
}

fn is_refused(status: &Status) -> bool {
    matches!(status.error.as_deref(), Some(OpError::Refused(_)))
}

/// Runs the role: one copy of one side fails, at its begin or at its end. It is the first, or one
/// in the middle.
pub(crate) fn failing(role: &Role) {
    let (runtime, driver) = with_driver(role, 64 << 20);
    let driver = driver.unwrap();
    let region = device(&runtime, SHORT);
    let mr = runtime.register_memory(&region).unwrap();
    let queue = CompQueue::new(4);
    let name = runtime.register_comp(&queue).unwrap();
    role.tells("memory", &mr.remote_key().to_bytes());
    let rmr = RemoteKey::from_bytes(&role.told("memory", 1)).unwrap();
    let sides = [0, 1];
    let times = [(FailAt::Submit, 1), (FailAt::Submit, 3), (FailAt::Event, 1), (FailAt::Event, 4)];
    for (side, (at, nth)) in sides.into_iter().flat_map(|side| times.map(|time| (side, time))) {
        for way in [0, 2, 3] {
            let what = format!("way {way}, {at:?} {nth} at rank {side}");
            let mine = role.rank == side;
            runtime.barrier().unwrap();
            if mine {
                driver.faults().fail_copies(at, Which::Nth(nth), 700);
            }
            runtime.barrier().unwrap();
            if role.rank == 0 {
                let mut slice = Some(region.whole());
                let status = completed(&runtime, |done| {
                    let slice = slice.take().unwrap();
                    match way {
                        0 => runtime.post_send(Rank(1), slice, Tag(7)).comp(done).submit(),
                        2 => runtime
                            .post_put(Rank(1), slice, &rmr, 0)
                            .comp(done)
                            .remote_comp(name)
                            .submit(),
                        _ => runtime
                            .post_get(Rank(1), slice, &rmr, 0)
                            .comp(done)
                            .remote_comp(name)
                            .submit(),
                    }
                });
                let status = status.unwrap();
                assert_eq!(status.buffer.len(), SHORT, "{what}");
                match (mine, way) {
                    (true, _) => assert!(is_the_engines(&status), "{what}: {status:?}"),
                    // Its bytes had left it.
                    (false, 0) => assert!(status.error.is_none(), "{what}: {status:?}"),
                    (false, _) => assert!(is_refused(&status), "{what}: {status:?}"),
                }
            } else if way == 0 {
                let status = received(&runtime, 0, region.whole(), 7).unwrap();
                assert_eq!(status.buffer.len(), SHORT, "{what}");
                assert!(
                    if mine { is_the_engines(&status) } else { is_refused(&status) },
                    "{what}: {status:?}"
                );
            }
            runtime.barrier().unwrap();
            driver.faults().heal_copies();
            exchange(&runtime, role.rank, 1 - role.rank, 5);
            // The bytes of a get had left their owner, in each case.
            let is_told = role.rank == 1 && way == 3 && side == 0;
            assert_eq!(queue.pop().is_some(), is_told, "{what}");
            assert!(runtime.pending().operations.is_empty(), "{what}: {}", runtime.pending());
        }
    }
    role.meet("over", &runtime, 0..2);
}

/// Runs the role: the sender stops in the middle, for longer than the receive's deadline.
pub(crate) fn late(role: &Role) {
    let (runtime, _) = with_driver(role, 256 << 20);
    let region = device(&runtime, LEN);
    let done = Synchronizer::new(1);
    if role.rank == 0 {
        let mut send = runtime.post_send(Rank(1), region.whole(), Tag(7)).comp(&done);
        send.submit().unwrap();
        while moved(&runtime) == 0 && !done.test() {
            runtime.progress().unwrap();
        }
        while !role.has_said("late", 1) {
            std::thread::sleep(Duration::from_millis(1));
        }
        runtime.wait_for(super::PATIENCE, || done.test()).expect("it comes to an end");
        assert!(done.take().unwrap().remove(0).error.is_none(), "its bytes have left it");
    } else {
        let recv = runtime.post_recv(Rank(0), region.whole(), Tag(7)).comp(&done);
        // Long enough for the message to begin.
        assert!(recv.deadline(Duration::from_secs(3)).try_submit().unwrap().is_posted());
        runtime.wait_for(super::PATIENCE, || done.test()).unwrap();
        let status = done.take().unwrap().remove(0);
        assert!(matches!(status.error.as_deref(), Some(OpError::TimedOut(Rank(0)))), "{status:?}");
        assert_eq!(status.buffer.len(), LEN, "the buffer comes back");
        // No peer writes to it any more.
        region.whole().write(&vec![0xee; LEN]).unwrap();
        role.says("late");
    }
    exchange(&runtime, role.rank, 1 - role.rank, 3);
    if role.rank == 1 {
        assert!(are_all(&[&region.whole().to_vec().unwrap()], 0xee));
    }
    role.meet("over", &runtime, 0..2);
}

/// Runs the role: a rank stops in the middle of two messages, one each way. It holds all the
/// blocks, and blocks no other rank from the GPU.
pub(crate) fn silent(role: &Role) {
    let (runtime, _) = with_driver(role, 256 << 20);
    let region = device(&runtime, 2 * LEN);
    let (out, back) = (region.slice(0, LEN).unwrap(), region.slice(LEN, LEN).unwrap());
    let (gone, come) = (Synchronizer::new(1), Synchronizer::new(1));
    if role.rank < 2 {
        let other = Rank(1 - role.rank);
        assert!(
            runtime.post_recv(other, back, Tag(1)).comp(&come).try_submit().unwrap().is_posted()
        );
        let mut send = runtime.post_send(other, out, Tag(1)).comp(&gone);
        send.submit().unwrap();
    }
    match role.rank {
        1 => {
            // Its ring fills, and its sending stands still.
            while moved(&runtime) == 0 {
                runtime.progress().unwrap();
            }
            role.says("silent");
            while !role.has_said("done", 0) {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        0 => {
            while !role.has_said("silent", 1) {
                runtime.progress().unwrap();
            }
            for _ in 0..1000 {
                runtime.progress().unwrap();
            }
            exchange(&runtime, 0, 2, 4);
            assert!(!gone.test() && !come.test(), "the other one is silent");
            role.says("done");
        }
        _ => exchange(&runtime, 2, 0, 4),
    }
    if role.rank < 2 {
        for done in [&gone, &come] {
            runtime.wait_for(super::PATIENCE, || done.test()).expect("it goes on");
            assert!(done.take().unwrap().remove(0).error.is_none());
        }
    }
    role.meet("over", &runtime, 0..3);
}
