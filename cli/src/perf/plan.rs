//! The points to measure.

use super::error::PerfError;
use super::options::{MemoryChoice, Op, PerfOptions, Wanted};
use crate::launch::Bind;
use carrack::settings::Settings;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

/// Sizes of latency and bandwidth when none are given: within a cache line, within a ring, a page, a packet.
const SIZES: [usize; 5] = [8, 64, 512, 4 << 10, 8 << 10];
/// Size of rate when none is given.
const RATE_SIZE: usize = 8;

/// What is measured at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Test {
    /// One way, from a ping-pong.
    Latency,
    /// Bytes a second, from a stream of windows.
    Bandwidth,
    /// Messages a second, from a stream of windows.
    Rate,
}

impl Test {
    /// As on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Bandwidth => "bandwidth",
            Self::Rate => "rate",
        }
    }
}

/// One row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Point {
    pub(super) op: Op,
    pub(super) test: Test,
    pub(super) size: usize,
    pub(super) threads: usize,
}

/// All points, in the order in which they are measured, and what they have in common.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) points: Vec<Point>,
    pub(super) memory: MemoryChoice,
    pub(super) seconds: Duration,
    /// Whether threads are pinned, where each can have a core.
    pub(super) pin: bool,
    /// Default sizes that are longer than a packet, and were left out.
    pub(super) left_out: Vec<usize>,
}

impl Plan {
    /// The points that the command line asks for.
    ///
    /// # Errors
    /// A size that was asked for is longer than a packet.
    pub(super) fn new(options: &PerfOptions, settings: &Settings) -> Result<Self, PerfError> {
        let max = settings.packet_size();
        if let Some(&size) = options.size.iter().find(|&&size| size > max) {
            return Err(PerfError::TooLong { size, max });
        }
        let given = !options.size.is_empty();
        let sizes: &[usize] = if given { &options.size } else { &SIZES };
        let rate_sizes: &[usize] = if given { &options.size } else { &[RATE_SIZE] };
        let tests: &[Test] = match options.test {
            Wanted::Latency => &[Test::Latency],
            Wanted::Bandwidth => &[Test::Bandwidth],
            Wanted::Rate => &[Test::Rate],
            Wanted::All => &[Test::Latency, Test::Bandwidth, Test::Rate],
        };
        let mut points = Vec::new();
        for &op in &options.op {
            for &threads in &options.threads {
                for &test in tests {
                    let sizes = if test == Test::Rate { rate_sizes } else { sizes };
                    let fitting = sizes.iter().filter(|&&size| size <= max);
                    points.extend(fitting.map(|&size| Point { op, test, size, threads }));
                }
            }
        }
        let uses_sizes = tests.iter().any(|&test| test != Test::Rate);
        let left_out = sizes.iter().copied().filter(|&size| uses_sizes && size > max).collect();
        Ok(Self {
            points,
            memory: options.mem,
            seconds: options.seconds,
            pin: options.bind == Bind::Core,
            left_out,
        })
    }

    /// The most threads that a point has.
    pub(super) fn most_threads(&self) -> usize {
        self.points.iter().map(|point| point.threads).max().unwrap_or(1)
    }

    /// A number that two ranks share if they mean the same points.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.points, self.memory, self.pin).hash(&mut hasher);
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: PerfOptions,
    }

    fn plan(args: &[&str], packet: &str) -> Result<Plan, PerfError> {
        let options = Command::try_parse_from([&["perf"], args].concat()).unwrap().options;
        Plan::new(&options, &Settings::from_vars([("CARRACK_PACKET_SIZE", packet)]).unwrap())
    }

    #[test]
    fn all_tests_of_both_operations_are_the_default_and_rate_is_of_small_messages() {
        let plan = plan(&[], "8K").unwrap();
        assert_eq!(plan.points.len(), 2 * (5 + 5 + 1));
        let rates = plan.points.iter().filter(|point| point.test == Test::Rate);
        assert!(rates.clone().count() == 2 && rates.clone().all(|point| point.size == 8));
    }

    #[test]
    fn a_default_size_that_does_not_fit_is_left_out_and_one_that_was_asked_for_is_an_error() {
        let shorter = plan(&["latency", "--op", "am"], "4K").unwrap();
        assert_eq!((shorter.points.len(), shorter.left_out), (4, vec![8192]));
        let error = plan(&["--size", "8K"], "4K").unwrap_err();
        assert!(matches!(error, PerfError::TooLong { size: 8192, max: 4096 }), "{error}");
    }

    #[test]
    fn a_default_size_is_not_said_to_be_left_out_of_a_test_that_has_no_use_for_it() {
        assert!(plan(&["rate"], "4K").unwrap().left_out.is_empty());
    }

    #[test]
    fn ranks_with_other_points_have_another_fingerprint() {
        let print = |args: &[&str]| plan(args, "8K").unwrap().fingerprint();
        assert_eq!(print(&["latency"]), print(&["latency"]));
        assert_ne!(print(&["latency"]), print(&["rate"]));
        assert_ne!(print(&["--size", "8"]), print(&["--size", "9"]));
    }
}
