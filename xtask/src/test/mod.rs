//! `cargo xtask test`: what must pass on a fresh machine with Rust and a C compiler.
//!
//! Every step runs, whatever came before it; the summary at the end says which passed, which
//! failed, and which were skipped and why. The last line counts test functions, as CI reads it.

mod deny;
mod launchers;
mod layout;
mod long;
mod miri;
mod msrv;
mod room;
mod step;
mod steps;
mod summary;
mod tally;
mod verbs_guest;

use clap::builder::NonEmptyStringValueParser;
use std::process::ExitCode;
use std::time::Instant;

use crate::error::TaskError;
use crate::workspace::Workspace;
use step::{Context, Step, Tier};
use summary::Summary;
use tally::{Repeated, Tally};

/// Options of `cargo xtask test`.
#[derive(clap::Args)]
pub(crate) struct TestOptions {
    /// Run what CI runs: also lints, docs, slow and optimised tests, loom, Miri, launchers, guests
    #[arg(long)]
    full: bool,
    /// Also run what takes hours: soaks, sanitizers, fuzzing
    #[arg(long)]
    long: bool,
    /// Run only the steps whose names have this in them, of all tiers
    #[arg(long, value_name = "STEP", value_parser = NonEmptyStringValueParser::new())]
    only: Option<String>,
}

/// Runs the steps; the exit code is a failure if any step failed.
pub(crate) fn run(options: &TestOptions) -> Result<ExitCode, TaskError> {
    let began = Instant::now();
    let workspace = Workspace::load()?;
    let tier = match (options.long, options.full) {
        (true, _) => Tier::Long,
        (false, true) => Tier::Full,
        (false, false) => Tier::Default,
    };
    let wanted: Vec<&Step> = match &options.only {
        Some(only) => steps::ALL.iter().filter(|step| step.name.contains(only)).collect(),
        None => steps::ALL.iter().filter(|step| step.tier <= tier).collect(),
    };
    let Some(largest) = wanted.iter().map(|step| step.tier).max() else {
        let names: Vec<_> = steps::ALL.iter().map(|step| step.name).collect();
        return Err(TaskError::NoStep { names: names.join("; ") });
    };
    let budget = largest.max(tier).budget();
    let mut context = Context {
        workspace,
        tally: Tally::default(),
        repeated: Repeated::default(),
        limit: budget,
    };
    let mut summary = Summary::default();
    let steps = wanted.iter().enumerate().take_while(|_| !children::interrupted());
    for (at, step) in steps {
        say!("\n=== {} === ({} of {})", step.name, at + 1, wanted.len());
        let left = budget.saturating_sub(began.elapsed());
        let step_began = Instant::now();
        let outcome = if left.is_zero() {
            step.out_of_time(budget)
        } else {
            context.limit = step.limit.min(left);
            (step.body)(&mut context)
        };
        let took = step_began.elapsed();
        say!("--- {}: {} ({:.1} s)", step.name, step::shown(&outcome), took.as_secs_f64());
        summary.add(step.name, outcome, took);
    }
    say!("\n{summary}");
    context.repeated.lines.iter().for_each(|line| say!("{line}"));
    say!("{}", context.tally);
    Ok(if summary.failed() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
