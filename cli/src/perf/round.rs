//! One round: all seats of a point at once, each with a thread of its own.

use super::check::payload;
use super::error::PerfError;
use super::fetch::Fetch;
use super::figures::Measured;
use super::line::{Line, Traffic};
use super::memory::Memory;
use super::plan::{Point, Test};
use super::seat::Seat;
use super::{fetch, latency, place, stream};
use carrack::Buffer;
use quanta::Clock;
use std::thread;

/// The parameters of a round, for all its seats.
#[derive(Clone, Copy)]
pub(super) struct Round<'a> {
    pub(super) memory: &'a Memory,
    /// Memory of the peer's kind, where there are copies to make within this rank.
    pub(super) beside: Option<&'a Memory>,
    pub(super) clock: &'a Clock,
    pub(super) point: Point,
    /// Messages of each seat; whole windows of them in a stream.
    pub(super) count: u64,
    /// `true` if this rank measures.
    pub(super) leads: bool,
}

impl Round<'_> {
    /// Goes it, on these seats. The first seat's thread is the caller's.
    ///
    /// Threads do not wait for each other: each begins with its peer's, and what they lose at the
    /// ends is the time that it takes to start a thread.
    pub(super) fn go(&self, seats: &mut [Seat]) -> Result<Vec<Measured>, PerfError> {
        let Some((first, others)) = seats.split_first_mut() else { return Ok(Vec::new()) };
        thread::scope(|scope| {
            let mut started = Vec::with_capacity(others.len());
            for seat in others {
                let thread = thread::Builder::new().name("perf seat".into());
                let spawned = thread.spawn_scoped(scope, move || self.sit_down(seat));
                started.push(spawned.map_err(|error| {
                    first.give_up();
                    PerfError::system("starting a thread")(error)
                })?);
            }
            let mut measured = vec![self.sit_down(first)];
            measured.extend(
                started.into_iter().map(|thread| thread.join().unwrap_or(Err(PerfError::Panicked))),
            );
            // The seat that failed says more than those that gave up because of it.
            if let Some(at) =
                measured.iter().position(|one| matches!(one, Err(error) if !error.is_echo()))
            {
                measured.swap(0, at);
            }
            measured.into_iter().collect()
        })
    }

    fn sit_down(&self, seat: &mut Seat) -> Result<Measured, PerfError> {
        let seat = &*seat;
        self.sit(seat).inspect_err(|_| seat.give_up())
    }

    fn sit(&self, seat: &Seat) -> Result<Measured, PerfError> {
        place::run_on(&seat.cpus)?;
        self.memory.make_current()?;
        (self.point.op.benchmark().round)(self, seat)
    }

    /// Makes the payload that a line sends or puts.
    pub(super) fn outgoing(&self, seat: &Seat) -> Result<Buffer, PerfError> {
        let lent = self.memory.is_lent(self.point, &seat.runtime);
        self.memory.holding(&payload(1, self.point.size), lent)
    }

    /// Returns the messages that come in at this rank.
    pub(super) fn traffic(&self) -> Traffic {
        match self.point.test {
            Test::Latency => latency::traffic(self.point.size, self.count),
            Test::Bandwidth | Test::Rate if self.leads => stream::outward(self.point.size),
            Test::Bandwidth | Test::Rate => stream::inward(self.point.size, self.count),
        }
    }

    /// Measures a fetch as rank 0; lends memory to it as rank 1.
    pub(super) fn fetch<'a>(
        &self,
        seat: &Seat,
        make: impl FnOnce() -> Result<Fetch<'a>, PerfError>,
    ) -> Result<Measured, PerfError> {
        let Point { test, size, .. } = self.point;
        if self.leads {
            make()?.measure(test, self.clock, self.count, size)
        } else {
            fetch::lend(seat)
        }
    }

    /// Measures a line: the loop is compiled for each kind of line.
    pub(super) fn line(&self, line: &mut impl Line, seat: &Seat) -> Result<Measured, PerfError> {
        let window = stream::window(self.point.size);
        match (self.point.test, self.leads) {
            (Test::Latency, true) => {
                latency::ping(line, self.clock, self.count).map(Measured::Trips)
            }
            (Test::Latency, false) => latency::echo(line, self.count).map(|()| Measured::Nothing),
            (_, true) => {
                stream::source(line, seat, self.clock, self.count, window).map(Measured::Stream)
            }
            (_, false) => stream::sink(line, seat, self.count, window).map(|()| Measured::Nothing),
        }
    }
}

/// Rounds a count to what a test can do.
pub(super) fn fitting(point: Point, count: u64) -> u64 {
    match point.test {
        Test::Latency => count.max(1),
        Test::Bandwidth | Test::Rate => stream::whole_windows(count.max(1), point.size),
    }
}
