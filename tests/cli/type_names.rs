//! A type name is used once in a crate.

use crate::traces::sources;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Crates whose sources are in `src`.
const CRATES: [&str; 7] =
    ["runtime", "transports", "transports/layout", "simulators", "cli", "children", "xtask"];

/// Folders in which each entry is a crate: a file or a folder.
const FOLDERS: [&str; 7] = [
    "tests",
    "runtime/examples",
    "transports/tests",
    "simulators/tests",
    "examples",
    "benches",
    "fuzz/fuzz_targets",
];

/// Returns the types that a source declares, with their lines: structs, enums, unions and traits,
/// and aliases outside of functions, traits and their implementations. The source is formatted: its
/// indentation shows its blocks.
fn declared(source: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    // Indentation of the blocks around a line, and whether each is a module.
    let mut blocks: Vec<(usize, bool)> = Vec::new();
    for (number, line) in (1..).zip(source.lines()) {
        let code = line.trim_start();
        if code.is_empty() {
            continue;
        }
        let indentation = line.len() - code.len();
        blocks.retain(|&(outer, _)| outer < indentation);
        let mut words = code
            .split_whitespace()
            .skip_while(|word| word.starts_with("pub") || word.ends_with(')') || *word == "unsafe");
        let keyword = words.next().unwrap_or("");
        let is_declaration = match keyword {
            "struct" | "enum" | "union" | "trait" => true,
            "type" => blocks.iter().all(|&(_, is_module)| is_module),
            _ => false,
        };
        let name = words.next().and_then(|word| word.split(['<', '(', ':', ';']).next());
        let is_type = |name: &&str| is_declaration && name.starts_with(char::is_uppercase);
        found.extend(name.filter(is_type).map(|name| (number, name)));
        if code.ends_with('{') {
            blocks.push((indentation, keyword == "mod"));
        }
    }
    found
}

/// Returns the names that several types of a crate have, with the places of each.
fn used_again(root: &Path, files: &[PathBuf]) -> Vec<String> {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in files {
        let source = fs::read_to_string(file).unwrap();
        let path = file.strip_prefix(root).unwrap().display();
        for (line, name) in declared(&source) {
            places.entry(name.into()).or_default().push(format!("{path}:{line}"));
        }
    }
    let again = places.into_iter().filter(|(_, places)| places.len() > 1);
    again.map(|(name, places)| format!("{name}: {}", places.join(", "))).collect()
}

#[test]
fn a_type_name_is_used_once_in_a_crate() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut crates: Vec<_> = CRATES.iter().map(|name| root.join(name).join("src")).collect();
    for folder in FOLDERS {
        crates.extend(fs::read_dir(root.join(folder)).unwrap().map(|entry| entry.unwrap().path()));
    }
    let (mut again, mut checked) = (Vec::new(), 0);
    for path in crates {
        let mut files = Vec::new();
        if path.is_dir() {
            sources(&path, &mut files)
        } else {
            files.push(path)
        }
        checked += files.len();
        again.extend(used_again(root, &files));
    }
    assert!(checked > 600, "only {checked} files were found");
    assert!(again.is_empty(), "give each of these types a name of its own:\n{}", again.join("\n"));
}

#[test]
fn declarations_are_found_where_they_are() {
    let source = "\
pub(in crate::a) struct A<'a>(&'a str);
type B = u8;
mod inner {
    pub unsafe trait C {
        type NotAnAlias;
    }
    pub(crate) type D = u8;
    impl C for u8 {
        type NotAnAlias = u8;
    }

    fn function()
    where
        u8: C,
    {
        union E {}
        type InAFunction = u8;
    }
}
// struct Comment
macro_rules! made { ($name:ident) => { enum $name {} } }
enum F {}
";
    let names: String = declared(source).into_iter().map(|(_, name)| name).collect();
    assert_eq!(names, "ABCDEF");
    assert_eq!(declared(source)[3], (7, "D"));
}
