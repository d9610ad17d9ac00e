//! Archive of a bundle's programs: its permitted content, and its unpacking.
//!
//! `xtask/src/bundle/pack.rs` writes the archive. Its reader does not trust it: no entry can name
//! a file outside of the target folder, and an incomplete archive is an error.

use lzma_rust2::{XzReader, xz_uncompressed_size};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Cursor, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

/// Name of the archive, which lies next to the command.
pub(super) const ARCHIVE: &str = "programs.tar.xz";

/// Folders of the archive. Each entry is a program directly in one of them.
const FOLDERS: [&str; 2] = ["tests", "examples"];

/// Memory limit of unpacking, in KiB: four times the need of our archives. A header may ask for 4
/// GiB.
const MOST_MEMORY: u32 = 256 << 10;

/// Bytes read and written at once.
const BLOCK: usize = 1 << 16;

/// Errors of finding and unpacking the programs.
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
    #[error("{}: there is room for {:.1} MB, and {:.1} MB are \
        needed", path.display(), megabytes(*free), megabytes(*needed))]
    NoRoom { path: PathBuf, free: u64, needed: u64 },
}

impl Unfit {
    /// Returns a function for `map_err` that adds `path` to an I/O error.
    pub(super) fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::File { path, source }
    }
}

/// Converts bytes to megabytes.
pub(super) fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

/// Unpacked files, with the length of each in bytes.
pub(super) type Files = BTreeMap<String, u64>;

/// An archive that may be unpacked.
pub(super) struct Archive {
    path: PathBuf,
    /// Content of the file, some ten megabytes. It is read once, so that no process can exchange
    /// the file between its check and its use.
    bytes: Vec<u8>,
    /// Length of all entries when unpacked, in bytes.
    pub(super) unpacked: u64,
}

impl Archive {
    /// Reads an archive and the index at its end, so a truncated file fails at once. The entries
    /// are checked when they are unpacked.
    pub(super) fn open(path: PathBuf) -> Result<Self, UnpackError> {
        let unreadable = |source| UnpackError::Unreadable { archive: path.clone(), source };
        let bytes = fs::read(&path).map_err(unreadable)?;
        let unpacked = xz_uncompressed_size(Cursor::new(&bytes))
            .map_err(|source| UnpackError::Broken { archive: path.clone(), source })?;
        Ok(Self { path, bytes, unpacked })
    }

    /// Unpacks all entries into `into`, an empty folder of this process, until `stop` returns
    /// `true`.
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

    /// Copies one entry's bytes. Errors of the archive and of the target differ.
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

/// Returns an entry's program as FOLDER/NAME; `None` for links, folders, and files anywhere else.
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
