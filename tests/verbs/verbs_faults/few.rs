//! Ranks that are processes and have few of something, or of everything, on one network of
//! simulated NICs.

use crate::support::nics::fabric;
use crate::support::ranks::{Ranks, Role};
use crate::support::traffic::script::Plan;
use crate::support::traffic::{SMALL, Taking};
use crate::support::{Job, OverSimulatedNic, Watchdog, rng};
use carrack_simulators::nic::FABRIC_VARIABLE;
use rand::Rng;
use std::time::Duration;

/// Runs each choice of settings several times; `TEST_FEW` sets the number.
fn works_with(what: &str, choices: &[&[&str]], lanes: u64) {
    let times: u32 = std::env::var("TEST_FEW").map_or(2, |text| text.parse().expect("a number"));
    let _watchdog =
        Watchdog::patient(what, Duration::from_secs(100) * choices.len() as u32 * times);
    let mut rng = rng();
    for number in 0..times {
        for settings in choices {
            let words = [rng.random(), lanes];
            println!("{number}: {settings:?}, words {words:?}");
            let network = format!("{FABRIC_VARIABLE}={}", fabric());
            let wrapper: Vec<&str> =
                ["env", &network].into_iter().chain(settings.iter().copied()).collect();
            Ranks::start_under(&wrapper, "verbs_faults::few", 2, &words).succeed();
        }
    }
}

#[test]
fn few_of_one_thing_cost_time_only() {
    let each: Vec<&[&str]> = SMALL.chunks(1).collect();
    works_with("small settings", &each, 1);
}

#[test]
fn few_of_everything_cost_time_only() {
    works_with("all settings small", &[SMALL], 2);
}

/// Most messages are offered, so both ranks have their largest number of offers in flight nearly
/// all the time.
#[test]
fn ranks_that_both_have_all_their_offers_in_flight_do_not_wait_for_each_other() {
    works_with(
        "full of offers",
        &[&SMALL[..1], &["CARRACK_OFFERS=16", "CARRACK_UNEXPECTED=4096"]],
        3,
    );
}

pub(crate) fn rank(role: &Role) {
    let [seed, lanes] = role.words[..] else { panic!("two words") };
    let runtime = role.runtime_with(OverSimulatedNic::settings().build().unwrap());
    let large = if lanes == 3 { 80 } else { 15 };
    let plan = Plan { seed, steps: 150, lanes: lanes as u32, large, longest: 60_000, room: 50_000 };
    Taking::part(role, runtime.clone(), plan, None).run();
    role.meet("over", &runtime, 0..role.size);
}
