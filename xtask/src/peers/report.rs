//! The medians, as a table and as lines of JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::comparison::{Entry, Measured, Out};
use super::cores::Cores;
use super::machine::Machine;
use super::row::{Op, Test};

/// What is printed at the end.
#[derive(Debug)]
pub(super) struct Report<'a> {
    pub(super) heading: Heading,
    pub(super) measured: &'a [Measured],
}

/// Under which conditions the figures came about: the first line of JSON.
#[derive(Debug, Serialize)]
pub(super) struct Heading {
    pub(super) machine: Machine,
    pub(super) cores: Cores,
    pub(super) rounds: u32,
    pub(super) seconds: f64,
    /// Each side's name and version.
    pub(super) sides: Vec<String>,
}

/// A row: each further line of JSON.
#[derive(Debug, Serialize)]
struct Line<'a> {
    op: Op,
    test: Test,
    size: usize,
    unit: &'static str,
    lower_is_better: bool,
    sides: Vec<SideLine<'a>>,
    better_peer: Option<&'static str>,
    /// Median of Carrack over median of the better peer.
    ratio: Option<f64>,
    /// The same of the averages of a latency.
    average_ratio: Option<f64>,
}

/// One side of a row.
#[derive(Debug, Serialize)]
struct SideLine<'a> {
    side: &'static str,
    median: Option<f64>,
    average: Option<f64>,
    rounds: Vec<f64>,
    setting: Option<&'static str>,
    /// Why it has no figure, or not of all rounds.
    out: Option<&'a str>,
    failed: bool,
}

impl Report<'_> {
    /// A line for the conditions, and one for each row.
    pub(super) fn json(&self) -> String {
        // Numbers, strings and structs of them have no way to fail; the text is for the compiler.
        let failed = |error: serde_json::Error| format!("{{\"error\":\"{error}\"}}");
        let mut text = serde_json::to_string(&self.heading).unwrap_or_else(failed);
        for measured in self.measured {
            text.push('\n');
            text.push_str(&serde_json::to_string(&line(measured)).unwrap_or_else(failed));
        }
        text
    }

    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        let Heading { machine, cores, rounds, seconds, sides } = &self.heading;
        let (cpu, cpus, kernel, date) = (&machine.cpu, machine.cpus, &machine.kernel, &machine.date);
        let load = machine.load_before;
        // Writing into a string has no way to fail.
        let _ = writeln!(text, "{cpu}, {cpus} CPUs, Linux {kernel}, {date}, load before {load:.2}");
        let _ = writeln!(
            text,
            "{}; cores {} and {}; medians of {rounds} rounds of {seconds} s",
            sides.join(", "),
            cores.0,
            cores.1
        );
        text.push_str(
            "Latency: one way, the median of a run's messages, lower is better; bandwidth in 10^9 bytes and rate in \
             10^6 messages a second, higher is better.\nRatio: carrack / better peer; average: the same of the \
             averages of the latencies.\n\n",
        );
        let names: Vec<&str> =
            self.measured.first().iter().flat_map(|one| &one.entries).map(|entry| entry.side).collect();
        let _ = write!(text, "{:<24}", "test");
        for name in names {
            let _ = write!(text, " {name:>14}");
        }
        let _ = writeln!(text, " {:>7} {:>8}  better peer", "ratio", "average");
        for measured in self.measured {
            table_row(&mut text, measured);
        }
        for measured in self.measured {
            notes(&mut text, measured);
        }
        text.truncate(text.trim_end().len());
        text
    }
}

fn table_row(text: &mut String, measured: &Measured) {
    let unit = measured.row.test.unit();
    let _ = write!(text, "{:<24}", measured.row);
    for entry in &measured.entries {
        let shown = match (entry.median(), &entry.out) {
            (Some(value), _) => format!("{value:.*} {unit}", if value < 100.0 { 3 } else { 1 }),
            (None, Some(Out::Failed(_))) => "failed".to_owned(),
            (None, Some(Out::Cannot(_))) if !entry.is_peer => "cannot yet".to_owned(),
            (None, _) => "-".to_owned(),
        };
        let _ = write!(text, " {shown:>14}");
    }
    let two = |ratio: Option<f64>| ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
    let Line { ratio, average_ratio, .. } = line(measured);
    let peer = match measured.better_peer() {
        Some(peer) => format!("{} ({})", peer.side, peer.setting.map_or("", |setting| setting.variant.name)),
        None => "-".to_owned(),
    };
    let _ = writeln!(text, " {:>7} {:>8}  {peer}", two(ratio), two(average_ratio));
}

/// What a reader has to know about the cells without a figure.
fn notes(text: &mut String, measured: &Measured) {
    let row = &measured.row;
    for entry in &measured.entries {
        let (side, rounds) = (entry.side, entry.figures.len());
        let _ = match &entry.out {
            Some(Out::Cannot(why)) if !entry.is_peer => {
                writeln!(text, "{row}: skipped, {side} cannot do it yet: {}", why.trim_end())
            }
            Some(Out::Failed(why)) => {
                writeln!(text, "{row}: {side} failed after {rounds} rounds: {}", why.trim_end())
            }
            // What a peer does not have is no news.
            Some(Out::Cannot(_) | Out::Skipped) | None => Ok(()),
        };
    }
}

fn line(measured: &Measured) -> Line<'_> {
    let (ours, peer) = (measured.ours(), measured.better_peer());
    let ratio = |of: fn(&Entry) -> Option<f64>| {
        let (ours, theirs) = (of(ours?)?, of(peer?)?);
        (theirs > 0.0).then(|| ours / theirs)
    };
    let row = &measured.row;
    Line {
        op: row.op,
        test: row.test,
        size: row.size,
        unit: row.test.unit(),
        lower_is_better: row.test.lower_is_better(),
        sides: measured.entries.iter().map(side_line).collect(),
        better_peer: peer.map(|peer| peer.side),
        ratio: ratio(Entry::median),
        average_ratio: ratio(Entry::average),
    }
}

fn side_line(entry: &Entry) -> SideLine<'_> {
    SideLine {
        side: entry.side,
        median: entry.median(),
        average: entry.average(),
        rounds: entry.figures.iter().map(|figure| figure.value).collect(),
        setting: entry.setting.map(|setting| setting.variant.name),
        out: entry.out.as_ref().map(|out| match out {
            Out::Cannot(why) | Out::Failed(why) => why.as_str(),
            Out::Skipped => "skipped",
        }),
        failed: matches!(entry.out, Some(Out::Failed(_))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::side::Figure;
    use super::*;

    fn entry(side: &'static str, values: &[f64], average: Option<f64>) -> Entry {
        let figures = values.iter().map(|&value| Figure { value, average }).collect();
        Entry { figures, ..Entry::new(side, side != "carrack") }
    }

    fn report(measured: &[Measured]) -> Report<'_> {
        let machine =
            Machine { cpu: "A".into(), cpus: 2, kernel: "6".into(), date: "now".into(), load_before: 0.0 };
        let heading = Heading { machine, cores: Cores(0, 1), rounds: 3, seconds: 1.0, sides: vec![] };
        Report { heading, measured }
    }

    #[test]
    fn a_row_compares_the_medians_with_the_better_peer() {
        let entries = vec![
            entry("carrack", &[0.05, 0.06, 0.9], None),
            entry("UCX", &[0.07, 0.12, 0.13], Some(0.1)),
            entry("MPICH", &[0.5], Some(0.5)),
        ];
        let measured = Measured { row: "send:latency:8".parse().unwrap(), entries };
        let line = line(&measured);
        assert_eq!((line.better_peer, line.ratio, line.average_ratio), (Some("UCX"), Some(0.5), None));
        let json = report(std::slice::from_ref(&measured)).json();
        assert_eq!(json.lines().count(), 2);
        assert!(json.contains(r#""op":"send","test":"latency","size":8,"unit":"us""#), "{json}");
    }

    #[test]
    fn the_table_says_why_a_cell_is_empty() {
        let mut ours = entry("carrack", &[], None);
        ours.out = Some(Out::Cannot("longer than a packet".into()));
        let mut theirs = entry("UCX", &[0.1], None);
        theirs.out = Some(Out::Failed("it hung\n".into()));
        let measured = [Measured { row: "send:latency:1M".parse().unwrap(), entries: vec![ours, theirs] }];
        let table = report(&measured).table();
        assert!(table.contains("skipped, carrack cannot do it yet: longer than a packet"), "{table}");
        assert!(table.contains("UCX failed after 1 rounds: it hung"), "{table}");
    }
}
