//! Lines to the user on stderr, from a library whose log few programs show.

use std::fmt;
use std::io::{self, Write as _};

/// Writes a line, unless nobody reads stderr any more.
pub fn say(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stderr(), "carrack: {line}");
}
