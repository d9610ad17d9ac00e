//! The report of instructions: what is counted now, next to what `instructions.txt` notes.

use crate::{gpu_costs, host_instructions, profile, verbs_instructions};
use std::collections::BTreeMap;
use std::fmt::Write;

/// File of the noted counts: one in a line, its name in front.
const NOTED: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/costs/instructions.txt");

/// Per cent by which a count may differ from what is noted: the compiler's choices in other places
/// move it by as much.
const TOLERANCE: f64 = 3.0;

/// A count: its name, and instructions of a call.
pub(crate) type Count = (String, u64);

/// Returns the lines of the report, and the names of counts that have moved.
fn compared(noted: &BTreeMap<&str, u64>, counts: &[Count]) -> (String, Vec<String>) {
    let (mut lines, mut moved) = (String::new(), Vec::new());
    for (name, now) in counts {
        let change = noted.get(&**name).map(|was| 100.0 * (*now as f64 / *was as f64 - 1.0));
        let is_moved = change.is_none_or(|change| change.abs() > TOLERANCE);
        let told = change.map_or("new".into(), |change| format!("{change:+.1} %"));
        let mark = if is_moved { "*" } else { "" };
        let _ = writeln!(lines, "{name:<36} {now:>6} {told:>8} {mark}");
        moved.extend(is_moved.then(|| name.clone()));
    }
    (lines, moved)
}

fn parsed(text: &str) -> BTreeMap<&str, u64> {
    text.lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(name, count)| Some((name, count.trim().parse().ok()?)))
        .collect()
}

/// Fails only if nothing is counted: a count that has moved is marked, and is noted anew by
/// `WRITE_COSTS=1`.
#[test]
fn a_report_of_instructions() {
    if let Some(why) = profile::why_not("costs") {
        println!("skipped: {why}");
        return;
    }
    let all =
        [verbs_instructions::counts, gpu_costs::instructions::counts, host_instructions::counts];
    let counts: Vec<Count> = all.into_iter().flat_map(|counts| counts()).collect();
    let there = std::fs::read_to_string(NOTED).unwrap_or_default();
    let (lines, moved) = compared(&parsed(&there), &counts);
    println!("{lines}");
    assert!(counts.iter().all(|(_, count)| *count > 20), "nothing was counted");
    if std::env::var_os("WRITE_COSTS").is_some() {
        let lines = counts.iter().map(|(name, count)| format!("{name} {count}\n"));
        std::fs::write(NOTED, lines.collect::<String>()).unwrap();
    } else if !moved.is_empty() {
        println!(
            "report: {} counts of instructions differ from what is noted by more than {TOLERANCE} \
            %: {}; WRITE_COSTS=1 cargo test --release --test costs notes them anew",
            moved.len(),
            moved.join(", ")
        );
    }
}

#[test]
fn a_count_that_moves_by_more_than_the_tolerance_or_is_new_is_marked() {
    let noted = parsed("send 100\npoll 200\ngone 7\n");
    let counts = [("send", 102), ("poll", 193), ("new", 5)];
    let counts = counts.map(|(name, count)| (name.to_owned(), count));
    let (lines, moved) = compared(&noted, &counts);
    assert_eq!(moved, ["poll", "new"]);
    assert!(lines.contains("+2.0 %") && lines.contains("-3.5 % *"), "{lines}");
}
