//! The medians, as a table and as lines of JSON.

use std::fmt::Write as _;

use serde::Serialize;
use serde_json::{Value, json};

use super::comparison::{Entry, Measured, median};
use super::cores::Cores;
use super::machine::Machine;
use super::row::{Op, Row};
use super::side::{Figure, Out, Role};

/// Width of the column of rows.
const WIDTH: usize = 36;

/// The report that is printed at the end.
#[derive(Debug)]
pub(super) struct Report<'a> {
    pub(super) heading: Heading,
    pub(super) measured: &'a [Measured],
}

/// Conditions of the measurement: the first line of JSON.
#[derive(Debug, Serialize)]
pub(super) struct Heading {
    pub(super) machine: Machine,
    pub(super) cores: Cores,
    pub(super) rounds: usize,
    pub(super) seconds: f64,
    /// Each side's name and version.
    pub(super) sides: Vec<String>,
}

/// A row: each further line of JSON.
#[derive(Debug, Serialize)]
struct ReportRow {
    #[serde(flatten)]
    row: Row,
    unit: &'static str,
    lower_is_better: bool,
    sides: Vec<Value>,
    better_peer: Option<&'static str>,
    /// Median of Carrack over median of the better peer.
    ratio: Option<f64>,
    /// The same of the averages of a latency.
    average_ratio: Option<f64>,
    /// Median of Carrack over that of the yardstick.
    of_raw: Option<f64>,
    /// Median of Carrack over its own of one thread.
    of_one_thread: Option<f64>,
}

impl Report<'_> {
    /// Returns a line for the conditions, and one for each row.
    pub(super) fn json(&self) -> String {
        // Numbers, strings and structs of them have no way to fail; the text is for the compiler.
        let failed = |error: serde_json::Error| {
            serde_json::json!({ "error": error.to_string() }).to_string()
        };
        let mut text = serde_json::to_string(&self.heading).unwrap_or_else(failed);
        for measured in self.measured {
            text.push('\n');
            text.push_str(&serde_json::to_string(&self.line(measured)).unwrap_or_else(failed));
        }
        text
    }

    pub(super) fn table(&self) -> String {
        let Heading { machine, cores, rounds, seconds, sides } = &self.heading;
        let Machine { cpu, cpus, kernel, date, load_before } = machine;
        let sides = sides.join(", ");
        let mut text = format!(
            "{cpu}, {cpus} CPUs, Linux {kernel}, {date}, load before {load_before:.2}\n\
            {sides}; on the first of cores {cores}; medians of {rounds} rounds of {seconds} s\n\
            Latency: one way (until it ends, of get, fetch_add and barrier), the median of a \
            run's messages, lower is better; bandwidth in 10^9 bytes and rate in 10^6 messages a \
            second, higher is better.\nRatio: carrack / better peer, the median over the rounds; \
            average: the same of the averages of the latencies. /raw: carrack / one copy of that \
            size, by one thread's memcpy or the GPU's engine, or raw sockets, or as many pairs of \
            processes as a row has threads; /one: carrack / its figure of one thread.\n\n\
            {:<WIDTH$}",
            "test"
        );
        // Writing into a string has no way to fail.
        for entry in self.measured.first().iter().flat_map(|one| &one.entries) {
            let _ = write!(text, " {:>14}", entry.side);
        }
        columns(&mut text, ["ratio", "average", "/raw", "/one", "better peer"]);
        for measured in self.measured {
            self.table_row(&mut text, measured);
        }
        for measured in self.measured {
            notes(&mut text, measured);
        }
        text.truncate(text.trim_end().len());
        text
    }

    fn table_row(&self, text: &mut String, measured: &Measured) {
        let unit = measured.row.test.unit();
        let _ = write!(text, "{:<WIDTH$}", measured.row);
        for entry in &measured.entries {
            let shown = match (entry.median(), &entry.out) {
                (Some(value), _) => format!("{value:.*} {unit}", if value < 100.0 { 3 } else { 1 }),
                (None, Some(Out::Failed(_))) => "failed".to_owned(),
                (None, Some(Out::Cannot(_))) if entry.role == Role::Ours => "cannot yet".to_owned(),
                (None, _) => "-".to_owned(),
            };
            let _ = write!(text, " {shown:>14}");
        }
        let ReportRow { ratio, average_ratio, of_raw, of_one_thread, .. } = self.line(measured);
        let ratios = [ratio, average_ratio, of_raw, of_one_thread];
        let [ratio, average, copy, one] =
            ratios.map(|ratio| ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")));
        let peer = measured.better_peer().map_or_else(
            || "-".into(),
            |peer| {
                let test = peer.test.map_or_else(String::new, |test| format!(" {test}"));
                let variant = peer.setting.map_or("", |setting| setting.variant.name);
                format!("{}{test} ({variant})", peer.side)
            },
        );
        columns(text, [&ratio, &average, &copy, &one, &peer]);
    }

    fn line(&self, measured: &Measured) -> ReportRow {
        let (ours, peer) = (measured.of(Role::Ours), measured.better_peer());
        let row = &measured.row;
        ReportRow {
            row: *row,
            unit: row.test.unit(),
            lower_is_better: row.test.lower_is_better(),
            sides: measured.entries.iter().map(|entry| self.side_line(row, entry)).collect(),
            better_peer: peer.map(|peer| peer.side),
            ratio: ratio(ours, peer, value),
            average_ratio: ratio(ours, peer, |figure| figure.average),
            of_raw: ratio(ours, measured.of(Role::Yardstick), value),
            of_one_thread: ours.and_then(|ours| self.of_one_thread(row, ours)),
        }
    }

    /// Returns one side of a row.
    fn side_line(&self, row: &Row, entry: &Entry) -> Value {
        let rounds: Vec<f64> = entry.figures.iter().map(|figure| figure.value).collect();
        let why = match &entry.out {
            Some(Out::Cannot(why) | Out::Failed(why)) => Some(why.as_str()),
            Some(Out::Skipped) => Some("skipped"),
            None => None,
        };
        json!({
            "side": entry.side,
            "test": entry.test,
            "median": entry.median(),
            "average": entry.average(),
            "rounds": rounds,
            "setting": entry.setting.map(|setting| setting.variant.name),
            "of_one_thread": self.of_one_thread(row, entry),
            "out": why,
            "failed": matches!(entry.out, Some(Out::Failed(_))),
        })
    }

    /// Returns the rate of a side's threads together, divided by the rate of one.
    fn of_one_thread(&self, row: &Row, entry: &Entry) -> Option<f64> {
        let one = row.of_one_thread()?;
        let measured = self.measured.iter().find(|measured| measured.row == one)?;
        let of_one = measured.entries.iter().find(|other| other.side == entry.side);
        ratio(Some(entry), of_one, value)
    }
}

/// Writes the reasons of the cells without a figure.
fn notes(text: &mut String, measured: &Measured) {
    let row = &measured.row;
    for entry in &measured.entries {
        let (side, rounds) = (entry.side, entry.figures.len());
        let _ = match &entry.out {
            Some(Out::Cannot(why)) if entry.role == Role::Ours && row.op != Op::Memcpy => {
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

/// Writes the columns behind those of the sides.
fn columns(text: &mut String, [ratio, average, copy, one, peer]: [&str; 5]) {
    let _ = writeln!(text, " {ratio:>7} {average:>8} {copy:>8} {one:>7}  {peer}");
}

/// Returns the median over the rounds of one side's figure divided by another one's. The machine's
/// speed may change from round to round, and a side that fails has no further ones.
fn ratio(
    one: Option<&Entry>,
    other: Option<&Entry>,
    of: fn(&Figure) -> Option<f64>,
) -> Option<f64> {
    let rounds = one?.figures.iter().zip(&other?.figures);
    let ratio = |(one, other)| Some(of(one)? / of(other).filter(|other| *other > 0.0)?);
    median(rounds.filter_map(ratio))
}

fn value(figure: &Figure) -> Option<f64> {
    Some(figure.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(side: &'static str, values: &[f64], average: Option<f64>) -> Entry {
        let figures = values.iter().map(|&value| Figure { value, average }).collect();
        let role = match side {
            "carrack" => Role::Ours,
            "copy" => Role::Yardstick,
            _ => Role::Peer,
        };
        Entry { figures, ..Entry::new(side, role) }
    }

    fn report(measured: &[Measured]) -> Report<'_> {
        let machine = Machine {
            cpu: "A".into(),
            cpus: 2,
            kernel: "6".into(),
            date: "now".into(),
            load_before: 0.0,
        };
        let cores = "0,1".parse().unwrap();
        let heading = Heading { machine, cores, rounds: 3, seconds: 1.0, sides: vec![] };
        Report { heading, measured }
    }

    #[test]
    fn a_row_is_compared_with_the_better_peer_round_by_round() {
        let entries = vec![
            entry("carrack", &[1.0, 20.0, 110.0], None),
            entry("UCX", &[1.0, 10.0, 100.0], Some(0.1)),
            entry("MPICH", &[50.0], Some(0.5)),
        ];
        let measured = Measured { row: "send:latency:8".parse().unwrap(), entries };
        let all = std::slice::from_ref(&measured);
        let report = report(all);
        let line = report.line(&measured);
        assert_eq!(
            (line.better_peer, line.ratio, line.average_ratio),
            (Some("UCX"), Some(1.1), None)
        );
        let json = report.json();
        assert_eq!(json.lines().count(), 2);
        assert!(
            json.contains(concat!(
                r#""op":"send","test":"latency","size":8,"ranks":2,"threads":1,"shared":false,"#,
                r#""gpu":false,"tcp":false,"asleep":false,"copier":false,"unit":"us""#
            )),
            "{json}"
        );
    }

    #[test]
    fn a_row_of_threads_is_compared_with_one_and_a_put_with_a_copy() {
        let one = |row: &str, entries| Measured { row: row.parse().unwrap(), entries };
        let measured = [
            one("send:rate:8", vec![entry("carrack", &[10.0], None), entry("MPICH", &[5.0], None)]),
            one(
                "send:rate:8@4",
                vec![entry("carrack", &[35.0], None), entry("MPICH", &[10.0], None)],
            ),
            one("shared:send:rate:8@4", vec![entry("carrack", &[8.0], None)]),
            one(
                "put:bandwidth:1M",
                vec![entry("carrack", &[9.0], None), entry("copy", &[10.0], None)],
            ),
        ];
        let report = report(&measured);
        let lines: Vec<_> = measured.iter().map(|measured| report.line(measured)).collect();
        let of_one: Vec<_> = lines.iter().map(|line| line.of_one_thread).collect();
        assert_eq!(of_one, [None, Some(3.5), Some(0.8), None]);
        assert_eq!(lines[1].sides[1]["of_one_thread"], 2.0);
        assert_eq!(
            (lines[3].of_raw, lines[3].better_peer, lines[3].ratio),
            (Some(0.9), None, None)
        );
        let rows: Vec<_> = report.table().lines().map(str::to_owned).collect();
        let cells = |of: &str| rows.iter().find(|row| row.starts_with(of)).unwrap().to_owned();
        assert!(cells("send rate, 8 B, 4 threads ").contains(" 3.50"));
        assert!(cells("send rate, 8 B, 4 threads, 1 device").contains(" 0.80"));
        assert!(cells("put bandwidth, 1 MiB").contains(" 0.90"));
    }

    #[test]
    fn the_table_says_which_test_of_the_peers_it_was() {
        let theirs = Entry { test: Some("ucp_put_lat"), ..entry("UCX", &[0.1], None) };
        let row = "gpu:copier:put:latency:8".parse().unwrap();
        let measured = [Measured { row, entries: vec![entry("carrack", &[0.1], None), theirs] }];
        let report = report(&measured);
        assert!(report.table().contains("UCX ucp_put_lat"), "{}", report.table());
        assert!(
            report.json().contains(r#""side":"UCX","test":"ucp_put_lat""#),
            "{}",
            report.json()
        );
    }

    #[test]
    fn the_table_says_why_a_cell_is_empty() {
        let mut ours = entry("carrack", &[], None);
        ours.out = Some(Out::Cannot("longer than a packet".into()));
        let mut theirs = entry("UCX", &[0.1], None);
        theirs.out = Some(Out::Failed("it hung\n".into()));
        let measured =
            [Measured { row: "send:latency:1M".parse().unwrap(), entries: vec![ours, theirs] }];
        let table = report(&measured).table();
        assert!(
            table.contains("skipped, carrack cannot do it yet: longer than a packet"),
            "{table}"
        );
        assert!(table.contains("UCX failed after 1 rounds: it hung"), "{table}");
    }
}
