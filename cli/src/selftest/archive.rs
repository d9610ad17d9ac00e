//! The archive of a bundle's programs: what may stand in it, and how it becomes files.
//!
//! `xtask/src/bundle/pack.rs` writes it. It comes from somewhere else all the same: nothing in it
//! can name a file outside of the folder that it is unpacked into, and what is not all there is an
//! error.

use lzma_rust2::{XzReader, xz_uncompressed_size};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Cursor, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Component, Path, PathBuf};

/// Its name, beside the command.
pub(super) const ARCHIVE: &str = "programs.tar.xz";

/// The folders that it has, with a program in each place below.
const FOLDERS: [&str; 2] = ["tests", "examples"];

/// What unpacking may take, in KiB: four times what our archives need, and not what a header may
/// ask for (4 GiB).
const MOST_MEMORY: u32 = 256 << 10;

/// What is read and written at once.
const BLOCK: usize = 1 << 16;

/// Why the programs are not there.
#[derive(Debug, thiserror::Error)]
pub(super) enum UnpackError {
    #[error("{}: {source}; it has to be readable", archive.display())]
    Unreadable { archive: PathBuf, source: io::Error },
    #[error(
        "{}: {source}: the archive is damaged, or not all of it is here; carry the bundle here \
        again", archive.display()
    )]
    Broken { archive: PathBuf, source: io::Error },
    #[error(
        "{} has {entry}, and no bundle has: programs are files, and lie in tests/ or examples/. \
        Nothing was unpacked; make the bundle again with `cargo xtask bundle`", archive.display()
    )]
    Foreign { archive: PathBuf, entry: String },
    #[error(transparent)]
    Unfit(#[from] Unfit),
    #[error(
        "there is no place for the programs: {beside}; {below}; name a folder with --report that \
        can be written to, has room, and is on no file system mounted noexec"
    )]
    Nowhere { beside: Unfit, below: Unfit },
    #[error("a signal came while the programs were unpacked; nothing of them is left")]
    Interrupted,
}

/// Why programs cannot be unpacked into a place.
#[derive(Debug, thiserror::Error)]
pub(super) enum Unfit {
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{}: its file system is mounted noexec, so no program can be started there", .0.display())]
    NoExec(PathBuf),
    #[error("{}: there is room for {:.1} MB, and {:.1} MB are needed", path.display(), megabytes(*free), megabytes(*needed))]
    NoRoom { path: PathBuf, free: u64, needed: u64 },
    #[error("{}, and others beside it, are not as they were unpacked: remove them", .0.display())]
    Spoiled(PathBuf),
}

impl Unfit {
    /// For `map_err` on what is done to the file at `path`.
    pub(super) fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }
}

/// Bytes as people count them.
pub(super) fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// What was unpacked: the files, and how many bytes each has.
pub(super) type Files = BTreeMap<String, u64>;

/// An archive that may be unpacked.
pub(super) struct Archive {
    path: PathBuf,
    /// All of it, so that nobody can exchange it between two looks: some ten megabytes.
    bytes: Vec<u8>,
    /// SHA-256 of the file, in hexadecimal digits: archives that differ have different ones.
    pub(super) sum: String,
    /// What all of it takes when unpacked, in bytes.
    pub(super) unpacked: u64,
    /// The user whose file it is.
    pub(super) owner: u32,
}

impl Archive {
    /// Reads an archive. What its bytes mean is not looked at, but for their end: one that was cut
    /// off is known at once.
    pub(super) fn open(path: PathBuf) -> Result<Self, UnpackError> {
        let unreadable = |source| UnpackError::Unreadable { archive: path.clone(), source };
        let bytes = fs::read(&path).map_err(unreadable)?;
        let owner = fs::metadata(&path).map_err(unreadable)?.uid();
        let unpacked = xz_uncompressed_size(Cursor::new(&bytes))
            .map_err(|source| UnpackError::Broken { archive: path.clone(), source })?;
        let sum = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { path, bytes, sum, unpacked, owner })
    }

    /// Unpacks all of it into a folder of ours that is empty, unless `stop` says that it is to end.
    pub(super) fn unpack(
        &self,
        into: &Path,
        stop: &dyn Fn() -> bool,
    ) -> Result<Files, UnpackError> {
        for folder in FOLDERS {
            let folder = into.join(folder);
            fs::create_dir(&folder).map_err(Unfit::file(&folder))?;
        }
        let mut tar =
            tar::Archive::new(XzReader::new_mem_limit(self.bytes.as_slice(), true, MOST_MEMORY));
        let mut files = Files::new();
        for entry in tar.entries().map_err(|source| self.broken(source))? {
            let mut entry = entry.map_err(|source| self.broken(source))?;
            let name = program(&entry).filter(|name| !files.contains_key(name));
            let name = name.ok_or_else(|| self.foreign(&entry))?;
            let path = into.join(&name);
            let mut options = OpenOptions::new();
            let mut file = options
                .write(true)
                .create_new(true)
                .mode(0o755)
                .open(&path)
                .map_err(Unfit::file(&path))?;
            let bytes = self.copy(&mut entry, &mut file, &path, stop)?;
            files.insert(name, bytes);
        }
        // The checksum stands behind the last entry, and is compared when all has been read.
        io::copy(&mut tar.into_inner(), &mut io::sink()).map_err(|source| self.broken(source))?;
        Ok(files)
    }

    /// One entry's bytes. What fails is told apart: the archive, or the place.
    fn copy(
        &self,
        from: &mut impl Read,
        to: &mut File,
        path: &Path,
        stop: &dyn Fn() -> bool,
    ) -> Result<u64, UnpackError> {
        let mut block = vec![0; BLOCK];
        let mut bytes = 0;
        loop {
            if stop() {
                return Err(UnpackError::Interrupted);
            }
            match from.read(&mut block).map_err(|source| self.broken(source))? {
                0 => return Ok(bytes),
                read => {
                    to.write_all(&block[..read]).map_err(Unfit::file(path))?;
                    bytes += read as u64;
                }
            }
        }
    }

    fn broken(&self, source: io::Error) -> UnpackError {
        UnpackError::Broken { archive: self.path.clone(), source }
    }

    fn foreign(&self, entry: &tar::Entry<'_, impl Read>) -> UnpackError {
        let name = String::from_utf8_lossy(&entry.path_bytes()).escape_debug().to_string();
        let entry = match entry.header().entry_type() {
            tar::EntryType::Regular => format!("`{name}`"),
            other => format!("`{name}` ({other:?})"),
        };
        UnpackError::Foreign { archive: self.path.clone(), entry }
    }
}

/// The program that an entry is, as FOLDER/NAME: no link, no folder, and no file anywhere else.
fn program(entry: &tar::Entry<'_, impl Read>) -> Option<String> {
    let path =
        entry.path().ok().filter(|_| entry.header().entry_type() == tar::EntryType::Regular)?;
    let mut components = path.components();
    let (Some(Component::Normal(folder)), Some(Component::Normal(name)), None) =
        (components.next(), components.next(), components.next())
    else {
        return None;
    };
    let (folder, name) = (folder.to_str()?, name.to_str()?);
    FOLDERS.contains(&folder).then(|| format!("{folder}/{name}"))
}

#[cfg(test)]
pub(super) mod tests;
