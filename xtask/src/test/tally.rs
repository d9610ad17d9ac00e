//! Counts tests from what `cargo test` prints.

use std::fmt;

/// Test functions that passed and failed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    passed: u64,
    failed: u64,
}

impl Tally {
    /// Takes in a line of output; only `test result:` lines count.
    pub(super) fn read(&mut self, line: &str) {
        // "ok. 3 passed; 0 failed; 1 ignored; ...": the count stands before its word.
        let counts = line.trim().strip_prefix("test result: ").unwrap_or_default();
        for (count, word) in counts.split(['.', ';']).filter_map(|it| it.trim().split_once(' ')) {
            let count: u64 = count.parse().unwrap_or_default();
            match word {
                "passed" => self.passed += count,
                "failed" => self.failed += count,
                _ => {}
            }
        }
    }

    pub(super) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
    }

    /// Returns `true` if no test was executed.
    pub(super) fn is_empty(&self) -> bool {
        self.passed + self.failed == 0
    }

    pub(super) fn at_least_one_failed(&mut self) {
        self.failed = self.failed.max(1);
    }
}

/// The line that CI reads: alone, and the last one.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)
    }
}

/// Beginning of a line that a test reports by.
const REPORT: &str = "report: ";

/// Lines of a failed test's output that are repeated: its panic is among the first.
const SHOWN: usize = 30;

/// Picks the lines that stand again at the end of the run: reports, and what the tests that failed
/// printed. CI may keep no more than the end.
#[derive(Default)]
pub(super) struct Repeated {
    /// Lines of a failed test's output that are still shown. `None` outside of the failures.
    left: Option<usize>,
}

impl Repeated {
    /// Returns `true` if a line is to be repeated.
    pub(super) fn takes(&mut self, line: &str) -> bool {
        match (line, self.left) {
            ("failures:", _) => self.left = Some(0),
            (_, Some(_)) if line.starts_with("test result: ") => self.left = None,
            (_, Some(_)) if line.starts_with("---- ") => {
                self.left = Some(SHOWN);
                return true;
            }
            (_, Some(left @ 1..)) => {
                self.left = Some(left - 1);
                return !line.is_empty();
            }
            _ => {}
        }
        line.starts_with(REPORT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_and_the_output_of_tests_that_failed_are_repeated() {
        let mut repeated = Repeated::default();
        let long: Vec<String> = (0..2 * SHOWN).map(|at| format!("line {at}")).collect();
        let mut lines = vec!["test slow ... FAILED", "report: 3 counts", "successes:"];
        lines.extend(["---- quick stdout ----", "fine", "failures:", "", "---- slow stdout ----"]);
        lines.extend(long.iter().map(String::as_str));
        lines.extend(["---- wrong stdout ----", "panicked", "", "failures:", "    slow"]);
        lines.extend(["test result: FAILED. 2 passed; 2 failed", "---- next stdout ----", "more"]);
        lines.retain(|line| repeated.takes(line));
        let mut expected = vec!["report: 3 counts", "---- slow stdout ----"];
        expected.extend(long[..SHOWN].iter().map(String::as_str));
        expected.extend(["---- wrong stdout ----", "panicked"]);
        assert_eq!(lines, expected);
    }

    #[test]
    fn result_lines_are_summed_and_all_others_ignored() {
        let mut tally = Tally::default();
        for line in [
            "running 3 tests",
            "test a_test ... ok",
            "test result: ok. 410 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; \
            finished in 0.10s",
            "test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; \
            finished in 0.10s",
            "5 passed",
        ] {
            tally.read(line);
        }
        assert_eq!(tally.to_string(), "412 passed, 1 failed");
    }

    #[test]
    fn a_run_in_which_all_tests_are_filtered_out_is_empty() {
        let mut tally = Tally::default();
        tally.read(
            "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out; finished \
            in 0.00s",
        );
        assert!(tally.is_empty());
    }
}
