//! Results as rows for people.

use super::record::Record;

/// The names of the columns, with their units.
pub(super) fn heading() -> String {
    format!(
        "{:<9} {:<10} {:>8} {:>7} | {:>8} {:>8} {:>8} {:>9} | {:>9} {:>9}",
        "op", "test", "size", "threads", "min µs", "p50 µs", "p99 µs", "max µs", "GB/s", "M msg/s"
    )
}

/// A result's row. What does not apply is a dash.
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

/// A size in the largest unit of which it is a whole number: `4 KiB`, `100 B`.
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
