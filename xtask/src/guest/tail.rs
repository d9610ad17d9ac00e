//! Files in which QEMU stores the output of a guest's ports, read while they grow.
//!
//! Pipes could be full, and output that waits in the guest is lost when its power goes off.

use std::io::{self, Read};
use std::path::PathBuf;

use fs_err::{File, OpenOptions};
use rustix::fs::{FallocateFlags, fallocate};

use crate::error::TaskError;

/// Longest line that is returned in one piece, in bytes.
const LINE: usize = 1 << 16;

/// Longest read, in bytes.
const LOOK: u64 = 1 << 20;

/// Reader of a file that grows.
pub(super) struct Tail {
    path: PathBuf,
    file: Option<File>,
    /// Bytes that were read so far.
    read: u64,
    /// A line that has no end yet.
    begun: Vec<u8>,
}

impl Tail {
    /// Creates a reader of a file that may not exist yet.
    pub(super) fn new(path: PathBuf) -> Self {
        Self { path, file: None, read: 0, begun: Vec::new() }
    }

    /// Returns the lines that have come since the last call, with their line endings. Once the
    /// file is `over`, the last line needs none. Bytes that were read are removed from the file,
    /// which would otherwise fill the disk.
    pub(super) fn lines(&mut self, over: bool) -> Result<Vec<Vec<u8>>, TaskError> {
        let new = self.look()?;
        let mut lines = Vec::new();
        for part in new.split_inclusive(|byte| *byte == b'\n') {
            for piece in part.chunks(LINE) {
                self.begun.extend_from_slice(piece);
                if piece.ends_with(b"\n") || self.begun.len() >= LINE {
                    lines.push(std::mem::take(&mut self.begun));
                }
            }
        }
        if over && new.is_empty() && !self.begun.is_empty() {
            lines.push(std::mem::take(&mut self.begun));
        }
        Ok(lines)
    }

    fn look(&mut self) -> io::Result<Vec<u8>> {
        let mut new = Vec::new();
        if self.file.is_none() {
            self.file = match OpenOptions::new().read(true).write(true).open(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(new),
                other => Some(other?),
            };
        }
        if let Some(file) = &mut self.file {
            file.take(LOOK).read_to_end(&mut new)?;
            let before = self.read / LOOK;
            self.read += new.len() as u64;
            if self.read / LOOK > before {
                // Not every file system can do this. The file then stays whole until the run ends.
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(file, hole, 0, self.read);
            }
        }
        Ok(new)
    }
}

#[cfg(test)]
mod tests {
    use fs_err as fs;
    use std::io::Write;

    use super::*;

    fn file(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("xtask-tail-{name}-{}", std::process::id()))
    }

    #[test]
    fn lines_of_a_growing_file_come_whole_and_once() {
        let path = file("lines");
        let mut tail = Tail::new(path.clone());
        assert_eq!(tail.lines(true).unwrap(), [[0; 0]; 0]);
        let mut file = File::create(&path).unwrap();
        for (written, expected) in [
            ("one\r\ntw", vec!["one\r\n"]),
            ("", vec![]),
            ("o\n\nthr", vec!["two\n", "\n"]),
            ("ee", vec![]),
        ] {
            file.write_all(written.as_bytes()).unwrap();
            assert_eq!(
                tail.lines(false).unwrap(),
                expected.iter().map(|line| line.as_bytes()).collect::<Vec<_>>()
            );
        }
        assert_eq!(tail.lines(true).unwrap(), [b"three"]);
        assert_eq!(tail.lines(true).unwrap(), [[0; 0]; 0]);
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn much_of_it_comes_unchanged_in_pieces_and_leaves_the_disk() {
        let path = file("much");
        let bytes: Vec<u8> = (0..3_500_000u32).map(|at| (at % 251) as u8 | 0x80).collect();
        fs::write(&path, &bytes).unwrap();
        let mut tail = Tail::new(path.clone());
        let mut pieces = Vec::new();
        loop {
            match tail.lines(true).unwrap() {
                none if none.is_empty() => break,
                some => pieces.extend(some),
            }
        }
        assert!(pieces.iter().all(|piece| piece.len() <= 2 * LINE));
        assert!(pieces.concat() == bytes);
        assert_eq!(fs::metadata(&path).unwrap().len(), 3_500_000);
        fs::remove_file(path).unwrap();
    }
}
