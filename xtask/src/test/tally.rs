//! Reads what `cargo test` prints: counts tests, and keeps what stands again at the end of the run.

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

/// Lines of a failed test's output that are repeated: the first ones, and the last ones.
const FIRST: usize = 10;
const LAST: usize = 30;

/// Lines that stand again at the end of the run: reports, warnings, and what failed tests printed.
/// CI may keep no more than the end.
#[derive(Debug, Default)]
pub(super) struct Repeated {
    pub(super) lines: Vec<String>,
    /// `true` within the list of failures.
    is_in_failures: bool,
    /// Number of the first line of the present test's output.
    began: Option<usize>,
}

impl Repeated {
    /// Begins with another command: the one before may have died within its list of failures.
    pub(super) fn begin(&mut self) {
        (self.is_in_failures, self.began) = (false, None);
    }

    /// Takes in a line of output.
    pub(super) fn read(&mut self, line: &str) {
        if line == "failures:" || line.starts_with("test result: ") {
            (self.is_in_failures, self.began) = (line == "failures:", None);
        } else if self.is_in_failures && line.starts_with("---- ") {
            self.began = Some(self.lines.len());
            self.lines.push(line.to_owned());
        } else if let Some(began) = self.began {
            self.lines.extend((!line.is_empty()).then(|| line.to_owned()));
            if self.lines.len() - began > FIRST + LAST {
                self.lines.remove(began + FIRST);
            }
        } else if line.starts_with(REPORT) {
            self.lines.push(line.to_owned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_and_the_output_of_tests_that_failed_are_repeated() {
        let mut repeated = Repeated::default();
        let long: Vec<String> = (0..100).map(|at| format!("line {at}")).collect();
        let long: Vec<&str> = long.iter().map(String::as_str).collect();
        let before = ["test slow ... FAILED", "report: 3 counts", "successes:"];
        let quick = ["---- quick stdout ----", "fine", "failures:", ""];
        let (slow, wrong) = (["---- slow stdout ----"], ["---- wrong stdout ----", "| failures:"]);
        let end = ["", "failures:", "    slow", "test result: FAILED. 2 passed; 2 failed"];
        let next = ["---- next stdout ----", "more"];
        let all = [&before[..], &quick, &slow, &long, &wrong, &end, &next].concat();
        all.into_iter().for_each(|line| repeated.read(line));
        // A program that has died among its failures.
        for line in ["failures:", "---- last stdout ----"] {
            repeated.read(line);
        }
        repeated.begin();
        repeated.read("of another program");
        let (first, last) = (&long[..FIRST - 1], &long[100 - LAST..]);
        assert_eq!(
            repeated.lines,
            [&["report: 3 counts"], &slow[..], first, last, &wrong, &["---- last stdout ----"]]
                .concat()
        );
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
