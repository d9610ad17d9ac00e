//! Copies programs and libraries without their debug information.

use std::io;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use fs_err as fs;

use crate::child;
use crate::error::TaskError;

/// A file of tens of megabytes, on a slow disk.
const STRIP: Duration = Duration::from_secs(120);

/// Returns `true` if `strip` is installed.
pub(crate) fn can_strip() -> bool {
    child::answers(Command::new("strip").arg("--version"))
}

/// Copies a file without its symbols, and gives its size.
pub(crate) fn strip(from: &Path, to: &Path) -> Result<u64, TaskError> {
    make_room(to)?;
    let mut command = Command::new("strip");
    command.arg("-o").arg(to).arg(from);
    child::read(&mut command, STRIP)?;
    size(to)
}

/// Copies a file as it is, and gives its size.
pub(crate) fn copy(from: &Path, to: &Path) -> Result<u64, TaskError> {
    make_room(to)?;
    fs::copy(from, to)?;
    size(to)
}

fn make_room(to: &Path) -> Result<(), TaskError> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    // One that runs cannot be written to, but replaced.
    match fs::remove_file(to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

fn size(of: &Path) -> Result<u64, TaskError> {
    Ok(of.metadata()?.len())
}
