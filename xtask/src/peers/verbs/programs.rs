//! Runs Carrack, a program of perftest or `ucx_perftest` between the guest's two devices.

use std::fmt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::child;
use crate::error::TaskError;
use crate::peers::cores::Cores;
use crate::peers::row::{Row, Test};
use crate::peers::side::{self, Figure};
use crate::peers::{carrack, ucx};

/// The devices of the guest: rank 0 has the first, which the client has too.
const DEVICES: [&str; 2] = ["rxe0", "rxe1"];

/// The address of the second.
const SERVER: &str = "10.77.0.2";

/// Ports of perftest and UCX: nothing else runs in the guest.
const PERFTEST_PORT: u16 = 18515;
const UCX_PORT: u16 = 13337;

/// For one run, on a machine that has others to do.
const LIMIT: Duration = Duration::from_secs(40);

/// Seconds by which [`ucx::between`] comes to the same limit.
const LONG: f64 = 2.0;

/// A peer of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Peer {
    /// This program of perftest.
    Perftest(&'static str),
    /// This test of `ucx_perftest`.
    Ucx(&'static str),
}

/// All sides.
pub(super) struct Sides {
    pub(super) carrack: PathBuf,
    /// Duration of Carrack's measurement. The others take a number of messages instead.
    pub(super) seconds: f64,
}

impl Sides {
    /// Returns the peers and their versions as readable text.
    pub(super) fn peers(&self) -> String {
        let version = |program: &str, argument| {
            let said = child::hear(Command::new(program).arg(argument), LIMIT);
            side::version(&said.map_or_else(|_| String::new(), |said| said.said + &said.complained))
        };
        let (ucx, perftest) = (version("ucx_info", "-v"), version("ib_send_lat", "--version"));
        format!("UCX {ucx} over rc, perftest {perftest}")
    }

    /// Measures Carrack between two ranks over verbs.
    pub(super) fn ours(&self, row: &Row) -> Result<Figure, TaskError> {
        let mut command = carrack::perf(Command::new(&self.carrack), row, self.seconds);
        carrack::read(&child::read(command.args(["--transport", "verbs"]), LIMIT)?, row)
    }

    /// Measures a peer.
    pub(super) fn peer(&self, peer: Peer, row: &Row) -> Result<Figure, TaskError> {
        // Enough for a median; what takes longer than ours does would be measured in other minutes.
        let count = match row.test {
            Test::Latency => 1000,
            Test::Rate => 5000,
            Test::Bandwidth => 30,
        };
        let (size, count) = (row.size.to_string(), count.to_string());
        let side_of = |at: usize, port: u16, name: &str| {
            let mut command = Cores::pin(&[at], name);
            command.args(["-p", &port.to_string(), "-s", &size, "-n", &count]);
            command.args((at == 1).then_some(SERVER)).stderr(Stdio::null());
            command
        };
        match peer {
            Peer::Perftest(name) => {
                let side = |at: usize| {
                    let mut command = side_of(at, PERFTEST_PORT, name);
                    command.args(["-d", DEVICES[1 - at]]);
                    command.args((row.test == Test::Bandwidth).then_some("--report_gbits"));
                    command
                };
                read_perftest(&ucx::between(side(0), side(1), PERFTEST_PORT, LONG)?, row)
            }
            Peer::Ucx(test) => {
                let side = |at: usize| {
                    let mut command = side_of(at, UCX_PORT, "ucx_perftest");
                    command
                        .envs([("UCX_TLS", "rc"), ("UCX_UD_VERBS_ETH_DGID_CHECK", "n")])
                        .env("UCX_NET_DEVICES", format!("{}:1", DEVICES[1 - at]))
                        .args(["-t", test, "-f", "-v", "-w", "50"]);
                    command
                };
                ucx::parse(&ucx::between(side(0), side(1), UCX_PORT, LONG)?, row.test)
            }
        }
    }
}

/// Reads the line of numbers. Of a latency the fifth is the median ("typical"), of a bandwidth the
/// fourth the average, in 10⁹ bits.
fn read_perftest(said: &str, row: &Row) -> Result<Figure, TaskError> {
    let size = row.size.to_string();
    let mut numbers = said.lines().rev().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let of_size = numbers.find(|words| words.first() == Some(&&*size) && words.len() > 4);
    let number = |at: usize| of_size.as_ref()?.get(at)?.parse::<f64>().ok();
    let column = |at| number(at).filter(|value| *value > 0.0);
    let value = match row.test {
        Test::Latency => column(4),
        Test::Bandwidth => column(3).map(|gigabits| gigabits / 8.0),
        Test::Rate => None,
    };
    value.map(Figure::plain).ok_or_else(|| TaskError::Output {
        program: "perftest",
        expected: "a line of numbers that begins with the size",
        found: said.to_owned(),
    })
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Perftest(name) => f.pad(name),
            Self::Ucx(test) => f.pad(&format!("UCX {test}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(text: &str) -> Row {
        text.parse().unwrap()
    }

    #[test]
    fn perftests_typical_latency_and_average_bandwidth_are_read() {
        let said = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    \
                    t_avg[usec]\n \
                    8       200          47.64          32054.51      5944.85  \t       7832.09    \
                     \t7549.61\n---\n";
        assert_eq!(read_perftest(said, &row("send:latency:8")).unwrap().value, 5944.85);
        let said = " #bytes     #iterations    BW peak[Gb/sec]    BW \
            average[Gb/sec]   MsgRate[Mpps]\n \
                    1048576    30               1.00               0.80                 0.000095\n";
        assert_eq!(read_perftest(said, &row("put:bandwidth:1M")).unwrap().value, 0.1);
    }

    #[test]
    fn output_without_figures_is_an_error_that_shows_it() {
        for (said, row) in [
            ("", "send:latency:8"),
            ("8 1 2\n", "send:latency:8"),
            ("8 1 1 1 0 1\n", "put:latency:8"),
        ] {
            assert!(read_perftest(said, &self::row(row)).is_err(), "{said:?}");
        }
        let error = read_perftest("no luck\n", &row("send:latency:8")).unwrap_err().to_string();
        assert!(error.contains("no luck"), "{error}");
    }
}
