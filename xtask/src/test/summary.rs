//! The table at the end of a test run.

use std::fmt;
use std::time::Duration;

use super::step::{Outcome, Stopped, shown};

/// The outcome of each step.
#[derive(Default)]
pub(super) struct Summary {
    rows: Vec<(&'static str, Outcome, Duration)>,
}

impl Summary {
    pub(super) fn add(&mut self, step: &'static str, outcome: Outcome, took: Duration) {
        self.rows.push((step, outcome, took));
    }

    pub(super) fn failed(&self) -> bool {
        self.count(|outcome| matches!(outcome, Err(Stopped::Failed(_)))) > 0
    }

    fn count(&self, which: fn(&Outcome) -> bool) -> usize {
        self.rows.iter().filter(|(_, outcome, _)| which(outcome)).count()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "=== summary ===")?;
        for (step, outcome, took) in &self.rows {
            let line = shown(outcome);
            // An error may run over many lines; here only its first, since the rest stands above.
            let first = line.lines().next().unwrap_or_default();
            writeln!(f, "{step:<18} {:>7.1} s  {first}", took.as_secs_f64())?;
        }
        let skipped = self.count(|outcome| matches!(outcome, Err(Stopped::Skipped(_))));
        if skipped > 0 {
            let steps = if skipped == 1 { "STEP WAS" } else { "STEPS WERE" };
            writeln!(
                f,
                "\n!!! {skipped} {steps} SKIPPED: what it checks is not checked on this machine"
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_fails_when_a_step_failed_and_says_loudly_what_was_skipped() {
        let mut summary = Summary::default();
        summary.add("format", Ok(()), Duration::from_secs(1));
        summary.add("miri", Stopped::skipped("no nightly"), Duration::ZERO);
        assert!(!summary.failed());
        let text = summary.to_string();
        assert!(
            text.contains("SKIPPED: no nightly") && text.contains("!!! 1 STEP WAS SKIPPED"),
            "{text}"
        );

        let failed = Err(Stopped::Failed("exit 101\nlong story".into()));
        summary.add("test", failed, Duration::from_secs(1));
        assert!(summary.failed());
        let text = summary.to_string();
        assert!(text.contains("FAILED: exit 101") && !text.contains("long story"), "{text}");
    }
}
