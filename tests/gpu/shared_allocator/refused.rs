//! Impossible requests: every rank gets an error that names the cause. No memory stays, and the
//! allocator goes on.

use super::{BLOCK, MIB, check, fill, on_one_gpu};
use crate::support::gpu_ranks::{Gpus, PATIENCE, can_order};
use crate::support::ranks::{Ranks, Role};
use crate::support::{Job, OverShm, Watchdog};
use carrack::alloc::{Scope, SharedAllocError, SharedDeviceAllocator};
use carrack::settings::AutoChoice;
use carrack::transports::gpu::HandleForm;
use carrack::{Handler, Rank, Runtime, Tag};
use carrack_simulators::gpu::FakeConfig;
use parking_lot::Mutex;
use std::sync::Arc;

/// gpu.md, legacy IPC rule 5.
#[test]
fn a_leader_without_memory_is_an_error_at_all_ranks_and_released_memory_is_used_again() {
    let _watchdog = Watchdog::over("exhausted");
    Ranks::start("shared_allocator::exhausted", 3, &[]).succeed();
}

pub(crate) fn exhausted(role: &Role) {
    let gpus = Gpus::of(FakeConfig { memory: 20 * MIB, ..FakeConfig::devices(1) });
    let runtime = gpus.runtime(role);
    let allocator = on_one_gpu(&gpus, &runtime);
    let all = usize::try_from(gpus.all[0].info().memory).unwrap();
    let most = all / 10 * 6;
    for turn in 0..4 {
        // Only once: what the others still have mapped of the last one is given back first.
        let shared = allocator.allocate(most).unwrap();
        for len in [all, most, isize::MAX as usize / 2, usize::MAX, 0] {
            let why = allocator.allocate(len).unwrap_err();
            match &why {
                SharedAllocError::Leader { leader: Rank(0), ranks: 3, .. } => {
                    assert!(
                        why.to_string().contains("rank 0, which allocates for 3 ranks"),
                        "{why}"
                    );
                }
                SharedAllocError::Len { len: 0 | usize::MAX } => {}
                other => panic!("{other}"),
            }
        }
        let part = shared.subregion(5000, 100_000).unwrap();
        if role.rank == turn % 3 {
            fill(&part, 7);
        }
        runtime.barrier().unwrap();
        check(&part, 7);
        let stats = allocator.stats();
        assert_eq!((stats.allocations, stats.made), (1, 1 + u64::from(turn)), "{stats:?}");
    }
    let shared = allocator.allocate(most).unwrap();
    let pool = allocator.pool(BLOCK).unwrap();
    let why = pool.allocate(all).unwrap_err();
    assert!(matches!(why, SharedAllocError::Leader { .. }), "{why}");
    let piece = pool.allocate(100).unwrap();
    assert_eq!(pool.stats().held, BLOCK);
    for len in [0, usize::MAX] {
        assert!(matches!(pool.allocate(len), Err(SharedAllocError::Len { .. })));
    }
    assert!(matches!(allocator.pool(usize::MAX), Err(SharedAllocError::Len { .. })));
    drop((piece, shared));
    role.meet("over", &runtime, 0..3);
}

#[test]
fn memory_that_one_rank_cannot_map_goes_to_no_rank_and_the_reason_is_the_drivers() {
    let _watchdog = Watchdog::over("unmapped");
    if can_order("what a driver refuses") {
        Ranks::start("shared_allocator::unmapped", 3, &[]).succeed();
    }
}

pub(crate) fn unmapped(role: &Role) {
    let gpus = Gpus::here();
    let fake = gpus.fake.as_ref().unwrap();
    let runtime = gpus.runtime(role);
    let allocator = on_one_gpu(&gpus, &runtime);
    let kept = allocator.allocate(1000).unwrap();
    let refused = |by: u32, says: &[&str]| {
        let why = allocator.allocate(1000).unwrap_err();
        let SharedAllocError::NotMapped { rank, leader: Rank(0), .. } = &why else {
            panic!("{why}")
        };
        assert_eq!(*rank, Rank(by), "{why}");
        assert!(says.iter().all(|part| why.to_string().contains(part)), "{why}");
    };
    // One that does not open it.
    if role.rank == 2 {
        fake.faults().fail_open(Some(999));
    }
    refused(2, &["999", "ordered by a test"]);
    fake.faults().fail_open(None);
    // One that does not export it: the leader's own reason is told by the first that misses it.
    if role.rank == 0 {
        for form in HandleForm::ALL {
            fake.faults().refuse_export(form, true);
        }
    }
    // What has been exported before says nothing of new memory.
    refused(1, &["at its leader", "ordered to be refused"]);
    for form in HandleForm::ALL {
        fake.faults().refuse_export(form, false);
    }
    let again = allocator.allocate(1000).unwrap();
    fill_by(&runtime, 1, || fill(&again, 8));
    check(&again, 8);
    assert_eq!(allocator.stats().allocations, 2);
    drop((kept, again));
    let is_empty = || {
        let counters = fake.counters();
        counters.allocs == counters.frees
            && counters.opens == counters.closes
            && counters.maps == counters.unmaps
    };
    runtime.wait_for(PATIENCE, is_empty).expect("nothing is left of what was refused");
    role.meet("over", &runtime, 0..3);
}

#[test]
fn a_rank_that_is_told_to_map_nothing_is_named_with_the_setting() {
    let _watchdog = Watchdog::over("off");
    for off in [0, 1] {
        Ranks::start("shared_allocator::off", 3, &[off]).succeed();
    }
}

pub(crate) fn off(role: &Role) {
    let gpus = Gpus::here();
    let is_off = role.words[0] == u64::from(role.rank);
    let choice = if is_off { AutoChoice::Off } else { AutoChoice::Auto };
    let runtime =
        gpus.rank(OverShm::settings().setting("gpu_ipc", choice), Box::new(role.bootstrap()));
    let allocator = on_one_gpu(&gpus, &runtime);
    let why = allocator.allocate(1000).unwrap_err().to_string();
    // Without the leader's help the first of the others misses it.
    assert!(why.starts_with("rank 1") && why.contains("CARRACK_GPU_IPC=off"), "{why}");
    assert_eq!(why.contains("at its leader"), role.words[0] == 0, "{why}");
    role.meet("over", &runtime, 0..3);
}

fn fill_by(runtime: &Runtime, rank: u32, fill: impl Fn()) {
    if runtime.rank() == Rank(rank) {
        fill();
    }
    runtime.barrier().unwrap();
}

#[test]
fn calls_that_differ_are_named_at_all_ranks_and_the_next_ones_work() {
    let _watchdog = Watchdog::over("differ");
    Ranks::start("shared_allocator::differ", 3, &[]).succeed();
}

pub(crate) fn differ(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let odd = role.rank == 1;
    let of_scope = |scope| SharedDeviceAllocator::new(&runtime.world(), &gpus.all[0], scope);
    let why = of_scope(if odd { Scope::Socket } else { Scope::Node }).unwrap_err();
    named(role, &why, ["scope Socket", "scope Node"]);
    let allocator = of_scope(Scope::Node).unwrap();
    let pools = [BLOCK, 2 * BLOCK].map(|block| allocator.pool(block).unwrap());
    let [first, second] = &pools;
    let live = first.allocate(300).unwrap();
    for turn in 0..3 {
        let why = allocator.allocate(if odd { 200 } else { 100 }).unwrap_err();
        named(role, &why, ["allocate(200)", "allocate(100)"]);
        // Releases that were reported in a failed call are reported again.
        let gone = first.allocate(400).unwrap();
        drop(gone);
        let why = if odd { second.allocate(300) } else { first.allocate(300) }.unwrap_err();
        named(role, &why, ["allocate(300) of pool 1", "allocate(300) of pool 0"]);
        let why =
            if odd { first.trim().map(drop) } else { first.allocate(5).map(drop) }.unwrap_err();
        named(role, &why, ["trim() of pool 0", "allocate(5) of pool 0"]);
        let shared = allocator.allocate(100).unwrap();
        fill_by(&runtime, 2, || fill(&shared, turn));
        check(&shared, turn);
        runtime.barrier().unwrap();
    }
    assert_eq!((first.stats().allocations, first.stats().held), (1, BLOCK));
    // Pools that were made alike, but not of the same blocks.
    let uneven = allocator.pool(if odd { BLOCK } else { 2 * BLOCK }).unwrap();
    let why = uneven.allocate(1).unwrap_err();
    named(role, &why, ["blocks of 2097152", "blocks of 4194304"]);
    drop(live);
    assert_eq!(first.trim().unwrap(), BLOCK);
    role.meet("over", &runtime, 0..3);
}

/// Checks that the first rank that differs is named: rank 1 at the others, one of them at rank 1.
#[track_caller]
fn named(role: &Role, why: &SharedAllocError, [odd, others]: [&str; 2]) {
    let SharedAllocError::Differ { rank, theirs, ours } = why else { panic!("{why}") };
    let (who, theirs_is, ours_is) =
        if role.rank == 1 { (Rank(0), others, odd) } else { (Rank(1), odd, others) };
    assert_eq!(*rank, who, "{why}");
    assert!(theirs.contains(theirs_is) && ours.contains(ours_is), "{why}");
}

/// A handler runs within a call that makes progress, for example one of this very allocator.
#[test]
fn inside_of_a_handler_nothing_is_allocated_and_nothing_waits_and_the_allocator_goes_on() {
    let _watchdog = Watchdog::over("handler");
    Ranks::start("shared_allocator::handler", 2, &[]).succeed();
}

pub(crate) fn handler(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let allocator = on_one_gpu(&gpus, &runtime);
    let pool = allocator.pool(BLOCK).unwrap();
    if role.rank == 1 {
        // On the way in front of what the call tells.
        runtime.post_send(Rank(0), b"now".to_vec(), Tag(1)).submit().unwrap();
    } else {
        let (told, world, gpu) =
            (Arc::<Mutex<Vec<_>>>::default(), runtime.world(), gpus.all[0].clone());
        let (kept, calls) = (told.clone(), (allocator.clone(), allocator.pool(BLOCK).unwrap()));
        let handler = Handler::new(move |_| {
            let (allocator, pool) = &calls;
            let mut told = kept.lock();
            told.push(allocator.allocate(100).err());
            told.push(allocator.pool(BLOCK).err());
            told.push(pool.allocate(100).err());
            told.push(pool.trim().err());
            told.push(SharedDeviceAllocator::new(&world, &gpu, Scope::Node).err());
        });
        let mut received = runtime.post_recv(Rank(1), vec![0; 8], Tag(1)).comp(&handler);
        received.submit().unwrap();
        let shared = allocator.allocate(1000).unwrap();
        runtime.wait_for(PATIENCE, || told.lock().len() == 5).unwrap();
        let told = told.lock();
        assert!(
            told.iter().all(|why| matches!(why, Some(SharedAllocError::InHandler))),
            "{told:?}"
        );
        drop(shared);
    }
    if role.rank == 1 {
        drop(allocator.allocate(1000).unwrap());
        // As many pools at each rank.
        drop(allocator.pool(BLOCK).unwrap());
    }
    let shared = pool.allocate(1000).unwrap();
    fill_by(&runtime, 1, || fill(&shared, 8));
    check(&shared, 8);
    role.meet("over", &runtime, 0..2);
}
