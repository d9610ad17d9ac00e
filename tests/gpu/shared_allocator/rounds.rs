//! Resources that are given back are free again.

use super::{BLOCK, check, fill, on_one_gpu};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{Gpus, PATIENCE};
use crate::support::possessions::Possessions;
use crate::support::ranks::{Ranks, Role};

const ROUNDS: u64 = 1000;

/// gpu.md, legacy IPC rules 4 and 5.
#[test]
fn after_a_thousand_rounds_mappings_and_descriptors_are_what_they_were_in_the_middle() {
    let _watchdog = Watchdog::over("rounds");
    Ranks::start("shared_allocator::rounds", 3, &[]).succeed();
}

pub(crate) fn rank(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let allocator = on_one_gpu(&gpus, &runtime);
    let mut middle = None;
    let mut last = Vec::new();
    for round in 0..ROUNDS {
        // Two at a time now and then, dropped in one order or the other.
        let mut all = vec![allocator.allocate(5000 + round as usize).unwrap()];
        if round % 4 == 0 {
            all.push(allocator.allocate(BLOCK + 1).unwrap());
        }
        if round % 16 == u64::from(role.rank) {
            fill(&all[0], round);
        }
        runtime.barrier().unwrap();
        if round % 16 < 3 {
            check(&all[0], round);
        }
        if (round + u64::from(role.rank)).is_multiple_of(2) {
            all.reverse();
        }
        last = all.iter().map(|shared| (shared.addr(), shared.id())).collect();
        drop(all);
        if round == ROUNDS / 2 || round + 1 == ROUNDS {
            runtime
                .wait_for(PATIENCE, || last.iter().all(|name| !gpus.has(*name)))
                .expect("it is freed everywhere");
            role.meet(&format!("freed {round}"), &runtime, 0..3);
            let now = Possessions::of_this_process(&gpus);
            eprintln!("{}: after {round} rounds {now:?}", runtime.rank());
            if let Some(live) = now.live {
                assert_eq!(live, [0; 3], "of a simulated driver nothing is left");
            }
            let before: &Possessions = middle.get_or_insert(now);
            let now = Possessions::of_this_process(&gpus);
            assert!(now.within(before), "{before:?} in the middle, and at the end {now:?}");
        }
    }
    let stats = allocator.stats();
    assert_eq!(
        (stats.allocations, stats.made, stats.held),
        (0, ROUNDS + ROUNDS / 4, 0),
        "{last:?}"
    );
    role.meet("over", &runtime, 0..3);
}
