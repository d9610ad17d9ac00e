//! Runs `carrack perf`, which starts its own two ranks.

use std::process::{Command, Stdio};

use super::cores::Cores;
use super::kit::Setup;
use super::row::{Op, Row, name};
use super::side::{self, AS_IT_COMES, Figure, Out, Role, Setting, Side, limit};
use super::ucx;
use crate::error::TaskError;
use crate::workspace::clean;
use children::{Heard, Running};

/// The status of a command that was asked for what it has not: an option, or a size.
const REFUSED: i32 = 2;

/// Arguments of the trial that shows whether a row can run at all.
const TRY_SECONDS: f64 = 0.02;

/// Our own command, built for release.
#[derive(Debug)]
pub(super) struct Carrack(pub(super) Setup);

impl Carrack {
    fn run(&self, row: &Row, cores: &[usize], seconds: f64) -> Result<(Command, Heard), TaskError> {
        if row.tcp {
            return self.run_between_nodes(row, seconds);
        }
        let mut command = perf(Cores::pin(cores, &self.0.kit.carrack), row, seconds);
        let memory = if self.0.gpus > 1 { "device:0,device:1" } else { "device:0,device:0" };
        // A simulated GPU is no comparison.
        command.envs(row.gpu.then_some(("CARRACK_GPU", "cuda")));
        command.envs(row.copier.then_some(("CARRACK_GPU_COPIER", "1")));
        command.args(["--ranks", &row.ranks.to_string(), "--threads", &row.threads.to_string()]);
        command.args(row.shared.then_some("--share-device")).args(["--bind", "core"]);
        command.args(row.gpu.then_some(["--mem", memory]).into_iter().flatten());
        let heard = children::hear(&mut command, limit(seconds))?;
        Ok((command, heard))
    }

    /// Measures a row by one run on these cores.
    pub(super) fn measure_on(&self, row: &Row, cores: &[usize]) -> Result<Figure, TaskError> {
        let (command, heard) = self.run(row, cores, self.0.seconds)?;
        read(&heard.unless_failed(&command)?, row)
    }

    /// Runs one rank on each node: rank 0 prints the figures.
    fn run_between_nodes(&self, row: &Row, seconds: f64) -> Result<(Command, Heard), TaskError> {
        let port = ucx::free_port()?.to_string();
        let [mut first, mut other] = [0, 1].map(|side| {
            let mut command = perf(self.0.pin(row, side, &self.0.kit.carrack), row, seconds);
            command.env("RANK", side.to_string()).env("WORLD_SIZE", "2");
            command.env("MASTER_ADDR", children::ADDRESSES[0]).env("MASTER_PORT", &port);
            // Both nodes are of one machine, on which shared memory would be nearer.
            command.env("CARRACK_TRANSPORT", "tcp").env("CARRACK_JOB_SECRET", "a benchmark's own");
            command
        });
        let other = Running::start(other.stdin(Stdio::null()).stdout(Stdio::null()))?;
        let heard = children::hear(&mut first, limit(seconds))?;
        drop(other);
        Ok((first, heard))
    }
}

impl Side for Carrack {
    fn name(&self) -> &'static str {
        "carrack"
    }

    fn version(&self) -> String {
        format!("Carrack {}", env!("CARGO_PKG_VERSION"))
    }

    fn role(&self) -> Role {
        Role::Ours
    }

    fn prepare(&self, row: &Row) -> Result<Setting, Out> {
        if row.op == Op::Memcpy {
            return Out::cannot("it is no communication");
        }
        if row.gpu && self.0.gpus == 0 {
            return Out::cannot("there is no GPU here");
        }
        let cores = self.0.cores.first(row.cores()).map_err(Out::Cannot)?;
        let (command, heard) = self.run(row, cores, TRY_SECONDS)?;
        if heard.status.code() == Some(REFUSED) {
            return Out::cannot(&reason(&heard.stderr));
        }
        read(&heard.unless_failed(&command)?, row)?;
        Ok(Setting { variant: &AS_IT_COMES[0], iterations: 0 })
    }

    fn measure(&self, row: &Row, _: &Setting) -> Result<Figure, TaskError> {
        // `prepare` has found as many.
        self.measure_on(row, self.0.cores.first(row.cores()).unwrap_or_default())
    }
}

/// Adds the arguments of `carrack perf` for a row to a command that runs Carrack.
pub(super) fn perf(mut command: Command, row: &Row, seconds: f64) -> Command {
    clean(&mut command);
    command.args(["perf", &name(row.test), "--op", &name(row.op), "--json"]);
    command.args(["--size", &row.size.to_string(), "--seconds", &seconds.to_string()]);
    if row.asleep {
        command.args(["--wait", "sleep"]).env("CARRACK_SPIN_US", "0");
    }
    command
}

/// Reads the figure of a row from the output of `carrack perf`.
pub(super) fn read(said: &str, row: &Row) -> Result<Figure, TaskError> {
    side::read_line("carrack perf --json", said, row)
}

/// Returns the reason of a refusal: the first line of its errors, without its name.
fn reason(complained: &str) -> String {
    let line = complained.lines().find(|line| !line.trim().is_empty());
    let line = line.unwrap_or("it does not say why");
    line.trim_start_matches("carrack: ").trim_start_matches("error: ").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: &str = concat!(
        r#"{"op":"am","test":"latency","size":8,"threads":1,"transport":"shm","mem":"host","#,
        r#""latency_us":{"min":0.05,"mean":0.07,"p50":0.061,"p99":0.1,"max":9.0},"#,
        r#""bandwidth_gbps":null,"rate_mps":null}"#,
    );
    const STREAM: &str = concat!(
        r#"{"op":"am","test":"rate","size":8,"threads":1,"transport":"shm","mem":"host","#,
        r#""latency_us":null,"bandwidth_gbps":0.28,"rate_mps":35.0}"#,
    );

    fn row(text: &str) -> Row {
        text.parse().unwrap()
    }

    #[test]
    fn the_line_of_the_size_is_read_and_all_others_ignored() {
        let said =
            format!("starting\n{}\n{LATENCY}\n", LATENCY.replace("\"size\":8", "\"size\":16"));
        let latency = Figure { value: 0.061, average: Some(0.07) };
        assert_eq!(read(&said, &row("am:latency:8")).ok(), Some(latency));
        assert_eq!(read(STREAM, &row("am:rate:8")).ok(), Some(Figure::plain(35.0)));
        let stream = STREAM.replace("rate\",", "bandwidth\",");
        assert_eq!(read(&stream, &row("am:bandwidth:8")).ok(), Some(Figure::plain(0.28)));
    }

    #[test]
    fn a_line_without_what_the_test_measures_is_an_error_that_shows_it() {
        assert!(read(LATENCY, &row("am:rate:8")).is_err());
        assert!(read(&LATENCY.replace("0.061", "0.0"), &row("am:latency:8")).is_err());
        let error = read("nothing to see\n", &row("am:latency:8")).unwrap_err().to_string();
        assert!(error.contains("nothing to see"), "{error}");
    }

    #[test]
    fn the_reason_of_a_refusal_is_its_first_line() {
        assert_eq!(reason("\ncarrack: too long: leave it out\nmore"), "too long: leave it out");
        assert_eq!(reason("error: invalid value\n"), "invalid value");
        assert_eq!(reason(""), "it does not say why");
    }
}
