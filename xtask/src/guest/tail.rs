//! Files in which QEMU stores the output of a guest's ports, read while they grow.
//!
//! Pipes could be full, and output that waits in the guest is lost when its power goes off.

use std::io::{self, BufRead, BufReader, Read};
use std::path::PathBuf;

use fs_err::{File, OpenOptions};
use rustix::fs::{FallocateFlags, fallocate};

use crate::error::TaskError;

/// Longest line that is returned in one piece, in bytes.
const LINE: usize = 1 << 16;

/// Bytes after which a call returns, and after which they are removed from the file.
const LOOK: u64 = 1 << 20;

/// Reader of a file that grows.
pub(super) struct Tail {
    path: PathBuf,
    file: Option<BufReader<File>>,
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
    /// file has `ended`, the last line needs none. Bytes that were read are removed from the file,
    /// which would otherwise fill the disk.
    pub(super) fn lines(&mut self, ended: bool) -> Result<Vec<Vec<u8>>, TaskError> {
        let (mut lines, before) = (Vec::new(), self.read);
        let file = match &mut self.file {
            Some(file) => file,
            none => match OpenOptions::new().read(true).write(true).open(&self.path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(lines),
                opened => none.insert(BufReader::new(opened?)),
            },
        };
        let mut at_end = false;
        while !at_end && self.read - before < LOOK {
            let room = LINE - self.begun.len();
            let new = file.take(room as u64).read_until(b'\n', &mut self.begun)?;
            self.read += new as u64;
            at_end = new == 0;
            let is_whole = self.begun.ends_with(b"\n") || self.begun.len() == LINE;
            if is_whole || at_end && ended && !self.begun.is_empty() {
                lines.push(std::mem::take(&mut self.begun));
            }
        }
        if self.read / LOOK > before / LOOK {
            // Not every file system can do this. The file then stays whole until the run ends.
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = fallocate(file.get_ref(), hole, 0, self.read);
        }
        Ok(lines)
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
