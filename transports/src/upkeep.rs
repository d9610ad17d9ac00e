//! Pace at which a polled device checks the sources that need a system call.

use crate::clock::{TICKS_PER_MICROSECOND, ticks};

/// Time of the next look at the epoll set.
#[derive(Debug, Default)]
pub(crate) struct Upkeep {
    idle: u32,
    busy: u32,
    last: u64,
}

impl Upkeep {
    /// Returns `true` if a look is due, after a poll. Idle polls read the clock now and then, busy
    /// ones rarely.
    #[inline(always)]
    pub(crate) fn is_due(&mut self, idle: bool) -> bool {
        if idle {
            self.idle += 1;
            self.idle.is_multiple_of(8) && self.since(100 * TICKS_PER_MICROSECOND)
        } else {
            self.idle = 0;
            self.busy += 1;
            self.busy.is_multiple_of(4096) && self.since(20_000 * TICKS_PER_MICROSECOND)
        }
    }

    fn since(&mut self, span: u64) -> bool {
        let now = ticks();
        let due = now.wrapping_sub(self.last) >= span;
        if due {
            self.last = now;
        }
        due
    }
}
