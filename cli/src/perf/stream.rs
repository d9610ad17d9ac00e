//! A stream of windows, one way.
//!
//! The receiver acknowledges each window; the sender may be some windows ahead, so that it does not stand
//! still while an acknowledgement is on its way. The clock stops at the last one: what is counted has arrived.

use super::error::PerfError;
use super::line::{Line, Traffic};
use super::seat::Seat;
use quanta::Clock;

/// Messages of a window.
pub(super) const WINDOW: u64 = 64;
/// Windows that the sender may be ahead.
const AHEAD: u64 = 4;

/// The count rounded up to whole windows.
pub(super) fn whole_windows(count: u64) -> u64 {
    count.next_multiple_of(WINDOW)
}

/// What comes in at the receiver: the stream, and a message in front of it that says both are there.
pub(super) fn inward(size: usize, count: u64) -> Traffic {
    Traffic { size, incoming: 1 + count, depth: WINDOW * AHEAD }
}

/// What comes in at the sender: nothing but acknowledgements.
pub(super) fn outward(size: usize) -> Traffic {
    Traffic { size, incoming: 0, depth: 0 }
}

/// The side that sends and measures. The time of `count` messages, in ticks of the raw clock.
pub(super) fn source(line: &mut impl Line, seat: &Seat, clock: &Clock, count: u64) -> Result<u64, PerfError> {
    let before = seat.acks.get() + 1;
    let acknowledged = |windows: u64| seat.until(|| seat.acks.get() >= before + windows);
    line.send()?;
    acknowledged(0)?;
    let start = clock.raw();
    let windows = count / WINDOW;
    for window in 0..windows {
        if window >= AHEAD {
            acknowledged(window - AHEAD + 1)?;
        }
        for _ in 0..WINDOW {
            line.send()?;
        }
    }
    acknowledged(windows)?;
    Ok(clock.raw().saturating_sub(start).max(1))
}

/// The side that receives.
pub(super) fn sink(line: &mut impl Line, seat: &Seat, count: u64) -> Result<(), PerfError> {
    line.receive(1)?;
    seat.acknowledge()?;
    for _ in 0..count / WINDOW {
        line.receive(WINDOW)?;
        seat.acknowledge()?;
    }
    Ok(())
}
