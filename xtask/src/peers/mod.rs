//! `cargo xtask bench-peers`: Carrack, UCX, MPICH and Open MPI side by side.
//!
//! All sides run on the same cores, pinned, in rounds in which they take turns and another one goes
//! first. The report has each side's median over the rounds, and the ratio to the better peer's.
//! Of a peer's settings, those are used that are fastest in a trial of the row.
//!
//! With `--pack DIR` all that this needs goes into a folder for a machine without Cargo; there
//! `DIR/xtask bench-peers --packed DIR` does the same.
//!
//! | module | what it does |
//! |---|---|
//! | `install` | brings peers and launchers from the package registry, without root |
//! | `kit` | where the programs are: built here, or packed |
//! | `pack` | puts them all into a folder |
//! | `row` | what is measured |
//! | `side` | what every side can do; finds a peer's best settings; reads lines of JSON |
//! | `carrack` | runs `carrack perf` |
//! | `ucx` | runs `ucx_perftest` and reads its output |
//! | `mpi` | runs `mpi_bench` (`xtask/peers/mpi_bench.c`) below `mpiexec` |
//! | `yardstick` | one copy, raw sockets (`xtask/peers/*.c`), or processes in place of threads |
//! | `nodes` | two network namespaces, for TCP |
//! | `verbs` | `--guest`: Carrack over verbs, perftest and UCX in a small virtual machine |
//! | `comparison` | rounds of all sides, their medians, the better peer |
//! | `cores` | chooses cores and pins to them |
//! | `machine` | says where the figures were measured |
//! | `report` | the medians, as a table or as JSON |

mod carrack;
mod comparison;
mod cores;
pub(crate) mod install;
mod kit;
mod machine;
mod mpi;
mod nodes;
mod pack;
mod report;
mod row;
mod side;
mod ucx;
mod verbs;
mod yardstick;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use crate::error::TaskError;
use crate::workspace::Workspace;
use carrack::Carrack;
use comparison::Measured;
use cores::Cores;
use kit::{Kit, Setup};
use machine::Machine;
use mpi::{Library, Mpi};
use nodes::Nodes;
use report::{Heading, Report};
use row::{GPU_ROWS, ROWS, Row, TCP_ROWS};
use side::{Out, Role, Side};
use ucx::Ucx;
use yardstick::Yardstick;

/// Options of `cargo xtask bench-peers`.
#[derive(clap::Args)]
#[command(after_help = "\
Rows: the operations are am, send, put, put_seen, get, fetch_add, barrier and memcpy; the tests
latency, bandwidth and rate. A size is in bytes; of a barrier it is the number of ranks. With
@THREADS each rank has that many threads, each with a device of its own, or all with one after
`shared:`; the row of one thread is measured too, and the ratio to it is shown. Threads with a
device each are compared with as many pairs of processes. MPICH's threads send messages, also in
rows of active ones. Puts and gets are compared with one memcpy of their size. With gpu: in front
the memory is that of the first two GPUs, or of the only one, and the comparison is with raw copies
by the driver. With gpu:copier: Carrack's resident copier has the small ones (CARRACK_GPU_COPIER=1).
With tcp: in front the ranks are in two network namespaces, which takes root, and the comparison is
with raw sockets; tcp:asleep:send:latency:8 is of threads that sleep while they wait. A row that
Carrack cannot do yet is reported and skipped; a program that fails or hangs is ended, reported, and
not measured any further in that row, and the status is 1 then.")]
pub(crate) struct PeersOptions {
    /// Rounds; the median over them is taken
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Seconds that one measurement is to last
    #[arg(long, default_value_t = 0.3, value_parser = seconds)]
    seconds: f64,
    /// Seconds after which the report is of the rounds and rows so far
    #[arg(long, value_name = "SECONDS")]
    limit: Option<u64>,
    /// Rows, such as
    /// send:latency:8,put:bandwidth:64K,barrier:latency:4,am:rate:8@4,shared:am:rate:8@4
    #[arg(long, value_name = ROW, value_delimiter = ',')]
    rows: Vec<Row>,
    /// Measure memory of GPUs, if no rows are named
    #[arg(long, conflicts_with = "rows")]
    gpu: bool,
    /// Measure TCP, if no rows are named
    #[arg(long, conflicts_with_all = ["rows", "gpu"])]
    tcp: bool,
    /// Print lines of JSON, the conditions and then one a row, and the table to standard error
    #[arg(long)]
    json: bool,
    /// Folder in which the peers are, or are installed [default: peers in the target directory]
    #[arg(long, value_name = "DIR", conflicts_with = "packed")]
    peers: Option<PathBuf>,
    /// The cores, as in `0,1`: a row takes the first it needs [default: all, one thread of each]
    #[arg(long, value_name = "A,B,...")]
    cores: Option<Cores>,
    /// Measure the peers alone
    #[arg(long, conflicts_with = "pack")]
    peer_only: bool,
    /// Measure nothing, but put all it takes into this folder, for a machine without Cargo
    #[arg(long, value_name = "DIR", conflicts_with = "packed")]
    pack: Option<PathBuf>,
    /// Measure verbs, perftest and UCX over rc on the simulated RDMA devices of a small virtual
    /// machine: only ratios mean anything
    #[arg(long, conflicts_with_all = OF_HOST)]
    guest: bool,
    /// The same, from within: with this command of Carrack
    #[arg(long, value_name = "CARRACK", hide = true)]
    in_guest: Option<PathBuf>,
    /// Measure with what was packed into this folder, and ask Cargo for nothing
    #[arg(long, value_name = "DIR")]
    packed: Option<PathBuf>,
}

const ROW: &str = "[shared:|tcp:[asleep:]|gpu:[copier:]]OP:TEST:SIZE[@THREADS],...";

/// Options that have no meaning with `--guest`.
const OF_HOST: [&str; 10] =
    ["limit", "rows", "gpu", "tcp", "json", "peers", "cores", "peer_only", "pack", "packed"];

/// Measures, and prints the comparison; or packs what that takes.
pub(crate) fn run(options: &PeersOptions) -> Result<ExitCode, TaskError> {
    if options.guest {
        return verbs::run(options);
    }
    if let Some(carrack) = &options.in_guest {
        return verbs::measure(carrack, options);
    }
    let kit = match &options.packed {
        Some(folder) => Kit::packed(folder)?,
        None => {
            let workspace = Workspace::load()?;
            let peers = options.peers.clone().unwrap_or_else(|| workspace.target.join("peers"));
            let kit = Kit::build(&workspace, &peers, options.peer_only)?;
            if options.pack.is_none() && options.chosen().iter().any(|row| row.tcp) {
                kit.add_open_mpi(&workspace)?;
            }
            kit
        }
    };
    let Some(folder) = &options.pack else { return compare(options, kit) };
    let mib = pack::pack(&kit, folder)? as f64 / 1048576.0;
    let folder = folder.display();
    say!("{folder}: {mib:.1} MiB; there: {folder}/xtask bench-peers --packed {folder}");
    Ok(ExitCode::SUCCESS)
}

fn compare(options: &PeersOptions, kit: Kit) -> Result<ExitCode, TaskError> {
    let cores = options.cores.clone().map_or_else(Cores::choose, Cores::allowed)?;
    let (seconds, gpus) = (options.seconds, kit.gpus());
    let rows = options.chosen();
    let nodes =
        if rows.iter().any(|row| row.tcp) { Some(Nodes::make(&kit.peers)?.into()) } else { None };
    let setup = Setup { kit, cores, seconds, gpus, nodes };
    let mut sides: Vec<Box<dyn Side>> = vec![
        Box::new(Carrack(setup.clone())),
        Box::new(Ucx::new(setup.clone())?),
        Box::new(Mpi::new(Library::Mpich, setup.clone())?),
        Box::new(Yardstick(setup.clone())),
    ];
    if setup.nodes.is_some() && options.packed.is_none() {
        sides.push(Box::new(Mpi::new(Library::OpenMpi, setup.clone())?));
    }
    sides.retain(|side| !options.peer_only || side.role() != Role::Ours);
    report(options, &rows, &sides, setup.cores)
}

/// Measures all rows, and prints the report. The status is 1 if a program has failed, or nothing
/// was measured.
fn report(
    options: &PeersOptions,
    rows: &[Row],
    sides: &[Box<dyn Side>],
    cores: Cores,
) -> Result<ExitCode, TaskError> {
    let machine = Machine::look_before_rounds()?;
    let measured = measure(options, rows, sides);
    let heading = Heading {
        machine,
        cores,
        rounds: measured.iter().map(Measured::rounds).max().unwrap_or(0),
        seconds: options.seconds,
        sides: sides.iter().map(|side| side.version()).collect(),
    };
    let report = Report { heading, measured: &measured };
    if options.json {
        say!("{}", report.json());
        eprintln!("{}", report.table());
    } else {
        say!("{}", report.table());
    }
    let mut entries = measured.iter().flat_map(|one| &one.entries);
    let failed = entries.any(|entry| matches!(entry.out, Some(Out::Failed(_))));
    let is_empty = measured.iter().all(|one| one.rounds() == 0);
    if is_empty {
        eprintln!("xtask: nothing was measured");
    }
    Ok(if failed || is_empty { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

impl PeersOptions {
    /// Returns the rows that are measured.
    fn chosen(&self) -> Vec<Row> {
        let rows = match &self.rows[..] {
            [] if self.gpu => row::read(GPU_ROWS),
            [] if self.tcp => row::read(TCP_ROWS),
            [] => row::read(ROWS),
            rows => rows.to_vec(),
        };
        row::with_one_thread(&rows)
    }
}

fn measure(options: &PeersOptions, rows: &[Row], sides: &[Box<dyn Side>]) -> Vec<Measured> {
    let begun = Instant::now();
    let is_late = || options.limit.is_some_and(|limit| begun.elapsed().as_secs() >= limit);
    let why_stop = || match children::interrupted() {
        true => Some("a signal came"),
        false => is_late().then_some("over the limit"),
    };
    let mut measured: Vec<Measured> = Vec::new();
    for &row in rows {
        if let Some(why) = why_stop() {
            eprintln!("{why}: the rows from {row} on are left out");
            break;
        }
        eprintln!("trying settings: {row}");
        measured.push(Measured::prepare(row, sides));
    }
    for round in 0..options.rounds {
        eprintln!("round {} of {}", round + 1, options.rounds);
        for one in &mut measured {
            if let Some(why) = why_stop() {
                eprintln!("{why}, at {}", one.row);
                return measured;
            }
            one.round(round as usize, sides);
        }
    }
    measured
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.01..=60.0).contains(seconds));
    seconds.ok_or_else(|| "expected from 0.01 to 60 seconds, for example 1 or 0.5".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: PeersOptions,
    }

    #[test]
    fn over_the_limit_the_report_is_of_what_was_measured_before() {
        let rows = row::read("send:latency:8 send:rate:8");
        let measured = |limit: &[&str]| {
            let words = ["bench-peers", "--rounds", "2"].iter().chain(limit);
            measure(&Command::parse_from(words).options, &rows, &[]).len()
        };
        assert_eq!((measured(&[]), measured(&["--limit", "0"])), (2, 0));
    }
}
