//! Very many messages: four ranks, two threads each with a device of its own, all kinds of
//! operations. Every one is accounted for, and a rank takes no more memory in the end than when a
//! tenth was done.

use crate::support::amount;
use crate::support::ranks::{Ranks, Role};
use crate::support::traffic::Taking;
use crate::support::traffic::script::Plan;
use crate::support::{Job, OverShm, Watchdog, patience, rng};
use carrack::Runtime;
use rand::Rng;
use std::time::Duration;

const RANKS: u32 = 4;
const LANES: u32 = 2;
/// Growth that is no leak: an arena of the allocator, a page table.
pub(crate) const SLACK: u64 = 8 << 20;

pub(crate) fn messages() -> u64 {
    amount("TEST_SOAK", 100_000, 1_000_000)
}

#[test]
fn many_messages_of_all_kinds_are_all_accounted_for_and_leave_no_memory_behind() {
    let _watchdog = Watchdog::patient("soak", Duration::from_secs(300 + messages() / 5000));
    let seed = rng().random();
    Ranks::start("ordeals::soak", RANKS, &[seed]).succeed();
}

pub(crate) fn rank(role: &Role) {
    part(role, &role.runtime(OverShm::settings()), messages());
}

/// Takes part with its share of the messages.
pub(crate) fn part(role: &Role, runtime: &Runtime, messages: u64) {
    let others = u64::from(RANKS - 1) * u64::from(LANES);
    let steps = messages / (u64::from(RANKS) * others);
    let plan =
        Plan { seed: role.words[0], steps, lanes: LANES, large: 2, longest: 40_000, room: 16_384 };
    let mut taking = Taking::part(role, runtime.clone(), plan, None);
    taking.patience = patience(taking.patience);
    let early = std::thread::scope(|scope| {
        let early = scope.spawn(|| {
            while taking.steps() < others * steps / 10 {
                std::thread::sleep(Duration::from_millis(5));
            }
            resident()
        });
        taking.run();
        early.join().unwrap()
    });
    let late = resident();
    assert_eq!(taking.steps(), others * steps);
    eprintln!(
        "rank {}: {} messages, {early} bytes resident, then {late}",
        role.rank,
        others * steps
    );
    assert!(late < early + SLACK, "{early} bytes after a tenth, {late} in the end");
    role.meet("over", runtime, 0..role.size);
}

pub(crate) fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}
