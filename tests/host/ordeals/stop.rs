//! A rank that is stopped during traffic, and goes on after a while. No message is lost, no rank
//! takes it for dead, and no buffer is given back before its bytes are in place.

use crate::support::amount;
use crate::support::ranks::{Ranks, Role};
use crate::support::traffic::Taking;
use crate::support::traffic::script::Plan;
use crate::support::{Job, OverShm, Watchdog, rng};
use carrack::Rank;
use carrack::settings::AutoChoice;
use rand::Rng;
use rustix::process::{Signal, getpid, kill_process};
use std::time::Duration;

pub(crate) fn seconds() -> u64 {
    amount("TEST_STOP_SECONDS", 2, 2)
}

#[test]
fn a_rank_that_is_stopped_for_a_while_loses_nothing_and_is_not_taken_for_dead() {
    let _watchdog = Watchdog::patient("stop", Duration::from_secs(120 + 2 * seconds()));
    let mut rng = rng();
    for parts in [0, 1] {
        let (size, stopped) = (3, rng.random_range(0..3));
        let words = [rng.random(), stopped, rng.random_range(0..5000), parts];
        let mut ranks = Ranks::start("ordeals::stop", size, &words);
        assert!(ranks.hears("going to stop", stopped as u32), "it has ended");
        while !ranks.is_stopped(Rank(stopped as u32)) {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_secs(seconds()));
        let ended = (0..size).filter(|&rank| ranks.has_said("over", rank)).count();
        assert_eq!(ended, 0, "a rank was done before the one that was stopped: it was no test");
        ranks.signal(Rank(stopped as u32), Signal::CONT);
        ranks.succeed();
    }
}

pub(crate) fn rank(role: &Role) {
    let [seed, stopped, after, parts] = role.words[..] else { panic!("four words") };
    let steps = amount("TEST_STOP_STEPS", 1000, 20_000);
    let kernel_copy = if parts == 1 { AutoChoice::Off } else { AutoChoice::Auto };
    let runtime = role.runtime(OverShm::settings().setting("kernel_copy", kernel_copy));
    let plan = Plan { seed, steps, lanes: 1, large: 20, longest: 300_000, room: 270_000 };
    let mut taking = Taking::part(role, runtime.clone(), plan, None);
    taking.patience += Duration::from_secs(seconds());
    std::thread::scope(|scope| {
        if u64::from(role.rank) == stopped {
            scope.spawn(|| {
                while taking.steps() < steps / 5 {
                    std::thread::sleep(Duration::from_micros(200));
                }
                role.says("going to stop");
                std::thread::sleep(Duration::from_micros(after));
                // All its threads, wherever they are.
                kill_process(getpid(), Signal::STOP).unwrap();
            });
        }
        taking.run();
    });
    role.meet("over", &runtime, 0..role.size);
}
