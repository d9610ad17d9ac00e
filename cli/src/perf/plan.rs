//! The points to measure.

use super::benchmark::{Reach, Sizes};
use super::error::PerfError;
use super::options::{Op, PerfOptions, Wanted};
use super::seat::Pace;
use super::sides::Sides;
use crate::launch::Bind;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::hint::black_box;
use std::time::Duration;

/// Sizes of latency and bandwidth when none are given. All except the last two fit in a packet.
const SIZES: [usize; 7] = [8, 64, 512, 4 << 10, 8 << 10, 64 << 10, 1 << 20];
/// Size of rate when none is given.
const RATE_SIZE: usize = 8;

/// The test of a point.
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
    /// Returns the name of the test, as on the command line.
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
    /// Pieces of a batch; one for all other operations.
    pub(super) pieces: usize,
}

impl Point {
    /// Returns the number of seats that it takes at each rank.
    pub(super) fn seats(self) -> usize {
        if self.op.benchmark().reach == Reach::AllRanks { 0 } else { self.threads }
    }
}

/// All points, in the order in which they are measured, and what they have in common.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) points: Vec<Point>,
    pub(super) sides: Sides,
    /// `true` if all threads of a rank share one device.
    pub(super) share_device: bool,
    pub(super) seconds: Duration,
    /// `true` if threads are pinned, where each can have a core.
    pub(super) pin: bool,
    /// The threads' way of waiting, if the user has named one.
    pub(super) wait: Option<Pace>,
}

impl Plan {
    /// Creates a plan of the points that the command line asks for.
    pub(super) fn new(options: &PerfOptions) -> Self {
        let given = !options.size.is_empty();
        let sizes: &[usize] = if given { &options.size } else { &SIZES };
        let rate_sizes: &[usize] = if given { &options.size } else { &[RATE_SIZE] };
        let tests: &[Test] = match options.test {
            Wanted::Latency => &[Test::Latency],
            Wanted::Bandwidth => &[Test::Bandwidth],
            Wanted::Rate => &[Test::Rate],
            Wanted::All => &[Test::Latency, Test::Bandwidth, Test::Rate],
        };
        let mut points: Vec<Point> = Vec::new();
        for &op in &options.op {
            let row = op.benchmark();
            let pieces = if row.has_pieces { options.pieces } else { 1 };
            for &threads in &options.threads {
                for &test in tests.iter().filter(|test| row.tests.contains(test)) {
                    let sizes: &[usize] = match row.sizes {
                        Sizes::Fixed(fixed) => fixed,
                        Sizes::AskedOr(default) if !given => default,
                        _ if test == Test::Rate => rate_sizes,
                        _ => sizes,
                    };
                    let all_ranks = row.reach == Reach::AllRanks;
                    let threads = if all_ranks { 1 } else { threads };
                    for &size in sizes {
                        let point = Point { op, test, size, threads, pieces };
                        // All requests for a barrier are one point.
                        if !(all_ranks && points.contains(&point)) {
                            points.push(point);
                        }
                    }
                }
            }
        }
        let (sides, seconds, pin) = (options.mem, options.seconds, options.bind == Bind::Core);
        let (share_device, wait) = (options.share_device, options.wait);
        Self { points, sides, share_device, seconds, pin, wait }
    }

    /// Returns the most seats that a point takes: none for a barrier, which is of all ranks.
    pub(super) fn most_seats(&self) -> usize {
        self.points.iter().map(|point| point.seats()).max().unwrap_or(0)
    }

    /// Checks that the plan suits this number of ranks, under a launcher or not.
    pub(super) fn fits(&self, ranks: u32) -> Result<(), PerfError> {
        match (self.points.is_empty(), self.most_seats(), ranks) {
            (true, ..) => Err(PerfError::NoPoints),
            (_, 0, 2..) | (_, _, 2) => Ok(()),
            _ => Err(PerfError::Ranks(ranks)),
        }
    }

    /// Returns `true` if rank 0 copies within itself.
    pub(super) fn has_copies(&self) -> bool {
        self.points.iter().any(|point| point.op.benchmark().reach == Reach::WithinRank)
    }

    /// Checks that each operation works on the chosen memory.
    pub(super) fn suits_memory(&self) -> Result<(), PerfError> {
        let refuses = |point: &&Point| !point.op.benchmark().needs.accepts(self.sides);
        match self.points.iter().find(refuses) {
            Some(point) => {
                let works_with = point.op.benchmark().needs.describe();
                let given = format!("{},{}", self.sides.first, self.sides.others);
                Err(PerfError::OtherMemory { op: point.op.name(), works_with, given })
            }
            None => Ok(()),
        }
    }

    /// Checks that a process can allocate the longest message, which is made in host memory first.
    /// Systems promise more than they have; sizes far beyond that are refused here.
    pub(super) fn has_room(&self) -> Result<(), PerfError> {
        let most = self.points.iter().map(|point| point.size.saturating_mul(point.pieces)).max();
        let most = most.unwrap_or(0);
        // `black_box`, since the compiler may remove an unused allocation.
        let mut room = black_box(Vec::<u8>::new());
        room.try_reserve_exact(most).map_err(|why| PerfError::Room { most, why })?;
        black_box(&room);
        Ok(())
    }

    /// Returns a number that two ranks share if they mean the same points.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (&self.points, self.sides, self.share_device, self.pin, self.wait).hash(&mut hasher);
        hasher.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct PlanCommand {
        #[command(flatten)]
        options: PerfOptions,
    }

    fn plan(args: &[&str]) -> Plan {
        Plan::new(&PlanCommand::try_parse_from([&["perf"], args].concat()).unwrap().options)
    }

    #[test]
    fn all_tests_of_both_operations_are_the_default_and_rate_is_of_small_messages() {
        let plan = plan(&[]);
        assert_eq!(plan.points.len(), 2 * (7 + 7 + 1));
        let rates = plan.points.iter().filter(|point| point.test == Test::Rate);
        assert!(rates.clone().count() == 2 && rates.clone().all(|point| point.size == 8));
    }

    #[test]
    fn ranks_with_other_points_have_another_fingerprint() {
        let print = |args: &[&str]| plan(args).fingerprint();
        assert_eq!(print(&["latency"]), print(&["latency"]));
        assert_ne!(print(&["latency"]), print(&["rate"]));
        assert_ne!(print(&["--size", "8"]), print(&["--size", "9"]));
        assert_ne!(print(&[]), print(&["--share-device"]));
        assert_ne!(print(&["--mem", "host,pinned"]), print(&["--mem", "pinned,host"]));
    }

    #[test]
    fn a_barrier_is_one_point_and_a_fetch_add_is_of_a_word() {
        let all = plan(&["--op", "barrier,fetch_add", "--threads", "1,2", "--size", "0,64"]).points;
        let barrier: Vec<_> = all.iter().filter(|point| point.op == Op::Barrier).copied().collect();
        let one = Point { op: Op::Barrier, test: Test::Latency, size: 0, threads: 1, pieces: 1 };
        assert_eq!(barrier, [one]);
        let adds: Vec<_> = all
            .iter()
            .filter(|point| point.op == Op::FetchAdd)
            .map(|p| (p.test, p.size, p.threads))
            .collect();
        let both = [1, 2].map(|threads| [(Test::Latency, 8, threads), (Test::Rate, 8, threads)]);
        assert_eq!(adds, both.concat());
    }

    #[test]
    fn a_put_that_is_seen_has_a_latency_only_and_host_memory() {
        let all = plan(&["--op", "put_seen", "--size", "8,64"]);
        assert!(
            all.points.len() == 2 && all.points.iter().all(|point| point.test == Test::Latency)
        );
        assert!(all.suits_memory().is_ok());
        assert!(plan(&["--op", "put_seen", "--mem", "device"]).suits_memory().is_err());
        assert!(plan(&["--op", "put_seen", "--mem", "pinned,host"]).suits_memory().is_err());
        assert!(all.has_room().is_ok());
        // More than there are addresses.
        let why = plan(&["--size", "8,900000000G"]).has_room().unwrap_err().to_string();
        assert!(why.contains("966367641600000000 bytes") && why.contains("--size"), "{why}");
        assert!(
            plan(&["--op", "put_batch", "--size", "16000000G", "--pieces", "4000"])
                .has_room()
                .is_err()
        );
    }

    #[test]
    fn a_batch_has_a_latency_only_and_as_many_pieces_as_is_said() {
        let of = |args: &[&str]| {
            plan(args).points.iter().map(|p| (p.size, p.pieces)).collect::<Vec<_>>()
        };
        assert_eq!(of(&["--op", "put_batch"]), [(64, 1000)]);
        assert_eq!(of(&["--op", "put_batch", "--pieces", "7", "--size", "8,9"]), [(8, 7), (9, 7)]);
        assert!(plan(&["latency"]).points.iter().all(|point| point.pieces == 1));
        let wrong =
            PlanCommand::try_parse_from(["perf", "--pieces", "0"]).err().unwrap().to_string();
        assert!(wrong.contains("1 to 1048576 pieces"), "{wrong}");
    }

    #[test]
    fn more_than_two_ranks_have_nothing_but_barriers() {
        let fits = |args: &[&str], ranks| plan(args).fits(ranks).is_ok();
        assert!(fits(&["--op", "barrier"], 2) && fits(&["--op", "barrier"], 4) && fits(&[], 2));
        assert!(!fits(&["--op", "barrier,am"], 4) && !fits(&[], 3) && !fits(&[], 1));
        assert!(!fits(&["--op", "barrier"], 1) && !fits(&["rate", "--op", "barrier"], 2));
    }
}
