//! The archive of a bundle's programs. Each of them carries the same runtime, which one dictionary
//! for all of them keeps only once: a tenth of their size is left.
//!
//! What unpacks it is `cli/src/selftest/unpacked.rs`, whose tests, and `tests/cli/cli_selftest.rs`,
//! pack by this very file.

use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use lzma_rust2::{CheckType, XzOptions, XzWriter};

/// The archive's name in a bundle.
pub(crate) const ARCHIVE: &str = "programs.tar.xz";

/// Compression level of `xz`. It shrinks programs of 102 MB to 10.0 MB; level 6 to 9.0 MB in three
/// times the time.
const LEVEL: u32 = 3;

/// An archive that is being written.
pub(crate) struct ArchiveWriter(tar::Builder<XzWriter<BufWriter<File>>>);

impl ArchiveWriter {
    /// Begins an archive at `path`, where none may be. What repeats is found as many bytes back as
    /// `dictionary` says.
    pub(crate) fn begin(path: &Path, dictionary: u32) -> io::Result<Self> {
        let mut options = XzOptions::with_preset(LEVEL);
        options.lzma_options.dict_size = dictionary;
        options.set_check_sum_type(CheckType::Sha256);
        let file = BufWriter::new(File::create_new(path)?);
        Ok(Self(tar::Builder::new(XzWriter::new(file, options)?)))
    }

    /// Adds a program as `below`, and gives its size in bytes.
    pub(crate) fn add(&mut self, below: &Path, program: &Path) -> io::Result<u64> {
        let program = File::open(program)?;
        let size = program.metadata()?.len();
        // Nothing of who built it, and where.
        let mut header = tar::Header::new_gnu();
        header.set_size(size);
        header.set_mode(0o755);
        header
            .set_mtime(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_secs()));
        self.0.append_data(&mut header, below, program)?;
        Ok(size)
    }

    /// Ends it, and gives its size in bytes.
    pub(crate) fn finish(self) -> io::Result<u64> {
        let file = self.0.into_inner()?.finish()?.into_inner()?;
        Ok(file.metadata()?.len())
    }
}
