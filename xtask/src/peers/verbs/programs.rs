//! Runs Carrack, a program of perftest or `ucx_perftest` between the guest's two devices.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::error::TaskError;
use crate::peers::cores::Cores;
use crate::peers::row::{Op, Row, Test};
use crate::peers::side::{self, AS_IT_COMES, Figure, Out, Role, Setting, Side};
use crate::peers::{carrack, ucx};

/// The devices of the guest: rank 0 has the first, which the client has too.
const DEVICES: [&str; 2] = ["rxe0", "rxe1"];

/// The address of the second.
const SERVER: &str = "10.77.0.2";

/// Ports of perftest and UCX: nothing else runs in the guest.
const PERFTEST_PORT: u16 = 18515;
const UCX_PORT: u16 = 13337;

/// Time for one run, on a machine that has others to do.
const LIMIT: Duration = Duration::from_secs(40);

/// Seconds by which [`ucx::between`] comes to the same limit.
const LONG: f64 = 2.0;

/// Carrack between two ranks over verbs.
#[derive(Debug)]
pub(super) struct Ours {
    pub(super) carrack: PathBuf,
    /// Duration of a measurement. The others take a number of messages instead.
    pub(super) seconds: f64,
}

/// The programs of perftest. Messages and puts of a bandwidth are compared with its writes: nothing
/// moves bytes with less.
#[derive(Debug)]
pub(super) struct Perftest;

/// `ucx_perftest` over RC.
#[derive(Debug)]
pub(super) struct UcxPerftest;

/// Returns a setting with enough messages for a median. More would take longer than Carrack's
/// measurement does.
fn setting(row: &Row) -> Setting {
    let iterations = match row.test {
        Test::Latency => 1000,
        Test::Rate => 5000,
        Test::Bandwidth => 30,
    };
    Setting { variant: &AS_IT_COMES[0], iterations }
}

/// Returns the version that a program prints.
fn version(program: &str, argument: &str) -> String {
    let said = children::hear(Command::new(program).arg(argument), LIMIT);
    side::version(&said.map_or_else(|_| String::new(), |said| said.stdout + &said.stderr))
}

/// Runs a program of a peer on both processors, and returns the client's output.
fn between(
    program: &str,
    port: u16,
    (row, setting): (&Row, &Setting),
    with_device: impl Fn(&mut Command, &str),
) -> Result<String, TaskError> {
    let [server, client] = [0, 1].map(|at: usize| {
        let mut command = Cores::pin(&[at], program);
        command.args(["-p", &port.to_string(), "-s", &row.size.to_string()]);
        command.args(["-n", &setting.iterations.to_string()]);
        command.args((at == 1).then_some(SERVER)).stderr(Stdio::null());
        with_device(&mut command, DEVICES[1 - at]);
        command
    });
    ucx::between(server, client, port, LONG)
}

impl Side for Ours {
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
        Ok(setting(row))
    }

    fn measure(&self, row: &Row, _: &Setting) -> Result<Figure, TaskError> {
        let mut command = carrack::perf(Command::new(&self.carrack), row, self.seconds);
        carrack::read(&children::read(command.args(["--transport", "verbs"]), LIMIT)?, row)
    }
}

impl Side for Perftest {
    fn name(&self) -> &'static str {
        "perftest"
    }

    fn version(&self) -> String {
        format!("perftest {}", version("ib_send_lat", "--version"))
    }

    fn test(&self, row: &Row) -> Option<&'static str> {
        match (row.op, row.test) {
            (Op::Send, Test::Latency) => Some("ib_send_lat"),
            (Op::PutSeen, Test::Latency) => Some("ib_write_lat"),
            (Op::Send | Op::Put, Test::Bandwidth) => Some("ib_write_bw"),
            _ => None,
        }
    }

    fn prepare(&self, row: &Row) -> Result<Setting, Out> {
        self.test(row).map_or_else(|| Out::cannot("it has no such test"), |_| Ok(setting(row)))
    }

    fn measure(&self, row: &Row, setting: &Setting) -> Result<Figure, TaskError> {
        let program = self.test(row).unwrap_or_default();
        let said = between(program, PERFTEST_PORT, (row, setting), |command, device| {
            command.args(["-d", device]);
            command.args((row.test == Test::Bandwidth).then_some("--report_gbits"));
        })?;
        read_perftest(&said, row)
    }
}

impl Side for UcxPerftest {
    fn name(&self) -> &'static str {
        "UCX"
    }

    fn version(&self) -> String {
        format!("UCX {} over rc", version("ucx_info", "-v"))
    }

    fn test(&self, row: &Row) -> Option<&'static str> {
        ucx::name(row)
    }

    fn prepare(&self, row: &Row) -> Result<Setting, Out> {
        Ok(setting(row))
    }

    fn measure(&self, row: &Row, setting: &Setting) -> Result<Figure, TaskError> {
        let test = self.test(row).unwrap_or_default();
        let said = between("ucx_perftest", UCX_PORT, (row, setting), |command, device| {
            command
                .envs([("UCX_TLS", "rc"), ("UCX_UD_VERBS_ETH_DGID_CHECK", "n")])
                .env("UCX_NET_DEVICES", format!("{device}:1"))
                .args(["-t", test, "-f", "-v", "-w", "50"]);
        })?;
        ucx::parse(&said, row.test)
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
