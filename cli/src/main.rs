//! The carrack command.
//!
//! | module | idea |
//! |---|---|
//! | [`launch`] | `carrack run`: starts the ranks of a job, and leaves nothing behind |
//! | [`perf`] | `carrack perf` and `put_get_bench`: latency and rate of two ranks |
//! | [`info`] | `carrack info`: what this machine has, and the settings in force |
//! | [`explain`] | `carrack explain`: the path to each peer, and why not another |
//! | [`selftest`] | `carrack selftest`: runs tests and examples here, and writes a report |
//! | [`args`] | numbers on the command line |
//! | [`bar`] | progress on stderr |
//! | [`gpus`] | which GPUs these work on |
//! | [`template`] | texts for people from what is JSON for programs |
//! | [`own_ranks`] | how `perf` and `explain` get their ranks when no launcher started them |

mod args;
mod bar;
mod explain;
mod gpus;
mod info;
mod launch;
mod own_ranks;
mod perf;
mod selftest;
mod template;

use carrack_transports::stderr::say;
use clap::{Parser, Subcommand};
use std::io::{self, ErrorKind};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// Exit status for a wrong command line or environment.
const USAGE: u8 = 2;

#[derive(Parser)]
#[command(name = "carrack", version, about = "Runs, measures and explains Carrack jobs")]
#[command(after_help = "Exit status:
  0    done
  1    it failed, and said why on stderr; `selftest`: a part failed
  2    the command line or a variable is wrong
  124  `run`: the time limit was reached
  126  `run`: the program cannot be executed
  127  `run`: there is no such program
  130  `selftest`: it was interrupted
  else `run`: that of the first rank that failed; 128 and a signal's number when a signal ended it

CARRACK_LOG, or RUST_LOG where it is not set, says what is logged on stderr (`warn`, \
`carrack=debug`); `carrack info` lists all variables.")]
struct Cli {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Start the ranks of a job on this machine
    Run(launch::Job),
    /// Measure latency, bandwidth and message rate between two ranks
    Perf(perf::PerfOptions),
    /// Ping-pong, puts, gets and message rate, in the output format of the OSU benchmarks
    #[command(name = "put_get_bench", visible_alias = "osu")]
    PutGetBench(perf::OsuOptions),
    /// Say what this machine has, and which settings are in force
    Info(info::InfoOptions),
    /// Say which path leads to each peer, and why no other was taken
    Explain(explain::ExplainOptions),
    /// Test this machine: conformance, examples and figures, with a report
    Selftest(selftest::SelftestOptions),
    #[command(name = "__keeper", hide = true)]
    Keeper(launch::KeeperOptions),
}

fn main() -> ExitCode {
    // Programs may have this command make their trials.
    carrack::trial::answer();
    let command = Cli::parse().command;
    // The launcher has the same variables, and has complained of them.
    let is_told = matches!(command, Verb::Keeper(_)) || launch::is_started();
    log_to_stderr(is_told);
    match command {
        Verb::Run(options) => launch::launch(&options),
        Verb::Keeper(options) => launch::keep(options),
        Verb::Perf(options) => perf::perf(&options),
        Verb::PutGetBench(options) => perf::put_get_bench(&options),
        Verb::Info(options) => info::info(&options),
        Verb::Explain(options) => explain::explain(&options),
        Verb::Selftest(options) => selftest::selftest(&options),
    }
}

/// Logs as CARRACK_LOG says, or RUST_LOG if CARRACK_LOG is not set. They are not read with the
/// other settings: `run` starts programs whose variables it must not judge.
///
/// `is_told`: another process complains of a filter that is none.
fn log_to_stderr(is_told: bool) {
    let set = ["CARRACK_LOG", "RUST_LOG"]
        .into_iter()
        .find_map(|name| Some((name, std::env::var(name).ok()?)));
    let (name, wanted) = set.unwrap_or_else(|| ("CARRACK_LOG", "warn".into()));
    let filter = EnvFilter::try_new(&wanted).unwrap_or_else(|error| {
        if !is_told {
            say(format_args!(
                "{name}={wanted} is no filter ({error}); write a level such as `warn`, or \
                `carrack=debug`"
            ));
        }
        EnvFilter::new("warn")
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        // It would report a closed stderr on stderr, with a panic.
        .log_internal_errors(false)
        .init();
}

/// Returns `true` if the reader of the output has closed it (`carrack info | head`), which is no
/// failure.
fn is_closed_pipe(error: &io::Error) -> bool {
    error.kind() == ErrorKind::BrokenPipe
}

/// Prints all of a command's output, and gives the exit status.
fn print(text: &str) -> ExitCode {
    use io::Write as _;
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if !is_closed_pipe(&error) => {
            say(format_args!(
                "writing to stdout failed: {error}; check the file or pipe that it goes to"
            ));
            ExitCode::FAILURE
        }
        _ => ExitCode::SUCCESS,
    }
}
