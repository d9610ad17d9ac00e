//! Carrack's own tasks, run as `cargo xtask NAME`.
//!
//! | module | what it does |
//! |---|---|
//! | `test` | `cargo xtask test`: the steps of a check, their summary and the closing count |
//! | `peers` | `bench-peers`: Carrack, UCX, MPICH and Open MPI side by side on the same two cores |
//! | `bundle` | `bundle`: a folder for `carrack selftest` on a machine without Rust |
//! | `bindings` | `bindings`: what `verbs/sys` knows of rdma-core's headers |
//! | `guest` | `rdma-guest`: a command in a virtual machine with simulated RDMA devices |
//! | `files` | finds files by patterns, strips programs, compiles those in C |
//! | `apt` | packages of other suites of Debian, without touching the machine's set-up |
//! | `workspace` | paths and programs, as Cargo tells them |
//! | `error` | errors with their remedies |

/// Prints a line, also where the reader of the output has gone.
macro_rules! say {
    ($($words:tt)*) => { children::echo(&format!($($words)*)) };
}

mod apt;
mod bindings;
mod bundle;
mod error;
mod files;
mod guest;
mod peers;
mod test;
mod workspace;

use std::path::{self, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use error::TaskError;
use workspace::{BUILD, Workspace};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Carrack's own tasks")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build and test everything; with --full run all that CI runs, and install its tools
    Test(test::TestOptions),
    /// Measure Carrack, UCX, MPICH and Open MPI side by side, in alternating rounds on two cores
    BenchPeers(peers::PeersOptions),
    /// Build a folder of programs with which `carrack selftest` runs on a machine without Rust
    Bundle(bundle::BundleOptions),
    /// Make the bindings of libibverbs from rdma-core's headers, or compare them
    Bindings(bindings::BindingsOptions),
    /// Run a command in a small virtual machine with simulated RDMA devices (docs/testing.md)
    RdmaGuest(guest::GuestOptions),
    /// Measure the start of jobs of 16 to 4096 ranks, and the cost of a silent peer (benches/scale)
    Scale {
        /// A picture of the curve
        picture: Option<PathBuf>,
    },
}

/// Exit status of a program that Ctrl-C has ended, as shells report it.
const INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let task = Arguments::parse().task;
    let outcome =
        children::watch_for_signals().map_err(TaskError::from).and_then(|()| match task {
            Task::Test(options) => test::run(&options),
            Task::BenchPeers(options) => peers::run(&options),
            Task::Bundle(options) => bundle::run(&options),
            Task::Bindings(options) => bindings::run(&options),
            Task::RdmaGuest(options) => Ok(guest::run(&options)),
            Task::Scale { picture } => scale(picture),
        });
    let status = outcome.unwrap_or_else(|error| {
        eprintln!("xtask: {error}");
        ExitCode::FAILURE
    });
    if children::interrupted() { INTERRUPTED.into() } else { status }
}

fn scale(picture: Option<PathBuf>) -> Result<ExitCode, TaskError> {
    let mut bench = Workspace::load()?.cargo("bench --bench scale --");
    // Cargo runs it in the root.
    bench.args(picture.map(path::absolute).transpose()?);
    children::run(&mut bench, BUILD, children::echo)?;
    Ok(ExitCode::SUCCESS)
}
