//! The comparisons, their measures and their outcomes.

use std::fmt::Write as _;

use super::programs::{Peer, Sides};
use crate::peers::comparison::median;
use crate::peers::row::Row;

/// The comparisons. The receivers of perftest's and UCX's writes look at their memory, so ours do.
/// Messages and puts of a bandwidth are compared with perftest's writes: nothing moves bytes with
/// less.
const COMPARISONS: &[(&str, Peer, f64)] = &[
    ("send:latency:8", Peer::Perftest("ib_send_lat"), 1.15),
    ("put_seen:latency:8", Peer::Perftest("ib_write_lat"), 1.15),
    ("send:latency:8", Peer::Ucx("tag_lat"), 0.9),
    ("put_seen:latency:8", Peer::Ucx("ucp_put_lat"), 0.9),
    ("am:latency:8", Peer::Ucx("ucp_am_lat"), 0.9),
    ("send:bandwidth:1M", Peer::Perftest("ib_write_bw"), 0.95),
    ("put:bandwidth:1M", Peer::Perftest("ib_write_bw"), 0.95),
    ("am:rate:8", Peer::Ucx("ucp_am_bw"), 1.5),
];

/// A comparison of Carrack with one peer, and the outcome of all rounds.
pub(super) struct Outcome {
    row: Row,
    peer: Peer,
    /// Goal of the ratio: at most this for a latency, at least this for a bandwidth or rate.
    wanted: f64,
    /// Ours and the peer's, of each round in which both had one.
    rounds: Vec<(f64, f64)>,
    /// The first reason why a side had none. Further rounds are measured all the same.
    failure: Option<String>,
}

/// Returns the comparisons, before their rounds.
pub(super) fn all() -> Vec<Outcome> {
    let read = |&(row, peer, wanted): &(&str, _, _)| {
        Some(Outcome { row: row.parse().ok()?, peer, wanted, rounds: Vec::new(), failure: None })
    };
    COMPARISONS.iter().filter_map(read).collect()
}

impl Outcome {
    /// Measures both sides; in odd rounds the peer is the first.
    pub(super) fn round(&mut self, number: u32, sides: &Sides) {
        let Self { row, peer, .. } = self;
        let theirs = || sides.peer(*peer, row);
        let first = (!number.is_multiple_of(2)).then(theirs);
        let ours = sides.ours(row);
        match (ours, first.unwrap_or_else(theirs)) {
            (Ok(ours), Ok(theirs)) => {
                let (ours, theirs, unit) = (ours.value, theirs.value, row.test.unit());
                let ratio = ours / theirs;
                // As they come: of a run that is cut off, this is what is left.
                eprintln!("{row} beside {peer}: {ours:.4} {theirs:.4} {unit}, {ratio:.2}");
                self.rounds.push((ours, theirs));
            }
            (Err(error), _) | (_, Err(error)) => {
                eprintln!("{row} beside {peer}: {error}");
                self.failure.get_or_insert(error.to_string());
            }
        }
    }

    /// Returns `true` if there is a round without a figure.
    pub(super) fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Median of the rounds' ratios, ours over the peer's, and its middle half.
    fn ratio(&self) -> Option<(f64, f64, f64)> {
        let mut ratios: Vec<_> = self.rounds.iter().map(|(ours, theirs)| ours / theirs).collect();
        ratios.sort_by(f64::total_cmp);
        let quarter = ratios.len() / 4;
        let ends = (*ratios.get(quarter)?, *ratios.get(ratios.len() - 1 - quarter)?);
        Some((median(ratios)?, ends.0, ends.1))
    }

    /// The best round of ours over the peer's best: what is left when the machine disturbs neither.
    fn best(&self) -> Option<f64> {
        let lower = self.row.test.lower_is_better();
        let better = |one: f64, other: f64| if lower { one.min(other) } else { one.max(other) };
        let ours = self.rounds.iter().map(|round| round.0).reduce(better)?;
        let theirs = self.rounds.iter().map(|round| round.1).reduce(better)?;
        Some(ours / theirs)
    }

    fn is_met(&self) -> Option<bool> {
        let (Self { row, wanted, .. }, (ratio, ..)) = (self, self.ratio()?);
        Some(if row.test.lower_is_better() { ratio <= *wanted } else { ratio >= *wanted })
    }
}

/// The outcomes as a table of Markdown's.
pub(super) fn table(outcomes: &[Outcome]) -> String {
    let mut text = "| | beside | rounds | Carrack | peer | ratio | middle half | best by best | \
        wanted | |\n|---|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for outcome in outcomes {
        let Outcome { row, peer, wanted, .. } = outcome;
        let sign = if row.test.lower_is_better() { '≤' } else { '≥' };
        let unit = row.test.unit().replace("us", "µs");
        let value = |of: fn(&(f64, f64)) -> f64| {
            let median = median(outcome.rounds.iter().map(of));
            median.map_or("–".into(), |value| format!("{value:.4} {unit}"))
        };
        let (ours, theirs) = (value(|round| round.0), value(|round| round.1));
        let ratio = outcome.ratio().zip(outcome.best()).map_or_else(
            || "– | – | –".to_owned(),
            |((ratio, low, high), best)| format!("{ratio:.2} | {low:.2} to {high:.2} | {best:.2}"),
        );
        let verdict = match outcome.is_met() {
            Some(true) => "met",
            Some(false) => "missed",
            None => "not measured",
        };
        let rounds = outcome.rounds.len();
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "| {row} | {peer} | {rounds} | {ours} | {theirs} | {ratio} | {sign} {wanted} | \
            {verdict} |",
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the outcome of the comparison whose peer is shown as `peer`.
    fn outcome(peer: &str, rounds: &[(f64, f64)]) -> Outcome {
        let of_it = all().into_iter().find(|outcome| outcome.peer.to_string() == peer);
        Outcome { rounds: rounds.to_vec(), ..of_it.unwrap() }
    }

    #[test]
    fn every_comparison_is_of_a_row() {
        assert_eq!(all().len(), COMPARISONS.len());
    }

    #[test]
    fn the_ratio_is_the_median_of_the_rounds_and_not_the_ratio_of_medians() {
        let latency = "ib_send_lat";
        let all = outcome(latency, &[(1.0, 1.0), (20.0, 10.0), (110.0, 100.0)]);
        assert_eq!(all.ratio().map(|(ratio, ..)| ratio), Some(1.1));
        assert_eq!((all.best(), all.is_met()), (Some(1.0), Some(true)));
        assert_eq!(outcome(latency, &[(1.2, 1.0)]).is_met(), Some(false));
        assert_eq!(outcome(latency, &[]).is_met(), None);
    }

    #[test]
    fn of_rates_the_higher_is_the_better_one_and_the_table_says_so() {
        let rate = "UCX ucp_am_bw";
        let (good, bad) = (outcome(rate, &[(3.0, 2.0)]), outcome(rate, &[(2.0, 2.0)]));
        assert_eq!((good.is_met(), bad.is_met()), (Some(true), Some(false)));
        let text = table(&[good, bad, outcome(rate, &[])]);
        assert!(
            text.contains(
                "| am rate, 8 B | UCX ucp_am_bw | 1 | 3.0000 M/s | 2.0000 M/s | 1.50 \
            | 1.50 to 1.50 | 1.50 | ≥ 1.5 | met |"
            ),
            "{text}"
        );
        assert!(text.contains("| missed |") && text.contains("| not measured |"), "{text}");
    }
}
