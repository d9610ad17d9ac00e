//! The lock-free structures take atomics and cells from their module `primitives`, which loom
//! replaces: one that came from elsewhere would be left out of the models without anyone noticing.
//! Test modules may use the standard library's, to count what happened outside the structure.

use super::tree::Source;

const FOLDER: &str = "transports/src/sync/";

pub(super) fn check(sources: &[Source]) -> Vec<String> {
    let structures = sources.iter().filter(|source| {
        let inside = source.path.strip_prefix(FOLDER);
        inside.is_some_and(|path| path != "primitives.rs" && !path.starts_with("primitives/"))
    });
    let mut violations = Vec::new();
    for source in structures {
        for (number, line) in source.outside_tests() {
            if let Some(name) = foreign(line) {
                let path = &source.path;
                violations.push(format!(
                    "{path}:{number}: `{name}` not from {FOLDER}primitives.rs, where loom reaches \
                    it"
                ));
            }
        }
    }
    violations
}

/// A path of the standard library that must come from `primitives`; also inside the braces of a
/// `use`.
fn foreign(line: &str) -> Option<&'static str> {
    ["sync::atomic", "cell::UnsafeCell"].into_iter().find(|name| {
        line.match_indices(name)
            .any(|(at, _)| !line[..at].ends_with("primitives::") && !line[..at].ends_with(is_word))
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> usize {
        check(&[Source::new(path, text)]).len()
    }

    #[test]
    fn atomics_and_cells_of_the_standard_library_are_found_in_the_structures() {
        for line in [
            "use std::sync::atomic::AtomicU32;",
            "use core::sync::atomic::{AtomicU64, Ordering};",
            "use std::{sync::atomic::AtomicU32, fmt};",
            "x: std::cell::UnsafeCell<u8>,",
            "use loom::sync::atomic::AtomicU32;",
        ] {
            assert_eq!(found("transports/src/sync/ring/mod.rs", line), 1, "{line}");
        }
    }

    #[test]
    fn those_of_the_primitives_are_allowed_and_so_is_a_comment() {
        assert_eq!(
            found("transports/src/sync/ring.rs", "use super::primitives::{AtomicU32, UnsafeCell};"),
            0
        );
        assert_eq!(
            found(
                "transports/src/sync/ring.rs",
                "use crate::sync::primitives::sync::atomic::AtomicU32;"
            ),
            0
        );
        assert_eq!(found("transports/src/sync/ring.rs", "// unlike std::sync::atomic"), 0);
    }

    #[test]
    fn a_test_module_may_count_with_the_standard_librarys() {
        let text = "struct Ring;\n#[cfg(all(test, loom))]\nmod models {\n    use \
            std::sync::atomic::AtomicU32;\n}\n";
        assert_eq!(found("transports/src/sync/ring.rs", text), 0);
    }

    #[test]
    fn the_primitives_themselves_and_other_folders_may_name_them() {
        assert_eq!(
            found("transports/src/sync/primitives.rs", "pub use std::sync::atomic::AtomicU32;"),
            0
        );
        assert_eq!(found("transports/src/shm/mod.rs", "use std::sync::atomic::AtomicU32;"), 0);
    }
}
