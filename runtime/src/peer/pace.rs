//! Pace of the polls of a device that polls by system calls.
//!
//! A poll of such a device costs a message of another transport more than it takes itself. So it
//! is left alone by most calls of progress while it has nothing.

use carrack_transports::clock::{TICKS_PER_MICROSECOND, ticks};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Calls of progress that leave a device alone which polls by system calls and has nothing.
///
/// Threads that race may poll once more or less, which does no harm.
#[derive(Default)]
pub(crate) struct Pace {
    /// Polls in a row that found nothing.
    idle: AtomicU32,
    /// Calls that still leave the device alone.
    left: AtomicU32,
    /// Ticks of the last poll behind many that found nothing.
    polled_at: AtomicU64,
}

impl Pace {
    /// Polls that find nothing before the device is left alone: some dozen microseconds, in which
    /// the answer of a peer comes.
    const IDLE: u32 = 512;
    /// Calls between two polls of a device that has nothing.
    const REST: u32 = 16;
    /// Ticks within which [`REST`](Self::REST) calls come from a thread that polls all the time.
    /// One that calls now and then leaves no device alone.
    const SPAN: u64 = 50 * TICKS_PER_MICROSECOND;

    /// Returns `true` if this call leaves the device alone.
    #[inline]
    pub(crate) fn rests(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        if left > 0 {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        left > 0
    }

    /// Notes what a poll found.
    #[inline]
    pub(crate) fn polled(&self, something: bool) {
        let idle = if something { 0 } else { self.idle.load(Ordering::Relaxed) + 1 };
        if idle < Self::IDLE {
            return self.idle.store(idle, Ordering::Relaxed);
        }
        let now = ticks();
        let before = self.polled_at.swap(now, Ordering::Relaxed);
        if now.wrapping_sub(before) < Self::SPAN {
            self.left.store(Self::REST, Ordering::Relaxed);
        }
    }

    /// Has the next call poll the device.
    pub(crate) fn rouse(&self) {
        self.idle.store(0, Ordering::Relaxed);
        self.left.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Returns the calls until the device is polled again.
    fn rest(pace: &Pace) -> u32 {
        let calls = (0..).take_while(|_| pace.rests()).count();
        u32::try_from(calls).unwrap()
    }

    fn idle(pace: &Pace, polls: u32) {
        for _ in 0..polls {
            pace.polled(false);
        }
    }

    #[test]
    fn a_device_with_nothing_rests_until_it_has_something_or_a_thread_has_slept() {
        let pace = Pace::default();
        idle(&pace, Pace::IDLE - 1);
        assert_eq!(rest(&pace), 0, "an answer may be on its way");
        idle(&pace, 2);
        assert_eq!(rest(&pace), Pace::REST);
        pace.polled(true);
        idle(&pace, 1);
        assert_eq!(rest(&pace), 0);
        idle(&pace, Pace::IDLE + 1);
        pace.rouse();
        assert_eq!(rest(&pace), 0);
    }

    #[test]
    fn a_thread_that_calls_now_and_then_leaves_no_device_alone() {
        let pace = Pace::default();
        idle(&pace, Pace::IDLE);
        rest(&pace);
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(2));
            pace.polled(false);
            assert_eq!(rest(&pace), 0);
        }
    }
}
