//! Pieces of blocks: no two overlap, at any rank, and none is used again before all ranks have
//! released it.

use super::{BLOCK, MIB, check, fill, on_one_gpu};
use crate::support::gpu_ranks::{Gpus, PATIENCE};
use crate::support::ranks::{Ranks, Role};
use crate::support::words::mix;
use crate::support::{Watchdog, rng};
use carrack::alloc::SharedRegion;
use rand::Rng;
use std::collections::VecDeque;

#[test]
fn a_piece_is_used_again_when_all_ranks_have_released_it_and_not_before() {
    let _watchdog = Watchdog::over("pieces");
    let seed = rng().random();
    Ranks::start("shared_allocator::pieces", 3, &[seed]).succeed();
}

/// Runs the role: all ranks allocate alike. Each drops pieces at its own pace, and checks their
/// bytes before.
pub(crate) fn pieces(role: &Role) {
    let seed = role.words[0];
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let allocator = on_one_gpu(&gpus, &runtime);
    let pool = allocator.pool(BLOCK).unwrap();
    let mut kept: VecDeque<(SharedRegion, u64)> = VecDeque::new();
    let mut highest = 0;
    for turn in 0..400_u64 {
        let dice = mix(seed ^ turn);
        // Alike at all ranks: from a byte to more than a block, most of them short.
        let len = match dice % 16 {
            0 => BLOCK + (dice >> 8) as usize % MIB,
            1..4 => 1 + (dice >> 8) as usize % (MIB / 2),
            _ => 1 + (dice >> 8) as usize % 5000,
        };
        let shared = pool.allocate(len).unwrap();
        assert_eq!((shared.len(), shared.number(), shared.addr() % 256), (len, turn, 0));
        let writer = (dice >> 40) % 3;
        if writer == u64::from(role.rank) {
            fill(&shared, turn);
        }
        runtime.barrier().unwrap();
        kept.push_back((shared, turn));
        highest = highest.max(kept.iter().map(|(shared, _)| shared.len()).sum());
        // Each rank drops pieces at its own pace: another one may keep a piece for long.
        let own = mix(seed ^ turn << 20 ^ u64::from(role.rank) << 50);
        let mut going = own % 3;
        while going > 0 && kept.len() > 3 || kept.len() > 40 {
            let at = (own >> 20) as usize % kept.len();
            let (shared, salt) = kept.remove(at).unwrap();
            check(&shared, salt);
            going = going.saturating_sub(1);
        }
    }
    for (shared, salt) in &kept {
        check(shared, *salt);
    }
    let stats = pool.stats();
    assert_eq!((stats.allocations, stats.made, stats.highest), (kept.len(), 400, highest));
    assert_eq!(stats.in_use, kept.iter().map(|(shared, _)| shared.len()).sum::<usize>());
    assert_eq!(allocator.stats().held, stats.held, "{stats:?}");
    kept.clear();
    runtime.barrier().unwrap();
    assert_eq!(pool.trim().unwrap(), stats.held);
    assert_eq!((pool.stats().held, allocator.stats().held), (0, 0));
    role.meet("over", &runtime, 0..3);
}

#[test]
fn a_pool_takes_from_its_blocks_what_fits_and_gives_back_blocks_that_no_rank_uses() {
    let _watchdog = Watchdog::over("pool");
    Ranks::start("shared_allocator::pool", 2, &[]).succeed();
}

pub(crate) fn pool(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let allocator = on_one_gpu(&gpus, &runtime);
    let pool = allocator.pool(3 * MIB).unwrap();
    assert_eq!(pool.block(), 2 * BLOCK, "a power of two");
    // Many in one block: one allocation of the allocator's.
    let mut many: Vec<_> = (0..100).map(|_| pool.allocate(1000).unwrap()).collect();
    assert_eq!(
        (allocator.stats().made, pool.stats().held, pool.stats().in_use),
        (1, 2 * BLOCK, 100_000)
    );
    // No two meet, and each rank finds the same place.
    let base = many.iter().map(|shared| shared.addr()).min().unwrap();
    let places: Vec<_> = many.iter().map(|shared| (shared.addr() - base) as u64).collect();
    let bytes: Vec<_> = places.iter().flat_map(|place| place.to_le_bytes()).collect();
    let all = runtime.allgather(&bytes).unwrap();
    assert!(all.iter().all(|other| *other == bytes));
    let mut sorted = places.clone();
    sorted.sort_unstable();
    assert!(sorted.windows(2).all(|pair| pair[1] - pair[0] >= 1024), "{sorted:?}");
    // More pieces are released than one call reports. The next allocation that does not fit asks
    // for the rest before it takes a new block.
    let number = many[0].number();
    if role.rank == 0 {
        many.clear();
    }
    let large = pool.allocate(BLOCK + 1).unwrap();
    assert_eq!(allocator.stats().made, 2, "the other rank still has it");
    many.clear();
    runtime.barrier().unwrap();
    let again = pool.allocate(2 * BLOCK).unwrap();
    assert_eq!((again.addr(), allocator.stats().made), (base, 2), "the first block is whole again");
    assert!(again.number() > number);
    drop(again);
    // What is longer than a block has its own, which goes with it.
    let long = pool.allocate(2 * BLOCK + 1).unwrap();
    let name = (long.addr(), long.id());
    assert_eq!(pool.stats().held, 4 * BLOCK + 3 * BLOCK);
    drop(long);
    runtime.barrier().unwrap();
    assert_eq!(pool.trim().unwrap(), 2 * BLOCK + 3 * BLOCK, "one block has a piece in use");
    runtime.wait_for(PATIENCE, || !gpus.has(name)).expect("it is freed");
    // The pool goes before its pieces.
    fill_by_last(role, &runtime, &large);
    drop((pool, allocator));
    check(&large, 3);
    role.meet("over", &runtime, 0..2);
}

fn fill_by_last(role: &Role, runtime: &carrack::Runtime, shared: &SharedRegion) {
    if role.rank == 1 {
        fill(shared, 3);
    }
    runtime.barrier().unwrap();
}
