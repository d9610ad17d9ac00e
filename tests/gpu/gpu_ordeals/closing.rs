//! Memory goes when its last importer has closed it.

use crate::support::Watchdog;
use crate::support::gpu_ranks::{
    Gpus, Kind, PATIENCE, can_order, filled, get, heard, holds, registered, told,
};
use crate::support::ranks::{Ranks, Role};
use carrack::{AwaitError, PostError, Rank, Synchronizer};

/// gpu.md, legacy IPC rule 5: the exporter knows who has its memory mapped, and waits for the last
/// of them.
#[test]
#[ignore = "full: a quarter of a minute; every kind of memory"]
fn memory_that_its_owner_has_dropped_is_freed_when_the_last_of_two_importers_has_closed_it() {
    let _watchdog = Watchdog::over("closing");
    for kind in 0..KINDS.len() as u64 {
        Ranks::start("gpu_ordeals::closing", 3, &[kind]).succeed();
    }
}

/// The owner drops memory while an engine copies it.
#[test]
fn memory_that_its_owner_drops_under_a_copy_stays_until_the_copy_has_ended() {
    let _watchdog = Watchdog::over("in flight");
    if can_order("a copy that is held up") {
        for kind in 0..KINDS.len() as u64 {
            Ranks::start("gpu_ordeals::in_flight", 2, &[kind]).succeed();
        }
    }
}

const KINDS: [Kind; 2] = [Kind::Plain(0), Kind::Shareable(0)];
const LEN: usize = 3 << 20;

/// Runs the role: rank 0 exports, rank 1 closes the memory at once, and rank 2 keeps its remote
/// key.
pub(crate) fn rank(role: &Role) {
    let kind = KINDS[role.words[0] as usize];
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    if role.rank == 0 {
        let region = kind.region(&gpus, LEN);
        region.whole().write(&filled(LEN, 3)).unwrap();
        let name = (region.addr(), region.id());
        let mr = registered(role, &runtime, "memory", &region);
        for rank in [1, 2] {
            heard(role, &runtime, "read", rank);
        }
        drop((mr, region));
        assert!(gpus.has(name), "both have it mapped");
        role.says("dropped");
        heard(role, &runtime, "closed", 1);
        runtime.progress().unwrap();
        assert!(gpus.has(name), "one has it mapped");
        role.says("it is there");
        runtime.wait_for(PATIENCE, || !gpus.has(name)).expect("no rank has it mapped");
        role.says("freed");
    } else {
        let rmr = told(role, "memory", 0);
        let (_, buffer) = get(&runtime, || Kind::Plain(0).empty(&gpus, LEN), &rmr, 0);
        holds(&buffer, LEN, 3);
        drop(buffer);
        role.says("read");
        heard(role, &runtime, "dropped", 0);
        let stale = runtime.post_get(Rank(0), vec![0; 10], &rmr, 0).wait();
        assert!(matches!(stale, Err(AwaitError::Post(PostError::Stale(Rank(0))))), "{stale:?}");
        let is_open =
            || gpus.fake.as_ref().is_some_and(|fake| fake.counters().maps > fake.counters().unmaps);
        if role.rank == 1 {
            drop(rmr);
            runtime.wait_for(PATIENCE, || !is_open()).expect("it is closed");
            role.says("closed");
        } else {
            heard(role, &runtime, "it is there", 0);
            assert!(gpus.fake.is_none() || is_open(), "its name is kept");
            drop(rmr);
        }
        heard(role, &runtime, "freed", 0);
        assert!(!is_open());
    }
    role.meet("over", &runtime, 0..3);
}

/// Runs the role: rank 0 exports, and ends it while rank 1's engine copies from there.
pub(crate) fn in_flight(role: &Role) {
    let kind = KINDS[role.words[0] as usize];
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    if role.rank == 0 {
        let region = kind.region(&gpus, LEN);
        region.whole().write(&filled(LEN, 5)).unwrap();
        let name = (region.addr(), region.id());
        let mr = registered(role, &runtime, "memory", &region);
        heard(role, &runtime, "begun", 1);
        drop((mr, region));
        role.says("dropped");
        heard(role, &runtime, "looked", 1);
        assert!(gpus.has(name), "an engine reads it");
        role.says("it is there");
        runtime.wait_for(PATIENCE, || !gpus.has(name)).expect("the copy has ended");
        role.says("freed");
    } else {
        let rmr = told(role, "memory", 0);
        // Mapped before copies are held up.
        holds(&get(&runtime, || Kind::Plain(0).empty(&gpus, LEN), &rmr, 0).1, LEN, 5);
        let (held, done) =
            (gpus.fake.as_ref().unwrap().faults().hold_copies(), Synchronizer::new(1));
        let buffer = Kind::Plain(0).empty(&gpus, LEN);
        let begun = runtime
            .post_get(Rank(0), buffer, &rmr, 0)
            .comp(&done)
            .require(carrack_transports::cuda_ipc::NAME)
            .try_submit();
        assert!(begun.unwrap().is_posted());
        drop(rmr);
        role.says("begun");
        heard(role, &runtime, "dropped", 0);
        for _ in 0..10_000 {
            runtime.progress().unwrap();
        }
        assert!(!done.test());
        role.says("looked");
        heard(role, &runtime, "it is there", 0);
        drop(held);
        runtime.wait_for(PATIENCE, || done.test()).expect("it comes to an end");
        holds(&done.take().unwrap().remove(0).ok().unwrap().buffer, LEN, 5);
        heard(role, &runtime, "freed", 0);
    }
    role.meet("over", &runtime, 0..2);
}
