//! `cargo xtask bench-peers`: Carrack and UCX side by side.
//!
//! The same machine, the same minutes, the same two cores, both pinned, in rounds that alternate between the two and
//! change who goes first; of each the median over the rounds, and the ratio of the medians. UCX gets whatever makes
//! it fastest here: its transports are tried first, test by test.
//!
//! | module | what it does |
//! |---|---|
//! | `comparison` | the tests, and what is compared with what |
//! | `install` | brings UCX from the package registry, without root |
//! | `ucx` | runs `ucx_perftest` and reads its output |
//! | `carrack` | runs `carrack perf` and reads its output |
//! | `cores` | chooses two cores and pins to them |
//! | `machine` | says where the figures were measured |
//! | `report` | the medians, as a table or as JSON |

mod carrack;
mod comparison;
mod cores;
mod install;
mod machine;
mod report;
mod ucx;

use std::path::PathBuf;
use std::process::ExitCode;

use crate::error::TaskError;
use crate::workspace::Workspace;
use carrack::Carrack;
use comparison::{Measured, TESTS};
use cores::Cores;
use machine::Machine;
use report::Report;
use ucx::Ucx;

/// Load from which on the user is warned. Building Carrack just before may reach it too; then repeat the run.
const BUSY: f64 = 0.5;

/// Options of `cargo xtask bench-peers`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Rounds; the median over them is taken
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Seconds that one measurement is to last
    #[arg(long, default_value_t = 1.0, value_parser = seconds)]
    seconds: f64,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    /// Where the peers are, or are to be installed [default: peers in the target directory]
    #[arg(long, value_name = "DIR")]
    peers: Option<PathBuf>,
    /// The two cores, as in `0,1` [default: two that share no core]
    #[arg(long, value_name = "A,B")]
    cores: Option<Cores>,
    /// Measure UCX alone
    #[arg(long)]
    peer_only: bool,
}

/// Measures, and prints the comparison.
pub(crate) fn run(options: &Options) -> Result<ExitCode, TaskError> {
    let workspace = Workspace::load()?;
    let cores = match options.cores {
        Some(cores) => cores,
        None => Cores::choose()?,
    };
    let peers = options.peers.clone().unwrap_or_else(|| workspace.target.join("peers"));
    let ucx = Ucx::new(install::ucx(&peers)?, cores)?;
    let carrack =
        if options.peer_only { None } else { Some(Carrack::build(&workspace, cores, options.seconds)?) };

    let machine = Machine::look()?;
    if machine.load_before > BUSY {
        eprintln!(
            "warning: the load is {:.2}; something else runs here and disturbs both sides",
            machine.load_before
        );
    }
    let mut measured: Vec<Measured> = Vec::new();
    for test in TESTS {
        eprintln!("trying UCX's transports: {}", test.name);
        measured.push(Measured::new(test, ucx.tune(test, options.seconds)?));
    }
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        for one in &mut measured {
            one.round(round % 2 == 0, carrack.as_ref(), &ucx)?;
        }
    }
    let report = Report::new(machine, &measured, &ucx, cores, options.rounds, options.seconds);
    println!("{}", if options.json { report.json() } else { report.table() });
    Ok(ExitCode::SUCCESS)
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 =
        text.parse().map_err(|_| "expected a number of seconds, for example 1 or 0.5".to_owned())?;
    if (0.01..=60.0).contains(&seconds) {
        Ok(seconds)
    } else {
        Err("expected from 0.01 to 60 seconds".into())
    }
}
