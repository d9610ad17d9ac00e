//! The lines of a rank's output, each with its tag.

/// The longest piece of a line that is kept back while its end is awaited, in bytes.
const LONGEST: usize = 64 * 1024;

/// One stream of one rank, on its way to whole lines.
///
/// A line longer than 64 KiB comes out in pieces of that size, each as a line of its own. So a
/// program that never ends its line costs bounded memory.
#[derive(Debug)]
pub(super) struct Lines {
    tag: String,
    unfinished: Vec<u8>,
}

impl Lines {
    /// Creates a cutter that puts this tag before every line. The tag may be empty.
    pub(super) fn new(tag: String) -> Self {
        Self { tag, unfinished: Vec::new() }
    }

    /// Takes in what was read, and appends the lines that are whole to `out`.
    pub(super) fn feed(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.extend(&bytes[..end], out);
            self.finish_line(out);
            bytes = &bytes[end + 1..];
        }
        self.extend(bytes, out);
    }

    /// Appends the last line if it was not ended.
    pub(super) fn finish(&mut self, out: &mut Vec<u8>) {
        if !self.unfinished.is_empty() {
            self.finish_line(out);
        }
    }

    fn extend(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        // A line of exactly the limit is still one line, so a full piece waits for one byte more.
        while self.unfinished.len() + bytes.len() > LONGEST {
            let (piece, rest) = bytes.split_at(LONGEST - self.unfinished.len());
            self.unfinished.extend_from_slice(piece);
            self.finish_line(out);
            bytes = rest;
        }
        self.unfinished.extend_from_slice(bytes);
    }

    fn finish_line(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.tag.as_bytes());
        out.append(&mut self.unfinished);
        out.push(b'\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(reads: &[&[u8]]) -> String {
        let mut lines = Lines::new("[3] ".into());
        let mut out = Vec::new();
        for read in reads {
            lines.feed(read, &mut out);
        }
        lines.finish(&mut out);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn lines_are_tagged_wherever_the_reads_were_cut() {
        let whole = "[3] one\n[3] \n[3] two\n";
        assert_eq!(run(&[b"one\n\ntwo\n"]), whole);
        assert_eq!(run(&[b"o", b"ne", b"\n", b"\nt", b"wo\n"]), whole);
    }

    #[test]
    fn an_unfinished_last_line_is_finished() {
        assert_eq!(run(&[b"one\ntw"]), "[3] one\n[3] tw\n");
        assert_eq!(run(&[]), "");
    }

    #[test]
    fn a_line_at_the_limit_is_one_and_a_longer_one_comes_in_pieces() {
        let line = |len: usize| "x".repeat(len);
        assert_eq!(run(&[line(LONGEST).as_bytes(), b"\n"]), format!("[3] {}\n", line(LONGEST)));
        assert_eq!(
            run(&[line(LONGEST + 1).as_bytes(), b"\n"]),
            format!("[3] {}\n[3] x\n", line(LONGEST))
        );
        assert_eq!(run(&[line(3 * LONGEST).as_bytes()]).matches("[3] ").count(), 3);
    }

    #[test]
    fn memory_is_bounded_without_a_line_end() {
        let mut lines = Lines::new(String::new());
        for _ in 0..100 {
            lines.feed(&[b'x'; 10_000], &mut Vec::new());
            assert!(lines.unfinished.len() <= LONGEST);
        }
    }
}
