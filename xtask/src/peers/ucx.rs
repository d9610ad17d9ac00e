//! Runs `ucx_perftest`, a server and a client, and reads what the client prints.

use std::ffi::OsStr;
use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::comparison::{Figure, Quantity, Test};
use super::cores::Cores;
use crate::child::{self, Running};
use crate::error::TaskError;

/// Transports that UCX is tried with: all that it has, and each kind of shared memory without the rest to poll.
const TRANSPORTS: &[&str] = &["all", "posix,sysv,self", "posix,self", "sysv,self"];

/// Runs of each transport; the best one counts, since what disturbs a run only makes it worse.
const TRIES: usize = 3;

/// Iterations of a try, a few hundredths of a second.
const TRY_ITERATIONS: u64 = 100_000;

/// How long the server may take to listen.
const LISTENS: Duration = Duration::from_secs(20);

/// When a client counts as hung. A run takes seconds; on a machine that is busy with something else, minutes.
const HANGS: Duration = Duration::from_secs(600);

/// UCX, installed.
#[derive(Debug)]
pub(super) struct Ucx {
    home: PathBuf,
    cores: Cores,
    pub(super) version: String,
}

/// What makes UCX fastest in a test, and how long to run it.
#[derive(Debug, Clone)]
pub(super) struct Tuned {
    pub(super) transports: &'static str,
    pub(super) iterations: u64,
}

/// The columns that `ucx_perftest -v` prints.
#[derive(Debug, PartialEq)]
struct Final {
    median_us: f64,
    average_us: f64,
    messages_per_second: f64,
}

impl Ucx {
    pub(super) fn new(home: PathBuf, cores: Cores) -> Result<Self, TaskError> {
        let mut ucx = Self { home, cores, version: String::new() };
        let mut info = ucx.with_libraries(Command::new(ucx.home.join("bin/ucx_info")), "all");
        let said = child::read(info.arg("-v"), Duration::from_secs(60))?;
        // "# Library version: 1.22.0"
        let version =
            said.lines().find_map(|line| line.split_once("version:")).map(|(_, version)| version.trim());
        ucx.version = version.unwrap_or("of unknown version").to_owned();
        Ok(ucx)
    }

    /// Finds the transports that make it fastest, and the iterations that take `seconds`.
    pub(super) fn tune(&self, test: &Test, seconds: f64) -> Result<Tuned, TaskError> {
        let mut best: Option<(f64, Final, &'static str)> = None;
        for transports in TRANSPORTS {
            for _ in 0..TRIES {
                let tried = self.run(test, transports, TRY_ITERATIONS)?;
                let score = match test.quantity {
                    Quantity::Latency => -tried.average_us,
                    Quantity::Rate => tried.messages_per_second,
                };
                if best.as_ref().is_none_or(|(highest, ..)| score > *highest) {
                    best = Some((score, tried, transports));
                }
            }
        }
        let Some((_, best, transports)) = best else {
            return Ok(Tuned { transports: "all", iterations: TRY_ITERATIONS });
        };
        let per_second = match test.quantity {
            // An iteration is there and back.
            Quantity::Latency => 1e6 / (2.0 * best.average_us.max(0.001)),
            Quantity::Rate => best.messages_per_second,
        };
        // A float's conversion saturates, and the bounds keep what is left in reason.
        let iterations = ((per_second * seconds) as u64).clamp(10_000, 10_000_000_000);
        Ok(Tuned { transports, iterations })
    }

    /// One run of the length that was found.
    pub(super) fn measure(&self, test: &Test, tuned: &Tuned) -> Result<Figure, TaskError> {
        let columns = self.run(test, tuned.transports, tuned.iterations)?;
        Ok(match test.quantity {
            Quantity::Latency => Figure { value: columns.median_us, average: Some(columns.average_us) },
            Quantity::Rate => Figure { value: columns.messages_per_second, average: None },
        })
    }

    fn run(&self, test: &Test, transports: &str, iterations: u64) -> Result<Final, TaskError> {
        let port = free_port()?;
        let perftest = |cpu: usize, server: Option<&str>| {
            let program = self.home.join("bin/ucx_perftest");
            let mut command = self.with_libraries(Cores::pin(&[cpu], program), transports);
            command.args(server).args(["-p", &port.to_string(), "-t", test.ucx, "-f", "-v"]);
            command.args(["-s", &test.size.to_string(), "-n", &iterations.to_string()]);
            command
        };
        let mut server = Running::start(perftest(self.cores.0, None).stdout(Stdio::null()))?;
        wait_until_listening(port, &mut server)?;

        let mut client = perftest(self.cores.1, Some("127.0.0.1"));
        let mut said = String::new();
        child::run(&mut client, HANGS, |line| {
            said.push_str(line);
            said.push('\n');
        })?;
        wait_until_ended(&mut server)?;
        parse(&said)
    }

    /// Tells a program of UCX where its libraries are and which transports to use.
    fn with_libraries(&self, mut command: Command, transports: &str) -> Command {
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("UCX_") {
                command.env_remove(name);
            }
        }
        let lib = self.home.join("lib");
        command.env("UCX_TLS", transports).env("UCX_MODULE_DIR", lib.join("ucx"));
        command.env::<_, &OsStr>("LD_LIBRARY_PATH", lib.as_ref());
        command
    }
}

/// A port that was free a moment ago.
fn free_port() -> Result<u16, TaskError> {
    let address = || TaskError::file("127.0.0.1:0");
    let listener = TcpListener::bind("127.0.0.1:0").map_err(address())?;
    Ok(listener.local_addr().map_err(address())?.port())
}

/// Waits for the server without connecting to it: its first connection is its only one.
fn wait_until_listening(port: u16, server: &mut Running) -> Result<(), TaskError> {
    // "  0: 0100007F:3419 00000000:0000 0A ...": address and port in hexadecimal, 0A is LISTEN.
    let listening = format!(":{port:04X} 00000000:0000 0A ");
    let began = Instant::now();
    while began.elapsed() < LISTENS && server.ended()?.is_none() {
        if fs::read_to_string("/proc/net/tcp").is_ok_and(|table| table.contains(&listening)) {
            return Ok(());
        }
        thread::sleep(Duration::from_millis(5));
    }
    Err(TaskError::Output {
        program: "ucx_perftest",
        expected: "a server that listens",
        found: format!("nothing on port {port}; what it says on standard error stands above"),
    })
}

/// Lets the server end by itself; one that does not is ended when it is dropped.
fn wait_until_ended(server: &mut Running) -> Result<(), TaskError> {
    let began = Instant::now();
    while began.elapsed() < Duration::from_secs(5) && server.ended()?.is_none() {
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Reads the CSV: a line of names, and the last line of numbers.
fn parse(said: &str) -> Result<Final, TaskError> {
    let unreadable = || TaskError::Output {
        program: "ucx_perftest -v",
        expected: "a CSV of latencies and rates",
        found: said.to_owned(),
    };
    let names = said.lines().find(|line| line.starts_with("iterations,")).ok_or_else(unreadable)?;
    let numbers =
        said.lines().rfind(|line| line.starts_with(|c: char| c.is_ascii_digit())).ok_or_else(unreadable)?;
    let column = |name: &str| {
        let at = names.split(',').position(|one| one == name)?;
        numbers.split(',').nth(at)?.parse().ok()
    };
    let columns = || {
        Some(Final {
            median_us: column("50.0_percentile_lat")?,
            average_us: column("overall_lat")?,
            messages_per_second: column("overall_mr")?,
        })
    };
    columns().ok_or_else(unreadable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_the_csv_is_read_by_the_names_of_its_columns() {
        let said = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n\
                    100,0.300,0.900,0.900,1.0,1.0,1,1\n\
                    200000,0.060,0.059,0.061,128.94,128.94,16900420,16900421\n";
        let expected = Final { median_us: 0.060, average_us: 0.061, messages_per_second: 16_900_421.0 };
        assert_eq!(parse(said).ok(), Some(expected));
    }

    #[test]
    fn output_of_another_form_is_an_error_that_shows_it() {
        for said in ["", "iterations,a\n", "iterations,a\n1,2\n", "100,0.3\n"] {
            let error = parse(said).map(|_| ()).unwrap_err().to_string();
            assert!(error.contains("ucx_perftest"), "{error}");
        }
    }
}
