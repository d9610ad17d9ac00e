//! The traces of docs/architecture.md name functions, types and files that exist.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns all Rust files below a folder.
pub(crate) fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// Returns the words that follow one of these keywords in the text: the names that it defines.
fn defined<'a>(text: &'a str, keywords: &'a [&str]) -> impl Iterator<Item = &'a str> {
    let words = text.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    let words: Vec<_> = words.filter(|word| !word.is_empty()).collect();
    let pairs: Vec<_> = words.windows(2).map(|pair| (pair[0], pair[1])).collect();
    pairs.into_iter().filter(|(word, _)| keywords.contains(word)).map(|(_, name)| name)
}

#[test]
fn the_traces_name_functions_types_and_files_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in ["runtime/src", "transports/src"] {
        sources(&root.join(folder), &mut files);
    }
    let texts: Vec<_> = files.iter().map(|file| fs::read_to_string(file).unwrap()).collect();
    let names = |keywords: &'static [&'static str]| -> HashSet<&str> {
        texts.iter().flat_map(|text| defined(text, keywords)).collect()
    };
    let functions = names(&["fn"]);
    let types = names(&["struct", "enum", "trait", "mod", "type"]);
    let variants: HashSet<&str> = texts
        .iter()
        .flat_map(|text| text.lines())
        .filter_map(|line| line.trim().split([',', '(', ' ', '{']).next())
        .collect();
    let page = fs::read_to_string(root.join("docs/architecture.md")).unwrap();
    let (_, traces) = page.split_once("## Traces").unwrap();
    let traces = traces.split("\n## ").next().unwrap();
    let mut checked = 0;
    for name in traces.split('`').skip(1).step_by(2) {
        if name.ends_with(".rs") {
            assert!(files.iter().any(|file| file.ends_with(name)), "there is no file {name}");
            continue;
        }
        if name.starts_with("CARRACK_") {
            continue;
        }
        // `Link::submit(Op::Put)` and `Post<Send>` are several names.
        let parts = name.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
        for part in parts.filter(|part| !part.is_empty()) {
            let is_known = functions.contains(part) || types.contains(part);
            assert!(is_known || variants.contains(part), "nothing is named {part} ({name})");
            checked += 1;
        }
    }
    assert!(checked > 60, "only {checked} names were found");
}
