//! Archives of the form that a Linux kernel unpacks into its first file system (cpio, "newc").

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::error::TaskError;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

/// The name of the entry that ends an archive.
const LAST: &str = "TRAILER!!!";

/// An archive that is being written.
pub(super) struct Archive<W> {
    to: W,
    entries: u32,
}

impl Archive<BufWriter<File>> {
    /// One in a file.
    pub(super) fn create(path: &Path) -> Result<Self, TaskError> {
        let file = File::create(path).map_err(TaskError::file(path))?;
        Ok(Self { to: BufWriter::new(file), entries: 0 })
    }
}

impl<W: Write> Archive<W> {
    /// Adds a folder. The one above it must be there already.
    pub(super) fn folder(&mut self, name: &str) -> Result<(), TaskError> {
        self.add(name, FOLDER, &[])
    }

    /// Adds a file that every user may execute.
    pub(super) fn file(&mut self, name: &str, contents: &[u8]) -> Result<(), TaskError> {
        self.add(name, PROGRAM, contents)
    }

    /// Adds a file of this machine under its own name, in `folder`.
    pub(super) fn carry(&mut self, folder: &str, from: &Path) -> Result<(), TaskError> {
        let contents = fs::read(from).map_err(TaskError::file(from))?;
        let name = from.file_name().unwrap_or_default().as_bytes();
        self.file(&format!("{folder}/{}", String::from_utf8_lossy(name)), &contents)
    }

    /// Ends the archive.
    pub(super) fn finish(mut self) -> Result<W, TaskError> {
        self.add(LAST, 0, &[])?;
        self.to.flush().map_err(TaskError::file("an archive"))?;
        Ok(self.to)
    }

    fn add(&mut self, name: &str, mode: u32, contents: &[u8]) -> Result<(), TaskError> {
        self.entries += 1;
        entry(&mut self.to, self.entries, name, mode, contents).map_err(TaskError::file(name))
    }
}

/// A header of 13 numbers of 8 hexadecimal digits each, the name with its zero, the contents; name
/// and contents are filled up to a multiple of four.
fn entry(
    to: &mut impl Write,
    number: u32,
    name: &str,
    mode: u32,
    contents: &[u8],
) -> io::Result<()> {
    let size =
        |bytes: usize| u32::try_from(bytes).map_err(|_| io::Error::other("4 GiB are too much"));
    let (links, named) = (1, name.len() + 1);
    let fields = [number, mode, 0, 0, links, 0, size(contents.len())?, 0, 0, 0, 0, size(named)?, 0];
    let header: String = fields.iter().map(|field| format!("{field:08x}")).collect();
    let head = format!("070701{header}{name}\0");
    to.write_all(head.as_bytes())?;
    to.write_all(fill(head.len()))?;
    to.write_all(contents)?;
    to.write_all(fill(contents.len()))
}

fn fill(after: usize) -> &'static [u8] {
    &[0; 3][..after.next_multiple_of(4) - after]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_is_what_the_kernel_documents() {
        let mut archive = Archive { to: Vec::new(), entries: 0 };
        archive.folder("bin").unwrap();
        archive.file("bin/a", b"hello").unwrap();
        let bytes = archive.finish().unwrap();
        // 6 of magic and 13 times 8 of header, then the name; so "bin" ends at 114 and its
        // successor begins at 116.
        assert_eq!(&bytes[..14], b"07070100000001");
        assert_eq!(&bytes[14..22], b"000041ed");
        assert_eq!(&bytes[110..116], b"bin\0\0\0");
        let file = &bytes[116..];
        assert_eq!(
            (&file[14..22], &file[54..62], &file[94..102]),
            (&b"000081ed"[..], &b"00000005"[..], &b"00000006"[..])
        );
        assert_eq!(&file[110..124], b"bin/a\0hello\0\0\0");
        assert_eq!(&file[124 + 110..], b"TRAILER!!!\0\0\0\0");
        assert_eq!(bytes.len() % 4, 0);
    }
}
