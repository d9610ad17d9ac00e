//! Runs `ucx_perftest`, a server and a client, and reads what the client prints.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use fs_err as fs;

use super::kit::Setup;
use super::row::{Op, Row, Test};
use super::side::{self, Figure, Out, Setting, Side, Variant, limit, tune};
use crate::error::TaskError;
use crate::workspace::without;
use children::Running;

/// Transports that UCX is tried with: each kind of shared memory, and all with kernel copies.
const VARIANTS: &[Variant] = &[
    Variant { name: "posix,self", env: &[("UCX_TLS", "posix,self")] },
    Variant { name: "sysv,self", env: &[("UCX_TLS", "sysv,self")] },
    Variant { name: "posix,sysv,cma,self", env: &[("UCX_TLS", "posix,sysv,cma,self")] },
];

/// Variants for memory of GPUs: as UCX chooses by itself, and what it needs for that alone.
const GPU_VARIANTS: &[Variant] = &[
    Variant { name: "all", env: &[] },
    Variant { name: "cuda,sm,self", env: &[("UCX_TLS", "cuda_copy,cuda_ipc,sm,self")] },
];

/// Between nodes.
const TCP_VARIANTS: &[Variant] = &[Variant { name: "tcp", env: &[("UCX_TLS", "tcp")] }];

/// Folders of NVIDIA's driver in containers, in addition to the system's.
const DRIVER: &[&str] = &["/usr/local/nvidia/lib64"];

/// Time in which the server has to listen.
const LISTENS: Duration = Duration::from_secs(20);

/// UCX, installed.
#[derive(Debug)]
pub(super) struct Ucx {
    setup: Setup,
    version: String,
}

impl Ucx {
    pub(super) fn new(setup: Setup) -> Result<Self, TaskError> {
        let mut ucx = Self { setup, version: String::new() };
        let mut info = ucx.with_libraries(Command::new(ucx.home().join("bin/ucx_info")), false);
        let said = children::read(info.arg("-v"), Duration::from_secs(60))?;
        ucx.version = side::version(&said);
        Ok(ucx)
    }

    fn home(&self) -> PathBuf {
        self.setup.kit.peers.join("ucx/libucx")
    }

    /// Tells a program of UCX where its libraries are.
    fn with_libraries(&self, mut command: Command, gpu: bool) -> Command {
        without(&mut command, &["UCX_"]);
        let lib = self.home().join("lib");
        // A packed folder has the modules for CUDA by themselves.
        let with_cuda = lib.join("ucx_cuda");
        let modules = if gpu && with_cuda.is_dir() { with_cuda } else { lib.join("ucx") };
        let mut libraries = vec![lib, self.home().join("../libucx_cu13.libs")];
        let own = std::env::var_os("LD_LIBRARY_PATH").filter(|_| gpu);
        libraries.extend(own.iter().flat_map(std::env::split_paths));
        libraries.extend(DRIVER.iter().filter(|_| gpu).map(PathBuf::from));
        command.env("UCX_MODULE_DIR", modules);
        if let Ok(libraries) = std::env::join_paths(libraries) {
            command.env("LD_LIBRARY_PATH", libraries);
        }
        command
    }
}

impl Side for Ucx {
    fn name(&self) -> &'static str {
        "UCX"
    }

    fn version(&self) -> String {
        format!("UCX {}", self.version)
    }

    fn test(&self, row: &Row) -> Option<&'static str> {
        name(row)
    }

    fn prepare(&self, row: &Row) -> Result<Setting, Out> {
        if name(row).is_none() {
            return Out::cannot("ucx_perftest has no such test");
        }
        let variants = match row {
            Row { gpu: true, .. } => GPU_VARIANTS,
            Row { tcp: true, .. } => TCP_VARIANTS,
            _ => VARIANTS,
        };
        tune(row, self.setup.seconds, variants, |setting| self.measure(row, setting))
    }

    fn measure(&self, row: &Row, setting: &Setting) -> Result<Figure, TaskError> {
        let missing = || TaskError::Missing {
            what: format!("{row} in ucx_perftest"),
            remedy: "leave it out",
        };
        let test = name(row).ok_or_else(missing)?;
        // Its own default, 10,000, is seconds of messages of a megabyte.
        let warm_up = (setting.iterations / 10).clamp(1, 10_000);
        let perftest = |side: usize, server: Option<&str>, port: u16| {
            let program = self.home().join("bin/ucx_perftest");
            let mut command = self.with_libraries(self.setup.pin(row, side, program), row.gpu);
            if row.gpu {
                // It takes the first device that it sees.
                let device = if self.setup.gpus > 1 { side.to_string() } else { "0".into() };
                command.args(["-m", "cuda"]).env("CUDA_VISIBLE_DEVICES", device);
            }
            command.args(server).args(["-p", &port.to_string(), "-t", test, "-f", "-v"]);
            // Its gets and additions are streams: one of them at a time is a latency.
            let alone = row.op.ways() == 1.0 && row.test == Test::Latency;
            command.args(alone.then_some(["-O", "1"]).into_iter().flatten());
            command.args(row.asleep.then_some(["-E", "sleep"]).into_iter().flatten());
            command.args(["-s", &row.size.to_string(), "-w", &warm_up.to_string()]);
            command.args(["-n", &setting.iterations.to_string()]);
            command.envs(setting.variant.env.iter().copied());
            command
        };
        let at = if row.tcp { children::ADDRESSES[1] } else { "127.0.0.1" };
        let run = || {
            let port = free_port()?;
            let (server, client) = (perftest(1, None, port), perftest(0, Some(at), port));
            between(server, client, port, self.setup.seconds)
        };
        let said = run().or_else(|error| match error {
            // The port was free for this process; in the server's namespace another has it.
            TaskError::Output { program: SERVER, .. } => run(),
            error => Err(error),
        });
        parse(&said?, row.test)
    }
}

/// Returns the name after `ucx_perftest -t`, if it has the test. Of several threads it gives no
/// figure that could be compared.
pub(super) fn name(row: &Row) -> Option<&'static str> {
    if row.threads > 1 {
        return None;
    }
    Some(match (row.op, row.test) {
        (Op::Am, Test::Latency) => "ucp_am_lat",
        (Op::Am, Test::Bandwidth | Test::Rate) => "ucp_am_bw",
        (Op::Send, Test::Latency) => "tag_lat",
        (Op::Send, Test::Bandwidth | Test::Rate) => "tag_bw",
        (Op::Put | Op::PutSeen, Test::Latency) => "ucp_put_lat",
        (Op::Put, Test::Bandwidth | Test::Rate) => "ucp_put_bw",
        (Op::Get, _) => "ucp_get",
        (Op::FetchAdd, _) => "ucp_fadd",
        (Op::PutSeen | Op::Barrier | Op::Memcpy, _) => return None,
    })
}

/// The program of an error that a server does not listen.
const SERVER: &str = "the server";

/// Returns a port that was free a moment ago.
pub(super) fn free_port() -> Result<u16, TaskError> {
    let address = || TaskError::file("127.0.0.1:0");
    let listener = TcpListener::bind("127.0.0.1:0").map_err(address())?;
    Ok(listener.local_addr().map_err(address())?.port())
}

/// Runs a server, and once it listens a client, and returns the client's output. A run of the
/// client is to last `seconds`.
pub(super) fn between(
    mut server: Command,
    mut client: Command,
    port: u16,
    seconds: f64,
) -> Result<String, TaskError> {
    let mut server = Running::start(server.stdin(Stdio::null()).stdout(Stdio::null()))?;
    // It is not connected to: its first connection is its only one.
    // "  0: 0100007F:3419 00000000:0000 0A ...": address and port in hexadecimal, 0A is LISTEN.
    let line = format!(":{port:04X} 00000000:0000 0A ");
    let table = format!("/proc/{}/net/tcp", server.id());
    let mut listens = false;
    server.wait(LISTENS, || {
        listens = fs::read_to_string(&table).is_ok_and(|table| table.contains(&line));
        !listens && children::pause()
    })?;
    if !listens {
        return Err(TaskError::Output {
            program: SERVER,
            expected: "that it listens",
            found: format!("nothing on port {port}; what it says on standard error stands above"),
        });
    }
    let heard = children::hear(&mut client, limit(seconds))?;
    // It ends by itself, or when it is dropped.
    server.wait(Duration::from_secs(5), children::pause)?;
    Ok(heard.unless_failed(&client)?)
}

/// Reads the figure of a test from the CSV: a line of names, and the last line of numbers.
pub(super) fn parse(said: &str, test: Test) -> Result<Figure, TaskError> {
    let column = |name: &str| {
        let names = said.lines().find(|line| line.starts_with("iterations,"))?;
        let at = names.split(',').position(|one| one == name)?;
        // It pads its numbers on the left.
        let is_numbers = |line: &&str| line.trim_start().starts_with(|c: char| c.is_ascii_digit());
        let numbers = said.lines().rfind(is_numbers)?;
        numbers.split(',').nth(at)?.trim().parse::<f64>().ok()
    };
    let value = match test {
        Test::Latency => column("50.0_percentile_lat"),
        Test::Bandwidth => column("overall_bw").map(|mib| mib * f64::from(1 << 20) / 1e9),
        Test::Rate => column("overall_mr").map(|rate| rate / 1e6),
    };
    let average = if test == Test::Latency { column("overall_lat") } else { None };
    value.map(|value| Figure { value, average }).ok_or_else(|| TaskError::Output {
        program: "ucx_perftest -v",
        expected: "a CSV of latencies and rates",
        found: said.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_of_the_csv_is_read_by_the_names_of_its_columns_in_our_units() {
        let said = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,\
                    overall_mr\n\
                    100,0.300,0.900,0.900,1.0,1.0,1,1\n\
                    200000,0.060,0.059,0.061,128.94,1000,16900420,2000000\n";
        for said in [said, &said.replace("\n200000,0.060", "\n   512, 0.060")] {
            let figure = |test| parse(said, test).unwrap();
            assert_eq!(figure(Test::Latency), Figure { value: 0.06, average: Some(0.061) });
            assert_eq!(figure(Test::Bandwidth), Figure::plain(1.048_576));
            assert_eq!(figure(Test::Rate), Figure::plain(2.0));
        }
    }

    #[test]
    fn output_of_another_form_is_an_error_that_shows_it() {
        for said in ["", "iterations,a\n", "iterations,a\n1,2\n", "100,0.3\n"] {
            let error = parse(said, Test::Latency).unwrap_err().to_string();
            assert!(error.contains("ucx_perftest"), "{error}");
        }
    }
}
