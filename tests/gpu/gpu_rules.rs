//! The rules of docs/gpu.md. Every rule has its row, and the files and tests that the row names
//! exist. The tests name their rules in their comments.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Each section of rules: its heading, how tests name it, and how many rules it has.
const SECTIONS: [(&str, &str, usize); 5] = [
    ("Legacy IPC", "legacy ipc", 10),
    ("VMM, pools, fabric", "vmm", 6),
    ("dma-buf and peermem", "dma-buf", 5),
    ("Streams, ordering, visibility", "streams", 8),
    ("Life and death", "life and death", 3),
];

/// A row of a table.
struct Row {
    section: &'static str,
    number: usize,
    places: Vec<String>,
    tests: Vec<(String, String)>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Held,
    WithVerbs,
}

fn file(path: &str) -> Option<String> {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).ok()
}

/// Returns the texts between backquotes.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// Returns the rows of a document, by section and number.
fn rows(text: &str) -> Vec<Row> {
    let (mut section, mut rows) = ("", Vec::new());
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            // The document has other sections, too.
            section =
                SECTIONS.iter().find(|(name, ..)| *name == heading).map_or("", |found| found.1);
        }
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", number, _, places, tests, ""] = cells[..] else { continue };
        let Ok(number) = number.parse() else { continue };
        let state = match tests {
            _ if tests.starts_with("*with verbs*") => State::WithVerbs,
            _ => State::Held,
        };
        let split = |test: String| {
            let (path, name) =
                test.split_once("::").unwrap_or_else(|| panic!("{test} is no path::name"));
            (path.to_owned(), name.to_owned())
        };
        let (places, tests) = (quoted(places), quoted(tests).into_iter().map(split).collect());
        rows.push(Row { section, number, places, tests, state });
    }
    rows
}

/// Returns the comment above a function, in one line; `None` when there is no such function.
fn comment_above(text: &str, name: &str) -> Option<String> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let is_it = |line: &&str| {
        let rest = line.strip_prefix("fn ").and_then(|rest| rest.strip_prefix(name));
        rest.is_some_and(|rest| rest.starts_with('(') || rest.starts_with('<'))
    };
    let at = lines.iter().position(is_it)?;
    let above = lines[..at]
        .iter()
        .rev()
        .take_while(|line| line.starts_with("///") || line.starts_with("#["));
    let mut comment: Vec<&str> =
        above.filter_map(|line| line.strip_prefix("///")).map(str::trim).collect();
    comment.reverse();
    Some(comment.join(" "))
}

/// Returns `true` if a comment names a rule: `Legacy IPC rules 1, 4 and 7; VMM rule 2: …`.
fn names(comment: &str, section: &str, number: usize) -> bool {
    let comment = comment.to_lowercase();
    let mut mentions = comment.match_indices(section).map(|(at, _)| &comment[at + section.len()..]);
    mentions.any(|rest| {
        let Some(rest) = rest.strip_prefix(" rules ").or_else(|| rest.strip_prefix(" rule "))
        else {
            return false;
        };
        let list = rest.split([';', ':', '.']).next().unwrap_or("");
        let words = list.split([',', ' ']).filter(|word| !word.is_empty() && *word != "and");
        words.map_while(|word| word.parse::<usize>().ok()).any(|named| named == number)
    })
}

/// Returns the faults of a row.
fn faults(row: &Row, file: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let (rule, mut faults) = (format!("{} rule {}", row.section, row.number), Vec::new());
    for place in row.places.iter().filter(|place| file(place).is_none()) {
        faults.push(format!("{rule}: there is no {place}"));
    }
    let found: Vec<Option<String>> =
        row.tests.iter().map(|(path, name)| comment_above(&file(path)?, name)).collect();
    match row.state {
        State::WithVerbs => {}
        State::Held => {
            if row.places.is_empty() || row.tests.is_empty() {
                faults.push(format!("{rule}: nothing is named that keeps or holds it"));
            }
            for ((path, name), _) in
                row.tests.iter().zip(&found).filter(|(_, found)| found.is_none())
            {
                faults.push(format!("{rule}: there is no {path}::{name}"));
            }
            if !found.iter().flatten().any(|comment| names(comment, row.section, row.number)) {
                faults.push(format!("{rule}: none of its tests names it in its comment"));
            }
        }
    }
    faults
}

#[test]
fn every_rule_of_gpu_memory_has_tests_that_exist_and_name_it() {
    let rows = rows(&file("docs/gpu.md").expect("the document"));
    let mut count: BTreeMap<(&str, usize), usize> = BTreeMap::new();
    for row in &rows {
        *count.entry((row.section, row.number)).or_default() += 1;
    }
    let all = SECTIONS
        .iter()
        .flat_map(|(_, section, last)| (1..=*last).map(move |number| ((*section, number), 1)));
    assert_eq!(count, all.collect(), "each rule has one row");
    let faults: Vec<String> = rows.iter().flat_map(|row| faults(row, file)).collect();
    assert!(faults.is_empty(), "docs/gpu.md:\n{}", faults.join("\n"));
}

#[test]
fn a_row_that_names_what_is_not_there_is_found_out() {
    let text = "## Legacy IPC\n| 1 | a. | `a.rs` | `t.rs::one` `t.rs::two` |\n| 2 | b. | `b.rs` | \
        *with verbs* `t.rs::new` |\n\
                ## VMM, pools, fabric\n| 1 | c. | `a.rs` | `t.rs::two` |\n\
                | 2 | e. | | |\n";
    let file = |path: &str| match path {
        "a.rs" => Some(String::new()),
        "t.rs" => Some(
            "/// Legacy IPC rules 4 and 1.\n#[test]\nfn one() {\n}\n/// VMM rule 12.\nfn two<J: \
            Job>() {}"
                .to_owned(),
        ),
        _ => None,
    };
    let rows = rows(text);
    let found: Vec<Vec<String>> = rows.iter().map(|row| faults(row, file)).collect();
    assert_eq!(found[0], [""; 0]);
    assert_eq!(found[1], ["legacy ipc rule 2: there is no b.rs"]);
    assert_eq!(found[2], ["vmm rule 1: none of its tests names it in its comment"]);
    assert!(found[3].iter().any(|fault| fault.contains("nothing is named")), "{:?}", found[3]);
    let without = |path: &str| file(path).map(|text| text.replace("fn one", "fn other"));
    assert!(faults(&rows[0], without).iter().any(|fault| fault.contains("there is no t.rs::one")));
}
