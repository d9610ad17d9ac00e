//! The table of benchmarks: one row for each operation of `--op`.

use super::am::AmLine;
use super::copy::Copying;
use super::error::PerfError;
use super::fetch::Fetch;
use super::figures::Measured;
use super::options::Op;
use super::plan::Test;
use super::put::{PutLine, SeenLine};
use super::round::Round;
use super::seat::Seat;
use super::send::SendLine;
use super::sides::{Kind, Sides};
use super::window::Window;
use super::{batch, check, copy, stream};

/// A benchmark.
///
/// `round` and `check` are called once a round and once a point.
/// The loop inside `round` is compiled for its operation.
pub(super) struct Benchmark {
    pub(super) op: Op,
    /// Name on the command line and in the results.
    pub(super) name: &'static str,
    /// Line of the command's help.
    pub(super) help: &'static str,
    /// Tests that apply.
    pub(super) tests: &'static [Test],
    pub(super) sizes: Sizes,
    pub(super) reach: Reach,
    pub(super) needs: Needs,
    /// `true` if `--pieces` applies.
    pub(super) has_pieces: bool,
    /// Measures one round on one seat.
    pub(super) round: fn(&Round<'_>, &Seat) -> Result<Measured, PerfError>,
    /// Compares a payload made of the seed on one seat.
    pub(super) check: fn(&Round<'_>, &Seat, u64) -> Result<(), PerfError>,
}

/// Sizes of a benchmark's points.
#[derive(Clone, Copy)]
pub(super) enum Sizes {
    /// `--size`, or the defaults of the test.
    Asked,
    /// `--size`, or this size.
    AskedOr(&'static [usize]),
    /// This size, independent of `--size`.
    Fixed(&'static [usize]),
}

/// Direction of a benchmark's bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// Messages between both ranks.
    Messages,
    /// Operations of rank 0 on memory of rank 1, and puts both ways.
    RemoteMemory,
    /// An operation of all ranks, without a seat.
    AllRanks,
    /// Copies within rank 0.
    WithinRank,
}

/// Memory that a benchmark requires.
#[derive(Clone, Copy)]
pub(super) enum Needs {
    Anything,
    /// Rank 1's memory is accessible to CPUs.
    WordOfCpu,
    /// Both ranks have host memory.
    Host,
}

impl Needs {
    /// Returns `true` if the benchmark runs on this memory.
    pub(super) fn accepts(self, sides: Sides) -> bool {
        match self {
            Self::Anything => true,
            Self::WordOfCpu => !matches!(sides.others, Kind::Device(_)),
            Self::Host => sides.are_host(),
        }
    }
}

const ALL: &[Test] = &[Test::Latency, Test::Bandwidth, Test::Rate];

/// Defaults of a row: each row names what differs.
const MESSAGES: Benchmark = Benchmark {
    op: Op::Am,
    name: "am",
    help: "Active messages",
    tests: ALL,
    sizes: Sizes::Asked,
    reach: Reach::Messages,
    needs: Needs::Anything,
    has_pieces: false,
    round: |round, seat| round.line(&mut AmLine::new(seat, &round.outgoing(seat)?), seat),
    check: check::messages,
};

const PUTS: Benchmark = Benchmark {
    op: Op::Put,
    name: "put",
    help: "Puts into memory that the peer has mapped",
    reach: Reach::RemoteMemory,
    round: |round, seat| {
        let size = round.point.size;
        let window = Window::open(seat, round.memory, &vec![0; size])?;
        let every = if round.point.test == Test::Latency { 1 } else { stream::window(size) };
        round.line(&mut PutLine::new(seat, &window, &round.outgoing(seat)?, every), seat)
    },
    check: check::puts,
    ..MESSAGES
};

/// All benchmarks, in the order of [`Op`].
pub(super) const BENCHMARKS: &[Benchmark] = &[
    MESSAGES,
    Benchmark {
        op: Op::Send,
        name: "send",
        help: "Messages that are matched by receives",
        round: |round, seat| {
            let payload = round.outgoing(seat)?;
            let over = SendLine::queue(round.traffic());
            let mut line = SendLine::new(seat, &payload, &over, round.memory, round.traffic())?;
            round.line(&mut line, seat)
        },
        ..MESSAGES
    },
    PUTS,
    Benchmark {
        op: Op::PutSeen,
        name: "put_seen",
        help: "Puts without a signal, whose receiver looks at its memory until they are there",
        tests: &[Test::Latency],
        needs: Needs::Host,
        round: |round, seat| {
            let size = round.point.size;
            let window = Window::open(seat, round.memory, &vec![0; size.max(1)])?;
            round.line(&mut SeenLine::new(seat, &window, size), seat)
        },
        ..PUTS
    },
    Benchmark {
        op: Op::PutOver,
        name: "put_over",
        help: "Puts without a signal, of which each is waited for before the next",
        tests: &[Test::Latency],
        round: |round, seat| {
            let window = Window::open(seat, round.memory, &vec![0; round.point.size])?;
            round.fetch(seat, || Ok(Fetch::put(seat, &window, round.outgoing(seat)?)))
        },
        ..PUTS
    },
    Benchmark {
        op: Op::PutBatch,
        name: "put_batch",
        help: "Puts of many pieces at once",
        tests: &[Test::Latency],
        sizes: Sizes::AskedOr(&[64]),
        has_pieces: true,
        round: |round, seat| {
            let Round { memory, clock, point, count, leads, .. } = *round;
            batch::measure(seat, memory, point, clock, count, leads)
        },
        check: |round, seat, seed| batch::check(seat, round.memory, round.point, seed, round.leads),
        ..PUTS
    },
    Benchmark {
        op: Op::Get,
        name: "get",
        help: "Gets from memory of the peer",
        round: |round, seat| {
            let (memory, size) = (round.memory, round.point.size);
            let window = Window::open(seat, memory, &check::payload(1, size))?;
            round.fetch(seat, || Fetch::get(seat, &window, memory, size))
        },
        check: check::gets,
        ..PUTS
    },
    Benchmark {
        op: Op::FetchAdd,
        name: "fetch_add",
        help: "Additions to a word of the peer's memory",
        tests: &[Test::Latency, Test::Rate],
        sizes: Sizes::Fixed(&[8]),
        needs: Needs::WordOfCpu,
        round: |round, seat| {
            let window = Window::open(seat, round.memory, &[0; 8])?;
            round.fetch(seat, || Ok(Fetch::add(seat, &window)))
        },
        check: check::additions,
        ..PUTS
    },
    Benchmark {
        op: Op::Barrier,
        name: "barrier",
        help: "Barriers of all ranks",
        tests: &[Test::Latency],
        sizes: Sizes::Fixed(&[0]),
        reach: Reach::AllRanks,
        // A barrier takes no seat: `barrier::round` and `barrier::check` have the runtime.
        round: |_, _| Ok(Measured::Nothing),
        check: |_, _, _| Ok(()),
        ..MESSAGES
    },
    Benchmark {
        op: Op::Copy,
        name: "copy",
        help: "Copies within rank 0, from its memory to memory of rank 1's kind: what puts are \
            compared with",
        reach: Reach::WithinRank,
        round: |round, seat| {
            let Round { memory, beside, clock, point, count, .. } = *round;
            let Some(beside) = beside else { return Ok(Measured::Nothing) };
            let content = check::payload(1, point.size);
            let copying = Copying::new(memory, beside, &content, seat.pace)?;
            copying.measure(point.test, clock, count)
        },
        check: |round, seat, seed| match round.beside {
            Some(beside) => copy::check(round.memory, beside, round.point, seed, seat.pace),
            None => Ok(()),
        },
        ..MESSAGES
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_stands_at_the_place_of_its_operation() {
        for (at, row) in BENCHMARKS.iter().enumerate() {
            assert_eq!(row.op as usize, at, "{}", row.name);
        }
        assert_eq!(BENCHMARKS.len(), Op::Copy as usize + 1);
    }
}
