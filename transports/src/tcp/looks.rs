//! The time when a poll reads the epoll set.

use crate::clock::{TICKS_PER_MICROSECOND, ticks};

/// Time between two looks.
const LOOK: u64 = 20 * TICKS_PER_MICROSECOND;

/// Times its own length that a look which finds nothing is apart from the next. Where system calls
/// are slow, looks still take a fiftieth of the time.
const APART: u64 = 50;

/// Time between two looks of a device that has no connection, and makes none.
const ALONE: u64 = 100 * TICKS_PER_MICROSECOND;

/// Time between two looks, at most.
const LONGEST: u64 = 500 * TICKS_PER_MICROSECOND;

/// The looks of a device at its epoll set.
#[derive(Debug)]
pub(super) struct Looks {
    polls: u32,
    /// Ticks of the last look.
    last: u64,
    /// Ticks from the last look to the next.
    pause: u64,
}

impl Looks {
    pub(super) fn new() -> Self {
        Self { polls: 0, last: 0, pause: LOOK }
    }

    /// Returns `true` if a look is due, after a poll.
    #[inline(always)]
    pub(super) fn is_due(&mut self, idle: bool) -> bool {
        self.polls = self.polls.wrapping_add(1);
        let asks = if idle { self.polls.is_multiple_of(8) } else { self.polls.is_multiple_of(64) };
        asks && self.since() >= self.pause
    }

    /// Returns `true` if the last look is as long ago as one that finds something is from the next.
    pub(super) fn is_past(&self) -> bool {
        self.since() >= LOOK
    }

    pub(super) fn begin(&mut self) {
        self.last = ticks();
    }

    /// Notes the end of a look. `is_alone`: the device has no connection, and makes none.
    pub(super) fn end(&mut self, has_found: bool, is_alone: bool) {
        let least = if is_alone { ALONE } else { LOOK };
        self.pause = if has_found { LOOK } else { pause(self.since(), least) };
    }

    fn since(&self) -> u64 {
        ticks().wrapping_sub(self.last)
    }
}

/// Returns the ticks from a look that took `took` and found nothing to the next.
fn pause(took: u64, least: u64) -> u64 {
    took.saturating_mul(APART).clamp(least, LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_that_find_nothing_take_a_fiftieth_of_the_time_up_to_a_limit() {
        let spans = [(0, LOOK), (LOOK / 10, 5 * LOOK), (LOOK, LONGEST), (u64::MAX, LONGEST)];
        for (took, wanted) in spans {
            assert_eq!(pause(took, LOOK), wanted);
        }
        assert_eq!(pause(0, ALONE), ALONE);
        let mut looks = Looks::new();
        looks.begin();
        looks.end(false, true);
        assert!(looks.pause >= ALONE);
        looks.end(true, true);
        assert_eq!(looks.pause, LOOK, "who connects is heard");
    }
}
