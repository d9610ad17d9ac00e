//! The ping-pong.

use super::error::PerfError;
use super::figures::{Times, new_times};
use super::line::{Line, Traffic};
use quanta::Clock;

/// Round trips before the first that counts: both threads are there, and caches are warm.
const WARM_UP: u64 = 64;
/// Round trips whose times are kept before they go into the histogram, outside the measured time: 8 KiB.
const BLOCK: usize = 1024;

/// What comes in on either side.
pub(super) fn traffic(size: usize, count: u64) -> Traffic {
    // One receive for the message under way, and one that is posted while that one is.
    Traffic { size, incoming: WARM_UP + count, depth: 2 }
}

/// The side that measures: `count` round trips, each with a time of its own, in ticks of the raw clock.
pub(super) fn ping(line: &mut impl Line, clock: &Clock, count: u64) -> Result<Times, PerfError> {
    let mut times = new_times();
    let mut stamps = [0_u64; BLOCK + 1];
    for _ in 0..WARM_UP {
        line.send()?;
        line.receive(1)?;
    }
    let mut left = count;
    while left > 0 {
        let length = usize::try_from(left).unwrap_or(BLOCK).min(BLOCK);
        stamps[0] = clock.raw();
        for stamp in &mut stamps[1..=length] {
            line.send()?;
            line.receive(1)?;
            *stamp = clock.raw();
        }
        for pair in stamps[..=length].windows(2) {
            times.saturating_record(pair[1].saturating_sub(pair[0]).max(1));
        }
        left -= length as u64;
    }
    Ok(times)
}

/// The side that answers.
pub(super) fn echo(line: &mut impl Line, count: u64) -> Result<(), PerfError> {
    for _ in 0..WARM_UP + count {
        line.receive(1)?;
        line.send()?;
    }
    Ok(())
}
