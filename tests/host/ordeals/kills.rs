//! A rank is killed at a random moment of traffic among three or four. Operations of the others
//! with it end, and failed ones name it. Operations among the others go on, and no process or file
//! is left.

use crate::support::amount;
use crate::support::ranks::{Ranks, Role, die, listing};
use crate::support::traffic::Taking;
use crate::support::traffic::script::Plan;
use crate::support::{Job, OverShm, Watchdog, rng};
use carrack::Rank;
use carrack::settings::AutoChoice;
use rand::Rng;
use std::time::Duration;

const STEPS: u64 = 300;

#[test]
#[ignore = "full: 40 jobs of processes, a minute of processor time"]
fn a_rank_that_is_killed_at_any_moment_harms_no_other_rank() {
    let count = amount("TEST_KILLS", 40, 100);
    let _watchdog = Watchdog::patient("kills", Duration::from_secs(120 + 2 * count));
    let mut rng = rng();
    for number in 0..count {
        let size = rng.random_range(3..=4);
        let lanes = rng.random_range(1..=2);
        let victim = rng.random_range(0..size);
        // By steps of its own, or by the clock: the one is fine where much happens, the other where
        // little does.
        let by_clock = rng.random_range(0..2);
        let when = match by_clock {
            0 => rng.random_range(0..=lanes * STEPS * u64::from(size - 1)),
            _ => 1 << rng.random_range(0..18),
        };
        let parts = rng.random_range(0..2);
        let words = [rng.random(), victim.into(), lanes, by_clock, when, parts];
        println!("kill {number}: {size} ranks, words {words:?}");
        Ranks::start("ordeals::kills", size, &words).succeed_except(Rank(victim));
    }
}

pub(crate) fn rank(role: &Role) {
    let [seed, victim, lanes, by_clock, when, parts] = role.words[..] else { panic!("six words") };
    let victim = Rank(victim as u32);
    let is_victim = role.rank == victim.0;
    let before = listing("/proc/self/fd").len();
    let kernel_copy = if parts == 1 { AutoChoice::Off } else { AutoChoice::Auto };
    let runtime = role.runtime(OverShm::settings().setting("kernel_copy", kernel_copy));
    let plan = Plan {
        seed,
        steps: STEPS,
        lanes: lanes as u32,
        large: 25,
        longest: 300_000,
        room: 270_000,
    };
    let mut taking = Taking::part(role, runtime.clone(), plan, (!is_victim).then_some(victim));
    if is_victim {
        match by_clock {
            0 => taking.dies_at = when,
            _ => drop(std::thread::spawn(move || {
                std::thread::sleep(Duration::from_micros(when));
                die()
            })),
        }
        taking.run();
        die();
    }
    taking.run();
    role.meet("over", &runtime, (0..role.size).filter(|&rank| rank != victim.0));
    drop((taking, runtime));
    assert_eq!(listing("/proc/self/fd").len(), before, "descriptors are left");
}
