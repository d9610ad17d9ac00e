//! The command line of `run`, and the job that it describes.

use std::ffi::{OsStr, OsString};
use std::time::Duration;

use carrack::bootstrap::MAX_RANKS;
use clap::Args;

use super::binding::Bind;
use super::nodes::Nodes;
use crate::args;

/// A job: one program that runs as several ranks. Also the options of `carrack
/// run`.
#[derive(Args, Clone, Debug)]
pub(crate) struct Job {
    /// Number of ranks, on each node.
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = parse_ranks)]
    pub(crate) ranks: u32,

    #[command(flatten)]
    pub(crate) nodes: Nodes,

    /// Pin rank i to the i-th CPU that the launcher may use, or leave placement to the kernel.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Bind::None)]
    pub(crate) bind: Bind,

    /// End the job after this many seconds, with status 124.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub(crate) timeout: Option<Duration>,

    /// Do not put `[rank] ` before each line of output.
    #[arg(long)]
    pub(crate) no_tag: bool,

    /// The ranks write to the launcher's own stdout and stderr, terminals included.
    #[arg(skip)]
    pub(crate) is_direct: bool,

    /// Variables to add to the environment that the ranks inherit.
    #[arg(skip)]
    pub(crate) env: Vec<(OsString, OsString)>,

    /// The program and its arguments. Without a slash it is looked for in PATH, then in the
    /// folder of the carrack command, then among the examples there.
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM [ARGS]")]
    pub(crate) command: Vec<OsString>,
}

impl Job {
    /// Creates a job of this very binary, with these arguments. Its output is untagged and passes
    /// straight through.
    pub(crate) fn of_this_program(args: impl Iterator<Item = OsString>, ranks: u32) -> Self {
        // The running binary even when the file has been replaced by a new build meanwhile.
        let command = std::iter::once("/proc/self/exe".into()).chain(args).collect();
        let (bind, timeout, no_tag, is_direct) = (Bind::None, None, true, true);
        let (nodes, env) = (Nodes::default(), Vec::new());
        Self { ranks, nodes, bind, timeout, no_tag, is_direct, env, command }
    }

    /// Returns the program: a path with a slash in it, or a name to look up.
    pub(super) fn program(&self) -> &OsStr {
        // clap requires one; an empty name is reported as not found.
        self.command.first().map_or(OsStr::new(""), OsString::as_os_str)
    }
}

fn parse_ranks(text: &str) -> Result<u32, String> {
    args::number(text, 1..=MAX_RANKS, &format!("a job has 1 to {MAX_RANKS} ranks"))
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    // A year is more than any job is given, and far from where clocks overflow.
    let what = "give a number of seconds above 0 and up to 31622400 (a year), such as 30 or 0.5";
    args::seconds(text, 366.0 * 86400.0, what)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_has_at_least_one_rank_and_at_most_the_limit() {
        assert_eq!(parse_ranks("1"), Ok(1));
        assert_eq!(parse_ranks("4096"), Ok(4096));
        for wrong in ["0", "4097", "-1", "two", ""] {
            assert!(parse_ranks(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_timeout_is_a_positive_number_of_seconds() {
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "NaN", "inf", "1e300", "soon"] {
            assert!(parse_seconds(wrong).is_err(), "{wrong}");
        }
    }
}
