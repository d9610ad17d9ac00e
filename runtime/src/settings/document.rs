//! Rows of docs/configuration.md against the table: only the meaning is written by hand.

use super::Settings;
use std::fs;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");

/// The document with its rows made anew, and the settings that have none.
fn made_of(there: &str) -> (String, Vec<&'static str>) {
    let (mut text, mut missing) = (there.to_owned(), Vec::new());
    for line in Settings::defaults().describe() {
        let begin = format!("| `{}` |", line.variable);
        let Some(row) = there.lines().find(|row| row.starts_with(&begin)) else {
            missing.push(line.variable);
            continue;
        };
        let meaning = row.trim_end_matches(" |").rsplit(" | ").next().unwrap_or_default();
        let made = format!("{begin} `{}` | {} | {meaning} |", line.value, line.expected);
        text = text.replace(row, &made);
    }
    (text, missing)
}

#[test]
fn the_document_has_a_row_of_each_setting_with_its_default_and_form() {
    let there = fs::read_to_string(DOCUMENT).expect("docs/configuration.md is readable");
    let (made, missing) = made_of(&there);
    assert_eq!(missing, [""; 0], "each needs a row `| VARIABLE | | | meaning |`");
    if std::env::var_os("WRITE_DOCS").is_some() {
        fs::write(DOCUMENT, made).expect("docs/configuration.md is writable");
    } else {
        assert!(made == there, "write its rows: WRITE_DOCS=1 cargo test -p carrack settings");
    }
}
