//! What is measured: the rows of the table.

use std::fmt;
use std::str::FromStr;

use serde::{Serialize, Serializer};

/// A row: an operation, what is measured of it, and the size of its messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) op: Op,
    pub(super) test: Test,
    /// Bytes of a message.
    pub(super) size: usize,
}

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Op {
    /// Active messages.
    Am,
    /// Messages that are matched by receives.
    Send,
    /// Puts into mapped memory.
    Put,
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Test {
    /// One way, in microseconds: the median of all messages, since all sides have it and a thread that loses its
    /// core for a moment does not move it. UCX prints it in steps of about 5 ns; the averages stand beside it.
    Latency,
    /// 10⁹ bytes a second: the average of the whole run on all sides.
    Bandwidth,
    /// 10⁶ messages a second: the average of the whole run on all sides.
    Rate,
}

/// What is measured when no rows are asked for.
pub(super) const ROWS: &[Row] = &[
    Row { op: Op::Am, test: Test::Latency, size: 8 },
    Row { op: Op::Am, test: Test::Rate, size: 8 },
    Row { op: Op::Send, test: Test::Latency, size: 8 },
    Row { op: Op::Send, test: Test::Rate, size: 8 },
    Row { op: Op::Send, test: Test::Latency, size: 4 << 10 },
    Row { op: Op::Send, test: Test::Latency, size: 64 << 10 },
    Row { op: Op::Send, test: Test::Latency, size: 1 << 20 },
    Row { op: Op::Send, test: Test::Bandwidth, size: 64 << 10 },
    Row { op: Op::Send, test: Test::Bandwidth, size: 1 << 20 },
    Row { op: Op::Send, test: Test::Bandwidth, size: 4 << 20 },
    Row { op: Op::Put, test: Test::Rate, size: 8 },
    Row { op: Op::Put, test: Test::Bandwidth, size: 1 << 20 },
];

/// The longest message of a row: what `mpi_bench` allows.
const LONGEST: usize = 1 << 30;

impl Op {
    /// As `carrack perf --op` knows it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Am => "am",
            Self::Send => "send",
            Self::Put => "put",
        }
    }
}

impl Test {
    /// As `carrack perf` knows it, and `mpi_bench`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Bandwidth => "bandwidth",
            Self::Rate => "rate",
        }
    }

    /// The unit of its figures.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Latency => "us",
            Self::Bandwidth => "GB/s",
            Self::Rate => "M/s",
        }
    }

    /// Whether the lower of two figures is the better one.
    pub(super) fn lower_is_better(self) -> bool {
        self == Self::Latency
    }

    /// Whether `one` is better than `other`.
    pub(super) fn prefers(self, one: f64, other: f64) -> bool {
        if self.lower_is_better() { one < other } else { one > other }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, unit) = match self.size {
            size if size > 0 && size % (1 << 20) == 0 => (size >> 20, "MiB"),
            size if size > 0 && size % (1 << 10) == 0 => (size >> 10, "KiB"),
            size => (size, "B"),
        };
        // Through a string, so that the table can ask for a width.
        f.pad(&format!("{} {}, {size} {unit}", self.op.name(), self.test.name()))
    }
}

impl Serialize for Test {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl Serialize for Op {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl FromStr for Row {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let words: Vec<&str> = text.trim().split(':').collect();
        let [op, test, size] = words[..] else {
            return Err("expected OP:TEST:SIZE, for example send:latency:4K".into());
        };
        let op = [Op::Am, Op::Send, Op::Put].into_iter().find(|known| known.name() == op);
        let test =
            [Test::Latency, Test::Bandwidth, Test::Rate].into_iter().find(|known| known.name() == test);
        Ok(Self {
            op: op.ok_or("the operations are am and send")?,
            test: test.ok_or("the tests are latency, bandwidth and rate")?,
            size: bytes(size).ok_or("a size is from 1 to 1024M, for example 8, 64K or 1M")?,
        })
    }
}

fn bytes(text: &str) -> Option<usize> {
    let (digits, shift) = match text.strip_suffix(['K', 'k']) {
        Some(digits) => (digits, 10),
        None => text.strip_suffix(['M', 'm']).map_or((text, 0), |digits| (digits, 20)),
    };
    let count: usize = digits.parse().ok()?;
    count.checked_mul(1 << shift).filter(|bytes| (1..=LONGEST).contains(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_read_from_its_three_words_and_shown_with_its_unit() {
        let row: Row = "send:bandwidth:64K".parse().unwrap();
        assert_eq!(row, Row { op: Op::Send, test: Test::Bandwidth, size: 65536 });
        assert_eq!(row.to_string(), "send bandwidth, 64 KiB");
        assert_eq!("am:rate:8".parse::<Row>().unwrap().to_string(), "am rate, 8 B");
        assert_eq!("send:latency:1M".parse::<Row>().unwrap().to_string(), "send latency, 1 MiB");
    }

    #[test]
    fn what_is_no_row_is_refused() {
        for wrong in
            ["", "am", "am:rate", "get:rate:8", "am:jitter:8", "am:rate:0", "am:rate:2048M", "am:rate:x"]
        {
            assert!(wrong.parse::<Row>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn short_latencies_and_high_rates_are_better() {
        assert!(Test::Latency.prefers(1.0, 2.0) && !Test::Latency.prefers(2.0, 1.0));
        assert!(Test::Rate.prefers(2.0, 1.0) && !Test::Bandwidth.prefers(1.0, 2.0));
    }
}
