//! Copies within rank 0, from its memory to memory of rank 1's kind: what the driver's engine does,
//! or the CPU where no GPU has to do with it, without anything of a communication's.

use super::check::payload;
use super::error::PerfError;
use super::figures::Measured;
use super::memory::Memory;
use super::plan::{Point, Test};
use super::seat::Pace;
use super::stream::AHEAD;
use super::{latency, stream};
use carrack::Buffer;
use carrack::buffer::RegionSlice;
use carrack::transports::mem::Transfer;
use quanta::Clock;
use std::collections::VecDeque;

/// A repeated copy, and the way in which its thread waits.
pub(super) struct Copying {
    from: RegionSlice,
    to: RegionSlice,
    pace: Pace,
}

impl Copying {
    /// Of this content.
    pub(super) fn new(
        from: &Memory,
        to: &Memory,
        content: &[u8],
        pace: Pace,
    ) -> Result<Self, PerfError> {
        let (from, to) = (from.room(content.len())?, to.room(content.len())?);
        from.write(content)?;
        Ok(Self { from, to, pace })
    }

    fn begin(&self) -> Result<Transfer, PerfError> {
        let begun =
            Transfer::start(Buffer::Region(self.to.clone()), Buffer::Region(self.from.clone()));
        begun.map_err(|refused| refused.cause.into())
    }

    fn finish(&self, mut copy: Transfer) -> Result<(), PerfError> {
        loop {
            match copy.poll() {
                Some(outcome) => return Ok(outcome?),
                None if self.pace == Pace::Sleep => std::thread::yield_now(),
                None => std::hint::spin_loop(),
            }
        }
    }

    /// `count` of them, one at a time or back to back.
    pub(super) fn measure(
        &self,
        test: Test,
        clock: &Clock,
        count: u64,
    ) -> Result<Measured, PerfError> {
        if test == Test::Latency {
            return latency::each(clock, count, || self.finish(self.begin()?)).map(Measured::Spans);
        }
        let most = AHEAD * stream::window(self.from.len());
        self.back_to_back(most, most)?;
        let start = clock.raw();
        self.back_to_back(count, most)?;
        Ok(Measured::Stream(clock.raw().saturating_sub(start).max(1)))
    }

    /// Makes `count` copies with at most `most` in flight, which is the limit of puts.
    fn back_to_back(&self, count: u64, most: u64) -> Result<(), PerfError> {
        let mut under_way = VecDeque::new();
        for _ in 0..count {
            if under_way.len() as u64 == most
                && let Some(first) = under_way.pop_front()
            {
                self.finish(first)?;
            }
            under_way.push_back(self.begin()?);
        }
        under_way.into_iter().try_for_each(|copy| self.finish(copy))
    }
}

/// Copies a payload made of `seed`, and compares it.
pub(super) fn check(
    from: &Memory,
    to: &Memory,
    point: Point,
    seed: u64,
    pace: Pace,
) -> Result<(), PerfError> {
    let copying = Copying::new(from, to, &payload(seed, point.size), pace)?;
    copying.to.write(&payload(!seed, point.size))?;
    copying.finish(copying.begin()?)?;
    let (sent, got) = (copying.from.to_vec()?, copying.to.to_vec()?);
    match sent.iter().zip(&got).position(|(one, other)| one != other) {
        Some(at) => Err(PerfError::Corrupt { what: point.op.name(), size: point.size, at }),
        None => Ok(()),
    }
}
