//! The ping-pong, and the time of what is none.

use super::error::PerfError;
use super::figures::{Times, new_times};
use super::line::{Line, Traffic};
use quanta::Clock;

/// Round trips before the first that counts: both threads are there, and caches are warm.
const WARM_UP: u64 = 64;
/// Round trips whose times are kept before they go into the histogram, outside the measured time: 8
/// KiB.
const BLOCK: usize = 1024;

/// Returns the incoming traffic of either side.
pub(super) fn traffic(size: usize, count: u64) -> Traffic {
    // One receive for the message in flight, and one that is posted meanwhile.
    Traffic { size, incoming: WARM_UP + count, depth: 2 }
}

/// The side that measures: `count` round trips, each with a time of its own, in ticks of the raw
/// clock.
pub(super) fn ping(line: &mut impl Line, clock: &Clock, count: u64) -> Result<Times, PerfError> {
    let times = each(clock, count, || {
        line.send()?;
        line.receive(1)
    })?;
    line.settle(0)?;
    Ok(times)
}

/// The time of each of `count` steps, in ticks of the raw clock.
#[inline]
pub(super) fn each(
    clock: &Clock,
    count: u64,
    mut step: impl FnMut() -> Result<(), PerfError>,
) -> Result<Times, PerfError> {
    let mut times = new_times();
    let mut stamps = [0_u64; BLOCK + 1];
    for _ in 0..WARM_UP {
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

/// Takes the same number of steps as [`each`], unmeasured.
pub(super) fn join_in(
    count: u64,
    mut step: impl FnMut() -> Result<(), PerfError>,
) -> Result<(), PerfError> {
    (0..WARM_UP + count).try_for_each(|_| step())
}

/// The side that answers.
pub(super) fn echo(line: &mut impl Line, count: u64) -> Result<(), PerfError> {
    join_in(count, || {
        line.receive(1)?;
        line.send()
    })?;
    line.settle(0)
}
