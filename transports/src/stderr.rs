//! Lines to the user on stderr, from a library whose log few programs show.

use std::fmt::Display;
use std::io::{self, Write};

/// Writes a line, or nothing where stderr is closed.
pub fn say(line: impl Display) {
    print(format_args!("carrack: {line}\n"));
}

/// Writes a text as it is, or nothing where stderr is closed.
pub fn print(text: impl Display) {
    print_to(&mut io::stderr(), text);
}

/// Writes with one call, so that texts of several ranks to one stderr do not mix.
fn print_to(out: &mut impl Write, text: impl Display) {
    // No other place is left to report that stderr takes nothing.
    let _ = out.write_all(text.to_string().as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts the writes, and takes all.
    struct Counting(usize);

    impl Write for Counting {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += 1;
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_text_of_several_parts_is_one_write() {
        let mut out = Counting(0);
        print_to(&mut out, format_args!("rank {} waits for {} of {}\n", 1, 2, 3));
        assert_eq!(out.0, 1);
    }
}
