//! Runs `mpi_bench`, our own benchmark over MPI, below the `mpiexec` of an MPI library.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use super::cores::Cores;
use super::kit::Setup;
use super::row::{Op, Row, name};
use super::side::{self, Figure, Out, Setting, Side, Variant, limit, tune};
use crate::error::TaskError;
use crate::workspace::without;

/// Settings that are tried with MPICH. By itself it takes its own shared memory and asks its
/// network for messages as well. It can also leave everything to the UCX that it carries, which is
/// often faster.
const VARIANTS: &[Variant] = &[
    Variant { name: "as it comes", env: &[] },
    Variant { name: "all by UCX, posix", env: &[NO_LOCAL, ("UCX_TLS", "posix,self")] },
    Variant { name: "all by UCX, posix+cma", env: &[NO_LOCAL, ("UCX_TLS", "posix,sysv,cma,self")] },
];

/// Settings that are tried when several threads call it: also with a virtual interface for each.
const OF_THREADS: &[Variant] = &[
    Variant { name: "as it comes", env: &[] },
    Variant { name: "an interface a thread", env: &[INTERFACES] },
    Variant {
        name: "all by UCX, an interface a thread",
        env: &[NO_LOCAL, ("UCX_TLS", "posix,self"), INTERFACES],
    },
];

/// Settings that are tried with MPICH between nodes.
const OVER_TCP: &[Variant] = &[
    Variant {
        name: "ofi",
        env: &[NO_LOCAL, ("MPIR_CVAR_CH4_NETMOD", "ofi"), ("FI_PROVIDER", "tcp")],
    },
    Variant { name: "ucx", env: &[NO_LOCAL, ("MPIR_CVAR_CH4_NETMOD", "ucx"), ("UCX_TLS", "tcp")] },
];

/// Settings that are tried with Open MPI between nodes.
const OPEN_MPI_OVER_TCP: &[Variant] = &[Variant {
    name: "ob1",
    env: &[
        ("OMPI_MCA_pml", "ob1"),
        ("OMPI_MCA_btl", "tcp,self"),
        ("OMPI_MCA_btl_tcp_if_include", "eth0"),
    ],
}];

/// Everything goes by the network module, also within a node.
const NO_LOCAL: (&str, &str) = ("MPIR_CVAR_NOLOCAL", "1");
const INTERFACES: (&str, &str) = ("MPIR_CVAR_CH4_NUM_VCIS", THREADS);

/// A variable's value that stands for the number of threads.
const THREADS: &str = "THREADS";

/// A library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Library {
    Mpich,
    OpenMpi,
}

impl Library {
    /// Returns its launcher and the benchmark compiled with it, in the peers' folder.
    fn programs(self) -> [&'static str; 2] {
        match self {
            Self::Mpich => ["mpich/bin/mpiexec", "mpi_bench"],
            Self::OpenMpi => ["openmpi/bin/mpiexec", "openmpi/mpi_bench"],
        }
    }
}

/// A library, installed, and the benchmark compiled with it.
#[derive(Debug)]
pub(super) struct Mpi {
    library: Library,
    setup: Setup,
    version: String,
}

impl Mpi {
    pub(super) fn new(library: Library, setup: Setup) -> Result<Self, TaskError> {
        let mut info = Command::new(setup.kit.peers.join(library.programs()[0]));
        let said = children::read(info.arg("--version"), Duration::from_secs(60))?;
        Ok(Self { library, setup, version: side::version(&said) })
    }

    /// Returns what starts the ranks: here, or one on each node.
    fn launcher(&self, row: &Row, cores: &[usize]) -> Command {
        let program = self.setup.kit.peers.join(self.library.programs()[0]);
        let Some(nodes) = self.setup.nodes.as_ref().filter(|_| row.tcp) else {
            let mut command = Command::new(program);
            command.args(["-launcher", "fork"]);
            return command;
        };
        let mut command = nodes.command(0, cores, program);
        match self.library {
            Library::Mpich => {
                command.args(["-launcher", "ssh", "-launcher-exec"]).arg(nodes.agent());
                command.args([
                    "-iface",
                    "eth0",
                    "-ppn",
                    "1",
                    "-hosts",
                    &children::ADDRESSES.join(","),
                ]);
            }
            Library::OpenMpi => {
                command.args(["--allow-run-as-root", "--bind-to", "none", "--prtemca"]);
                command.arg("plm_ssh_agent").arg(nodes.agent()).arg("--host");
                command.arg(children::ADDRESSES.map(|address| format!("{address}:1")).join(","));
            }
        }
        command
    }
}

impl Side for Mpi {
    fn name(&self) -> &'static str {
        if self.library == Library::Mpich { "MPICH" } else { "Open MPI" }
    }

    fn version(&self) -> String {
        format!("{} {}", self.name(), self.version)
    }

    fn prepare(&self, row: &Row) -> Result<Setting, Out> {
        self.setup.cores.first(row.cores()).map_err(Out::Cannot)?;
        if row.gpu {
            return Out::cannot("this build of it knows no GPUs");
        }
        if row.asleep {
            return Out::cannot("its ranks do not sleep");
        }
        let variants = match self.library {
            Library::OpenMpi if row.tcp => OPEN_MPI_OVER_TCP,
            Library::OpenMpi => return Out::cannot("it is measured between nodes"),
            Library::Mpich if row.tcp => OVER_TCP,
            Library::Mpich if row.threads > 1 => OF_THREADS,
            Library::Mpich => VARIANTS,
        };
        match row.op {
            // Several threads are compared with what MPI has for messages.
            Op::Am if row.threads == 1 => Out::cannot("MPI has no active messages"),
            Op::Put | Op::PutSeen | Op::Get | Op::FetchAdd => {
                Out::cannot("its windows are not measured yet")
            }
            Op::Memcpy => Out::cannot("it is no communication"),
            Op::Am | Op::Send | Op::Barrier => {
                tune(row, self.setup.seconds, variants, |setting| self.measure(row, setting))
            }
        }
    }

    fn measure(&self, row: &Row, setting: &Setting) -> Result<Figure, TaskError> {
        // Each rank by itself, so that each has its own core.
        let test = if row.op == Op::Barrier { "barrier" } else { &name(row.test) };
        let threads = row.threads.to_string();
        let arguments = [test, &row.size.to_string(), &setting.iterations.to_string(), &threads];
        let cores = self.setup.cores.first(row.cores()).unwrap_or_default();
        let mut command = self.launcher(row, cores);
        without(
            &mut command,
            &["MPI", "OMPI_", "OPAL_", "PRTE_", "HYDRA_", "PMI", "UCX_", "FI_", "LD_LIBRARY_PATH"],
        );
        let bench = self.setup.kit.peers.join(self.library.programs()[1]);
        for (number, cpus) in cores.chunks(row.threads).enumerate() {
            command.args((number > 0).then_some(":")).args(rank(cpus, &bench)).args(arguments);
        }
        let value = |value| if value == THREADS { threads.as_str() } else { value };
        command.envs(setting.variant.env.iter().map(|(name, text)| (name, value(*text))));
        read(&children::read(&mut command, limit(self.setup.seconds))?, row)
    }
}

/// Returns the words that start one rank on its cores.
fn rank(cpus: &[usize], bench: &Path) -> Vec<std::ffi::OsString> {
    let pinned = Cores::pin(cpus, bench);
    let words = [pinned.get_program()].into_iter().chain(pinned.get_args());
    ["-n".as_ref(), "1".as_ref()].into_iter().chain(words).map(Into::into).collect()
}

fn read(said: &str, row: &Row) -> Result<Figure, TaskError> {
    // A barrier's line is called after what it is.
    side::read_line("mpi_bench", &said.replace(r#""test":"barrier""#, r#""test":"latency""#), row)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LATENCY: &str = concat!(
        r#"{"test":"latency","size":8,"iterations":500000,"#,
        r#""latency_us":{"min":0.8,"mean":1.11220,"p50":1.11667,"p99":1.2,"max":3667.5},"#,
        r#""bandwidth_gbps":null,"rate_mps":null}"#,
    );
    const STREAM: &str = concat!(
        r#"{"test":"bandwidth","size":1048576,"iterations":2048,"latency_us":null,"#,
        r#""bandwidth_gbps":10.25900,"rate_mps":0.00978}"#,
    );

    #[test]
    fn the_line_of_the_benchmark_is_read_whatever_mpiexec_says_around_it() {
        let latency =
            read(&format!("[mpiexec] hello\n{LATENCY}\n"), &"send:latency:8".parse().unwrap());
        assert_eq!(latency.ok(), Some(Figure { value: 1.11667, average: Some(1.1122) }));
        let bandwidth = read(STREAM, &"send:bandwidth:1M".parse().unwrap());
        assert_eq!(bandwidth.ok(), Some(Figure::plain(10.259)));
    }

    #[test]
    fn the_line_of_another_test_or_size_is_an_error() {
        for wrong in ["send:latency:1M", "send:rate:1M", "send:bandwidth:64K"] {
            let error = read(STREAM, &wrong.parse().unwrap()).unwrap_err().to_string();
            assert!(error.contains("mpi_bench"), "{error}");
        }
    }

    #[test]
    fn each_rank_is_pinned_by_itself() {
        assert_eq!(
            rank(&[3, 4], Path::new("/x/bench")),
            ["-n", "1", "taskset", "-c", "3,4", "/x/bench"]
        );
    }
}
