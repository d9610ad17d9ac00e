//! `cargo xtask test`: the one command that must pass on a fresh machine with Rust and a C
//! compiler.
//!
//! Every step runs, whatever came before it; the summary at the end says which passed, which
//! failed, and which were skipped and why. The last line counts test functions, as CI reads it.

mod deny;
mod layout;
mod miri;
mod msrv;
mod room;
mod step;
mod steps;
mod summary;
mod tally;
mod verbs_guest;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use crate::error::TaskError;
use crate::workspace::Workspace;
use step::{Context, Outcome, Step};
use summary::Summary;
use tally::Tally;

/// What the whole run may take. CI gives up at 90 minutes, and a step under way when time is up
/// still has to end.
const BUDGET: Duration = Duration::from_secs(55 * 60);

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct Options {
    /// Leave out what takes minutes: documentation, release builds, loom, Miri, layouts, cargo-deny
    #[arg(long)]
    quick: bool,
    /// Run only the steps whose names have this in them
    #[arg(long, value_name = "STEP")]
    only: Option<String>,
}

/// Runs the steps; the exit code is a failure if any step failed.
pub(crate) fn run(options: &Options) -> Result<ExitCode, TaskError> {
    let began = Instant::now();
    let workspace = Workspace::load()?;
    let mut context = Context { workspace, tally: Tally::default(), limit: BUDGET };
    let mut summary = Summary::default();
    let wanted = |step: &&Step| options.only.as_ref().is_none_or(|only| step.name.contains(only));
    if !steps::ALL.iter().any(|step| wanted(&step)) {
        let names: Vec<_> = steps::ALL.iter().map(|step| step.name).collect();
        return Err(TaskError::NoStep { names: names.join("; ") });
    }
    for step in steps::ALL.iter().filter(wanted) {
        println!("\n=== {} ===", step.name);
        let left = BUDGET.saturating_sub(began.elapsed());
        let step_began = Instant::now();
        let outcome = if options.quick && !step.quick {
            Outcome::Skipped("--quick leaves it out".into())
        } else if left.is_zero() {
            step.out_of_time(BUDGET)
        } else {
            context.limit = step.limit.min(left);
            (step.body)(&mut context)
        };
        let took = step_began.elapsed();
        println!("--- {}: {outcome} ({:.1} s)", step.name, took.as_secs_f64());
        summary.add(step.name, outcome, took);
    }
    println!("\n{summary}");
    println!("{}", context.tally);
    Ok(if summary.failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
