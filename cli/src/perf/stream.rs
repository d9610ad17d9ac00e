//! A stream of windows, one way.
//!
//! The receiver acknowledges each window; the sender may be some windows ahead, so that it does not
//! stand still while an acknowledgement is on its way. The clock stops at the last one: what is
//! counted has arrived.

use super::error::PerfError;
use super::line::{Line, Traffic};
use super::seat::Seat;
use quanta::Clock;

/// Windows that the sender may be ahead.
pub(super) const AHEAD: u64 = 4;

/// Returns the messages of a window. They are numerous enough to hide the cost of an
/// acknowledgement, and few enough that the receives of large messages stay within the caches.
pub(super) fn window(size: usize) -> u64 {
    match size {
        0..=1024 => 512,
        1025..=0x1_0000 => 64,
        _ => (0x40_0000 / size).max(2) as u64,
    }
}

/// The count rounded up to whole windows.
pub(super) fn whole_windows(count: u64, size: usize) -> u64 {
    count.next_multiple_of(window(size))
}

/// Returns the incoming traffic of the receiver: the stream, and one message before it that shows
/// that both sides are ready.
pub(super) fn inward(size: usize, count: u64) -> Traffic {
    Traffic { size, incoming: 1 + count, depth: window(size) * AHEAD }
}

/// Returns the incoming traffic of the sender, which gets acknowledgements only.
pub(super) fn outward(size: usize) -> Traffic {
    Traffic { size, incoming: 0, depth: 0 }
}

/// The side that sends and measures. The time of `count` messages, in ticks of the raw clock.
pub(super) fn source(
    line: &mut impl Line,
    seat: &Seat,
    clock: &Clock,
    count: u64,
    window: u64,
) -> Result<u64, PerfError> {
    let before = seat.acks.get() + 1;
    let acknowledged = |windows: u64| seat.until(|| seat.acks.get() >= before + windows);
    line.send()?;
    acknowledged(0)?;
    let start = clock.raw();
    let windows = count / window;
    for under_way in 0..windows {
        if under_way >= AHEAD {
            acknowledged(under_way - AHEAD + 1)?;
            line.settle((AHEAD - 1) * window)?;
        }
        for _ in 1..window {
            line.send_with_more()?;
        }
        line.send()?;
    }
    acknowledged(windows)?;
    line.settle(0)?;
    Ok(clock.raw().saturating_sub(start).max(1))
}

/// The side that receives.
pub(super) fn sink(
    line: &mut impl Line,
    seat: &Seat,
    count: u64,
    window: u64,
) -> Result<(), PerfError> {
    line.receive(1)?;
    seat.acknowledge()?;
    for _ in 0..count / window {
        line.receive(window)?;
        seat.acknowledge()?;
    }
    Ok(())
}
