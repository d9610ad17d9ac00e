//! Faults that last, and traffic over a link that is cut and healed at random.

use super::faults::{BUSY, IDLE, NEVER_MADE, cards_down, millis, pull};
use super::{Faulty, NONE};
use crate::support::amount;
use crate::support::nodes::Weather;
use crate::support::rng;
use carrack::Rank;
use rand::Rng;
use rustix::process::Signal;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Messages over the link that is cut at random.
fn messages() -> u64 {
    amount("TEST_FAULTS", 20_000, 200_000)
}

/// Returns the time that these messages take at most.
pub(super) fn hours() -> Duration {
    Duration::from_secs(messages() / 500)
}

#[test]
#[ignore = "long: minutes of bad weather"]
fn each_kind_of_bad_weather_harms_no_message() {
    let none = Weather::default();
    for weather in [
        Weather { lost: 0.01, ..none },
        Weather { delay: millis(10), ..none },
        Weather { delay: millis(1), jitter: millis(5), ..none },
        Weather { doubled: 0.1, ..none },
    ] {
        println!("{weather:?}");
        let Some(job) = Faulty::traffic("weather", weather, 500, NONE) else { return };
        job.ranks.succeed();
    }
}

#[test]
#[ignore = "long: half a minute without a network, four times"]
fn a_cut_of_half_a_minute_harms_no_message_however_it_is_made() {
    for cut in [[true, true], [true, false], [false, true], [false, false]] {
        println!("cut {cut:?}");
        let Some(job) = Faulty::traffic("cut", Weather::default(), 1000, NONE) else { return };
        match cut {
            [false, false] => job.nodes.card(0, "down"),
            _ => job.nodes.cut(cut),
        }
        std::thread::sleep(Duration::from_secs(30));
        job.is_still_going();
        job.nodes.cut([false; 2]);
        job.nodes.card(0, "up");
        job.ranks.succeed();
    }
}

#[test]
#[ignore = "long: 20 seconds of silence"]
fn a_rank_that_is_stopped_for_twenty_seconds_is_not_down() {
    let Some(job) = Faulty::traffic("stop", Weather::default(), 1000, NONE) else { return };
    job.ranks.signal(Rank(2), Signal::STOP);
    std::thread::sleep(Duration::from_secs(20));
    job.is_still_going();
    job.ranks.signal(Rank(2), Signal::CONT);
    job.ranks.succeed();
}

#[test]
#[ignore = "long: minutes of waiting"]
fn a_pulled_cable_ends_every_operation_in_time_whatever_the_time_is() {
    for timeout in [3, 10, 30] {
        for state in [IDLE, BUSY, NEVER_MADE] {
            pull("pulled", timeout, state, 0, |nodes| nodes.cut([true; 2]));
            pull("card down", timeout, state, 1, cards_down);
        }
    }
}

#[test]
#[ignore = "long: an hour of cuts"]
fn a_link_that_is_cut_and_healed_at_random_loses_and_doubles_nothing() {
    let mut job = Faulty::start("random", Weather::default(), "soak", &[messages()]);
    let Some(Faulty { nodes, ranks, .. }) = job.take() else { return };
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = rng();
            while !has_ended.load(Ordering::Relaxed) {
                std::thread::sleep(millis(rng.random_range(0..1000)));
                let cut = [[true, true], [true, false], [false, true]][rng.random_range(0..3)];
                nodes.cut(cut);
                // Most are short.
                std::thread::sleep(millis(1 << rng.random_range(0..12)));
                nodes.cut([false; 2]);
            }
        });
        ranks.succeed();
        has_ended.store(true, Ordering::Relaxed);
    });
}
