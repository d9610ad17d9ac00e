//! `unsafe` has addresses: it stands only in listed files, and those lie only in a few places.

use super::allowed::Allowed;
use super::code::find_word;
use super::tree::Source;

/// The list.
pub(super) const LIST: &str = "xtask/unsafe-files.txt";

/// Places of listed files. Tests and benches play hostile peers, which need raw access. Examples
/// hand kernels of their own to the driver.
const HOMES: &[&str] = &[
    "transports/src/",
    "transports/tests/",
    "simulators/",
    "cli/src/launch/",
    "runtime/src/buffer/raw.rs",
    "tests/",
    "benches/",
    "examples/",
    "fuzz/",
];

pub(super) fn check(sources: &[Source], allowed: &Allowed) -> Vec<String> {
    let homeless =
        allowed.entries().filter(|entry| !HOMES.iter().any(|home| entry.starts_with(home)));
    let mut violations: Vec<String> = homeless
        .map(|entry| format!("{LIST}: {entry} may not be listed; only {}", HOMES.join(", ")))
        .collect();
    let lines = sources
        .iter()
        .flat_map(|source| source.lines().map(move |(number, line)| (source, number, line)));
    let found = lines.filter(|(_, _, line)| find_word(line, "unsafe").is_some());
    violations.extend(allowed.compare(found.map(|(source, number, _)| (source, number, "unsafe"))));
    violations
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)], list: &str) -> Vec<String> {
        let sources: Vec<_> = files.iter().map(|(path, text)| Source::new(*path, text)).collect();
        check(&sources, &Allowed::parse(LIST, list))
    }

    #[test]
    fn unsafe_in_a_listed_file_is_allowed() {
        let files = [
            ("transports/src/mem/copy.rs", "unsafe { }"),
            ("transports/src/sync/ring.rs", "unsafe impl"),
        ];
        assert_eq!(found(&files, "transports/src/mem/copy.rs\ntransports/src/sync/\n"), [""; 0]);
    }

    #[test]
    fn unsafe_in_any_other_file_is_found_with_its_line() {
        let files = [("runtime/src/lib.rs", "fn f() {}\n// unsafe\nunsafe fn g() {}\n")];
        let violations = found(&files, "");
        assert_eq!(violations.len(), 1, "{violations:?}");
        assert!(violations[0].starts_with("runtime/src/lib.rs:3: `unsafe`"), "{violations:?}");
    }

    #[test]
    fn an_entry_without_unsafe_is_stale() {
        let files = [("transports/src/mem/copy.rs", "// no longer unsafe\n")];
        let violations = found(&files, "transports/src/mem/copy.rs\ntransports/src/gone/\n");
        assert_eq!(violations.len(), 2, "{violations:?}");
        assert!(
            violations.iter().all(|violation| violation.contains("no longer needs")),
            "{violations:?}"
        );
    }

    #[test]
    fn a_file_of_the_runtime_cannot_be_listed_but_for_the_raw_buffers() {
        let files = [
            ("runtime/src/buffer/raw.rs", "unsafe { }"),
            ("runtime/src/post/send.rs", "unsafe { }"),
        ];
        let violations = found(&files, "runtime/src/buffer/raw.rs\nruntime/src/post/send.rs\n");
        assert_eq!(violations.len(), 1, "{violations:?}");
        assert!(
            violations[0].contains("runtime/src/post/send.rs may not be listed"),
            "{violations:?}"
        );
    }
}
