//! What is compared with what.

use crate::error::TaskError;
use crate::peers::carrack::Carrack;
use crate::peers::ucx::{Tuned, Ucx};

/// A test that both sides have.
#[derive(Debug)]
pub(super) struct Test {
    pub(super) name: &'static str,
    pub(super) quantity: Quantity,
    /// Bytes of a message.
    pub(super) size: usize,
    /// The words after `carrack perf`.
    pub(super) carrack: &'static [&'static str],
    /// The name after `ucx_perftest -t`.
    pub(super) ucx: &'static str,
}

/// What a test measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quantity {
    /// One way, in microseconds: the median of all messages, since both sides have it and a thread that loses its
    /// core for a moment does not move it. UCX prints it in steps of about 5 ns; the averages stand beside it.
    Latency,
    /// Messages a second: the average of the whole run on both sides.
    Rate,
}

/// All tests.
pub(super) const TESTS: &[Test] = &[
    Test {
        name: "am latency, 8 B",
        quantity: Quantity::Latency,
        size: 8,
        carrack: &["latency", "--op", "am"],
        ucx: "ucp_am_lat",
    },
    Test {
        name: "am rate, 8 B",
        quantity: Quantity::Rate,
        size: 8,
        carrack: &["rate", "--op", "am"],
        ucx: "ucp_am_bw",
    },
    Test {
        name: "send latency, 8 B",
        quantity: Quantity::Latency,
        size: 8,
        carrack: &["latency", "--op", "send"],
        ucx: "tag_lat",
    },
];

/// What one run of one side gave.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Figure {
    /// In the unit of the test's quantity.
    pub(super) value: f64,
    /// The average, of a latency whose side prints one; in the same unit.
    pub(super) average: Option<f64>,
}

/// A test with what its rounds gave so far.
#[derive(Debug)]
pub(super) struct Measured {
    pub(super) test: &'static Test,
    pub(super) tuned: Tuned,
    pub(super) carrack: Vec<Figure>,
    pub(super) ucx: Vec<Figure>,
}

impl Measured {
    pub(super) fn new(test: &'static Test, tuned: Tuned) -> Self {
        Self { test, tuned, carrack: Vec::new(), ucx: Vec::new() }
    }

    /// One run of each side. Who goes first changes from round to round, in case the machine warms up or slows down.
    pub(super) fn round(
        &mut self,
        carrack_first: bool,
        carrack: Option<&Carrack>,
        ucx: &Ucx,
    ) -> Result<(), TaskError> {
        for carracks_turn in [carrack_first, !carrack_first] {
            if !carracks_turn {
                self.ucx.push(ucx.measure(self.test, &self.tuned)?);
            } else if let Some(carrack) = carrack {
                self.carrack.push(carrack.measure(self.test)?);
            }
        }
        Ok(())
    }
}

/// The middle of the values, or the mean of the two in the middle; nothing of none.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.len().checked_sub(1)? / 2, sorted.len() / 2);
    Some((sorted[low] + sorted[high]) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle_or_the_mean_of_both_middles() {
        assert_eq!(median([3.0, 1.0, 100.0]), Some(3.0));
        assert_eq!(median([4.0, 1.0, 2.0, 100.0]), Some(3.0));
        assert_eq!(median([]), None);
    }
}
