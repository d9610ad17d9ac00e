//! The report: plain data, as JSON and for people.

use super::halo::{self, Halo};
use super::kit::{About, Kit};
use super::libtest::Tally;
use super::machine::{Gpus, Machine};
use super::markdown;
use super::node::{self, Node};
use super::part::{Outcome, Ran};
use super::{SelftestError, file};
use serde::Serialize;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::time::Duration;

/// Results of a run.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) date: String,
    pub(super) host: String,
    /// Command line of the selftest.
    pub(super) command: String,
    pub(super) launcher: String,
    #[serde(flatten)]
    pub(super) about: About,
    /// `cuda` or `simulated`.
    pub(super) gpus: &'static str,
    /// Reason why NVIDIA's GPUs are not tested.
    pub(super) no_cuda: Option<String>,
    /// Output of `carrack info --json`: machine, transports, gpus, settings.
    pub(super) info: Value,
    pub(super) seconds: f64,
    pub(super) totals: Totals,
    pub(super) parts: Vec<Row>,
    /// The heat equation, on fewer GPUs first.
    pub(super) halo: Vec<Halo>,
    /// File names of the field's picture, if a run on all GPUs drew one, and of the plot.
    #[serde(skip)]
    pub(super) drawn: [Option<String>; 2],
    /// Lines of `carrack perf --json`, in the order of the parts.
    pub(super) perf: Vec<Value>,
}

/// Sums.
#[derive(Clone, Copy, Default, Serialize)]
pub(super) struct Totals {
    pub(super) parts_passed: usize,
    pub(super) parts_failed: usize,
    pub(super) parts_skipped: usize,
    pub(super) tests_passed: u64,
    pub(super) tests_failed: u64,
    pub(super) tests_ignored: u64,
}

/// A part.
#[derive(Serialize)]
pub(super) struct Row {
    pub(super) name: String,
    /// `tests`, `example`, `halo` or `perf`.
    pub(super) sort: &'static str,
    /// `cuda`, `simulated`, or none.
    pub(super) gpus: Option<&'static str>,
    /// `passed`, `failed` or `skipped`.
    pub(super) outcome: &'static str,
    /// Reason, unless the part passed.
    pub(super) reason: Option<String>,
    pub(super) words: String,
    pub(super) seconds: f64,
    pub(super) tests: Option<Tally>,
    pub(super) command: String,
    /// The end of the output of a part that failed.
    pub(super) tail: String,
}

impl Report {
    pub(super) fn of(
        date: String,
        took: Duration,
        kit: &Kit,
        node: &Node,
        machine: Machine,
        ran: Vec<Ran>,
    ) -> Self {
        let count = |word: &str| ran.iter().filter(|ran| ran.outcome.word() == word).count();
        let sum =
            |of: fn(&Tally) -> u64| ran.iter().filter_map(|ran| ran.tally.as_ref()).map(of).sum();
        let totals = Totals {
            parts_passed: count("passed"),
            parts_failed: count("failed"),
            parts_skipped: count("skipped"),
            tests_passed: sum(|tally| tally.passed),
            tests_failed: sum(|tally| tally.failed),
            tests_ignored: sum(|tally| tally.ignored),
        };
        let halo = Halo::of(&ran);
        let [picture, plot] = halo::drawn(node.suffix().as_deref());
        let drawn = [
            halo.last().filter(|last| last.gpus == machine.count).map(|_| picture),
            halo.first().map(|_| plot),
        ];
        let perf = ran.iter().flat_map(|ran| ran.figures.iter().cloned()).collect();
        Self {
            date,
            host: node::host(),
            command: std::env::args().collect::<Vec<_>>().join(" "),
            launcher: node.launcher(),
            about: kit.about.clone(),
            gpus: machine.gpus.in_words(),
            no_cuda: machine.no_cuda,
            info: machine.info,
            seconds: took.as_secs_f64(),
            totals,
            halo,
            drawn,
            parts: ran.into_iter().map(Row::of).collect(),
            perf,
        }
    }

    /// Writes report.md and report.json, with the name of the node in theirs if several write.
    /// Their paths, in words.
    pub(super) fn write(
        &self,
        folder: &Path,
        suffix: Option<&str>,
    ) -> Result<String, SelftestError> {
        let stem = suffix.map_or_else(|| "report".to_owned(), |node| format!("report-{node}"));
        let (people, machines) =
            (folder.join(format!("{stem}.md")), folder.join(format!("{stem}.json")));
        // Plain data under names that are strings: it has a form in JSON.
        let json = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        fs::write(&machines, json).map_err(file(&machines))?;
        if let Some(plot) = halo::draw(&self.halo, self.gpus == Gpus::Simulated.in_words())
            && let [_, Some(name)] = &self.drawn
        {
            let path = folder.join(name);
            fs::write(&path, plot).map_err(file(&path))?;
        }
        fs::write(&people, markdown::of(self)).map_err(file(&people))?;
        Ok(format!("{} and {}", people.display(), machines.display()))
    }

    pub(super) fn summary(&self) -> String {
        let Totals {
            parts_passed, parts_failed, parts_skipped, tests_passed, tests_failed, ..
        } = self.totals;
        format!(
            "{parts_passed} parts passed, {parts_failed} failed, {parts_skipped} skipped; \
            {tests_passed} tests passed, {tests_failed} failed"
        )
    }
}

impl Row {
    fn of(ran: Ran) -> Self {
        let reason = match &ran.outcome {
            Outcome::Passed => None,
            other => other.reason().map(str::to_owned),
        };
        Self {
            sort: ran.part.sort.word(),
            gpus: ran.part.gpus.map(|gpus| gpus.in_words()),
            outcome: ran.outcome.word(),
            reason,
            words: ran.in_words(),
            seconds: ran.took.as_secs_f64(),
            command: ran.part.command_line(),
            name: ran.part.name,
            tests: ran.tally,
            tail: ran.tail,
        }
    }
}
