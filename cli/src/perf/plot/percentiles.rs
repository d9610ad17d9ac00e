//! An SVG of the distribution of latencies: each point's percentiles over the number of nines.

use super::{Axis, Curve, Marks, chart, name, ranges, write};
use crate::perf::error::PerfError;
use crate::perf::figures::Latency;
use crate::perf::record::{Record, size_in_words};
use plotters::prelude::*;
use std::collections::BTreeMap;
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
        chart(area, &caption, &across, "latency (µs)", (nines(), up.log_scale()), &curves)
    })
}

/// Returns the curves, by operation, threads and size.
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

/// Returns the name of the percentile at this place.
fn label(place: &f64) -> String {
    let near = |known: &&(f64, &str)| (known.0 - place).abs() < 0.01;
    PLACES.iter().find(near).map(|(_, name)| (*name).to_owned()).unwrap_or_default()
}

/// Returns the axis, with its marks where percentiles are.
fn nines() -> Marks {
    Marks(0.1..5.2, PLACES.map(|(place, _)| place).to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use plotters::coord::ranged1d::Ranged;

    #[test]
    fn each_percentile_stands_at_its_number_of_nines() {
        let parts = [0.5, 0.9, 0.99, 0.999, 0.9999_f64];
        for (part, (place, name)) in parts.iter().zip(PLACES) {
            assert!((place + (1.0 - part).log10()).abs() < 1e-9, "{name}");
            assert_eq!(label(&place), name);
        }
        let at = PLACES.map(|(place, _)| nines().map(&place, (0, 510)));
        assert_eq!(at, [20, 90, 190, 290, 390, 490]);
    }
}
