//! A point's result: as a line of JSON, and as a row for people.

use super::figures::{Figures, Latency};
use super::plan::Point;
use serde::Serialize;

/// A point's result: what `--json` prints on a line of its own. The help of `perf` says what the
/// fields mean.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Record {
    pub(super) op: &'static str,
    pub(super) test: &'static str,
    pub(super) size: usize,
    pub(super) pieces: usize,
    pub(super) threads: usize,
    #[serde(flatten)]
    pub(super) conditions: Conditions,
    pub(super) messages: u64,
    pub(super) latency_us: Option<Latency>,
    pub(super) bandwidth_gbps: Option<f64>,
    pub(super) rate_mps: Option<f64>,
}

/// Conditions of all points of a run.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Conditions {
    pub(super) ranks: u32,
    /// `own` if threads have a device each, else `shared`.
    pub(super) device: &'static str,
    pub(super) transport: &'static str,
    pub(super) mem: String,
    pub(super) peer_mem: String,
}

impl Conditions {
    /// Describes the memory of both sides in words.
    pub(super) fn memory(&self) -> String {
        let Self { mem, peer_mem, .. } = self;
        if mem == peer_mem {
            format!("{mem} memory")
        } else {
            format!("{mem} to {peer_mem} memory")
        }
    }
}

impl Record {
    /// Puts it together.
    pub(super) fn new(
        point: Point,
        conditions: Conditions,
        messages: u64,
        figures: Figures,
    ) -> Self {
        let Point { op, test, size, threads, pieces } = point;
        let Figures { latency: latency_us, rate, .. } = figures;
        Self {
            op: op.name(),
            test: test.name(),
            size,
            pieces,
            threads,
            conditions,
            messages,
            latency_us,
            bandwidth_gbps: rate.map(|rate| rate * size as f64 / 1e9),
            rate_mps: rate.map(|rate| rate / 1e6),
        }
    }
}

/// Returns the names of the columns, with their units.
pub(super) fn heading() -> String {
    format!(
        "{:<9} {:<10} {:>8} {:>7} | {:>8} {:>8} {:>8} {:>9} | {:>9} {:>9}",
        "op", "test", "size", "threads", "min µs", "p50 µs", "p99 µs", "max µs", "GB/s", "M msg/s"
    )
}

/// Returns the row of a result. A value that does not apply is a dash.
pub(super) fn row(record: &Record) -> String {
    let [min, p50, p99, max] = match record.latency_us {
        Some(us) => [us.min, us.p50, us.p99, us.max].map(|us| format!("{us:.3}")),
        None => [const { String::new() }; 4].map(|_| "-".to_owned()),
    };
    let or_dash =
        |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
    let (bandwidth, rate) = (or_dash(record.bandwidth_gbps), or_dash(record.rate_mps));
    let Record { op, test, threads, .. } = record;
    let size = size_in_words(record.size);
    format!(
        "{op:<9} {test:<10} {size:>8} {threads:>7} | {min:>8} {p50:>8} {p99:>8} {max:>9} | \
        {bandwidth:>9} {rate:>9}"
    )
}

/// Formats a size in the largest unit of which it is a whole number: `4 KiB`, `100 B`.
pub(super) fn size_in_words(size: usize) -> String {
    let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
    match units.iter().find(|(unit, _)| size >= *unit && size.is_multiple_of(*unit)) {
        Some((unit, name)) => format!("{} {name}", size / unit),
        None => format!("{size} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_given_in_the_largest_unit_that_needs_no_fraction() {
        for (size, words) in
            [(0, "0 B"), (8, "8 B"), (1024, "1 KiB"), (1025, "1025 B"), (3 << 20, "3 MiB")]
        {
            assert_eq!(size_in_words(size), words);
        }
    }
}
