//! Where the programs are that a comparison needs: built and installed here, or brought along in a
//! folder.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fs_err as fs;

use super::install;
use crate::child;
use crate::error::TaskError;
use crate::workspace::Workspace;

/// To say how many GPUs there are: a driver takes a second for each.
const ANSWER: Duration = Duration::from_secs(60);

/// The programs, and their libraries in the same folder.
#[derive(Debug)]
pub(super) struct Kit {
    pub(super) carrack: PathBuf,
    /// Holds `ucx/libucx`, `mpich`, `mpi_bench` and `copy_bench`; a packed folder has them in the
    /// same places.
    pub(super) peers: PathBuf,
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
        install::mpich(&peers)?;
        install::mpi_bench(&workspace.root.join("xtask/peers/mpi_bench.c"), &peers)?;
        install::copy_bench(&workspace.root.join("xtask/peers/copy_bench.c"), &peers)?;
        let carrack = if peer_only { PathBuf::new() } else { workspace.release()? };
        Ok(Self { carrack, peers })
    }

    /// Returns the programs that [`super::pack`] put into `folder`.
    pub(super) fn packed(folder: &Path) -> Result<Self, TaskError> {
        let folder = fs::canonicalize(folder)?;
        let kit = Self { carrack: folder.join("carrack"), peers: folder };
        let programs = [
            kit.carrack.clone(),
            kit.ucx().join("bin/ucx_perftest"),
            kit.mpich().join("bin/mpiexec"),
            kit.mpi_bench(),
            kit.copy_bench(),
        ];
        match programs.into_iter().find(|program| !install::is_executable(program)) {
            None => Ok(kit),
            Some(program) => Err(TaskError::Missing {
                what: format!("an executable {}", program.display()),
                remedy: "make the folder with `cargo xtask bench-peers --pack DIR`, and copy it \
                    with its permissions",
            }),
        }
    }

    pub(super) fn ucx(&self) -> PathBuf {
        self.peers.join("ucx/libucx")
    }

    pub(super) fn mpich(&self) -> PathBuf {
        self.peers.join("mpich")
    }

    pub(super) fn copy_bench(&self) -> PathBuf {
        self.peers.join("copy_bench")
    }

    /// The GPUs that a program sees here.
    pub(super) fn gpus(&self) -> usize {
        let said = child::read(Command::new(self.copy_bench()).arg("devices"), ANSWER);
        said.ok().and_then(|said| said.trim().parse().ok()).unwrap_or(0)
    }

    pub(super) fn mpi_bench(&self) -> PathBuf {
        self.peers.join("mpi_bench")
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
