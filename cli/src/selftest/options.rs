//! The command line of `selftest`.

use crate::args;
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::time::Duration;

/// The options of `carrack selftest`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
The parts are the test programs, the examples, and `carrack perf` between every pair of kinds of
memory. Each is a process of its own with a time limit; what it prints goes to DIR/logs. The
report is DIR/report.md, and the same as JSON in DIR/report.json. The status is 0 only if no part
failed. Simulated GPUs are called simulated wherever they are named; their figures say nothing of
any real one.

The parts see none of the caller's CARRACK_* variables: what is tested are the defaults, and what
each part sets.

A bundle's programs are unpacked into the temporary folder (TMPDIR) or, where programs cannot be
started there, into DIR; they are removed at the end.

Under a launcher (carrack run, mpirun, mpiexec, srun, flux run) one rank of each node works, its
first; the others say so and end with status 0. Where there are several nodes, each writes
report-HOST.md and report-HOST.json. A rank that its launcher has bound to one core tests with one
core: start it unbound (mpirun --bind-to none, srun --cpu-bind=none).

Ctrl-C ends what runs, and all it has started; the report tells what was done until then, and the
status is 130.")]
pub(crate) struct SelftestOptions {
    /// The folder of the report; made where it is missing.
    #[arg(long, value_name = "DIR", default_value = "carrack-selftest")]
    pub(super) report: PathBuf,

    /// The most important parts only, in a few minutes.
    #[arg(long)]
    pub(super) quick: bool,

    /// GPUs to use: NVIDIA's if there are any, else simulated ones (auto); NVIDIA's or an error
    /// (cuda); simulated ones (fake).
    #[arg(long, value_enum, default_value_t = Choice::Auto)]
    #[arg(value_name = "auto|cuda|fake", hide_possible_values = true)]
    pub(super) gpu: Choice,

    /// Seconds to measure each figure of `carrack perf`; 0.1 if not given, 0.02 for simulated GPUs
    /// and with --quick.
    #[arg(long, value_parser = args::of_measurement, value_name = "SECONDS")]
    pub(super) seconds: Option<Duration>,

    /// Only parts with one of these in their names.
    #[arg(long, value_name = "TEXT,...", value_delimiter = ',')]
    #[arg(value_parser = NonEmptyStringValueParser::new())]
    pub(super) filter: Vec<String>,

    /// Name the parts that would run, and run none.
    #[arg(long)]
    pub(super) list: bool,

    /// The longest that any part may take, in seconds; 5 minutes to 30 if not given, as each needs.
    #[arg(long, value_parser = limit, value_name = "SECONDS")]
    pub(super) limit: Option<Duration>,
}

/// GPUs to test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Choice {
    /// NVIDIA's if there are any, else simulated ones.
    Auto,
    /// NVIDIA's.
    Cuda,
    /// Simulated ones.
    Fake,
}

fn limit(text: &str) -> Result<Duration, String> {
    let what = "give a number of seconds from 0.1 to 1000000";
    let seconds = args::seconds(text, 1e6, what)?;
    if seconds.as_secs_f64() >= 0.1 { Ok(seconds) } else { Err(what.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct SelftestCommand {
        #[command(flatten)]
        options: SelftestOptions,
    }

    /// An empty text is in every name.
    #[test]
    fn a_filter_has_no_empty_text() {
        let parsed = |filter| SelftestCommand::try_parse_from(["selftest", "--filter", filter]);
        assert_eq!(parsed("conformance,halo").unwrap().options.filter, ["conformance", "halo"]);
        for filter in ["", "conformance,", ",halo"] {
            assert!(parsed(filter).is_err(), "{filter}");
        }
    }
}
