//! Programs that a comparison needs: built and installed here, or packed in a folder.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use fs_err as fs;

use super::cores::Cores;
use super::install;
use super::nodes::Nodes;
use super::row::Row;
use crate::error::TaskError;
use crate::files;
use crate::workspace::Workspace;

/// Time to say how many GPUs there are: a driver takes a second for each.
const ANSWER: Duration = Duration::from_secs(60);

/// The peers' programs, below their folder.
pub(super) const PROGRAMS: [&str; 5] =
    ["ucx/libucx/bin/ucx_perftest", "mpich/bin/mpiexec", "mpi_bench", "copy_bench", "tcp_bench"];

/// The programs, and their libraries in the same folder.
#[derive(Clone, Debug)]
pub(super) struct Kit {
    pub(super) carrack: PathBuf,
    /// Holds `ucx/libucx`, `mpich`, perhaps `openmpi`, and the programs of `xtask/peers`, also in a
    /// packed folder.
    pub(super) peers: PathBuf,
}

/// Setup that all sides are measured with.
#[derive(Clone, Debug)]
pub(super) struct Setup {
    pub(super) kit: Kit,
    pub(super) cores: Cores,
    /// Duration of a run's measurement.
    pub(super) seconds: f64,
    /// GPUs that are there.
    pub(super) gpus: usize,
    /// Nodes, where rows of TCP are measured.
    pub(super) nodes: Option<Arc<Nodes>>,
}

impl Setup {
    /// Returns a command that runs `program` on one of these cores: on its node, for a row of TCP.
    pub(super) fn pin(&self, row: &Row, side: usize, program: impl AsRef<OsStr>) -> Command {
        // A row is only measured where there are as many.
        let core = &self.cores.first(2).unwrap_or_default()[side..=side];
        match &self.nodes {
            Some(nodes) if row.tcp => nodes.command(side, core, program),
            _ => Cores::pin(core, program),
        }
    }
}

impl Kit {
    /// Installs the peers where they are not yet, and builds Carrack unless only they are wanted.
    pub(super) fn build(
        workspace: &Workspace,
        peers: &Path,
        peer_only: bool,
    ) -> Result<Self, TaskError> {
        fs::create_dir_all(peers)?;
        // The benchmark finds its libraries from where it lies, and children may run elsewhere.
        let peers = fs::canonicalize(peers)?;
        install::ucx(&peers)?;
        install::mpi(install::MPICH, &peers)?;
        let sources = workspace.root.join("xtask/peers");
        // It finds MPICH in its own folder, also elsewhere.
        let (mpicc, bench) = (peers.join("mpich/bin/mpicc"), sources.join("mpi_bench.c"));
        files::compile(mpicc, &bench, &peers, &["-pthread", "-Wl,-rpath,$ORIGIN/mpich/lib"])?;
        // It needs nothing of CUDA's until it runs.
        files::compile("cc", &sources.join("copy_bench.c"), &peers, &["-ldl"])?;
        files::compile("cc", &sources.join("tcp_bench.c"), &peers, &[])?;
        let carrack = if peer_only { PathBuf::new() } else { workspace.release()? };
        Ok(Self { carrack, peers })
    }

    /// Installs Open MPI, if it is not there, and compiles the benchmark with it.
    pub(super) fn add_open_mpi(&self, workspace: &Workspace) -> Result<(), TaskError> {
        let home = install::mpi(install::OPEN_MPI, &self.peers)?;
        let bench = workspace.root.join("xtask/peers/mpi_bench.c");
        let flags = ["-pthread", "-Wl,-rpath,$ORIGIN/lib"];
        files::compile(home.join("bin/mpicc"), &bench, &home, &flags)?;
        Ok(())
    }

    /// Returns the programs that [`super::pack`] put into `folder`.
    pub(super) fn packed(folder: &Path) -> Result<Self, TaskError> {
        let folder = fs::canonicalize(folder)?;
        let mut programs = ["carrack"].iter().chain(&PROGRAMS).map(|program| folder.join(program));
        match programs.find(|path| !files::is_executable(path)) {
            None => Ok(Self { carrack: folder.join("carrack"), peers: folder }),
            Some(program) => Err(TaskError::Missing {
                what: format!("an executable {}", program.display()),
                remedy: "make the folder with `cargo xtask bench-peers --pack DIR`, and copy it \
                    with its permissions",
            }),
        }
    }

    /// Counts the GPUs that a program sees here.
    pub(super) fn gpus(&self) -> usize {
        let said =
            children::read(Command::new(self.peers.join("copy_bench")).arg("devices"), ANSWER);
        said.ok().and_then(|said| said.trim().parse().ok()).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_without_the_programs_is_an_error_that_says_how_to_make_one() {
        let error =
            Kit::packed(Path::new(env!("CARGO_MANIFEST_DIR"))).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("carrack") && error.contains("--pack"), "{error}");
    }
}
