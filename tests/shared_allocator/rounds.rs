//! What is given back is given back.

use crate::support::Watchdog;
use crate::support::gpu_ranks::{Gpus, PATIENCE, are_real};
use crate::support::ranks::{Ranks, Role, listing};
use crate::{BLOCK, check, fill, on_one_gpu};

const ROUNDS: u64 = 1000;

/// gpu.md, legacy IPC rules 4 and 5.
#[test]
fn after_a_thousand_rounds_mappings_and_descriptors_are_what_they_were_in_the_middle() {
    let _watchdog = Watchdog::over("rounds");
    Ranks::start("rounds", 3, &[]).succeed();
}

pub(crate) fn rank(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let allocator = on_one_gpu(&gpus, &runtime);
    let mut middle = None;
    let mut last = Vec::new();
    for round in 0..ROUNDS {
        // Two at a time now and then, let go of in this order or that.
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
    assert_eq!((stats.allocations, stats.made, stats.held), (0, ROUNDS + ROUNDS / 4, 0), "{last:?}");
    role.meet("over", &runtime, 0..3);
}

/// What a rank has.
#[derive(Debug)]
struct Possessions {
    descriptors: usize,
    mappings: usize,
    /// Allocations and openings of a simulated driver.
    live: Option<[u64; 3]>,
}

impl Possessions {
    fn of_this_process(gpus: &Gpus) -> Self {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let live = gpus.fake.as_ref().map(|fake| {
            let counters = fake.counters();
            [
                counters.allocs - counters.frees,
                counters.opens - counters.closes,
                counters.maps - counters.unmaps,
            ]
        });
        Self { descriptors: listing("/proc/self/fd").len(), mappings: maps.lines().count(), live }
    }

    /// The kernel joins mappings that are neighbours, and splits them; a real driver maps for itself, too.
    fn within(&self, other: &Self) -> bool {
        let slack = if are_real() { 32 } else { 8 };
        self.descriptors <= other.descriptors && self.mappings <= other.mappings + slack
    }
}
