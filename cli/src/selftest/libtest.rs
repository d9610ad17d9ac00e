//! Counts tests in what a test program prints.

use serde::Serialize;
use std::collections::BTreeMap;

/// Results that a test program printed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(super) struct TestResults {
    pub(super) passed: u64,
    pub(super) failed: u64,
    pub(super) ignored: u64,
    /// The tests that failed, by name.
    pub(super) failures: Vec<String>,
    /// Reasons why tests skipped all or part of their checks, with the number of times each was
    /// printed.
    pub(super) left_out: BTreeMap<String, u64>,
}

impl TestResults {
    /// Reads a test program's output; `None` if there is no result, because the program ended
    /// before its tests did.
    ///
    /// Tests start their program again as ranks, whose output may be among it. The last result is
    /// that of the program itself.
    pub(super) fn read(text: &str) -> Option<Self> {
        let mut results = None;
        let mut failures = Vec::new();
        let mut left_out = BTreeMap::new();
        for line in text.lines().map(str::trim) {
            if let Some(result) = line.strip_prefix("test result: ") {
                results = Some(Self::counts(result));
            } else if let Some(name) =
                line.strip_prefix("test ").and_then(|line| line.strip_suffix("... FAILED"))
            {
                failures.push(name.trim().to_owned());
            } else if let Some(why) = line.strip_prefix("skipped: ") {
                *left_out.entry(why.to_owned()).or_insert(0) += 1;
            }
        }
        results.map(|results| Self { failures, left_out, ..results })
    }

    /// Describes in words the tests that passed.
    pub(super) fn in_words(&self) -> String {
        match (self.passed, self.left_out.values().sum::<u64>()) {
            (passed, 0) => format!("{passed} tests"),
            (passed, some) => {
                format!("{passed} tests, {some} of which skipped what they test, or a part of it")
            }
        }
    }

    /// Parses the counts of a result: "ok. 3 passed; 0 failed; 1 ignored; ...". Each count stands
    /// before its word.
    fn counts(result: &str) -> Self {
        let words: Vec<&str> = result.split([' ', ';']).filter(|word| !word.is_empty()).collect();
        let count = |what| {
            let of_it = words.windows(2).filter(|pair| pair[1] == what);
            of_it.filter_map(|pair| pair[0].parse().ok()).next_back().unwrap_or(0)
        };
        let (passed, failed, ignored) = (count("passed"), count("failed"), count("ignored"));
        Self { passed, failed, ignored, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_result_counts_and_failures_and_reasons_are_kept() {
        let text = "\nrunning 3 tests\ntest result: ok. 1 passed; 0 failed; 0 ignored; 0 \
            measured; 40 filtered out\n\
            test a::b ... ok\ntest a::c ... FAILED\nskipped: no compiler\n  skipped: no \
            compiler\nskipped: no GPU\n\
            test result: FAILED. 2 passed; 1 failed; 4 ignored; 0 measured; 0 filtered out; \
            finished in 0.10s\n";
        let results = TestResults::read(text).unwrap();
        assert_eq!((results.passed, results.failed, results.ignored), (2, 1, 4));
        assert_eq!(results.failures, ["a::c"]);
        assert_eq!(results.left_out, [("no GPU".into(), 1), ("no compiler".into(), 2)].into());
    }

    #[test]
    fn without_a_result_there_is_no_count() {
        assert_eq!(TestResults::read("running 3 tests\ntest a ... ok\n5 passed\n"), None);
        assert_eq!(TestResults::read(""), None);
        assert_eq!(TestResults::read("test result: what? ; ;;"), Some(TestResults::default()));
    }
}
