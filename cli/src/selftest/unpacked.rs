//! Folder of a bundle's unpacked programs: next to the command if possible, else below the
//! report's folder. The next selftest of the same bundle uses it again.
//!
//! The first ranks of a job's nodes may unpack at the same time on one file system. So the
//! folder's name holds the archive's checksum. Each process fills a folder with a random name, and
//! one rename gives it the final name: other processes see it complete or not at all. A process
//! that loses the race uses the winner's folder. A folder with its final name is never written to,
//! renamed or removed, since other processes run its programs. A damaged one stays, and the next
//! name is used.

use super::archive::{Archive, Files, Unfit, UnpackError, megabytes};
use rustix::fs::{Access, StatVfs, StatVfsMountFlags, access, statvfs};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

/// File that is written last: it marks the folder as complete and lists its content.
const MARK: &str = "unpacked.json";

/// The command, which test programs look for in the folder above their own.
const COMMAND: &str = "carrack";

/// Number of folder names that are tried for an archive in one place. A further one is used when
/// the ones before are damaged.
const TRIES: usize = 9;

#[derive(Serialize, Deserialize)]
struct Mark {
    /// The SHA-256 of the archive.
    archive: String,
    files: Files,
}

/// State of a folder of a given name.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Nothing,
    /// All programs of the archive.
    Whole,
    /// Something else, or not all.
    Spoiled,
}

/// Archive, and the command next to it.
pub(super) struct Programs<'a> {
    pub(super) archive: Archive,
    pub(super) carrack: &'a Path,
    /// Returns `true` once a signal asks the selftest to end.
    pub(super) stop: &'a dyn Fn() -> bool,
    /// Prints the target of the unpacking, which takes seconds and a hundred megabytes.
    pub(super) tell: &'a dyn Fn(&str),
}

impl Programs<'_> {
    /// Returns the folder with tests/ and examples/: in `bundle` if possible, else in `report`.
    pub(super) fn folder(&self, bundle: &Path, report: &Path) -> Result<PathBuf, UnpackError> {
        let beside = match self.in_place(bundle, None) {
            Err(UnpackError::Unfit(beside)) => beside,
            done => return done,
        };
        let below = fs::create_dir_all(report)
            .and_then(|()| report.canonicalize())
            .map_err(Unfit::file(report))
            .map_err(UnpackError::from)
            .and_then(|report| self.in_place(&report, Some(&beside)));
        match below {
            Err(UnpackError::Unfit(below)) => Err(UnpackError::Nowhere { beside, below }),
            done => done,
        }
    }

    /// Returns the folder in one place, and unpacks there if it is missing. `since` is the reason
    /// why a better place was not taken.
    fn in_place(&self, place: &Path, since: Option<&Unfit>) -> Result<PathBuf, UnpackError> {
        let name = format!("programs-{}", &self.archive.sum[..16]);
        let mut part = None;
        for again in 1..=TRIES {
            let folder =
                place.join(if again == 1 { name.clone() } else { format!("{name}-{again}") });
            match self.look(&folder) {
                Found::Whole => return Ok(folder),
                Found::Spoiled => continue,
                Found::Nothing => {}
            }
            let ready = match part.take() {
                Some(ready) => ready,
                None => self.unpack(place, &folder, since)?,
            };
            match ready.settle(&folder)? {
                None => return Ok(folder),
                Some(_) if self.look(&folder) == Found::Whole => return Ok(folder),
                lost => part = lost,
            }
        }
        Err(Unfit::Spoiled(place.join(name)).into())
    }

    fn look(&self, folder: &Path) -> Found {
        match fs::symlink_metadata(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Nothing,
            // Other users may have put anything there under that name.
            Ok(about)
                if about.is_dir() && self.is_trusted(about.uid()) && self.is_whole(folder) =>
            {
                Found::Whole
            }
            _ => Found::Spoiled,
        }
    }

    fn is_trusted(&self, owner: u32) -> bool {
        owner == rustix::process::geteuid().as_raw() || owner == self.archive.owner
    }

    fn is_whole(&self, folder: &Path) -> bool {
        let mark = fs::read_to_string(folder.join(MARK)).ok();
        let Some(mark) = mark.and_then(|text| serde_json::from_str::<Mark>(&text).ok()) else {
            return false;
        };
        let is_there = |(name, bytes): (&String, &u64)| {
            let path = folder.join(name);
            fs::symlink_metadata(&path).is_ok_and(|about| about.is_file() && about.len() == *bytes)
                && access(&path, Access::EXEC_OK).is_ok()
        };
        mark.archive == self.archive.sum
            && is_same(&folder.join(COMMAND), self.carrack)
            && mark.files.iter().all(is_there)
    }

    /// Unpacks into a folder with a random name, next to the final one.
    fn unpack(
        &self,
        place: &Path,
        folder: &Path,
        since: Option<&Unfit>,
    ) -> Result<Part, UnpackError> {
        let about = statvfs(place).map_err(|error| Unfit::file(place)(error.into()))?;
        self.fits(place, &about)?;
        let part = Part::begin(place, folder)?;
        let (size, since) = (
            megabytes(self.archive.unpacked),
            since.map_or_else(String::new, |why| format!(" ({why})")),
        );
        (self.tell)(&format!(
            "unpacking the programs, {size:.1} MB, into {}{since}",
            folder.display()
        ));
        let files = self.archive.unpack(&part.0, self.stop)?;
        let command = part.0.join(COMMAND);
        // A relative link keeps working when the bundle is moved.
        let beside = self.carrack.parent() == Some(place);
        let target = if beside { Path::new("..").join(COMMAND) } else { self.carrack.to_owned() };
        symlink(target, &command).map_err(Unfit::file(&command))?;
        let mark = part.0.join(MARK);
        let text = serde_json::to_string_pretty(&Mark { archive: self.archive.sum.clone(), files });
        fs::write(&mark, text.unwrap_or_default()).map_err(Unfit::file(&mark))?;
        Ok(part)
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

fn is_same(a: &Path, b: &Path) -> bool {
    let file = |path| fs::metadata(path).map(|about| (about.dev(), about.ino())).ok();
    file(a).is_some_and(|a| Some(a) == file(b))
}

/// Folder that is being filled. Dropping it removes the folder, unless it got its final name.
struct Part(PathBuf);

impl Part {
    fn begin(place: &Path, folder: &Path) -> Result<Self, Unfit> {
        let mut random = [0; 8];
        getrandom(&mut random, GetRandomFlags::empty())
            .map_err(|error| Unfit::file(place)(error.into()))?;
        let path = folder.with_extension(format!("part-{:016x}", u64::from_ne_bytes(random)));
        fs::create_dir(&path).map_err(Unfit::file(place))?;
        Ok(Self(path))
    }

    /// Gives the folder its final name; returns the folder if that name was taken meanwhile.
    fn settle(self, folder: &Path) -> Result<Option<Self>, Unfit> {
        use io::ErrorKind::{AlreadyExists, DirectoryNotEmpty, NotADirectory};
        match fs::rename(&self.0, folder) {
            Ok(()) => Ok(None),
            Err(error)
                if matches!(error.kind(), AlreadyExists | DirectoryNotEmpty | NotADirectory) =>
            {
                Ok(Some(self))
            }
            Err(error) => Err(Unfit::file(folder)(error)),
        }
    }
}

impl Drop for Part {
    /// Removes the folder. One that was renamed is no longer at this path.
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests;
