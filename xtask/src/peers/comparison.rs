//! Rounds of all sides in turn, their medians, and the better peer.

use super::row::{Op, Row};
use super::side::{Figure, Out, Role, Setting, Side};

/// A row with what its rounds gave so far.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) row: Row,
    /// Entries in the order of the sides.
    pub(super) entries: Vec<Entry>,
}

/// Results of one side in one row.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) side: &'static str,
    pub(super) role: Role,
    /// Test of its own benchmark that measures it.
    pub(super) test: Option<&'static str>,
    /// The setting, once it is prepared.
    pub(super) setting: Option<Setting>,
    /// One a round.
    pub(super) figures: Vec<Figure>,
    /// The reason why its measurement has stopped.
    pub(super) out: Option<Out>,
}

impl Measured {
    /// Asks each side for its settings of the row. A row that Carrack cannot do is skipped.
    pub(super) fn prepare(row: Row, sides: &[Box<dyn Side>]) -> Self {
        let mut measured = Self { row, entries: Vec::new() };
        for side in sides {
            let mut entry = Entry { test: side.test(&row), ..Entry::new(side.name(), side.role()) };
            let skipped = measured.is_skipped();
            match if skipped { Err(Out::Skipped) } else { side.prepare(&row) } {
                Ok(setting) => entry.setting = Some(setting),
                Err(out) => entry.out = Some(out),
            }
            measured.entries.push(entry);
        }
        measured
    }

    /// Runs each side once. The first one changes by round, in case the machine's speed does.
    pub(super) fn round(&mut self, number: usize, sides: &[Box<dyn Side>]) {
        for turn in 0..sides.len() {
            let which = (number + turn) % sides.len();
            let entry = &mut self.entries[which];
            let Some(setting) = entry.setting.filter(|_| entry.out.is_none()) else { continue };
            match sides[which].measure(&self.row, &setting) {
                Ok(figure) => entry.figures.push(figure),
                Err(_) if children::interrupted() => return,
                Err(error) => entry.out = Some(error.into()),
            }
        }
    }

    /// Returns `true` if Carrack cannot run the row, so that no side is measured.
    fn is_skipped(&self) -> bool {
        let cannot = |ours: &Entry| matches!(ours.out, Some(Out::Cannot(_)));
        self.row.op != Op::Memcpy && self.of(Role::Ours).is_some_and(cannot)
    }

    /// Returns the number of rounds that were measured.
    pub(super) fn rounds(&self) -> usize {
        self.entries.iter().map(|entry| entry.figures.len()).max().unwrap_or(0)
    }

    /// Returns the first entry in a role. There is none of ours if only peers are measured.
    pub(super) fn of(&self, role: Role) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.role == role)
    }

    /// Returns the peer with the better median, if any has one.
    pub(super) fn better_peer(&self) -> Option<&Entry> {
        let peers = self.entries.iter().filter(|entry| entry.role == Role::Peer);
        let medians = peers.filter_map(|entry| Some((entry.median()?, entry)));
        let prefers = |next: f64, best| self.row.test.prefers(next, best);
        Some(medians.reduce(|best, next| if prefers(next.0, best.0) { next } else { best })?.1)
    }
}

impl Entry {
    pub(super) fn new(side: &'static str, role: Role) -> Self {
        Self { side, role, test: None, setting: None, figures: Vec::new(), out: None }
    }

    /// Returns the median of the rounds' values.
    pub(super) fn median(&self) -> Option<f64> {
        median(self.figures.iter().map(|figure| figure.value))
    }

    /// Returns the median of the rounds' averages.
    pub(super) fn average(&self) -> Option<f64> {
        median(self.figures.iter().filter_map(|figure| figure.average))
    }
}

/// Returns the middle of the values, or the mean of the two in the middle; `None` of none.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.len().checked_sub(1)? / 2, sorted.len() / 2);
    Some((sorted[low] + sorted[high]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::super::side::Variant;
    use super::*;
    use crate::error::TaskError;

    /// A side that answers as it is told.
    struct Told {
        name: &'static str,
        role: Role,
        can: bool,
        value: Option<f64>,
    }

    const PLAIN: Variant = Variant { name: "", env: &[] };

    impl Side for Told {
        fn name(&self) -> &'static str {
            self.name
        }

        fn version(&self) -> String {
            self.name.into()
        }

        fn role(&self) -> Role {
            self.role
        }

        fn prepare(&self, _: &Row) -> Result<Setting, Out> {
            let setting = Setting { variant: &PLAIN, iterations: 1 };
            if self.can { Ok(setting) } else { Out::cannot("not yet") }
        }

        fn measure(&self, _: &Row, _: &Setting) -> Result<Figure, TaskError> {
            let hung = || children::ChildError::TimedOut {
                command: self.name.into(),
                limit: std::time::Duration::ZERO,
                said: String::new(),
            };
            Ok(self.value.map(Figure::plain).ok_or_else(hung)?)
        }
    }

    fn sides(can: bool, values: [Option<f64>; 3]) -> Vec<Box<dyn Side>> {
        let names = ["carrack", "UCX", "MPICH"];
        let told = names.into_iter().zip(values).map(|(name, value)| -> Box<dyn Side> {
            let role = if name == "carrack" { Role::Ours } else { Role::Peer };
            Box::new(Told { name, role, can: can || role == Role::Peer, value })
        });
        told.collect()
    }

    fn measured(row: &str, can: bool, values: [Option<f64>; 3]) -> Measured {
        let sides = sides(can, values);
        let mut measured = Measured::prepare(row.parse().unwrap(), &sides);
        (0..2).for_each(|number| measured.round(number, &sides));
        measured
    }

    #[test]
    fn the_better_peer_has_the_lower_latency_or_the_higher_rate() {
        let better =
            |row, values| measured(row, true, values).better_peer().map(|entry| entry.side);
        let values = [Some(1.0), Some(2.0), Some(3.0)];
        assert_eq!(better("send:latency:8", values), Some("UCX"));
        assert_eq!(better("send:rate:8", values), Some("MPICH"));
        assert_eq!(better("send:bandwidth:8", values), Some("MPICH"));
        assert_eq!(better("send:rate:8", [Some(1.0), Some(2.0), None]), Some("UCX"));
        assert_eq!(better("send:rate:8", [Some(1.0), None, None]), None);
    }

    #[test]
    fn a_side_that_hangs_is_out_and_the_others_go_on() {
        let measured = measured("send:latency:8", true, [Some(1.0), None, Some(3.0)]);
        assert!(matches!(&measured.entries[1].out, Some(Out::Failed(why)) if why.contains("UCX")));
        let rounds: Vec<usize> = measured.entries.iter().map(|entry| entry.figures.len()).collect();
        assert_eq!(rounds, [2, 0, 2]);
    }

    #[test]
    fn a_row_that_carrack_cannot_do_is_skipped_by_all() {
        let measured = measured("send:latency:1M", false, [Some(1.0); 3]);
        assert!(measured.is_skipped() && measured.better_peer().is_none());
        assert_eq!(measured.of(Role::Ours).unwrap().out, Some(Out::Cannot("not yet".into())));
        assert!(measured.entries[1..].iter().all(|entry| entry.out == Some(Out::Skipped)));
    }

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_both_middles() {
        assert_eq!(median([3.0, 1.0, 100.0]), Some(3.0));
        assert_eq!(median([4.0, 1.0, 2.0, 100.0]), Some(3.0));
        assert_eq!(median([]), None);
    }
}
