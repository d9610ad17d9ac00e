//! Folder of a bundle's unpacked programs: a folder of this run, removed at its end.
//!
//! It lies in the system's temporary folder, or in the report's folder if programs cannot be
//! unpacked or started there. Its random name and its mode keep other users out, and ranks of other
//! nodes that unpack the same bundle have folders of their own.

use super::archive::{Archive, Unfit, UnpackError, megabytes};
use rustix::fs::{StatVfs, StatVfsMountFlags, statvfs};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use tempfile::TempDir;

/// The command, which test programs look for in the folder above their own.
const COMMAND: &str = "carrack";

/// Archive, and the command that unpacks it.
pub(super) struct Programs<'a> {
    pub(super) archive: Archive,
    pub(super) carrack: &'a Path,
    /// Returns `true` once a signal asks the selftest to end.
    pub(super) stop: &'a dyn Fn() -> bool,
    /// Prints the target of the unpacking, which takes seconds and a hundred megabytes.
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
        self.fits(place, &about)?;
        let folder = tempfile::Builder::new().prefix("carrack-programs-").tempdir_in(place);
        let folder = folder.map_err(Unfit::file(place))?;
        let size = megabytes(self.archive.unpacked);
        let since = since.map_or_else(String::new, |why| format!(" ({why})"));
        let path = folder.path();
        (self.tell)(&format!(
            "unpacking the programs, {size:.1} MB, into {}{since}",
            path.display()
        ));
        self.archive.unpack(path, self.stop)?;
        let command = path.join(COMMAND);
        symlink(self.carrack, &command).map_err(Unfit::file(&command))?;
        Ok(folder)
    }

    /// Checks that the file system of a place allows programs and has room.
    fn fits(&self, place: &Path, about: &StatVfs) -> Result<(), Unfit> {
        if about.f_flag.contains(StatVfsMountFlags::NOEXEC) {
            return Err(Unfit::NoExec(place.to_owned()));
        }
        let (free, needed) = (about.f_bavail.saturating_mul(about.f_frsize), self.archive.unpacked);
        // Some file systems do not count their blocks.
        if about.f_blocks > 0 && free < needed {
            return Err(Unfit::NoRoom { path: place.to_owned(), free, needed });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
