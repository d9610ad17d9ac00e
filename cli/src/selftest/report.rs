//! The report: plain data, as JSON and for people.

use super::halo::{self, Halo};
use super::kit::{About, Kit};
use super::libtest::TestResults;
use super::machine::{Gpus, Machine};
use super::markdown;
use super::node::{self, Node};
use super::part::{Outcome, Ran};
use super::{SelftestError, file};
use serde::Serialize;
use serde_json::Value;
use std::fs;
use std::io;
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
    gpus: Gpus,
    /// Reason why NVIDIA's GPUs are not tested.
    pub(super) no_cuda: Option<String>,
    /// Output of `carrack info --json`: machine, transports, gpus, settings.
    pub(super) info: Value,
    pub(super) seconds: f64,
    pub(super) totals: Totals,
    pub(super) parts: Vec<Ran>,
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

impl Report {
    pub(super) fn of(
        date: String,
        took: Duration,
        kit: &Kit,
        node: &Node,
        machine: Machine,
        ran: Vec<Ran>,
    ) -> Self {
        let count = |outcome| ran.iter().filter(|ran| ran.outcome == outcome).count();
        let sum = |of: fn(&TestResults) -> u64| {
            ran.iter().filter_map(|ran| ran.tests.as_ref()).map(of).sum()
        };
        let totals = Totals {
            parts_passed: count(Outcome::Passed),
            parts_failed: count(Outcome::Failed),
            parts_skipped: count(Outcome::Skipped),
            tests_passed: sum(|results| results.passed),
            tests_failed: sum(|results| results.failed),
            tests_ignored: sum(|results| results.ignored),
        };
        let halo: Vec<Halo> = ran.iter().filter_map(|ran| ran.halo).collect();
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
            gpus: machine.gpus,
            no_cuda: machine.no_cuda,
            info: machine.info,
            seconds: took.as_secs_f64(),
            totals,
            halo,
            drawn,
            parts: ran,
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
        if let Some(plot) = halo::draw(&self.halo, self.gpus == Gpus::Simulated)
            && let [_, Some(name)] = &self.drawn
        {
            let path = folder.join(name);
            fs::write(&path, plot).map_err(file(&path))?;
        }
        let text = markdown::of(self).map_err(io::Error::other).map_err(file(&people))?;
        fs::write(&people, text).map_err(file(&people))?;
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
