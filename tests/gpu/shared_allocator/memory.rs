//! Memory that one rank writes and all others read, to the last byte.

use super::{BLOCK, MIB, check, fill, gpu_of, on_one_gpu};
use crate::support::gpu_ranks::Gpus;
use crate::support::ranks::{Ranks, Role};
use crate::support::{Job, OverLoopback, OverShm, Watchdog, gpus};
use carrack::alloc::{Scope, SharedDeviceAllocator};
use carrack::{Rank, Runtime};

/// gpu.md, legacy IPC rule 2.
#[test]
fn what_each_rank_writes_all_others_read_in_whole_blocks_of_the_leader() {
    let _watchdog = Watchdog::over("memory");
    for ranks in [1, 2, 4] {
        Ranks::start("shared_allocator::memory", ranks, &[]).succeed();
    }
}

const LENGTHS: [usize; 6] = [1, 255, 100_001, BLOCK, BLOCK + 1, 5 * MIB];

pub(crate) fn rank(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let gpu = gpu_of(&gpus, role);
    let allocator = SharedDeviceAllocator::new(&runtime.world(), gpu, Scope::Node).unwrap();
    assert_eq!((allocator.leader(), allocator.is_leader()), (Rank(0), role.rank == 0));
    assert_eq!(allocator.ranks().collect::<Vec<_>>(), (0..role.size).map(Rank).collect::<Vec<_>>());
    let mut kept = Vec::new();
    for (turn, len) in (0..).zip(LENGTHS) {
        let shared = allocator.allocate(len).unwrap();
        assert_eq!((shared.len(), shared.leader()), (len, Rank(0)));
        assert!(shared.slice(len, 1).is_none(), "no rank gets more than was asked for");
        let extent = gpus.driver.classify(shared.addr()).unwrap().expect("memory of a device");
        assert_eq!(extent.kind, shared.kind());
        assert_eq!(
            (extent.base, extent.len),
            (shared.addr(), len.next_multiple_of(BLOCK)),
            "whole blocks"
        );
        for writer in 0..role.size {
            let salt = 1000 * turn + u64::from(writer);
            if writer == role.rank {
                fill(&shared, salt);
            }
            runtime.barrier().unwrap();
            check(&shared, salt);
            runtime.barrier().unwrap();
        }
        kept.push(shared);
    }
    // All allocations exist at the same time.
    let last = u64::from(role.size - 1);
    for (turn, shared) in (0..).zip(&kept) {
        check(shared, 1000 * turn + last);
    }
    let (in_use, held) = LENGTHS
        .iter()
        .fold((0, 0), |(used, held), len| (used + len, held + len.next_multiple_of(BLOCK)));
    let stats = allocator.stats();
    assert_eq!(
        (stats.allocations, stats.made, stats.in_use),
        (LENGTHS.len(), LENGTHS.len() as u64, in_use)
    );
    assert_eq!((stats.held, stats.highest), (held, in_use));
    // A part keeps the allocation; dropping the part frees it.
    let part = kept[2].subregion(10, 100).unwrap();
    kept.clear();
    assert_eq!(allocator.stats().allocations, 1);
    drop(part);
    let stats = allocator.stats();
    assert_eq!((stats.allocations, stats.in_use, stats.held, stats.highest), (0, 0, 0, in_use));
    role.meet("over", &runtime, 0..role.size);
}

/// gpu.md, legacy IPC rule 3.
#[test]
fn ranks_of_one_process_have_the_very_same_memory() {
    let _watchdog = Watchdog::over("one process");
    in_one_process::<OverLoopback>();
    in_one_process::<OverShm>();
}

fn in_one_process<J: Job>() {
    let ranks = J::ranks_with(3, J::settings().gpu(gpus::choice()));
    // Simulated devices are each driver's own: those of one for all ranks.
    let gpu = gpus::of(&ranks[0]).remove(0);
    let work = |runtime: &Runtime| {
        let allocator = SharedDeviceAllocator::new(&runtime.world(), &gpu, Scope::Node).unwrap();
        let shared = allocator.allocate(10_000).unwrap();
        if runtime.rank() == Rank(2) {
            fill(&shared, 5);
        }
        runtime.barrier().unwrap();
        check(&shared, 5);
        runtime.barrier().unwrap();
        (shared.addr(), shared.id())
    };
    let found: Vec<_> = std::thread::scope(|threads| {
        let all: Vec<_> = ranks.iter().map(|rank| threads.spawn(move || work(rank))).collect();
        all.into_iter().map(|one| one.join().unwrap()).collect()
    });
    assert!(found.iter().all(|one| *one == found[0]), "{found:x?}");
    // No rank has it any more.
    for rank in &ranks {
        rank.progress().unwrap();
    }
    assert!(
        gpu.classify(found[0].0).unwrap().is_none_or(|extent| extent.id != found[0].1),
        "it was not freed"
    );
}

#[test]
fn a_rank_alone_has_memory_of_its_own() {
    let _watchdog = Watchdog::over("alone");
    let rank = OverShm::ranks_with(1, OverShm::settings().gpu(gpus::choice())).remove(0);
    let gpus = Gpus::here();
    let allocator = on_one_gpu(&gpus, &rank);
    let shared = allocator.allocate(77).unwrap();
    fill(&shared, 1);
    check(&shared, 1);
    let said = allocator.describe();
    let device = gpus.all[0].info().uuid.to_string();
    assert!(said.contains("ranks 0 of 1 are on this node") && said.contains(&device), "{said}");
}
