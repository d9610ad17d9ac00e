//! Lines to the user on stderr, from a library whose log few programs show.

use std::fmt;
use std::io::{self, Write as _};

/// Writes a line, or nothing where stderr is closed.
pub fn say(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "carrack: {line}");
}
