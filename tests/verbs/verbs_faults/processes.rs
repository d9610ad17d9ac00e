//! Processes on one network of simulated NICs: one is killed during traffic, another is stopped
//! for a while.

use crate::support::nics::fabric;
use crate::support::ranks::{Ranks, Role, die};
use crate::support::traffic::Taking;
use crate::support::traffic::script::Plan;
use crate::support::{Job, OverSimulatedNic, Watchdog, rng};
use carrack::Rank;
use carrack_simulators::nic::FABRIC_VARIABLE;
use rand::Rng;
use rustix::process::{Signal, getpid, kill_process};
use std::time::Duration;

const STEPS: u64 = 200;
const SIZE: u32 = 3;

/// Plays the role of a rank of these tests.
pub(crate) fn rank(role: &Role) {
    match role.name.as_str() {
        "killed" => killed(role),
        "stopped" => stopped(role),
        other => panic!("no role {other}"),
    }
}

fn plan(seed: u64) -> Plan {
    Plan { seed, steps: STEPS, lanes: 1, large: 15, longest: 200_000, room: 180_000 }
}

#[test]
fn a_rank_that_is_killed_in_the_midst_of_traffic_is_heard_of_and_harms_no_other_rank() {
    let _watchdog = Watchdog::patient("a rank is killed", Duration::from_secs(300));
    let mut rng = rng();
    for number in 0..6 {
        let victim = rng.random_range(0..SIZE);
        let words =
            [rng.random(), victim.into(), rng.random_range(0..=STEPS * u64::from(SIZE - 1))];
        println!("kill {number}: words {words:?}");
        let network = fabric();
        Ranks::start_each(|_| (FABRIC_VARIABLE, &network), "verbs_faults::killed", SIZE, &words)
            .succeed_except(Rank(victim));
    }
}

fn killed(role: &Role) {
    let [seed, victim, when] = role.words[..] else { panic!("three words") };
    let victim = Rank(victim as u32);
    let is_victim = role.rank == victim.0;
    let runtime = role.runtime(OverSimulatedNic::settings());
    let mut taking =
        Taking::part(role, runtime.clone(), plan(seed), (!is_victim).then_some(victim));
    if is_victim {
        taking.dies_at = when;
        taking.run();
        die();
    }
    taking.run();
    role.meet("over", &runtime, (0..role.size).filter(|&rank| rank != victim.0));
}

#[test]
fn a_rank_that_is_stopped_for_a_while_loses_nothing_and_is_not_taken_for_dead() {
    let _watchdog = Watchdog::patient("a rank is stopped", Duration::from_secs(200));
    let mut rng = rng();
    let stopped = rng.random_range(0..SIZE);
    let words = [rng.random(), stopped.into(), rng.random_range(0..5000)];
    let network = fabric();
    let mut ranks =
        Ranks::start_each(|_| (FABRIC_VARIABLE, &network), "verbs_faults::stopped", SIZE, &words);
    assert!(ranks.hears("going to stop", stopped), "it has ended");
    while !ranks.is_stopped(Rank(stopped)) {
        std::thread::sleep(Duration::from_millis(1));
    }
    // For the others to fill every queue and wait.
    std::thread::sleep(Duration::from_secs(2));
    assert!(
        (0..SIZE).all(|rank| !ranks.has_said("over", rank)),
        "a rank was done before: the test proves nothing"
    );
    ranks.signal(Rank(stopped), Signal::CONT);
    ranks.succeed();
}

fn stopped(role: &Role) {
    let [seed, stopped, after] = role.words[..] else { panic!("three words") };
    let runtime = role.runtime(OverSimulatedNic::settings());
    let mut taking = Taking::part(role, runtime.clone(), plan(seed), None);
    taking.patience += Duration::from_secs(2);
    std::thread::scope(|scope| {
        if u64::from(role.rank) == stopped {
            scope.spawn(|| {
                while taking.steps() < STEPS / 5 {
                    std::thread::sleep(Duration::from_micros(200));
                }
                role.says("going to stop");
                std::thread::sleep(Duration::from_micros(after));
                kill_process(getpid(), Signal::STOP).unwrap();
            });
        }
        taking.run();
    });
    role.meet("over", &runtime, 0..role.size);
}
