//! Ranks that die.

use super::{BLOCK, check, fill, on_one_gpu};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{Gpus, PATIENCE, heard};
use crate::support::ranks::{Ranks, Role, die};
use carrack::alloc::SharedAllocError;
use carrack::{Rank, Runtime};
use rustix::process::Signal;
use std::time::Duration;

/// gpu.md, life and death rule 1.
#[test]
fn a_leader_that_is_killed_is_named_and_what_others_have_mapped_stays() {
    let _watchdog = Watchdog::over("killed leader");
    Ranks::start("shared_allocator::killed", 3, &[0]).succeed_except(Rank(0));
}

#[test]
fn another_rank_that_is_killed_ends_the_allocator_and_keeps_no_memory() {
    let _watchdog = Watchdog::over("killed other");
    Ranks::start("shared_allocator::killed", 3, &[2]).succeed_except(Rank(2));
}

pub(crate) fn killed(role: &Role) {
    let victim = role.words[0] as u32;
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let allocator = on_one_gpu(&gpus, &runtime);
    let shared = allocator.allocate(100_001).unwrap();
    let pool = allocator.pool(BLOCK).unwrap();
    let piece = pool.allocate(1000).unwrap();
    if role.rank == 0 {
        fill(&shared, 3);
        fill(&piece, 4);
    }
    runtime.barrier().unwrap();
    if role.rank == victim {
        role.says("dying");
        die();
    }
    heard(role, &runtime, "dying", victim);
    for call in [0, 1, 2, 0] {
        let why = match call {
            0 => allocator.allocate(100).unwrap_err(),
            1 => pool.allocate(100).unwrap_err(),
            _ => pool.trim().unwrap_err(),
        };
        eprintln!("{}: {why}", runtime.rank());
        assert!(why.to_string().contains(&format!("rank {victim}")), "{why}");
        let names_leader = matches!(why, SharedAllocError::LeaderGone { leader: Rank(0), .. });
        assert_eq!(names_leader, victim == 0, "{why}");
    }
    check(&shared, 3);
    check(&piece, 4);
    let name = (shared.addr(), shared.id());
    drop((shared, piece, pool, allocator));
    if role.rank == 0 {
        runtime.wait_for(PATIENCE, || !gpus.has(name)).expect("the dead hold nothing");
    }
    // The others go on.
    let own = gpus.plain(1000);
    fill(&own, 9);
    check(&own, 9);
    role.meet("over", &runtime, (0..3).filter(|rank| *rank != victim));
}

/// All calls of the others end, at any moment of the kill.
#[test]
fn a_rank_that_is_killed_in_the_midst_of_calls_leaves_no_rank_waiting() {
    let _watchdog = Watchdog::over("anytime");
    for turn in 0..6 {
        let victim = Rank([0, 3, 1][turn % 3]);
        let mut ranks = Ranks::start("shared_allocator::anytime", 4, &[u64::from(victim.0)]);
        assert!(ranks.hears("going", victim.0));
        std::thread::sleep(Duration::from_micros(1700 * turn as u64));
        ranks.signal(victim, Signal::KILL);
        ranks.succeed_except(victim);
    }
}

pub(crate) fn anytime(role: &Role) {
    let victim = role.words[0] as u32;
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let allocator = on_one_gpu(&gpus, &runtime);
    let pool = allocator.pool(BLOCK).unwrap();
    let mut kept = Vec::new();
    for turn in 0.. {
        let made = if turn % 3 == 0 { allocator.allocate(5000) } else { pool.allocate(5000) };
        match made {
            Ok(shared) => kept.push(shared),
            Err(why) => {
                assert!(
                    why.to_string().contains(&format!("rank {victim}")) || is_told(&runtime, &why),
                    "{why}"
                );
                break;
            }
        }
        if turn == 3 {
            role.says("going");
        }
        if kept.len() > 5 {
            kept.remove(0);
        }
    }
    assert!(allocator.allocate(1).is_err() && pool.allocate(1).is_err(), "it is at its end");
    drop((kept, pool, allocator));
    role.meet("over", &runtime, (0..4).filter(|rank| *rank != victim));
}

/// Returns `true` if the error reports another rank's failure, whose own error says more.
fn is_told(runtime: &Runtime, why: &SharedAllocError) -> bool {
    let others = (0..4).filter(|rank| Rank(*rank) != runtime.rank());
    matches!(why, SharedAllocError::Ended(_))
        && others.into_iter().any(|rank| why.to_string().contains(&format!("rank {rank}")))
}
