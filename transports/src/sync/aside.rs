//! Places that many threads put aside, for the next poller to take up.
//!
//! A thread that puts a place aside counts it; the poller finds the count with one load. The
//! danger is a poller that goes to sleep meanwhile. So a poller announces its sleep and then looks
//! once more. A thread that puts a place aside counts it and then looks for sleeping pollers. The
//! four accesses are sequentially consistent: one of the two sees the other.

use super::primitives::{Mutex, MutexGuard, Sequential};
use crossbeam_utils::CachePadded;

/// See the [module](self).
#[derive(Debug)]
pub struct Aside {
    /// Number of polls that sleep, or are about to.
    asleep: CachePadded<Sequential>,
    /// Number of places in the list.
    count: Sequential,
    places: Mutex<Vec<u32>>,
}

impl Aside {
    /// Makes an empty list.
    #[allow(
        clippy::new_without_default,
        reason = "there is one for each device, made where that is made"
    )]
    pub fn new() -> Self {
        Self {
            asleep: CachePadded::new(Sequential::new(0)),
            count: Sequential::new(0),
            places: Mutex::new(Vec::new()),
        }
    }

    /// Puts `place` aside. Returns `true` if the poller may be asleep, so that this thread has to
    /// take the place up itself.
    #[must_use]
    pub fn put(&self, place: u32) -> bool {
        let mut places = self.places();
        places.push(place);
        self.count.store(places.len() as u64);
        drop(places);
        self.asleep.load() != 0
    }

    /// Returns `true` if any place is aside.
    #[inline(always)]
    pub fn has_any(&self) -> bool {
        self.count.load() != 0
    }

    /// Takes the places that were put aside.
    pub fn take_up(&self) -> Vec<u32> {
        let mut places = self.places();
        self.count.store(0);
        std::mem::take(&mut places)
    }

    /// Announces that a poller is about to sleep; it has to look at [`has_any`](Self::has_any)
    /// once more.
    pub fn sleep(&self) {
        self.asleep.add(1);
    }

    /// Ends the sleep of a poller.
    pub fn wake(&self) {
        self.asleep.add(u64::MAX);
    }

    /// Returns `true` if any poller sleeps.
    pub fn is_asleep(&self) -> bool {
        self.asleep.load() != 0
    }

    fn places(&self) -> MutexGuard<'_, Vec<u32>> {
        self.places.lock()
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_what_is_put_aside_while_the_poller_goes_to_sleep_is_taken_up() {
        loom::model(|| {
            let aside = Arc::new(Aside::new());
            let sender = {
                let aside = aside.clone();
                thread::spawn(move || aside.put(7))
            };
            aside.sleep();
            let sleeps = !aside.has_any();
            let is_told = sender.join().unwrap();
            assert!(!sleeps || is_told, "a place is left aside");
            assert_eq!(aside.take_up(), [7]);
            assert!(!aside.has_any());
        });
    }

    #[test]
    fn loom_nothing_that_is_put_aside_is_left_out_or_taken_up_twice() {
        loom::model(|| {
            let aside = Arc::new(Aside::new());
            let sender = {
                let aside = aside.clone();
                thread::spawn(move || [aside.put(1), aside.put(2)])
            };
            let mut found = if aside.has_any() { aside.take_up() } else { Vec::new() };
            sender.join().unwrap();
            if aside.has_any() {
                found.extend(aside.take_up());
            }
            assert_eq!(found, [1, 2]);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_puts_something_aside_is_told_whether_another_sleeps() {
        let aside = Aside::new();
        assert!(!aside.put(3));
        aside.sleep();
        assert!(aside.has_any() && aside.put(5));
        aside.wake();
        assert!(!aside.is_asleep() && !aside.put(3));
        assert_eq!(aside.take_up(), [3, 5, 3]);
        assert!(!aside.has_any() && aside.take_up().is_empty());
    }
}
