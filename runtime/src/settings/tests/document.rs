//! The tables of docs/configuration.md, made of the declarations.

use crate::settings::{Declared, RESERVED, Reserved, SettingLine, Settings};
use std::fs;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/configuration.md");

/// Headings of the runtime's own settings, and the first setting below each, in the table's order.
const OWN: [(&str, &str); 4] = [
    ("Paths and messages", "CARRACK_TRANSPORT"),
    ("Progress and waiting", "CARRACK_PROGRESS"),
    ("GPUs", "CARRACK_GPU"),
    ("Start", "CARRACK_BOOTSTRAP"),
];

/// Words of meanings, and the pages to which they are links in the document.
const LINKS: [(&str, &str); 4] = [
    ("messages may change places", "concepts.md#ordering-and-visibility"),
    ("Resident copier", "gpu.md#the-resident-copier"),
    ("the first that is there", "launchers.md"),
    ("the launcher's", "launchers.md"),
];

/// Returns the settings below each heading.
fn sections() -> Vec<(&'static str, Vec<SettingLine>)> {
    let settings = Settings::defaults();
    let (all, parts) = (settings.describe(), settings.of_transports());
    let mut sections = vec![
        ("Within a node", [parts.shm().describe(), parts.cuda_ipc().describe()].concat()),
        ("RDMA verbs", parts.verbs().describe()),
        ("TCP", parts.tcp().describe()),
    ];
    let mut own = all[..all.len() - parts.describe().len()].to_vec();
    for (heading, first) in OWN.into_iter().rev() {
        let at = own.iter().position(|line| line.variable == first);
        sections.push((heading, own.split_off(at.unwrap_or_else(|| panic!("no {first}")))));
    }
    sections
}

/// Returns the document with this table in place of the one below a heading.
fn with_table(there: &str, heading: &str, table: &str) -> String {
    let heading = format!("\n## {heading}\n\n");
    let begin = there.find(&heading).map(|at| at + heading.len());
    let begin = begin.unwrap_or_else(|| panic!("docs/configuration.md needs{heading}"));
    let (before, below) = there.split_at(begin);
    let rows = below.split_inclusive('\n').take_while(|line| line.starts_with('|'));
    let (_, after) = below.split_at(rows.map(str::len).sum());
    format!("{before}{table}{after}")
}

/// Returns the document with its tables made anew.
fn made_of(there: &str) -> String {
    let mut made = there.to_owned();
    for (heading, lines) in sections() {
        let mut table =
            "| variable | default | accepted | meaning |\n|---|---|---|---|\n".to_owned();
        for SettingLine { variable, value, expected, doc, .. } in lines {
            let meaning = LINKS.iter().fold(doc.to_owned(), |meaning, (words, page)| {
                meaning.replace(words, &format!("[{words}]({page})"))
            });
            // The document has told about units before.
            let accepted = expected.split(';').next().unwrap_or_default();
            table += &format!("| `{variable}` | `{value}` | {accepted} | {meaning} |\n");
        }
        made = with_table(&made, heading, &table);
    }
    let mut table = "| variable | set by | meaning |\n|---|---|---|\n".to_owned();
    for Reserved { variable, set_by, doc } in RESERVED {
        table += &format!("| `{variable}` | {set_by} | {doc} |\n");
    }
    with_table(&made, "Variables that are not settings", &table)
}

#[test]
fn the_tables_of_the_document_are_the_declarations_and_each_variable_is_in_one() {
    let there = fs::read_to_string(DOCUMENT).expect("docs/configuration.md is readable");
    let made = made_of(&there);
    let settings = Settings::defaults().describe().into_iter().map(|line| line.variable);
    for variable in settings.chain(RESERVED.iter().map(|reserved| reserved.variable)) {
        let row = format!("\n| `{variable}` |");
        let [before, after] = made.split(&row).collect::<Vec<_>>()[..] else {
            panic!("{variable} needs a row in one table");
        };
        let edited = [before, &row, &after.replacen(" |\n", " or another |\n", 1)].concat();
        assert!(made_of(&edited) == made, "a meaning of {variable} that was edited stays");
    }
    for (words, page) in LINKS {
        assert!(made.contains(&format!("[{words}]({page})")), "no meaning has {words:?}");
    }
    if std::env::var_os("WRITE_DOCS").is_some() {
        fs::write(DOCUMENT, made).expect("docs/configuration.md is writable");
    } else {
        assert!(made == there, "write its tables: WRITE_DOCS=1 cargo test -p carrack settings");
    }
}
