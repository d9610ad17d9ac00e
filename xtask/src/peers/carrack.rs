//! Runs `carrack perf`, which starts its own two ranks, and reads what it prints.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use serde::Deserialize;

use super::comparison::{Figure, Quantity, Test};
use super::cores::Cores;
use crate::child;
use crate::error::TaskError;
use crate::workspace::{Workspace, clean};

/// Our own command, built for release.
#[derive(Debug)]
pub(super) struct Carrack {
    program: PathBuf,
    cores: Cores,
    /// What `perf` is told besides the test, as far as it knows it.
    extra: Vec<String>,
    /// When a run counts as hung.
    limit: Duration,
}

/// A line of `carrack perf --json`.
#[derive(Debug, Deserialize)]
struct Line {
    size: usize,
    latency_us: Option<Latency>,
    /// Messages a second.
    rate_mps: Option<f64>,
}

/// One way, in microseconds.
#[derive(Debug, Deserialize)]
struct Latency {
    p50: f64,
    mean: Option<f64>,
}

impl Carrack {
    pub(super) fn build(workspace: &Workspace, cores: Cores, seconds: f64) -> Result<Self, TaskError> {
        let limit = Duration::from_secs(20 * 60);
        child::run(
            workspace.cargo().args(["build", "--release", "--package", "carrack-cli"]),
            limit,
            child::echo,
        )?;
        let program = workspace.target.join("release/carrack");

        let help =
            child::read(Command::new(&program).args(["perf", "latency", "--help"]), Duration::from_secs(60))?;
        let knows = |option: &str| help.contains(option);
        let mut extra = Vec::new();
        if knows("--bind") {
            extra.extend(["--bind".to_owned(), "core".to_owned()]);
        }
        if knows("--seconds") {
            extra.extend(["--seconds".to_owned(), seconds.to_string()]);
        }
        Ok(Self { program, cores, extra, limit: Duration::from_secs(120) })
    }

    /// One run.
    pub(super) fn measure(&self, test: &Test) -> Result<Figure, TaskError> {
        let mut command = Cores::pin(&[self.cores.0, self.cores.1], &self.program);
        clean(&mut command);
        command
            .arg("perf")
            .args(test.carrack)
            .args(["--size", &test.size.to_string(), "--json"])
            .args(&self.extra);
        let mut said = String::new();
        child::run(&mut command, self.limit, |line| {
            said.push_str(line);
            said.push('\n');
        })?;
        parse(&said, test)
    }
}

fn parse(said: &str, test: &Test) -> Result<Figure, TaskError> {
    let lines = said.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
    let figure = lines.filter(|line| line.size == test.size).find_map(|line| match test.quantity {
        Quantity::Latency => line.latency_us.map(|us| Figure { value: us.p50, average: us.mean }),
        // Carrack prints 10⁶ messages a second, UCX messages a second.
        Quantity::Rate => line.rate_mps.map(|rate| Figure { value: rate * 1e6, average: None }),
    });
    figure.ok_or_else(|| TaskError::Output {
        program: "carrack perf --json",
        expected: "a line with this size and its latency_us.p50 or rate_mps",
        found: said.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::super::comparison::TESTS;
    use super::*;

    const LATENCY: &str = r#"{"op":"am","test":"latency","size":8,"threads":1,"transport":"shm","mem":"host","latency_us":{"min":0.05,"p50":0.061,"p99":0.1,"max":9.0},"bandwidth_gbps":null,"rate_mps":null}"#;
    const RATE: &str = r#"{"op":"am","test":"rate","size":8,"threads":1,"transport":"shm","mem":"host","latency_us":null,"bandwidth_gbps":0.2,"rate_mps":35.0}"#;

    #[test]
    fn the_line_of_the_size_is_read_and_all_others_ignored() {
        let said = format!("starting\n{}\n{LATENCY}\n", LATENCY.replace("\"size\":8", "\"size\":16"));
        assert_eq!(parse(&said, &TESTS[0]).ok(), Some(Figure { value: 0.061, average: None }));
        assert_eq!(parse(RATE, &TESTS[1]).ok(), Some(Figure { value: 3.5e7, average: None }));
    }

    #[test]
    fn a_line_without_what_the_test_measures_is_an_error_that_shows_it() {
        assert!(parse(LATENCY, &TESTS[1]).is_err());
        let error = parse("nothing to see\n", &TESTS[0]).unwrap_err().to_string();
        assert!(error.contains("nothing to see"), "{error}");
    }
}
