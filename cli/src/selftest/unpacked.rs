//! Folder of a bundle's unpacked programs: a folder of this run, removed at its end.
//!
//! It lies in the system's temporary folder, or in the report's folder if programs cannot be
//! unpacked or started there. Its random name and its mode keep other users out, and ranks of other
//! nodes that unpack the same bundle have folders of their own.
//!
//! `xtask/src/bundle/pack.rs` writes the archive.

use super::temporary;
use lzma_rust2::XzReader;
use rustix::fs::{StatVfsMountFlags, statvfs};
use std::fs::{self, File};
use std::io::{self, BufReader, ErrorKind, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Name of the archive, which lies next to the command.
pub(super) const ARCHIVE: &str = "programs.tar.xz";

/// The command, which test programs look for in the folder above their own.
const COMMAND: &str = "carrack";

/// Memory limit of unpacking, in KiB: four times the need of our archives. A header may ask for 4
/// GiB.
const MOST_MEMORY: u32 = 256 << 10;

/// Errors of finding and unpacking the programs.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnpackError {
    #[error("{}: {source}; make it readable", archive.display())]
    Unreadable { archive: PathBuf, source: io::Error },
    #[error(
        "{}: {source}: the archive is damaged, or not all of it is here; carry the bundle here \
        again", archive.display()
    )]
    Broken { archive: PathBuf, source: io::Error },
    #[error(transparent)]
    Unfit(#[from] Unfit),
    #[error(
        "there is no place for the programs: {temporary}; {report}; name a folder with TMPDIR or \
        --report that is writable, has room, and is on no file system mounted noexec"
    )]
    Nowhere { temporary: Unfit, report: Unfit },
    #[error("a signal came while the programs were unpacked; nothing of them is left")]
    Interrupted,
}

/// Errors of unpacking programs into one place.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unfit {
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}: its file system is mounted noexec, so no program can be started \
        there", .0.display())]
    NoExec(PathBuf),
}

impl Unfit {
    /// Returns a function for `map_err` that adds `path` to an I/O error.
    fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }
}

/// Archive, and the command that unpacks it.
pub(super) struct Programs<'a> {
    pub(super) archive: &'a Path,
    pub(super) carrack: &'a Path,
    /// Returns `true` once a signal asks the selftest to end.
    pub(super) stop: &'a dyn Fn() -> bool,
    /// Function that prints the target of the unpacking, which takes seconds and a hundred
    /// megabytes.
    pub(super) tell: &'a dyn Fn(&str),
}

impl Programs<'_> {
    /// Returns a folder with tests/ and examples/: in `temporary` if possible, else in `report`.
    pub(super) fn folder(&self, temporary: &Path, report: &Path) -> Result<TempDir, UnpackError> {
        let temporary = match self.in_place(temporary, None) {
            Err(UnpackError::Unfit(temporary)) => temporary,
            done => return done,
        };
        let there = fs::create_dir_all(report)
            .and_then(|()| report.canonicalize())
            .map_err(|source| Unfit::file(report)(source).into())
            .and_then(|report| self.in_place(&report, Some(&temporary)));
        match there {
            Err(UnpackError::Unfit(report)) => Err(UnpackError::Nowhere { temporary, report }),
            done => done,
        }
    }

    /// Unpacks in one place. `since` is the reason why a better place was not taken.
    fn in_place(&self, place: &Path, since: Option<&Unfit>) -> Result<TempDir, UnpackError> {
        let about = statvfs(place).map_err(|error| Unfit::file(place)(error.into()))?;
        if about.f_flag.contains(StatVfsMountFlags::NOEXEC) {
            return Err(Unfit::NoExec(place.to_owned()).into());
        }
        let folder = temporary::folder(place, "programs").map_err(Unfit::file(place))?;
        let since = since.map_or_else(String::new, |why| format!(" ({why})"));
        let path = folder.path();
        (self.tell)(&format!("unpacking the programs into {}{since}", path.display()));
        self.unpack(path)?;
        let command = path.join(COMMAND);
        symlink(self.carrack, &command).map_err(Unfit::file(&command))?;
        Ok(folder)
    }

    /// Unpacks all programs into an empty folder of this process.
    fn unpack(&self, into: &Path) -> Result<(), UnpackError> {
        let archive = || self.archive.to_owned();
        let unreadable = |source| UnpackError::Unreadable { archive: archive(), source };
        let file = BufReader::new(File::open(self.archive).map_err(unreadable)?);
        let xz = XzReader::new_mem_limit(file, true, MOST_MEMORY);
        let mut tar = tar::Archive::new(Stoppable { xz, stop: self.stop });
        let unpacked = tar.unpack(into);
        // The checksum stands behind the last entry, and is compared when all has been read.
        match unpacked.and_then(|()| io::copy(&mut tar.into_inner(), &mut io::sink())) {
            Ok(_) => Ok(()),
            Err(_) if (self.stop)() => Err(UnpackError::Interrupted),
            Err(error) => match error.kind() {
                full @ (ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => {
                    Err(Unfit::file(into)(full.into()).into())
                }
                _ => Err(UnpackError::Broken { archive: archive(), source: error }),
            },
        }
    }
}

/// A reader that fails once `stop` returns `true`.
struct Stoppable<'a, R> {
    xz: R,
    stop: &'a dyn Fn() -> bool,
}

impl<R: Read> Read for Stoppable<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if (self.stop)() { Err(io::Error::other("a signal came")) } else { self.xz.read(into) }
    }
}

#[cfg(test)]
mod tests;
