//! Files, as the tasks handle them: found by a pattern, copied without their symbols, compiled.

use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use fs_err as fs;

use crate::error::TaskError;

/// Time to strip tens of megabytes, or compile some hundred lines, on a slow machine.
const LIMIT: Duration = Duration::from_secs(120);

/// Returns what is below a folder and fits a pattern, sorted.
pub(crate) fn matching(folder: &Path, pattern: &str) -> Vec<PathBuf> {
    let folder = glob::Pattern::escape(&folder.to_string_lossy());
    // A folder that cannot be read has nothing that fits.
    glob::glob(&format!("{folder}/{pattern}")).into_iter().flatten().flatten().collect()
}

/// Copies a program or a library without its symbols, and gives its size.
pub(crate) fn strip(from: &Path, to: &Path) -> Result<u64, TaskError> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder)?;
    }
    // One that runs cannot be written to, but replaced.
    if to.exists() {
        fs::remove_file(to)?;
    }
    children::read(Command::new("strip").arg("-o").arg(to).arg(from), LIMIT)?;
    Ok(fs::metadata(to)?.len())
}

/// Compiles a C program or library into a folder, and returns its path.
pub(crate) fn compile(
    compiler: impl AsRef<OsStr>,
    source: &Path,
    folder: &Path,
    flags: &[&str],
) -> Result<PathBuf, TaskError> {
    fs::create_dir_all(folder)?;
    let program = folder.join(source.file_stem().unwrap_or_default());
    let mut command = Command::new(compiler);
    // Libraries stand behind what needs them.
    command.args(["-O2", "-Wall", "-Wextra", "-o"]).args([&*program, source]).args(flags);
    children::read(&mut command, LIMIT)?;
    Ok(program)
}

/// Returns `true` if a file is there and may be run.
pub(crate) fn is_executable(path: &Path) -> bool {
    path.metadata().is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_fits_whole_names_in_its_folder_only() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        assert_eq!(matching(here, "src/fi*.rs"), [here.join("src/files.rs")]);
        assert!(matching(here, "fi*.rs").is_empty() && matching(here, "src/files").is_empty());
    }
}
