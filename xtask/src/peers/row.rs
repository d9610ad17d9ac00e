//! The rows of the table of measurements.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use serde::Serialize;

/// A row: an operation, what is measured of it, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Row {
    pub(super) op: Op,
    pub(super) test: Test,
    /// Bytes of a message; 0 for a barrier.
    pub(super) size: usize,
    /// Ranks: two, except for a barrier.
    pub(super) ranks: usize,
    /// Threads of each rank, each with a partner at the other one.
    pub(super) threads: usize,
    /// `true` if the threads of a rank share one device, instead of having one each.
    pub(super) shared: bool,
    /// `true` for memory of GPUs: rank 0's of the first, rank 1's of the second, if there is one.
    pub(super) gpu: bool,
    /// `true` for two nodes, between which there is TCP.
    pub(super) tcp: bool,
    /// `true` if threads sleep while they wait, instead of polling.
    pub(super) asleep: bool,
    /// `true` if Carrack's small copies go to its resident copier. Peers are unaffected.
    pub(super) copier: bool,
}

/// An operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(super) enum Op {
    /// Active messages.
    Am,
    /// Messages that are matched by receives.
    Send,
    /// Puts into mapped memory.
    Put,
    /// Puts without a notification: the receiver polls its memory.
    PutSeen,
    /// Gets from mapped memory.
    Get,
    /// Additions to a word of mapped memory.
    FetchAdd,
    /// Barriers of all ranks.
    Barrier,
    /// No communication: what one thread copies, for comparison.
    Memcpy,
}

/// A measured quantity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(super) enum Test {
    /// Time of a message one way, or of another operation until it ends, in microseconds. It is the
    /// median, since all sides have it and a thread that loses its core for a moment does not move
    /// it. UCX prints it in steps of about 5 ns; the averages are printed next to it.
    Latency,
    /// 10⁹ bytes a second: the average of the whole run on all sides.
    Bandwidth,
    /// 10⁶ messages a second: the average of the whole run on all sides.
    Rate,
}

/// The default rows. 64 bytes take several slots of a ring, and 512 a chunk.
pub(super) const ROWS: &str = "am:latency:8 am:rate:8 am:latency:64 am:latency:512 \
    send:latency:8 send:rate:8 send:latency:64 send:rate:64 send:latency:512 send:latency:4K \
    send:latency:64K send:latency:1M send:bandwidth:64K send:bandwidth:1M send:bandwidth:4M \
    put:rate:8 put:bandwidth:64K put:bandwidth:1M put:bandwidth:4M get:latency:8 \
    get:bandwidth:1M fetch_add:latency:8 fetch_add:rate:8 barrier:latency:2 barrier:latency:4 \
    barrier:latency:8 am:rate:8@2 am:rate:8@4 am:rate:8@8 shared:am:rate:8@8";

/// The rows of `--gpu`.
pub(super) const GPU_ROWS: &str = "gpu:send:latency:8 gpu:send:bandwidth:16M \
    gpu:send:bandwidth:256M gpu:put:latency:8 gpu:put:rate:8 gpu:put:bandwidth:16M \
    gpu:put:bandwidth:256M gpu:get:latency:8 gpu:get:bandwidth:16M gpu:get:bandwidth:256M \
    gpu:copier:send:latency:8 gpu:copier:put:latency:8 gpu:copier:put:latency:1K";

/// The rows of `--tcp`.
pub(super) const TCP_ROWS: &str = "tcp:am:latency:8 tcp:am:rate:8 tcp:send:latency:8 \
    tcp:send:rate:8 tcp:send:bandwidth:1M tcp:send:bandwidth:16M tcp:asleep:send:latency:8";

/// Reads rows of this file, with spaces between them.
pub(super) fn read(rows: &str) -> Vec<Row> {
    rows.split_whitespace().filter_map(|row| row.parse().ok()).collect()
}

/// The longest message of a row, and the most threads or ranks: what `mpi_bench` allows.
const LONGEST: usize = 1 << 30;
const MOST: usize = 64;

/// Returns these rows, and in front of those of several threads the ones that they are compared
/// with.
pub(super) fn with_one_thread(rows: &[Row]) -> Vec<Row> {
    let mut all: Vec<Row> = Vec::new();
    for row in rows {
        all.extend(row.of_one_thread().filter(|one| !rows.contains(one) && !all.contains(one)));
        all.push(*row);
    }
    all
}

impl Row {
    /// Returns the number of cores that it takes: one for each thread.
    pub(super) fn cores(&self) -> usize {
        if self.op == Op::Memcpy { 1 } else { self.ranks * self.threads }
    }

    /// Returns the same row with one thread, which a row of several is compared with.
    pub(super) fn of_one_thread(&self) -> Option<Self> {
        (self.threads > 1).then_some(Self { threads: 1, shared: false, ..*self })
    }

    /// Returns `true` if threads of one process could as well be processes.
    pub(super) fn is_of_apart_threads(&self) -> bool {
        self.threads > 1 && !self.shared && !self.gpu && !self.tcp && self.test != Test::Latency
    }

    /// Returns `true` if one copy of that size, by a thread or the GPU's engine, is the bound.
    pub(super) fn is_a_copy(&self) -> bool {
        self.gpu
            || matches!(self.op, Op::Put | Op::Get | Op::Memcpy)
                && self.test == Test::Bandwidth
                && self.threads == 1
    }
}

/// Returns the name of an operation or a test, as `carrack perf`, `mpi_bench` and JSON have it.
pub(super) fn name(of: impl ValueEnum) -> String {
    of.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

impl Op {
    /// Returns the one-way trips in one timed step of a latency.
    pub(super) fn ways(self) -> f64 {
        if matches!(self, Self::Am | Self::Send | Self::Put | Self::PutSeen) { 2.0 } else { 1.0 }
    }

    /// Returns the tests that the operation has.
    fn tests(self) -> &'static [Test] {
        match self {
            Self::Am | Self::Send | Self::Put | Self::Get => {
                &[Test::Latency, Test::Bandwidth, Test::Rate]
            }
            Self::FetchAdd => &[Test::Latency, Test::Rate],
            Self::Barrier | Self::PutSeen => &[Test::Latency],
            Self::Memcpy => &[Test::Bandwidth],
        }
    }
}

impl Test {
    /// Returns the unit of the test's figures.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Latency => "us",
            Self::Bandwidth => "GB/s",
            Self::Rate => "M/s",
        }
    }

    /// Returns `true` if lower figures are better.
    pub(super) fn lower_is_better(self) -> bool {
        self == Self::Latency
    }

    /// Returns `true` if `one` is better than `other`.
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
        let Self { op, test, ranks, threads, shared, gpu, tcp, asleep, copier, .. } = self;
        let of = match (op, threads) {
            (Op::Barrier, _) => format!("{ranks} ranks"),
            (_, 1) => format!("{size} {unit}"),
            (_, threads) => format!("{size} {unit}, {threads} threads"),
        };
        let shared = if *shared { ", 1 device" } else { "" };
        let how = [(gpu, "GPU "), (tcp, "TCP "), (copier, "copier "), (asleep, "asleep ")];
        let how: String = how.iter().filter(|(is_so, _)| **is_so).map(|(_, word)| *word).collect();
        // Through a string, so that the table can ask for a width.
        f.pad(&format!("{how}{} {}, {of}{shared}", name(*op), name(*test)))
    }
}

impl FromStr for Row {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let prefix = |prefix, text: &mut &str| match text.strip_prefix(prefix) {
            Some(rest) => std::mem::replace(text, rest) != rest,
            None => false,
        };
        let rest = &mut text.trim();
        let [shared, tcp, asleep, gpu, copier] =
            ["shared:", "tcp:", "asleep:", "gpu:", "copier:"].map(|it| prefix(it, rest));
        if copier && !gpu {
            return Err("the copier is for memory of GPUs: write gpu:copier:put:latency:8".into());
        }
        let words: Vec<&str> = rest.split(':').collect();
        let [op, test, size] = words[..] else {
            return Err("expected OP:TEST:SIZE, for example send:latency:4K or am:rate:8@4".into());
        };
        let ops = "the operations are am, send, put, put_seen, get, fetch_add, barrier and memcpy";
        let op = Op::from_str(op, false).map_err(|_| ops)?;
        let test = op.tests().iter().copied().find(|known| name(*known) == test);
        let test = test.ok_or_else(|| {
            let tests: Vec<_> = op.tests().iter().map(|test| name(*test)).collect();
            format!("the tests of {} are: {}", name(op), tests.join(", "))
        })?;
        let (size, threads) = size.split_once('@').unwrap_or((size, "1"));
        let number = |text: &str, least| text.parse().ok().filter(|it| (least..=MOST).contains(it));
        let threads = number(threads, 1).ok_or("threads are from 1 to 64, for example 8@4")?;
        if threads > 1 && (test == Test::Latency || op == Op::Memcpy) {
            return Err("several threads have rates and bandwidths of communication only".into());
        }
        if shared && threads == 1 {
            return Err("one thread has no other to share with: write shared:am:rate:8@4".into());
        }
        if gpu && (threads > 1 || !matches!(op, Op::Am | Op::Send | Op::Put | Op::Get)) {
            return Err("with memory of GPUs one thread a rank sends, puts or gets, for example \
                gpu:send:bandwidth:16M"
                .into());
        }
        if tcp && (threads > 1 || gpu || !matches!(op, Op::Am | Op::Send)) {
            return Err("over TCP one thread a rank sends host memory, for example \
                tcp:send:latency:8"
                .into());
        }
        if asleep && (!tcp || test != Test::Latency) {
            return Err("the latency over TCP is measured asleep: tcp:asleep:send:latency:8".into());
        }
        let row = Self { op, test, size: 0, ranks: 2, threads, shared, gpu, tcp, asleep, copier };
        if op == Op::Barrier {
            let ranks =
                number(size, 2).ok_or("a barrier is of 2 to 64 ranks: barrier:latency:4")?;
            return Ok(Self { ranks, ..row });
        }
        let size = bytes(size).ok_or("a size is from 1 to 1024M, for example 8, 64K or 1M")?;
        if op == Op::FetchAdd && size != 8 {
            return Err("a fetch_add is of 8 bytes".into());
        }
        Ok(Self { size, ..row })
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
        assert_eq!((row.op, row.test, row.size), (Op::Send, Test::Bandwidth, 65536));
        assert_eq!((row.ranks, row.threads, row.shared, row.gpu), (2, 1, false, false));
        assert_eq!(row.to_string(), "send bandwidth, 64 KiB");
        assert_eq!("am:rate:8".parse::<Row>().unwrap().to_string(), "am rate, 8 B");
        assert_eq!("send:latency:1M".parse::<Row>().unwrap().to_string(), "send latency, 1 MiB");
    }

    #[test]
    fn rows_of_gpus_say_so_and_are_of_one_thread() {
        let row: Row = "gpu:put:bandwidth:16M".parse().unwrap();
        assert!(row.gpu && !row.copier && row.size == 16 << 20);
        assert_eq!(row.to_string(), "GPU put bandwidth, 16 MiB");
        assert!("gpu:send:latency:8".parse::<Row>().unwrap().is_a_copy());
        let row: Row = "gpu:copier:put:latency:8".parse().unwrap();
        assert!(row.gpu && row.copier);
        assert_eq!(row.to_string(), "GPU copier put latency, 8 B");
        for wrong in [
            "gpu:barrier:latency:2",
            "gpu:put:rate:8@2",
            "gpu:memcpy:bandwidth:8",
            "gpu:fetch_add:latency:8",
            "copier:put:latency:8",
            "tcp:put:latency:8",
            "tcp:gpu:send:latency:8",
            "tcp:am:rate:8@2",
            "asleep:send:latency:8",
            "tcp:asleep:send:rate:8",
        ] {
            assert!(wrong.parse::<Row>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn ranks_of_a_barrier_and_threads_stand_where_they_say_how_much_it_takes() {
        let row = |text: &str| text.parse::<Row>().unwrap();
        let barrier = row("barrier:latency:4");
        assert_eq!((barrier.size, barrier.ranks, barrier.cores()), (0, 4, 4));
        let threads = row("am:rate:8@4");
        assert_eq!((threads.threads, threads.shared, threads.cores()), (4, false, 8));
        assert_eq!(threads.to_string(), "am rate, 8 B, 4 threads");
        let shared = row("shared:put:rate:8@2");
        assert_eq!((shared.threads, shared.shared), (2, true));
        assert_eq!(shared.of_one_thread(), Some(row("put:rate:8")));
        assert_eq!(row("put:rate:8").of_one_thread(), None);
        assert!(threads.is_of_apart_threads() && !shared.is_of_apart_threads());
        assert_eq!(with_one_thread(&[threads, threads]), [row("am:rate:8"), threads, threads]);
        assert_eq!(with_one_thread(&[shared, row("put:rate:8")]), [shared, row("put:rate:8")]);
        assert!(row("put:bandwidth:1M").is_a_copy() && !row("send:bandwidth:1M").is_a_copy());
    }

    #[test]
    fn the_rows_that_are_measured_by_default_are_rows_each_once() {
        for (rows, count) in [(ROWS, 30), (GPU_ROWS, 13), (TCP_ROWS, 7)] {
            let rows = read(rows);
            let shown: std::collections::BTreeSet<_> = rows.iter().map(Row::to_string).collect();
            assert_eq!((rows.len(), shown.len()), (count, count));
        }
    }

    #[test]
    fn what_is_no_row_is_refused() {
        for wrong in [
            "",
            "am",
            "am:rate",
            "scatter:rate:8",
            "am:jitter:8",
            "am:rate:0",
            "am:rate:2048M",
            "am:rate:x",
            "barrier:rate:4",
            "barrier:latency:1",
            "fetch_add:rate:16",
            "fetch_add:bandwidth:8",
            "am:rate:8@0",
            "am:latency:8@2",
            "shared:am:rate:8",
            "memcpy:bandwidth:1M@2",
        ] {
            assert!(wrong.parse::<Row>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn short_latencies_and_high_rates_are_better() {
        assert!(Test::Latency.prefers(1.0, 2.0) && !Test::Latency.prefers(2.0, 1.0));
        assert!(Test::Rate.prefers(2.0, 1.0) && !Test::Bandwidth.prefers(1.0, 2.0));
    }
}
