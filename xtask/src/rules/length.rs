//! A long file is asking to be two.

use super::tree::Source;

/// Lines from which a file is named in a warning.
const LONG: usize = 700;

/// Nobody reads it from top to bottom: `cargo xtask bindings` writes it.
const MADE: &str = "transports/src/verbs/sys/bindings.rs";

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let long = sources.iter().filter(|source| source.code.len() > LONG && source.path != MADE);
    long.map(|source| format!("{} has {} lines, more than {LONG}", source.path, source.code.len()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_warned_of_beyond_700_lines_and_not_at_them() {
        let lines = |count| Source::new("a.rs", &"line\n".repeat(count));
        assert_eq!(check(&[lines(700)]), [""; 0]);
        assert_eq!(check(&[lines(701)]), ["a.rs has 701 lines, more than 700"]);
    }
}
