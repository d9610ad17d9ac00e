//! The earliest of many points in time.

use super::chores::{Bit, Chores};
use super::primitives::{AtomicU64, Ordering};

/// The earliest of many deadlines: a chore of progress while there is one. It has no lock and no
/// list: the objects with deadlines wait elsewhere, and were put there before their times are
/// noted.
#[derive(Debug)]
pub struct Earliest {
    time: AtomicU64,
    chores: Chores,
    chore: Bit,
}

impl Earliest {
    /// A time that never comes.
    pub const NEVER: u64 = u64::MAX;

    /// Makes one without a time.
    pub fn new(chores: &Chores, chore: impl Into<Bit>) -> Self {
        Self { time: AtomicU64::new(Self::NEVER), chores: chores.clone(), chore: chore.into() }
    }

    /// Adds a time.
    #[inline]
    pub fn note(&self, time: u64) {
        // Release, and written even if an earlier time stands: the thread that takes that time
        // sees the object of this one, too.
        let before = self.time.fetch_min(time, Ordering::AcqRel);
        self.chores.set(self.chore, true);
        if time < before {
            // Threads that sleep would sleep too long.
            self.chores.wake();
        }
    }

    /// Returns the earliest time, or [`Self::NEVER`].
    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.time.load(Ordering::Acquire)
    }

    /// Returns the time now if the earliest time has passed, and removes that time. The caller,
    /// and only the caller, then looks at all objects that wait, and notes the times that are
    /// left.
    pub fn due(&self, now: impl FnOnce() -> u64) -> Option<u64> {
        let earliest = self.get();
        if earliest == Self::NEVER {
            self.chores.set(self.chore, false);
            // Another thread may have noted a time in between.
            if self.get() != Self::NEVER {
                self.chores.set(self.chore, true);
            }
            return None;
        }
        let now = now();
        let take = || {
            self.time.compare_exchange(earliest, Self::NEVER, Ordering::AcqRel, Ordering::Relaxed)
        };
        (earliest <= now && take().is_ok()).then_some(now)
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicBool;
    use loom::thread;

    const CHORE: Bit = Bit(1);

    struct Times {
        chores: Chores,
        earliest: Earliest,
        /// The object for which a time is noted.
        waits: AtomicBool,
    }

    impl Times {
        fn new() -> Arc<Self> {
            let chores = Chores::default();
            let earliest = Earliest::new(&chores, CHORE);
            Arc::new(Self { chores, earliest, waits: AtomicBool::new(false) })
        }

        /// Begins to wait.
        fn begin(&self, time: u64) {
            self.waits.store(true, Ordering::Relaxed);
            self.earliest.note(time);
        }

        /// Does as progress does, at time 10. Returns `true` if it has ended the wait.
        fn expire(&self) -> bool {
            self.chores.there().has(CHORE)
                && self.earliest.due(|| 10).is_some()
                && self.waits.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn loom_a_time_noted_while_there_seems_to_be_none_keeps_its_bit() {
        loom::model(|| {
            let times = Times::new();
            times.chores.set(CHORE, true);
            let poster = {
                let times = times.clone();
                thread::spawn(move || times.begin(20))
            };
            assert!(!times.expire());
            poster.join().unwrap();
            assert!(times.chores.there().has(CHORE));
            assert_eq!(times.earliest.get(), 20);
        });
    }

    #[test]
    fn loom_what_begins_to_wait_while_an_earlier_time_is_due_is_looked_at_now_or_later() {
        for time in [2, 4] {
            loom::model(move || {
                let times = Times::new();
                times.earliest.note(3);
                let poster = {
                    let times = times.clone();
                    thread::spawn(move || times.begin(time))
                };
                let ended = times.expire();
                poster.join().unwrap();
                assert!(ended || times.expire());
            });
        }
    }

    #[test]
    fn loom_a_time_is_due_to_one_of_two_threads() {
        loom::model(|| {
            let times = Times::new();
            times.begin(3);
            let other = {
                let times = times.clone();
                thread::spawn(move || times.expire())
            };
            let mine = times.expire();
            assert!(mine != other.join().unwrap());
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_the_earliest_is_due_once_and_a_chore_until_none_is_left() {
        let chores = Chores::default();
        let earliest = Earliest::new(&chores, Bit(4));
        assert_eq!(earliest.due(|| 5), None);
        earliest.note(9);
        earliest.note(7);
        earliest.note(8);
        assert!(chores.there().has(Bit(4)));
        assert_eq!((earliest.get(), earliest.due(|| 6)), (7, None));
        assert_eq!(earliest.due(|| 7), Some(7));
        assert!(chores.there().has(Bit(4)), "the caller may note the times that are left");
        assert_eq!(earliest.due(|| 100), None);
        assert!(!chores.there().any());
    }
}
