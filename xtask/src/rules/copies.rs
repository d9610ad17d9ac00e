//! One copy function: every other place could one day be given memory that lies on a device.

use super::allowed::Allowed;
use super::code::find_word;
use super::tree::Source;

/// The list.
pub(super) const LIST: &str = "xtask/copy-files.txt";

const COPIES: &[&str] = &[
    "copy_nonoverlapping",
    "ptr::copy",
    "copy_from_slice",
    "clone_from_slice",
    "libc::memcpy",
    "libc::memmove",
];

pub(super) fn check(sources: &[Source], allowed: &Allowed) -> Vec<String> {
    let data_path = |source: &&Source| {
        ["runtime/src/", "transports/src/", "simulators/src/"]
            .iter()
            .any(|at| source.path.starts_with(at))
    };
    let lines = sources.iter().filter(data_path).flat_map(|source| {
        source.outside_tests().map(move |(number, line)| (source, number, line))
    });
    let found = lines.filter_map(|(source, number, line)| {
        let copy = COPIES.iter().find(|copy| find_word(line, copy).is_some())?;
        Some((source, number, *copy))
    });
    allowed.compare(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(files: &[(&str, &str)], list: &str) -> Vec<String> {
        let sources: Vec<_> = files.iter().map(|(path, text)| Source::new(*path, text)).collect();
        check(&sources, &Allowed::parse(LIST, list))
    }

    #[test]
    fn every_way_to_copy_is_found_outside_the_listed_files() {
        for line in [
            "unsafe { core::ptr::copy_nonoverlapping(a, b, n) }",
            "use std::ptr::copy;",
            "to.copy_from_slice(from);",
            "to.clone_from_slice(from);",
            "libc::memcpy(a, b, n)",
            "libc::memmove(a, b, n)",
        ] {
            assert_eq!(found(&[("transports/src/shm/ring.rs", line)], "").len(), 1, "{line}");
        }
    }

    #[test]
    fn a_listed_file_may_copy_and_must() {
        let files = [("transports/src/mem/copy.rs", "to.copy_from_slice(from)")];
        assert_eq!(found(&files, "transports/src/mem/copy.rs"), [""; 0]);
        assert_eq!(found(&[], "transports/src/mem/copy.rs").len(), 1);
    }

    #[test]
    fn a_test_module_at_the_end_of_a_file_may_copy_and_what_stands_before_it_may_not() {
        let test = "fn f() {}\n#[cfg(test)]\nmod tests { fn g() { a.copy_from_slice(b) } }";
        assert_eq!(found(&[("runtime/src/a.rs", test)], ""), [""; 0]);
        let test = "fn f() {}\n#[cfg(all(test, not(loom)))]\nmod tests { fn g() { \
            a.copy_from_slice(b) } }";
        assert_eq!(found(&[("runtime/src/a.rs", test)], ""), [""; 0]);
        let own_file = "a.copy_from_slice(b)";
        assert_eq!(found(&[("runtime/src/a/tests.rs", own_file)], ""), [""; 0]);
        let before = format!("fn h() {{ a.copy_from_slice(b) }}\n{test}");
        assert_eq!(found(&[("runtime/src/a.rs", &before)], "").len(), 1);
    }

    #[test]
    fn a_test_module_in_another_file_and_a_function_for_tests_do_not_hide_what_follows() {
        for test in ["#[cfg(test)]\nmod tests;\n", "#[cfg(test)]\nfn for_tests() {}\n"] {
            let text = format!("{test}fn f() {{ a.copy_from_slice(b) }}");
            assert_eq!(found(&[("runtime/src/a.rs", &text)], "").len(), 1, "{test}");
        }
    }

    #[test]
    fn what_is_off_the_data_path_may_copy() {
        assert_eq!(found(&[("cli/src/perf.rs", "a.copy_from_slice(b)")], ""), [""; 0]);
    }
}
