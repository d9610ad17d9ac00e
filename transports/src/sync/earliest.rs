//! The earliest of many points in time.

use super::chores::{Bit, Chores};
use super::primitives::{AtomicU64, Ordering};

/// The earliest of the times by which something has to be looked at: a chore of progress while
/// there is one. It has no lock and no list: what is to be looked at waits elsewhere, put there
/// before its time is noted.
#[derive(Debug)]
pub struct Earliest {
    time: AtomicU64,
    chores: Chores,
    chore: Bit,
}

impl Earliest {
    /// The time that never comes.
    pub const NEVER: u64 = u64::MAX;

    /// None yet.
    pub fn new(chores: &Chores, chore: impl Into<Bit>) -> Self {
        Self { time: AtomicU64::new(Self::NEVER), chores: chores.clone(), chore: chore.into() }
    }

    /// Notes one more time.
    #[inline]
    pub fn note(&self, time: u64) {
        // Release, and written though an earlier one may stand: whoever takes that one sees what
        // waits for this one, too.
        let before = self.time.fetch_min(time, Ordering::AcqRel);
        self.chores.set(self.chore, true);
        if time < before {
            // Whoever sleeps would sleep too long.
            self.chores.wake();
        }
    }

    /// The earliest, or [`Self::NEVER`].
    #[inline(always)]
    pub fn get(&self) -> u64 {
        self.time.load(Ordering::Acquire)
    }

    /// The time now, if the earliest has passed: then there is none any more. The caller looks at
    /// everything that waits, and notes what is left; nobody else does meanwhile.
    pub fn due(&self, now: impl FnOnce() -> u64) -> Option<u64> {
        let earliest = self.get();
        if earliest == Self::NEVER {
            self.chores.set(self.chore, false);
            // A time may have been noted in between.
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
        /// What waits, for which a time is noted.
        waits: AtomicBool,
    }

    impl Times {
        fn new() -> Arc<Self> {
            let chores = Chores::default();
            let earliest = Earliest::new(&chores, CHORE);
            Arc::new(Self { chores, earliest, waits: AtomicBool::new(false) })
        }

        /// Something begins to wait.
        fn begin(&self, time: u64) {
            self.waits.store(true, Ordering::Relaxed);
            self.earliest.note(time);
        }

        /// As progress does, at time 10. Whether it has ended what waits.
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
    fn miri_the_earliest_is_due_once_and_a_chore_until_it_is_found_to_be_over() {
        let chores = Chores::default();
        let earliest = Earliest::new(&chores, Bit(4));
        assert_eq!(earliest.due(|| 5), None);
        earliest.note(9);
        earliest.note(7);
        earliest.note(8);
        assert!(chores.there().has(Bit(4)));
        assert_eq!((earliest.get(), earliest.due(|| 6)), (7, None));
        assert_eq!(earliest.due(|| 7), Some(7));
        assert!(chores.there().has(Bit(4)), "whoever was told may note what is left");
        assert_eq!(earliest.due(|| 100), None);
        assert!(!chores.there().any());
    }
}
