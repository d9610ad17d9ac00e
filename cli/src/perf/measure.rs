//! The measuring loop: a ping-pong, or a stream of windows, of any line.
//!
//! In a stream the receiver acknowledges each window. The sender may be some windows ahead, so that
//! it does not wait while an acknowledgement is in flight. The clock stops at the last one: what is
//! counted has arrived.

use super::error::PerfError;
use super::figures::{Measured, Times, new_times};
use super::line::Line;
use super::memory::Memory;
use super::place;
use super::plan::{Point, Test};
use super::seat::Seat;
use quanta::Clock;
use std::iter;
use std::thread::{self, ScopedJoinHandle};

/// Steps of a latency before the first that counts, at most: both threads are there, and caches are
/// warm.
const WARM_UP: u64 = 64;
/// Steps whose times are kept before they go into the histogram, outside the measured time: 8 KiB.
const BLOCK: usize = 1024;
/// Windows that the sender may be ahead.
pub(super) const AHEAD: u64 = 4;

/// Returns the operations of a window. They are numerous enough to hide the cost of an
/// acknowledgement, and few enough that the receives of large messages stay within the caches.
pub(super) fn window(size: usize) -> u64 {
    match size {
        0..=1024 => 512,
        1025..=0x1_0000 => 64,
        _ => (0x40_0000 / size).max(2) as u64,
    }
}

/// Rounds a count to what a test can do: whole windows in a stream.
pub(super) fn fitting(point: Point, count: u64) -> u64 {
    match point.test {
        Test::Latency => count.max(1),
        Test::Bandwidth | Test::Rate => count.max(1).next_multiple_of(window(point.size)),
    }
}

/// Returns the steps before those that count: no more of them, or slow ones would outlast the
/// round.
pub(super) fn warm_up(count: u64) -> u64 {
    count.min(WARM_UP)
}

/// Measures the time of each of `count` steps, in ticks of the raw clock.
#[inline]
pub(super) fn each(
    clock: &Clock,
    count: u64,
    mut step: impl FnMut() -> Result<(), PerfError>,
) -> Result<Times, PerfError> {
    let mut times = new_times();
    let mut stamps = [0_u64; BLOCK + 1];
    for _ in 0..warm_up(count) {
        step()?;
    }
    let mut left = count;
    while left > 0 {
        let length = usize::try_from(left).unwrap_or(BLOCK).min(BLOCK);
        stamps[0] = clock.raw();
        for stamp in &mut stamps[1..=length] {
            step()?;
            *stamp = clock.raw();
        }
        for pair in stamps[..=length].windows(2) {
            times.saturating_record(pair[1].saturating_sub(pair[0]).max(1));
        }
        left -= length as u64;
    }
    Ok(times)
}

/// Joins threads, and returns the results, the caller's own first. Of several errors it is the one
/// that says most: a seat gives up, and a peer is gone, because another one has failed.
pub(super) fn joined<T>(
    own: Result<T, PerfError>,
    threads: Vec<ScopedJoinHandle<'_, Result<T, PerfError>>>,
) -> Result<Vec<T>, PerfError> {
    let join = |thread: ScopedJoinHandle<'_, _>| thread.join().unwrap_or(Err(PerfError::Panicked));
    let mut all: Vec<_> = iter::once(own).chain(threads.into_iter().map(join)).collect();
    all.sort_by_key(|one| match one {
        Ok(_) => 3,
        Err(PerfError::GivenUp) => 2,
        Err(PerfError::PeerGone { .. }) => 1,
        Err(_) => 0,
    });
    all.into_iter().collect()
}

/// The parameters of a round, for all its seats.
#[derive(Clone, Copy)]
pub(super) struct Round<'a> {
    pub(super) memory: &'a Memory,
    /// Memory of the peer's kind, where there are copies to make within this rank.
    pub(super) theirs: Option<&'a Memory>,
    pub(super) clock: &'a Clock,
    pub(super) point: Point,
    /// Messages of each seat; whole windows of them in a stream.
    pub(super) count: u64,
    /// `true` if this rank measures.
    pub(super) leads: bool,
}

impl Round<'_> {
    /// Runs the round on these seats, each with a thread of its own. The first seat's thread is the
    /// caller's.
    ///
    /// Threads do not wait for each other: each begins with its peer's. At the ends they lose the
    /// time that it takes to start a thread.
    pub(super) fn go(&self, seats: &mut [Seat]) -> Result<Vec<Measured>, PerfError> {
        let Some((first, others)) = seats.split_first_mut() else { return Ok(Vec::new()) };
        thread::scope(|scope| {
            let mut started = Vec::with_capacity(others.len());
            for seat in others {
                let thread = thread::Builder::new().name("perf seat".into());
                let spawned = thread.spawn_scoped(scope, move || self.sit(seat));
                started.push(spawned.map_err(|error| {
                    first.give_up();
                    PerfError::system("starting a thread")(error)
                })?);
            }
            joined(self.sit(first), started)
        })
    }

    fn sit(&self, seat: &mut Seat) -> Result<Measured, PerfError> {
        let seat = &*seat;
        place::run_on(&seat.cpus)
            .and_then(|()| self.memory.make_current())
            .and_then(|()| (self.point.op.benchmark().round)(self, seat))
            .inspect_err(|_| seat.give_up())
    }

    /// Returns the messages that come in at this rank, and how many of them the sender may be ahead
    /// of this receiver. The first message of a stream shows that both sides are ready.
    pub(super) fn incoming(&self) -> (u64, u64) {
        match self.point.test {
            // One receive for the message in flight, and one that is posted meanwhile.
            Test::Latency => (warm_up(self.count) + self.count, 2),
            Test::Bandwidth | Test::Rate if self.leads => (0, 0),
            Test::Bandwidth | Test::Rate => (1 + self.count, window(self.point.size) * AHEAD),
        }
    }

    /// Measures a line as rank 0, and takes part in it as rank 1. The loops are compiled for each
    /// kind of line.
    pub(super) fn line<L: Line>(&self, line: &mut L, seat: &Seat) -> Result<Measured, PerfError> {
        match (self.point.test, self.leads) {
            (Test::Latency, true) => self.steps(line),
            (Test::Latency, false) if L::IS_ANSWERED => {
                for _ in 0..warm_up(self.count) + self.count {
                    line.take(1)?;
                    line.begin(false)?;
                }
                line.settle(0).map(|()| Measured::Nothing)
            }
            (_, true) => self.source(line, seat),
            (_, false) if L::IS_ANSWERED => self.sink(line, seat),
            // Memory that is not mapped is reached through its owner, who makes progress until rank
            // 0 has said that the round has ended.
            (_, false) => seat.take(1).map(|()| Measured::Nothing),
        }
    }

    /// Measures one step after another: a round trip, or the operation until its end.
    fn steps<L: Line>(&self, line: &mut L) -> Result<Measured, PerfError> {
        let times = each(self.clock, self.count, || {
            line.begin(false)?;
            if L::IS_ANSWERED { line.take(1) } else { line.settle(0) }
        })?;
        line.settle(0)?;
        Ok(Measured::Steps { times, ways: if L::IS_ANSWERED { 2.0 } else { 1.0 } })
    }

    /// Sends a stream and measures it.
    fn source<L: Line>(&self, line: &mut L, seat: &Seat) -> Result<Measured, PerfError> {
        let before = seat.acks.get() + 1;
        let acknowledged = |windows: u64| match L::IS_ANSWERED {
            true => seat.until(|| seat.acks.get() >= before + windows),
            false => Ok(()),
        };
        let window = window(self.point.size);
        line.begin(false)?;
        acknowledged(0)?;
        line.settle((AHEAD - 1) * window)?;
        let start = self.clock.raw();
        let windows = self.count / window;
        for sent in 0..windows {
            if sent >= AHEAD {
                acknowledged(sent - AHEAD + 1)?;
                line.settle((AHEAD - 1) * window)?;
            }
            for left in (0..window).rev() {
                line.begin(left > 0)?;
            }
        }
        acknowledged(windows)?;
        line.settle(0)?;
        Ok(Measured::Stream(self.clock.raw().saturating_sub(start).max(1)))
    }

    /// Receives a stream, and acknowledges each window of it.
    fn sink<L: Line>(&self, line: &mut L, seat: &Seat) -> Result<Measured, PerfError> {
        line.take(1)?;
        seat.acknowledge()?;
        let window = window(self.point.size);
        for _ in 0..self.count / window {
            line.take(window)?;
            seat.acknowledge()?;
        }
        Ok(Measured::Nothing)
    }
}
