//! The table of benchmarks: one row for each operation of `--op`.

use super::check;
use super::error::PerfError;
use super::figures::Measured;
use super::line::{self, Copies, Of, Repeated, SendLine};
use super::measure::{self, Round};
use super::plan::Test;
use super::seat::Seat;
use super::sides::{Kind, Sides};
use super::window::{Slots, Window};
use carrack::Buffer;
use std::collections::VecDeque;

/// A benchmark.
///
/// `round` and `check` are called once a round and once a point.
/// The loop inside `round` is compiled for its operation.
pub(super) struct Benchmark {
    /// Name on the command line and in the results.
    pub(super) name: &'static str,
    /// Tests that apply.
    pub(super) tests: &'static [Test],
    pub(super) sizes: Sizes,
    pub(super) reach: Reach,
    pub(super) needs: Needs,
    /// `true` if `--pieces` applies.
    pub(super) has_pieces: bool,
    /// Measures one round on one seat.
    pub(super) round: fn(&Round<'_>, &Seat) -> Result<Measured, PerfError>,
    /// Function that compares a payload made of the seed on one seat.
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
    /// Returns the memory, and of which rank.
    pub(super) fn describe(self) -> &'static str {
        match self {
            Self::Anything => "any memory",
            Self::WordOfCpu => "host or pinned memory of rank 1",
            Self::Host => "host memory of both ranks",
        }
    }

    /// Returns `true` if the benchmark runs on this memory.
    pub(super) fn accepts(self, sides: Sides) -> bool {
        match self {
            Self::Anything => true,
            Self::WordOfCpu => !matches!(sides.others, Kind::Device(_)),
            Self::Host => sides.are_host(),
        }
    }
}

impl Round<'_> {
    /// Makes a buffer that holds these bytes: one to be borrowed from, or one to be lent to every
    /// operation.
    pub(super) fn holding(&self, seat: &Seat, bytes: &[u8]) -> Result<Buffer, PerfError> {
        if !self.memory.is_lent(self.point, &seat.runtime) {
            return Ok(Buffer::Vec(bytes.to_vec()));
        }
        let room = self.memory.room(bytes.len())?;
        room.write(bytes)?;
        Ok(Buffer::Region(room))
    }

    /// Makes the payload that is sent or put.
    fn outgoing(&self, seat: &Seat) -> Result<Buffer, PerfError> {
        self.holding(seat, &check::payload(1, self.point.size))
    }

    /// Opens a window of memory that the peer puts into.
    fn window(&self, seat: &Seat) -> Result<Window, PerfError> {
        Window::open(seat, self.memory, &vec![0; self.point.size])
    }

    /// Copies of this content; none in another rank than the one that makes them.
    pub(super) fn copies(&self, seat: &Seat, content: &[u8]) -> Result<Option<Copies>, PerfError> {
        let Some(theirs) = self.theirs else { return Ok(None) };
        let (from, to) = (self.memory.room(content.len())?, theirs.room(content.len())?);
        from.write(content)?;
        Ok(Some(Copies { from, to, pace: seat.pace, in_flight: VecDeque::new() }))
    }
}

const ALL: &[Test] = &[Test::Latency, Test::Bandwidth, Test::Rate];

/// Defaults of a row: each row names what differs.
const MESSAGES: Benchmark = Benchmark {
    name: "am",
    tests: ALL,
    sizes: Sizes::Asked,
    reach: Reach::Messages,
    needs: Needs::Anything,
    has_pieces: false,
    round: |round, seat| {
        let Seat { runtime, device, peer, arrivals_name, .. } = seat;
        let payload = round.outgoing(seat)?;
        let mut message = Repeated::new(&payload, |bytes| {
            runtime.post_am(*peer, bytes, *arrivals_name).device(device)
        });
        let send = |more| message.post(more, |message| seat.send(message));
        round.line(&mut Of::both(seat, send, |count| seat.take(count)), seat)
    },
    check: check::messages,
};

const PUTS: Benchmark = Benchmark {
    name: "put",
    reach: Reach::RemoteMemory,
    // The last put of each window notifies the peer, so that both sides know how far they are. The
    // notification says that the bytes of its own put are there, and nothing of those before it:
    // their sender knows.
    round: |round, seat| {
        let Seat { runtime, device, peer, ended, arrivals_name, .. } = seat;
        let (window, payload) = (round.window(seat)?, round.outgoing(seat)?);
        let plain =
            |bytes| runtime.post_put(*peer, bytes, &window.theirs, 0).device(device).comp(ended);
        let mut put = Repeated::new(&payload, plain);
        let mut notifying =
            Repeated::new(&payload, |bytes| plain(bytes).remote_comp(*arrivals_name));
        let size = round.point.size;
        // The first message stands alone; then a window is one notification.
        let every = if round.point.test == Test::Latency { 1 } else { measure::window(size) };
        let mut sent = 0_u64;
        let begin = |_| {
            sent += 1;
            match (sent - 1).is_multiple_of(every) {
                true => notifying.post(false, |put| seat.begin(put)),
                false => put.post(false, |put| seat.begin(put)),
            }
        };
        let take = |count: u64| seat.take(count.div_ceil(every));
        round.line(&mut Of::both(seat, begin, take), seat)
    },
    check: check::puts,
    ..MESSAGES
};

/// All benchmarks, in the order of [`Op`](super::options::Op).
pub(super) const BENCHMARKS: &[Benchmark] = &[
    MESSAGES,
    Benchmark {
        name: "send",
        round: |round, seat| {
            let Seat { runtime, device, peer, tag, .. } = seat;
            let (payload, ended) = (round.outgoing(seat)?, line::queue(round));
            let message = Repeated::new(&payload, |bytes| {
                runtime.post_send(*peer, bytes, *tag).device(device)
            });
            round.line(&mut SendLine::new(round, seat, &ended, message)?, seat)
        },
        check: check::sends,
        ..MESSAGES
    },
    PUTS,
    Benchmark {
        name: "put_seen",
        tests: &[Test::Latency],
        needs: Needs::Host,
        // The last byte differs from put to put, and is written last. A NIC writes the bytes of one
        // packet in the order of addresses, on which programs that poll memory rely. A CPU that
        // copies does so, too.
        round: |round, seat| {
            let Seat { runtime, device, peer, ended, .. } = seat;
            let size = round.point.size.max(1);
            let window = Window::open(seat, round.memory, &vec![0; size])?;
            let mut payload = round.holding(seat, &vec![0; size])?;
            let last = window.mine.slice(size - 1, 1);
            let (mut sent, mut seen) = (0_u8, 0_u8);
            let begin = |_| {
                sent = sent.wrapping_add(1);
                let put = match &mut payload {
                    Buffer::Vec(bytes) => {
                        bytes[size - 1] = sent;
                        runtime.post_put(*peer, &bytes[..], &window.theirs, 0)
                    }
                    Buffer::Region(lent) => {
                        // The peer has seen the put before, so nothing reads this any more.
                        let last = lent.region().slice(lent.offset() + size - 1, 1);
                        last.map_or(Ok(()), |last| last.write(&[sent]))?;
                        runtime.post_put(*peer, lent.clone(), &window.theirs, 0)
                    }
                    _ => unreachable!("`holding` gives one of these"),
                };
                seat.begin(&mut put.device(device).comp(ended))
            };
            let take = |_| {
                seen = seen.wrapping_add(1);
                seat.look_until(|| {
                    let mut byte = [0];
                    last.as_ref().is_some_and(|last| last.read(&mut byte).is_ok()) && byte == [seen]
                })
            };
            round.line(&mut Of::both(seat, begin, take), seat)
        },
        ..PUTS
    },
    Benchmark {
        name: "put_done",
        tests: &[Test::Latency],
        round: |round, seat| {
            let Seat { runtime, device, peer, ended, .. } = seat;
            let (window, payload) = (round.window(seat)?, round.outgoing(seat)?);
            let mut put = Repeated::new(&payload, |bytes| {
                runtime.post_put(*peer, bytes, &window.theirs, 0).device(device).comp(ended)
            });
            let begin = || put.post(false, |put| seat.begin(put));
            round.alone(seat, begin, |_| Ok(()))
        },
        ..PUTS
    },
    Benchmark {
        name: "put_batch",
        tests: &[Test::Latency],
        sizes: Sizes::AskedOr(&[64]),
        has_pieces: true,
        round: |round, seat| {
            let Seat { runtime, device, peer, ended, .. } = seat;
            let slots = Slots::of(round.point)?;
            let window = Window::open(seat, round.memory, &vec![0; slots.room])?;
            let local = round.memory.room(slots.room)?;
            local.write(&check::payload(1, slots.room))?;
            let pieces = slots.pieces(local.region(), &window);
            let begin = || {
                let put = runtime.post_put_batch(*peer, &pieces).device(device).comp(ended);
                seat.begin(&mut { put })
            };
            round.alone(seat, begin, |_| Ok(()))
        },
        check: check::batches,
        ..PUTS
    },
    Benchmark {
        name: "get",
        // Into the same memory each time. The buffer that came back is at hand for the next one;
        // while others are in flight, another handle to that memory is made.
        round: |round, seat| {
            let Seat { runtime, device, peer, ended, .. } = seat;
            let size = round.point.size;
            let window = Window::open(seat, round.memory, &check::payload(1, size))?;
            let room = round.memory.target(size)?;
            let another = || match &room {
                Buffer::Region(slice) => Buffer::Region(slice.clone()),
                _ => Buffer::Vec(vec![0; size]),
            };
            let mut spare = Some(another());
            let begin = || {
                let buffer = spare.take().unwrap_or_else(another);
                let get = runtime.post_get(*peer, buffer, &window.theirs, 0);
                spare = seat.begin_with_buffer(&mut get.device(device).comp(ended))?;
                Ok(())
            };
            round.alone(seat, begin, |_| Ok(()))
        },
        check: check::gets,
        ..PUTS
    },
    Benchmark {
        name: "fetch_add",
        tests: &[Test::Latency, Test::Rate],
        sizes: Sizes::Fixed(&[8]),
        needs: Needs::WordOfCpu,
        round: |round, seat| {
            let Seat { runtime, device, peer, ended, .. } = seat;
            let window = Window::open(seat, round.memory, &[0; 8])?;
            let begin = || {
                let add = runtime.post_fetch_add(*peer, &window.theirs, 0, 1);
                seat.begin(&mut add.device(device).comp(ended))
            };
            round.alone(seat, begin, |begun| check::add(seat, &window, 0, begun))
        },
        check: check::additions,
        ..PUTS
    },
    Benchmark {
        name: "barrier",
        tests: &[Test::Latency],
        sizes: Sizes::Fixed(&[0]),
        reach: Reach::AllRanks,
        // A barrier takes no seat: `barrier::round` and `barrier::check` have the runtime.
        round: |_, _| Ok(Measured::Nothing),
        check: |_, _, _| Ok(()),
        ..MESSAGES
    },
    Benchmark {
        name: "copy",
        reach: Reach::WithinRank,
        round: |round, seat| match round.copies(seat, &check::payload(1, round.point.size))? {
            Some(mut copies) => round.line(&mut copies, seat),
            None => Ok(Measured::Nothing),
        },
        check: check::copies,
        ..MESSAGES
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::options::Op;
    use clap::ValueEnum;

    #[test]
    fn each_row_stands_at_the_place_of_its_operation() {
        let ops = Op::value_variants().iter().map(|op| op.to_possible_value().unwrap());
        let ops: Vec<_> = ops.map(|op| op.get_name().to_owned()).collect();
        assert_eq!(ops, BENCHMARKS.iter().map(|row| row.name).collect::<Vec<_>>());
    }
}
