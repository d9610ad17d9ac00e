//! An SVG of the distribution of latencies: each point's percentiles over the number of nines.

use super::{Axis, Curve, chart, name, ranges, write};
use crate::perf::error::PerfError;
use crate::perf::figures::Latency;
use crate::perf::record::Record;
use crate::perf::table::size_in_words;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::*;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Percentiles and their places: minus the logarithm of the share of longer latencies, so that
/// nines are equally spaced. The maximum has no such place, and stands behind them.
const PLACES: [(f64, &str); 6] = [
    (std::f64::consts::LOG10_2, "p50"),
    (1.0, "p90"),
    (2.0, "p99"),
    (3.0, "p99.9"),
    (4.0, "p99.99"),
    (5.0, "max"),
];

/// Draws the percentiles of all latencies.
pub(in crate::perf) fn draw(path: &Path, records: &[Record]) -> Result<(), PerfError> {
    let curves = curves(records);
    let caption = format!("Percentiles of latency ({})", super::about(records));
    write(path, |area| {
        area.fill(&WHITE)?;
        let (_, up) = ranges(&curves);
        let across = Axis { unit: "percentile", label: &label };
        chart(area, &caption, &across, "latency (µs)", (Nines, up.log_scale()), &curves)
    })
}

/// The curves, by operation, threads and size.
fn curves(records: &[Record]) -> BTreeMap<String, Curve> {
    let of = |record: &Record| {
        let Latency { p50, p90, p99, p999, p9999, max, .. } = record.latency_us?;
        let figures = [p50, p90, p99, p999, p9999, max];
        let curve =
            PLACES.iter().zip(figures).map(|((place, _), figure)| (*place, figure)).collect();
        let size = if record.size > 0 {
            format!(", {}", size_in_words(record.size))
        } else {
            String::new()
        };
        Some((name(record) + &size, curve))
    };
    records.iter().filter_map(of).collect()
}

/// The name of the percentile at this place.
fn label(place: &f64) -> String {
    let near = |known: &&(f64, &str)| (known.0 - place).abs() < 0.01;
    PLACES.iter().find(near).map(|(_, name)| (*name).to_owned()).unwrap_or_default()
}

/// The axis: it has its marks where percentiles are.
struct Nines;

impl Ranged for Nines {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        let Range { start, end } = self.range();
        from + (f64::from(to - from) * (value - start) / (end - start)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        PLACES.map(|(place, _)| place).to_vec()
    }

    fn range(&self) -> Range<f64> {
        0.1..5.2
    }
}

impl ValueFormatter<f64> for Nines {
    fn format(value: &f64) -> String {
        label(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_percentile_stands_at_its_number_of_nines() {
        let parts = [0.5, 0.9, 0.99, 0.999, 0.9999_f64];
        for (part, (place, name)) in parts.iter().zip(PLACES) {
            assert!((place + (1.0 - part).log10()).abs() < 1e-9, "{name}");
            assert_eq!(label(&place), name);
        }
        let at = PLACES.map(|(place, _)| Nines.map(&place, (0, 510)));
        assert_eq!(at, [20, 90, 190, 290, 390, 490]);
    }
}
