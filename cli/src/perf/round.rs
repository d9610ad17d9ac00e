//! One round: all seats of a point at once, each with a thread of its own.

use super::am::AmLine;
use super::check::payload;
use super::copy::Copying;
use super::error::PerfError;
use super::fetch::Fetch;
use super::figures::Measured;
use super::line::Line;
use super::memory::Memory;
use super::options::Op;
use super::plan::{Point, Test};
use super::put::{PutLine, SeenLine};
use super::seat::Seat;
use super::send::SendLine;
use super::window::Window;
use super::{batch, fetch, latency, place, stream};
use quanta::Clock;
use std::thread;

/// What all seats of a round have in common.
#[derive(Clone, Copy)]
pub(super) struct Round<'a> {
    pub(super) memory: &'a Memory,
    /// Memory of the peer's kind, where there are copies to make within this rank.
    pub(super) beside: Option<&'a Memory>,
    pub(super) clock: &'a Clock,
    pub(super) point: Point,
    /// Messages of each seat; whole windows of them in a stream.
    pub(super) count: u64,
    /// Whether this rank measures.
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
        let Point { op, test, size, .. } = self.point;
        let content = payload(1, size);
        let outgoing =
            || self.memory.holding(&content, self.memory.is_lent(self.point, &seat.runtime));
        let traffic = match test {
            Test::Latency => latency::traffic(size, self.count),
            Test::Bandwidth | Test::Rate if self.leads => stream::outward(size),
            Test::Bandwidth | Test::Rate => stream::inward(size, self.count),
        };
        match op {
            Op::Am => self.measure(&mut AmLine::new(seat, &outgoing()?), seat),
            Op::Send => {
                self.measure(&mut SendLine::new(seat, &outgoing()?, self.memory, traffic)?, seat)
            }
            Op::Get => {
                let window = Window::open(seat, self.memory, &content)?;
                self.fetch(seat, || Fetch::get(seat, &window, self.memory, size))
            }
            Op::FetchAdd => {
                let window = Window::open(seat, self.memory, &[0; 8])?;
                self.fetch(seat, || Ok(Fetch::add(seat, &window)))
            }
            Op::Copy => match self.beside {
                Some(beside) => Copying::new(self.memory, beside, &content, seat.pace)?
                    .measure(test, self.clock, self.count),
                None => Ok(Measured::Nothing),
            },
            Op::Barrier => Ok(Measured::Nothing),
            Op::PutBatch => {
                batch::measure(seat, self.memory, self.point, self.clock, self.count, self.leads)
            }
            Op::PutSeen => {
                let window = Window::open(seat, self.memory, &vec![0; size.max(1)])?;
                self.measure(&mut SeenLine::new(seat, &window, size), seat)
            }
            Op::PutOver => {
                let window = Window::open(seat, self.memory, &vec![0; size])?;
                self.fetch(seat, || Ok(Fetch::put(seat, &window, outgoing()?)))
            }
            Op::Put => {
                let window = Window::open(seat, self.memory, &vec![0; size])?;
                let every = if test == Test::Latency { 1 } else { stream::window(size) };
                self.measure(&mut PutLine::new(seat, &window, &outgoing()?, every), seat)
            }
        }
    }

    fn fetch<'a>(
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

    fn measure(&self, line: &mut impl Line, seat: &Seat) -> Result<Measured, PerfError> {
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
