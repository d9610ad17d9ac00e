//! The medians, as a table or as JSON.

use std::fmt::Write as _;

use serde::Serialize;

use super::comparison::{Figure, Measured, Quantity, median};
use super::cores::Cores;
use super::machine::Machine;
use super::ucx::Ucx;

/// What is printed at the end.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    machine: Machine,
    cores: [usize; 2],
    rounds: u32,
    seconds: f64,
    peer: String,
    results: Vec<Row>,
}

/// One quantity of one test.
#[derive(Debug, Serialize)]
struct Row {
    test: String,
    unit: &'static str,
    lower_is_better: bool,
    carrack: Side,
    peer: Side,
    /// Median of Carrack over median of the peer.
    ratio: Option<f64>,
    /// Transports that made UCX fastest.
    peer_transports: &'static str,
}

/// One side's rounds.
#[derive(Debug, Serialize)]
struct Side {
    median: Option<f64>,
    rounds: Vec<f64>,
}

impl Side {
    fn new(rounds: Vec<f64>) -> Self {
        Self { median: median(rounds.iter().copied()), rounds }
    }
}

impl Report {
    pub(super) fn new(
        machine: Machine,
        measured: &[Measured],
        ucx: &Ucx,
        cores: Cores,
        rounds: u32,
        seconds: f64,
    ) -> Self {
        Self {
            machine,
            cores: [cores.0, cores.1],
            rounds,
            seconds,
            peer: format!("UCX {}", ucx.version),
            results: measured.iter().flat_map(rows).collect(),
        }
    }

    pub(super) fn json(&self) -> String {
        // Numbers, strings and structs of them have no way to fail; the text is for the compiler.
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":\"{error}\"}}"))
    }

    pub(super) fn table(&self) -> String {
        let mut text = String::new();
        let machine = &self.machine;
        let (cpu, cpus, kernel, date) = (&machine.cpu, machine.cpus, &machine.kernel, &machine.date);
        // Writing into a string has no way to fail.
        let _ = writeln!(
            text,
            "{cpu}, {cpus} CPUs, Linux {kernel}, {date}, load before {:.2}",
            machine.load_before
        );
        let _ = writeln!(
            text,
            "{}; cores {} and {}; medians of {} rounds of {} s; ratio is carrack / peer",
            self.peer, self.cores[0], self.cores[1], self.rounds, self.seconds
        );
        let _ = writeln!(text, "\n{:<28} {:>14} {:>14} {:>8}", "test", "carrack", "peer", "ratio");
        for row in &self.results {
            let number = |value: Option<f64>| match value {
                None => "-".to_owned(),
                Some(us) if row.unit == "us" => format!("{us:.4} us"),
                Some(rate) => format!("{:.3} M/s", rate / 1e6),
            };
            let ratio = row.ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
            let better = if row.lower_is_better { "lower is better" } else { "higher is better" };
            let _ = writeln!(
                text,
                "{:<28} {:>14} {:>14} {ratio:>8}  {better}; UCX_TLS={}",
                row.test,
                number(row.carrack.median),
                number(row.peer.median),
                row.peer_transports
            );
        }
        text.truncate(text.trim_end().len());
        text
    }
}

/// A row for the value, and one for the average where a latency has one.
fn rows(measured: &Measured) -> Vec<Row> {
    let row = |what: &str, unit, of: fn(&Figure) -> Option<f64>| {
        let carrack = Side::new(measured.carrack.iter().filter_map(of).collect());
        let peer = Side::new(measured.ucx.iter().filter_map(of).collect());
        let ratio =
            carrack.median.zip(peer.median).filter(|(_, peer)| *peer > 0.0).map(|(ours, peer)| ours / peer);
        Row {
            test: format!("{}{what}", measured.test.name),
            unit,
            lower_is_better: measured.test.quantity == Quantity::Latency,
            carrack,
            peer,
            ratio,
            peer_transports: measured.tuned.transports,
        }
    };
    match measured.test.quantity {
        Quantity::Latency => vec![
            row(", p50", "us", |figure| Some(figure.value)),
            row(", average", "us", |figure| figure.average),
        ],
        Quantity::Rate => vec![row("", "messages/s", |figure| Some(figure.value))],
    }
}

#[cfg(test)]
mod tests {
    use super::super::comparison::TESTS;
    use super::super::ucx::Tuned;
    use super::*;

    #[test]
    fn a_row_compares_the_medians_and_has_no_ratio_where_a_side_has_no_figure() {
        let mut measured = Measured::new(&TESTS[0], Tuned { transports: "all", iterations: 1 });
        measured.carrack.extend([0.05, 0.06, 0.9].map(|value| Figure { value, average: None }));
        measured.ucx.extend([0.07, 0.12, 0.13].map(|value| Figure { value, average: Some(value) }));
        let rows = rows(&measured);
        assert_eq!((rows[0].carrack.median, rows[0].peer.median), (Some(0.06), Some(0.12)));
        assert_eq!(rows[0].ratio, Some(0.5));
        assert_eq!((rows[1].carrack.median, rows[1].ratio), (None, None));
    }
}
