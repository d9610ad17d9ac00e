//! A step of the test run, and how it ends.

use std::process::Command;
use std::time::Duration;

use children::ChildError;

use super::tally::{Repeated, Tally};
use crate::error::TaskError;
use crate::workspace::Workspace;

/// A step of the test run.
pub(super) struct Step {
    pub(super) name: &'static str,
    /// `true` if it may be skipped when time is up: only steps that a machine may be unable to run.
    pub(super) optional: bool,
    /// Time limit of its watchdog.
    pub(super) limit: Duration,
    /// The smallest tier that runs it.
    pub(super) tier: Tier,
    pub(super) body: fn(&mut Context) -> Outcome,
}

impl Step {
    /// Returns the same step, which may be skipped.
    pub(super) const fn optional(self) -> Self {
        Self { optional: true, ..self }
    }

    /// Returns its outcome when there is no time left to begin it.
    pub(super) fn out_of_time(&self, budget: Duration) -> Outcome {
        let reason =
            format!("the steps before it used up the {} minutes of the run", budget.as_secs() / 60);
        Err(if self.optional { Stopped::Skipped(reason) } else { Stopped::Failed(reason) })
    }
}

/// A set of steps; each tier includes those before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Tier {
    /// Builds and tests, without tests that take long.
    Default,
    /// `--full`: what CI runs.
    Full,
    /// `--long`: by hand.
    Long,
}

impl Tier {
    /// Returns the time limit of its whole run. CI gives up at 90 minutes, and the step that is
    /// running when time is up still has to end.
    pub(super) const fn budget(self) -> Duration {
        let minutes = match self {
            Self::Default => 30,
            Self::Full => 70,
            Self::Long => 12 * 60,
        };
        Duration::from_secs(60 * minutes)
    }
}

/// Context of a step.
pub(super) struct Context {
    pub(super) workspace: Workspace,
    pub(super) tally: Tally,
    /// Lines of tests for the end of the run.
    pub(super) repeated: Repeated,
    /// Time limit of the running step.
    pub(super) limit: Duration,
}

impl Context {
    /// Runs a command, its output streaming through.
    pub(super) fn run(&self, command: &mut Command) -> Result<(), ChildError> {
        say!("$ {}", children::spoken(command));
        children::run(command, self.limit, children::echo)
    }

    /// Returns `true` if something is there, at once or after `get` has run.
    pub(super) fn have(&self, there: impl Fn() -> bool, get: &mut Command) -> bool {
        there() || self.run(get).is_ok() && there()
    }

    /// Runs `cargo test` in some form, and counts its tests. A run that executes none fails: a
    /// filter that matches nothing tests nothing.
    pub(super) fn run_tests(&mut self, command: &mut Command) -> Outcome {
        say!("$ {}", children::spoken(command));
        let (mut tally, repeated) = (Tally::default(), &mut self.repeated);
        repeated.begin();
        let result = children::run(command, self.limit, |line| {
            children::echo(line);
            tally.read(line);
            repeated.read(line);
        });
        if result.is_err() {
            // A test that aborts its process, or does not compile, has no result line.
            tally.at_least_one_failed();
        }
        let is_empty = tally.is_empty();
        self.tally.add(tally);
        if is_empty {
            return Err(Stopped::Failed("no test ran: is its filter out of date?".into()));
        }
        Ok(result?)
    }
}

/// Outcome of a step.
pub(super) type Outcome = Result<(), Stopped>;

/// The reason why a step has not passed.
pub(super) enum Stopped {
    Failed(String),
    Skipped(String),
}

impl Stopped {
    /// Returns the outcome of a step that cannot run here.
    pub(super) fn skipped<T>(why: impl ToString) -> Result<T, Self> {
        Err(Self::Skipped(why.to_string()))
    }
}

/// Packages that cannot be installed are a reason to skip; any other error is a failure.
impl<E: Into<TaskError>> From<E> for Stopped {
    fn from(error: E) -> Self {
        match error.into() {
            error @ TaskError::Packages { .. } => Self::Skipped(error.to_string()),
            error => Self::Failed(error.to_string()),
        }
    }
}

/// Returns an outcome as text.
pub(super) fn shown(outcome: &Outcome) -> String {
    match outcome {
        Ok(()) => "passed".into(),
        Err(Stopped::Failed(reason)) => format!("FAILED: {reason}"),
        Err(Stopped::Skipped(reason)) => format!("SKIPPED: {reason}"),
    }
}
