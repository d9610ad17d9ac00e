//! The interface of a side of the comparison, and the search for a peer's best settings.

use std::time::Duration;

use children::ChildError;
use serde::Deserialize;

use super::row::{Row, Test, name};
use crate::error::TaskError;

/// A program that is measured.
pub(super) trait Side {
    /// Returns its name in the table.
    fn name(&self) -> &'static str;

    /// Returns its name and version.
    fn version(&self) -> String;

    /// Returns its role in the comparison.
    fn role(&self) -> Role {
        Role::Peer
    }

    /// Returns its benchmark's name of the test, where several of its tests could be compared.
    fn test(&self, _: &Row) -> Option<&'static str> {
        None
    }

    /// Finds its fastest settings of the row by short runs, or why it cannot do it.
    fn prepare(&self, row: &Row) -> Result<Setting, Out>;

    /// Measures a row by one run.
    fn measure(&self, row: &Row, setting: &Setting) -> Result<Figure, TaskError>;
}

/// A side's role in the comparison.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    /// Carrack.
    Ours,
    /// One that Carrack is compared with.
    Peer,
    /// No library: what the machine can do.
    Yardstick,
}

/// Reason why a row omits a side, or measures it no longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Out {
    /// The side has nothing of the kind, or not yet; that is no failure.
    Cannot(String),
    /// The row is skipped, since Carrack cannot do it.
    Skipped,
    /// A run failed, or hung and was ended; there is no other try, since each may take as long.
    Failed(String),
}

impl Out {
    /// Returns the error of a side that cannot do a row.
    pub(super) fn cannot<T>(why: &str) -> Result<T, Self> {
        Err(Self::Cannot(why.into()))
    }
}

impl<E: Into<TaskError>> From<E> for Out {
    fn from(error: E) -> Self {
        Self::Failed(error.into().to_string())
    }
}

/// Settings with which a side runs a row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setting {
    pub(super) variant: &'static Variant,
    /// Messages, or round trips for a latency; nothing to a side that measures by time.
    pub(super) iterations: u64,
}

/// Settings that a side is tried with.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Variant {
    /// Name in the table; empty for none.
    pub(super) name: &'static str,
    /// Environment variables.
    pub(super) env: &'static [(&'static str, &'static str)],
}

/// The settings of a side that is measured as it comes.
pub(super) const AS_IT_COMES: &[Variant] = &[Variant { name: "", env: &[] }];

/// Result of one run of one side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Figure {
    /// Value in the unit of the test.
    pub(super) value: f64,
    /// The average, of a latency whose side prints one; in the same unit.
    pub(super) average: Option<f64>,
}

impl Figure {
    /// Creates a figure without an average.
    pub(super) const fn plain(value: f64) -> Self {
        Self { value, average: None }
    }

    /// Returns the messages, or round trips, of a run of this duration.
    fn iterations(&self, row: &Row, seconds: f64) -> u64 {
        let per_second = match row.test {
            // An iteration is there and back, of a ping-pong.
            Test::Latency => 1e6 / (row.op.ways() * self.average.unwrap_or(self.value).max(0.001)),
            // Each thread does its part.
            Test::Bandwidth => self.value * 1e9 / row.size.max(1) as f64 / row.threads as f64,
            Test::Rate => self.value * 1e6 / row.threads as f64,
        };
        // A float's conversion saturates, and the bounds keep what is left in reason.
        ((per_second * seconds) as u64).clamp(FEWEST, MOST)
    }
}

/// Iterations that a figure needs at least, and that no run has more of.
const FEWEST: u64 = 100;
const MOST: u64 = 10_000_000_000;

/// A try is about a tenth of a second: `TRY_ITERATIONS`, or fewer that move `TRY_BYTES`. There
/// is one of each variant, since starting a peer may take longer than that.
const TRY_ITERATIONS: u64 = 200_000;
const TRY_BYTES: u64 = 1 << 30;

/// Finds the variant that makes a side fastest in a row, and the iterations that take `seconds`.
///
/// # Errors
/// The last one, if no variant works; one that works is enough.
pub(super) fn tune(
    row: &Row,
    seconds: f64,
    variants: &'static [Variant],
    run: impl Fn(&Setting) -> Result<Figure, TaskError>,
) -> Result<Setting, Out> {
    // A core that has nothing to do may take a fifth of a millisecond to wake up.
    let most = if row.asleep { TRY_ITERATIONS / 50 } else { TRY_ITERATIONS };
    let iterations = (TRY_BYTES / row.size.max(1) as u64).clamp(FEWEST, most);
    let mut best: Option<(Figure, &'static Variant)> = None;
    let mut failed = None;
    for variant in variants {
        let better = |one: Figure, other: Figure| row.test.prefers(one.value, other.value);
        match run(&Setting { variant, iterations }) {
            Ok(figure) if best.is_some_and(|(best, _)| !better(figure, best)) => {}
            Ok(figure) => best = Some((figure, variant)),
            Err(error) => failed = Some(error),
        }
        // The next one would most likely hang as long.
        if matches!(failed, Some(TaskError::Child(ChildError::TimedOut { .. }))) {
            break;
        }
    }
    let iterations = |figure: Figure| figure.iterations(row, seconds);
    match (best, failed) {
        (Some((figure, variant)), _) => Ok(Setting { variant, iterations: iterations(figure) }),
        (None, Some(error)) => Err(error.into()),
        (None, None) => Out::cannot("there are no settings to try"),
    }
}

/// Returns the time after which a run counts as hung; a busy machine takes several times as long.
pub(super) fn limit(seconds: f64) -> Duration {
    Duration::from_secs(20) + Duration::from_secs_f64(10.0 * seconds)
}

/// Finds the version in what a program says about itself.
pub(super) fn version(said: &str) -> String {
    let is_version =
        |word: &&str| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.');
    said.split_whitespace().find(is_version).unwrap_or("of unknown version").to_owned()
}

/// A line of `carrack perf --json`, or of `mpi_bench`, which has the same fields.
#[derive(Debug, Deserialize)]
struct PerfLine {
    test: String,
    size: usize,
    #[serde(default = "one")]
    threads: usize,
    latency_us: Option<Latency>,
    /// 10⁹ bytes a second.
    bandwidth_gbps: Option<f64>,
    /// 10⁶ messages a second.
    rate_mps: Option<f64>,
}

fn one() -> usize {
    1
}

/// One way, in microseconds.
#[derive(Debug, Deserialize)]
struct Latency {
    p50: f64,
    mean: Option<f64>,
}

/// Finds the figure of a row among the lines of JSON that a program said.
pub(super) fn read_line(program: &'static str, said: &str, row: &Row) -> Result<Figure, TaskError> {
    let lines = said.lines().filter_map(|line| serde_json::from_str::<PerfLine>(line).ok());
    let mut of_row = lines.filter(|line| {
        line.size == row.size && line.threads == row.threads && line.test == name(row.test)
    });
    let figure = of_row.find_map(|line| match row.test {
        Test::Latency => line.latency_us.map(|us| Figure { value: us.p50, average: us.mean }),
        Test::Bandwidth => line.bandwidth_gbps.map(Figure::plain),
        Test::Rate => line.rate_mps.map(Figure::plain),
    });
    figure.filter(|figure| figure.value.is_finite() && figure.value > 0.0).ok_or_else(|| {
        TaskError::Output {
            program,
            expected: "a line of JSON with this test, this size and its figure",
            found: said.to_owned(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const VARIANTS: &[Variant] = &[
        Variant { name: "slow", env: &[] },
        Variant { name: "broken", env: &[] },
        Variant { name: "fast", env: &[] },
    ];

    fn row(text: &str) -> Row {
        text.parse().unwrap()
    }

    fn broken() -> TaskError {
        TaskError::Missing { what: "a transport".into(), remedy: "" }
    }

    #[test]
    fn a_version_is_the_first_number_with_a_point() {
        assert_eq!(version("HYDRA build details:\n    Version:      5.0.2\n    CC: cc\n"), "5.0.2");
        assert_eq!(version("# Library version: 1.22.0\n# Library path: /x\n"), "1.22.0");
        assert_eq!(version("mpiexec (Open MPI) 5.0.11\n"), "5.0.11");
        assert_eq!(version(""), "of unknown version");
    }

    #[test]
    fn the_best_variant_that_works_is_taken_and_run_for_the_seconds_asked_for() {
        let prepared =
            tune(&row("am:latency:8"), 0.5, VARIANTS, |setting| match setting.variant.name {
                "slow" => Ok(Figure { value: 4.0, average: Some(4.0) }),
                "fast" => Ok(Figure { value: 1.0, average: Some(2.0) }),
                _ => Err(broken()),
            });
        let setting = prepared.unwrap();
        // Half a second of round trips of 4 us.
        assert_eq!((setting.variant.name, setting.iterations), ("fast", 125_000));
    }

    #[test]
    fn a_side_of_which_no_variant_works_is_an_error() {
        assert!(tune(&row("am:rate:8"), 0.5, VARIANTS, |_| Err(broken())).is_err());
    }

    #[test]
    fn iterations_come_from_rates_and_bandwidths_and_are_never_too_few() {
        let figure = Figure::plain(10.0);
        assert_eq!(figure.iterations(&row("am:rate:8"), 2.0), 20_000_000);
        assert_eq!(figure.iterations(&row("send:rate:8@4"), 2.0), 5_000_000);
        assert_eq!(figure.iterations(&row("barrier:latency:4"), 1.0), 100_000);
        assert_eq!(figure.iterations(&row("send:bandwidth:1M"), 1.0), 9_536);
        assert_eq!(figure.iterations(&row("send:bandwidth:1024M"), 0.1), 100);
    }
}
