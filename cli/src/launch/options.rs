//! The command line of `run`, and the job that it describes.

use std::ffi::OsString;
use std::time::Duration;

use carrack::bootstrap::MAX_RANKS;
use clap::{Args, ValueEnum};

use super::binding::Bind;

/// The options of `carrack run`.
#[derive(Args, Clone, Debug)]
pub(crate) struct LaunchOptions {
    /// Number of ranks.
    #[arg(short = 'n', long = "ranks", value_name = "N", value_parser = parse_ranks)]
    ranks: u32,

    /// Pin rank i to the i-th CPU that the launcher may use, or leave placement to the kernel.
    #[arg(long, value_enum, value_name = "HOW", default_value_t = Bind::None)]
    bind: Bind,

    /// End the job after this many seconds, with status 124.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    timeout: Option<Duration>,

    /// Do not put `[rank] ` before each line of output.
    #[arg(long)]
    no_tag: bool,

    /// The program and its arguments. Without a slash it is looked for in PATH, then in the
    /// folder of the carrack command, then among the examples there.
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "PROGRAM [ARGS]"
    )]
    command: Vec<OsString>,
}

impl LaunchOptions {
    /// The job that the command line describes.
    pub(crate) fn into_job(self) -> Job {
        let mut command = self.command.into_iter();
        Job {
            // clap requires one; an empty name is reported as not found.
            program: command.next().unwrap_or_default(),
            args: command.collect(),
            ranks: self.ranks,
            bind: self.bind,
            output: if self.no_tag { Output::Plain } else { Output::Tagged },
            timeout: self.timeout,
            env: Vec::new(),
        }
    }
}

/// Destination of the ranks' stdout and stderr.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    /// Whole lines, each after `[rank] `.
    Tagged,
    /// Whole lines as they are.
    Plain,
    /// The ranks write to the launcher's own stdout and stderr, terminals included.
    Inherited,
}

/// A job: one program that runs as several ranks on this machine.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    /// The program: a path with a slash in it, or a name to look up.
    pub(crate) program: OsString,
    /// Its arguments, the same for every rank.
    pub(crate) args: Vec<OsString>,
    /// Number of ranks, in `1..=MAX_RANKS`.
    pub(crate) ranks: u32,
    /// Placement of the ranks.
    pub(crate) bind: Bind,
    /// Destination of their output.
    pub(crate) output: Output,
    /// Time limit of the job.
    pub(crate) timeout: Option<Duration>,
    /// Variables to add to the environment that they inherit.
    pub(crate) env: Vec<(OsString, OsString)>,
}

impl Job {
    /// A job of this very binary, with these arguments; output untagged and straight through.
    pub(crate) fn of_this_program(args: Vec<OsString>, ranks: u32) -> Self {
        Self {
            // The running binary even when the file has been replaced by a new build meanwhile.
            program: "/proc/self/exe".into(),
            args,
            ranks,
            bind: Bind::None,
            output: Output::Inherited,
            timeout: None,
            env: Vec::new(),
        }
    }
}

/// Parses a number of ranks.
pub(super) fn parse_ranks(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(ranks) if (1..=MAX_RANKS).contains(&ranks) => Ok(ranks),
        _ => Err(format!("a job has 1 to {MAX_RANKS} ranks")),
    }
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    // A year is more than any job is given, and far from where clocks overflow.
    const LONGEST: f64 = 366.0 * 86400.0;
    match text.parse::<f64>() {
        Ok(seconds) if seconds > 0.0 && seconds <= LONGEST => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("give a number of seconds above 0, such as 30 or 0.5".into()),
    }
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
