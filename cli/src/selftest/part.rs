//! Part of the selftest: its command line, its run and its outcome.

use super::child::{self, End, Interrupt};
use super::halo::Halo;
use super::libtest::Tally;
use super::machine::Gpus;
use carrack::bootstrap::launchers::{LAUNCHERS, Launcher};
use carrack::bootstrap::tcp::variables::{RANK, WORLD_SIZE};
use serde_json::Value;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
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

impl Sort {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Tests => "tests",
            Self::Example => "example",
            Self::Halo(_) => "halo",
            Self::Perf => "perf",
        }
    }
}

/// Outcome of a part.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Passed,
    Failed(String),
    Skipped(String),
}

impl Outcome {
    pub(super) fn word(&self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed(_) => "failed",
            Self::Skipped(_) => "skipped",
        }
    }

    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Self::Passed => None,
            Self::Failed(why) | Self::Skipped(why) => Some(why),
        }
    }
}

/// Part that has ended.
pub(super) struct Ran {
    pub(super) part: Part,
    pub(super) outcome: Outcome,
    pub(super) took: Duration,
    pub(super) tally: Option<Tally>,
    /// The lines of JSON of `carrack perf`.
    pub(super) figures: Vec<Value>,
    /// The last line of an example.
    pub(super) last: Option<String>,
    /// The end of the output, if it failed.
    pub(super) tail: String,
}

impl Part {
    pub(super) fn skip_in_words(&self) -> String {
        self.skip.as_ref().map_or_else(String::new, |why| format!(" (skipped: {why})"))
    }

    /// Returns the command line as a user would type it.
    pub(super) fn command_line(&self) -> String {
        let env = self.env.iter().map(|(name, value)| format!("{name}={value}"));
        env.chain([self.program.display().to_string()])
            .chain(self.args.iter().cloned())
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// Runs the part. Its output goes to files in `logs`.
    pub(super) fn run(
        self,
        logs: &Path,
        scratch: &Path,
        interrupt: &Interrupt,
        on_tick: impl FnMut(),
    ) -> Ran {
        let start = Instant::now();
        if let Some(why) = self.skip.clone() {
            return Ran::without_output(self, Outcome::Skipped(why));
        }
        if interrupt.came() {
            return Ran::without_output(
                self,
                Outcome::Skipped("the run was interrupted before it".into()),
            );
        }
        let (said, complained) = (self.log(logs, "out"), self.log(logs, "err"));
        let end = match self.command(&said, &complained, scratch) {
            Ok(mut command) => child::run(&mut command, self.limit, interrupt, on_tick),
            Err(error) => End::NotStarted(error),
        };
        let read = |path: &Path| {
            fs::read(path)
                .map_or_else(|_| String::new(), |text| String::from_utf8_lossy(&text).into_owned())
        };
        let (said, complaints) = (read(&said), read(&complained));
        if complaints.is_empty() {
            let _ = fs::remove_file(complained);
        }
        Ran { took: start.elapsed(), ..self.judge(end, &said, &complaints) }
    }

    fn log(&self, logs: &Path, ending: &str) -> PathBuf {
        let plain = |c: char| if c.is_ascii_alphanumeric() || c == '_' { c } else { '-' };
        let name: String = self.name.chars().map(plain).collect();
        logs.join(format!("{}.{ending}", name.trim_end_matches('-')))
    }

    fn command(&self, said: &Path, complained: &Path, scratch: &Path) -> io::Result<Command> {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        clean(&mut command);
        command
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .env("TEST_SCRATCH", scratch);
        command
            .stdout(Stdio::from(File::create(said)?))
            .stderr(Stdio::from(File::create(complained)?));
        Ok(command)
    }

    fn judge(self, end: End, said: &str, complaints: &str) -> Ran {
        let ended = match end {
            End::Exited(status) if status.success() => None,
            End::Exited(status) => Some(Outcome::Failed(status.to_string())),
            End::Overran(limit) => {
                let limit = limit.as_secs_f64();
                Some(Outcome::Failed(format!(
                    "it was still running after {limit:.1} s, and was ended"
                )))
            }
            End::Interrupted => Some(Outcome::Skipped("interrupted".into())),
            End::Lost(why) => Some(Outcome::Failed(format!("the system lost its end: {why}"))),
            End::NotStarted(why) => {
                Some(Outcome::Failed(format!("it could not be started: {why}")))
            }
        };
        let tally = if self.sort == Sort::Tests { Tally::read(said) } else { None };
        let figures: Vec<Value> = match self.sort {
            Sort::Perf => said.lines().filter_map(|line| serde_json::from_str(line).ok()).collect(),
            _ => Vec::new(),
        };
        let last = said.lines().rfind(|line| !line.trim().is_empty()).map(str::to_owned);
        let outcome = match (ended, self.sort) {
            // Some pairs of memory kinds allow no puts and gets; `carrack perf` fails with these
            // words.
            (Some(Outcome::Failed(_)), Sort::Perf)
                if complaints.contains("cannot be mapped here") =>
            {
                Outcome::Skipped(complaints.lines().last().unwrap_or_default().to_owned())
            }
            (Some(Outcome::Failed(why)), Sort::Tests) => Outcome::Failed(match &tally {
                Some(tally) if tally.failed > 0 => {
                    format!("{} tests failed: {}", tally.failed, tally.failures.join(", "))
                }
                Some(_) => why,
                None => format!("{why}; it ended before its tests did"),
            }),
            (Some(outcome), _) => outcome,
            (None, Sort::Tests) => match &tally {
                None => Outcome::Failed("it printed no result of its tests".into()),
                Some(tally) if tally.failed > 0 => {
                    Outcome::Failed(format!("{} tests failed", tally.failed))
                }
                Some(tally) if tally.passed == 0 => Outcome::Failed("no test ran".into()),
                Some(_) => Outcome::Passed,
            },
            (None, Sort::Example) if last.is_none() => Outcome::Failed("it printed nothing".into()),
            (None, Sort::Halo(gpus))
                if last.as_deref().and_then(|line| Halo::read(gpus, line)).is_none() =>
            {
                Outcome::Failed("it printed no figures".into())
            }
            (None, Sort::Perf) if figures.is_empty() => {
                Outcome::Failed("it printed no figures".into())
            }
            (None, _) => Outcome::Passed,
        };
        let tail = match &outcome {
            Outcome::Failed(_) => [tail(said), tail(complaints)].join("\n").trim().to_owned(),
            _ => String::new(),
        };
        let last = last.filter(|_| matches!(self.sort, Sort::Example | Sort::Halo(_)));
        Ran { part: self, outcome, took: Duration::ZERO, tally, figures, last, tail }
    }
}

impl Ran {
    fn without_output(part: Part, outcome: Outcome) -> Self {
        Self {
            part,
            outcome,
            took: Duration::ZERO,
            tally: None,
            figures: Vec::new(),
            last: None,
            tail: String::new(),
        }
    }

    /// Returns a short summary.
    pub(super) fn in_words(&self) -> String {
        let counts = self.tally.as_ref().map(|tally| match tally.left_out.values().sum::<u64>() {
            0 => format!("{} tests", tally.passed),
            some => {
                format!(
                    "{} tests, {some} of which skipped what they test, or a part of it",
                    tally.passed
                )
            }
        });
        match (&self.outcome, counts) {
            (Outcome::Failed(why) | Outcome::Skipped(why), _) => why.clone(),
            (Outcome::Passed, Some(counts)) => counts,
            (Outcome::Passed, None) if self.part.sort == Sort::Perf => {
                format!("{} figures", self.figures.len())
            }
            (Outcome::Passed, None) => self.last.clone().unwrap_or_default(),
        }
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
        let is_of_rank = [RANK, WORLD_SIZE].contains(&&*lossy) || LAUNCHERS.iter().any(marks_rank);
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
        part.judge(End::Exited(ExitStatus::from_raw(code << 8)), said, complaints)
    }

    #[test]
    fn a_test_program_passes_only_if_it_says_so_and_ends_so() {
        let result = |passed: u32, failed: u32| {
            format!("test result: . {passed} passed; {failed} failed; 0 ignored;\n")
        };
        let fails = |code: i32, said: &str, why: &str| {
            let ran = judged(Sort::Tests, code, said, "");
            assert!(
                matches!(&ran.outcome, Outcome::Failed(told) if told.contains(why)),
                "{:?}",
                ran.outcome
            );
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
    fn figures_are_read_and_what_cannot_be_mapped_is_skipped_and_all_else_that_ends_badly_has_failed()
     {
        let ran = judged(Sort::Perf, 0, "{\"op\":\"put\"}\nnot JSON\n{\"op\":\"get\"}\n", "");
        assert_eq!((ran.outcome, ran.figures.len()), (Outcome::Passed, 2));
        let refused =
            judged(Sort::Perf, 1, "", "carrack: memory of rank 1 cannot be mapped here: why\n");
        assert!(
            matches!(refused.outcome, Outcome::Skipped(why) if why.contains("mapped here: why"))
        );
        assert!(matches!(judged(Sort::Perf, 1, "", "carrack: no\n").outcome, Outcome::Failed(_)));
        assert!(matches!(judged(Sort::Perf, 0, "", "").outcome, Outcome::Failed(_)));
        assert!(matches!(judged(Sort::Example, 0, " \n", "").outcome, Outcome::Failed(_)));
        assert!(matches!(
            judged(Sort::Halo(2), 0, "rank 0 of 1 x 2: 60 steps\n", "").outcome,
            Outcome::Failed(_)
        ));
        let ran = judged(Sort::Example, 3, "some\nlines\n", "and complaints\n");
        assert_eq!(ran.tail, "some\nlines\nand complaints");
    }
}
