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

#[cfg(test)]
mod tests {
    use super::*;

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
