//! Part of the selftest: its command line, its run and its outcome.

use super::child::{self, Ended, Trouble};
use super::halo::Halo;
use super::kit::Kit;
use super::libtest::TestResults;
use super::machine::Gpus;
use carrack::bootstrap::launchers::{LAUNCHERS, Launcher};
use carrack::bootstrap::source::VARIABLES;
use serde::Serialize;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// Lines of a failed part's output that are in the report.
const TAIL: usize = 40;

/// Command to run.
pub(super) struct Part {
    /// Unique name.
    pub(super) name: String,
    pub(super) sort: Sort,
    /// GPUs that it runs on, if any.
    pub(super) gpus: Option<Gpus>,
    pub(super) program: PathBuf,
    pub(super) args: Vec<String>,
    pub(super) env: Vec<(&'static str, String)>,
    pub(super) limit: Duration,
    /// Reason for skipping it; `None` if it is run.
    pub(super) skip: Option<String>,
}

/// Kind of a part's output.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Sort {
    /// Output of a test program.
    Tests,
    /// Output of an example, which ends with an error unless it has verified its results.
    Example,
    /// Figures of the heat equation on this number of GPUs.
    Halo(usize),
    /// Lines of JSON of `carrack perf`.
    Perf,
}

/// Outcome of a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Outcome {
    Passed,
    Failed,
    Skipped,
}

impl Outcome {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::Skipped => "skipped",
        }
    }
}

/// Part that has ended, as the report has it.
#[derive(Serialize)]
pub(super) struct Ran {
    pub(super) name: String,
    /// `tests`, `example`, `halo` or `perf`.
    sort: &'static str,
    gpus: Option<Gpus>,
    pub(super) outcome: Outcome,
    /// Reason, unless the part passed.
    pub(super) reason: Option<String>,
    /// Short summary.
    pub(super) words: String,
    pub(super) seconds: f64,
    pub(super) tests: Option<TestResults>,
    /// Command line, as a user would type it.
    command: String,
    /// The end of the output of a part that failed.
    tail: String,
    /// The lines of JSON of `carrack perf`.
    #[serde(skip)]
    pub(super) figures: Vec<Value>,
    #[serde(skip)]
    pub(super) halo: Option<Halo>,
}

impl Part {
    /// Creates a part on these GPUs, which its name says. The defaults: the command itself, and no
    /// skip.
    pub(super) fn new(name: &str, sort: Sort, gpus: Option<Gpus>, kit: &Kit) -> Self {
        let on = gpus.map_or_else(String::new, |gpus| format!(" ({})", gpus.in_words()));
        Self {
            name: format!("{name}{on}"),
            sort,
            gpus,
            program: kit.carrack.clone(),
            args: Vec::new(),
            env: gpus.map(|gpus| ("CARRACK_GPU", gpus.setting().to_owned())).into_iter().collect(),
            limit: Duration::from_secs(300),
            skip: None,
        }
    }

    /// Sets the program to an example, on this number of ranks; none: by itself, without the
    /// launcher.
    pub(super) fn of_example(mut self, example: &str, ranks: u32, kit: &Kit) -> Self {
        let found = kit.examples.get(example);
        self.skip = found.is_none().then(|| "it is not here: not built".into());
        let path = found.cloned().unwrap_or_else(|| example.into());
        if ranks == 0 {
            self.program = path;
        } else {
            let (ranks, path) = (ranks.to_string(), path.display().to_string());
            self.args = ["run", "-n", &ranks, "--no-tag", "--", &path].map(str::to_owned).into();
        }
        self
    }

    /// Runs the part. Its output goes to files in `logs`.
    pub(super) fn run(self, logs: &Path, scratch: &Path, on_tick: impl FnMut()) -> Ran {
        let skip = self.skip.clone();
        let too_late = || "the run was interrupted before it".to_owned();
        if let Some(why) = skip.or_else(|| children::interrupted().then(too_late)) {
            return self.ran(Outcome::Skipped, Some(why));
        }
        let start = Instant::now();
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
        let name: String = self.name.chars().map(plain).collect();
        let log = |ending| logs.join(format!("{}.{ending}", name.trim_end_matches('-')));
        let (said, complained) = (log("out"), log("err"));
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        clean(&mut command);
        command.envs(self.env.iter().cloned()).env("TEST_SCRATCH", scratch);
        let files = [said.as_path(), &complained];
        let ended = child::capture(&mut command, files, self.limit, on_tick);
        if ended.complaints.is_empty() {
            let _ = fs::remove_file(complained);
        }
        Ran { seconds: start.elapsed().as_secs_f64(), ..self.judge(&ended) }
    }

    fn judge(self, ended: &Ended) -> Ran {
        let Ended { said, complaints, end } = ended;
        let tests = if self.sort == Sort::Tests { TestResults::read(said) } else { None };
        let figures: Vec<Value> = match self.sort {
            Sort::Perf => said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect(),
            _ => Vec::new(),
        };
        let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
        let halo = if let Sort::Halo(gpus) = self.sort { Halo::read(gpus, last) } else { None };
        let (outcome, reason) = match (end, self.sort) {
            (Err(Trouble::Interrupted), _) => (Outcome::Skipped, Some("interrupted".into())),
            // Some pairs of memory kinds allow no puts and gets; `carrack perf` fails with these
            // words.
            (Err(_), Sort::Perf) if complaints.contains("cannot be mapped here") => {
                let why = complaints.lines().last().unwrap_or_default();
                (Outcome::Skipped, Some(why.to_owned()))
            }
            (end, sort) => {
                let trouble = end.as_ref().err().map(ToString::to_string);
                let why = match (sort, &tests) {
                    (Sort::Tests, tests) => wrong_tests(trouble, tests.as_ref()),
                    _ if trouble.is_some() => trouble,
                    (Sort::Example, _) if last.is_empty() => Some("it printed nothing".into()),
                    (Sort::Halo(_), _) if halo.is_none() => Some("it printed no figures".into()),
                    (Sort::Perf, _) if figures.is_empty() => Some("it printed no figures".into()),
                    _ => None,
                };
                (if why.is_some() { Outcome::Failed } else { Outcome::Passed }, why)
            }
        };
        let tail = match outcome {
            Outcome::Failed => [tail(said), tail(complaints)].join("\n").trim().to_owned(),
            _ => String::new(),
        };
        let words = match (&reason, &tests, self.sort) {
            (Some(why), ..) => why.clone(),
            (None, Some(results), _) => results.in_words(),
            (None, None, Sort::Perf) => format!("{} figures", figures.len()),
            (None, None, _) => last.to_owned(),
        };
        let halo = halo.filter(|_| outcome == Outcome::Passed);
        Ran { words, tests, tail, figures, halo, ..self.ran(outcome, reason) }
    }

    /// Returns the result of a part that has said nothing.
    fn ran(self, outcome: Outcome, reason: Option<String>) -> Ran {
        let env = self.env.iter().map(|(name, value)| format!("{name}={value}"));
        let words = env.chain([self.program.display().to_string()]).chain(self.args);
        Ran {
            name: self.name,
            sort: match self.sort {
                Sort::Tests => "tests",
                Sort::Example => "example",
                Sort::Halo(_) => "halo",
                Sort::Perf => "perf",
            },
            gpus: self.gpus,
            outcome,
            words: reason.clone().unwrap_or_default(),
            reason,
            seconds: 0.0,
            tests: None,
            command: words.collect::<Vec<_>>().join(" "),
            tail: String::new(),
            figures: Vec::new(),
            halo: None,
        }
    }
}

/// Returns the fault of a test program, if it has one: it ended badly, or its tests did.
fn wrong_tests(trouble: Option<String>, results: Option<&TestResults>) -> Option<String> {
    match (trouble, results) {
        (Some(_), Some(results)) if results.failed > 0 => {
            Some(format!("{} tests failed: {}", results.failed, results.failures.join(", ")))
        }
        (Some(why), Some(_)) => Some(why),
        (Some(why), None) => Some(format!("{why}; it ended before its tests did")),
        (None, None) => Some("it printed no result of its tests".into()),
        (None, Some(results)) if results.failed > 0 => {
            Some(format!("{} tests failed", results.failed))
        }
        (None, Some(results)) => (results.passed == 0).then(|| "no test ran".into()),
    }
}

/// Returns the last lines of a text.
fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}

/// Removes the caller's settings, so that a part tests the defaults and its own settings. Removes
/// a launcher's variables, too, since parts are jobs of their own.
pub(super) fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        let lossy = name.to_string_lossy();
        let is_setting =
            ["CARRACK_", "CARGO", "TEST_GPU"].iter().any(|prefix| lossy.starts_with(prefix));
        let marks_rank = |launcher: &Launcher| [launcher.mark, launcher.rank].contains(&&*lossy);
        let is_of_rank = VARIABLES.contains(&&*lossy) || LAUNCHERS.iter().any(marks_rank);
        if is_setting || is_of_rank {
            command.env_remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::ExitStatus;

    fn judged(sort: Sort, code: i32, said: &str, complaints: &str) -> Ran {
        let part = Part {
            name: "a part".into(),
            sort,
            gpus: None,
            program: "program".into(),
            args: Vec::new(),
            env: Vec::new(),
            limit: Duration::ZERO,
            skip: None,
        };
        let status = ExitStatus::from_raw(code << 8);
        let end = if code == 0 { Ok(()) } else { Err(Trouble::Exited(status)) };
        let (said, complaints) = (said.to_owned(), complaints.to_owned());
        part.judge(&Ended { said, complaints, end })
    }

    #[test]
    fn a_test_program_passes_only_if_it_says_so_and_ends_so() {
        let result = |passed: u32, failed: u32| {
            format!("test result: . {passed} passed; {failed} failed; 0 ignored;\n")
        };
        let fails = |code: i32, said: &str, why: &str| {
            let ran = judged(Sort::Tests, code, said, "");
            assert!(ran.outcome == Outcome::Failed && ran.words.contains(why), "{}", ran.words);
        };
        assert_eq!(judged(Sort::Tests, 0, &result(3, 0), "").outcome, Outcome::Passed);
        fails(0, "", "no result");
        fails(0, &result(0, 0), "no test ran");
        fails(0, &result(3, 1), "1 tests failed");
        fails(101, &format!("test a ... FAILED\n{}", result(3, 1)), "1 tests failed: a");
        fails(101, &result(3, 0), "101");
        fails(6, "test a ... ok\n", "before its tests did");
    }

    #[test]
    fn figures_are_read_and_unmapped_memory_is_skipped_and_every_other_bad_end_is_a_failure() {
        let ran = judged(Sort::Perf, 0, "{\"op\":\"put\"}\nnot JSON\n{\"op\":\"get\"}\n", "");
        assert_eq!((ran.outcome, ran.figures.len()), (Outcome::Passed, 2));
        let refused =
            judged(Sort::Perf, 1, "", "carrack: memory of rank 1 cannot be mapped here: why\n");
        assert_eq!(refused.outcome, Outcome::Skipped);
        assert!(refused.words.contains("mapped here: why"), "{}", refused.words);
        for (sort, code, said, complaints) in [
            (Sort::Perf, 1, "", "carrack: no\n"),
            (Sort::Perf, 0, "", ""),
            (Sort::Example, 0, " \n", ""),
            (Sort::Halo(2), 0, "rank 0 of 1 x 2: 60 steps\n", ""),
        ] {
            assert_eq!(judged(sort, code, said, complaints).outcome, Outcome::Failed, "{sort:?}");
        }
        let ran = judged(Sort::Example, 3, "some\nlines\n", "and complaints\n");
        assert_eq!(ran.tail, "some\nlines\nand complaints");
    }
}
