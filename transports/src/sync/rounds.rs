//! What many threads put aside, to be taken up by whoever polls next.
//!
//! A round is what lies between two polls. Those who put something aside say so, and where; the poller finds that with one load.
//! The danger is a poller that goes to sleep meanwhile: so it says that it sleeps and then looks once more, and whoever puts
//! something aside says so and then looks whether anybody sleeps. The four are sequentially consistent: one of the two sees the other.

use super::primitives::{AtomicU32, Mutex, MutexGuard, Ordering, Sequential};
use crossbeam_utils::CachePadded;

/// See the [module](self).
#[derive(Debug)]
pub struct Rounds {
    /// Twice the number of the round; and one, when something was sent in it. So polls between which nothing was sent write nothing,
    /// and senders find the line where it was.
    round: CachePadded<AtomicU32>,
    /// How many polls sleep, or are about to.
    asleep: CachePadded<Sequential>,
    /// How many numbers are in the list.
    count: Sequential,
    aside: Mutex<Vec<u32>>,
}

impl Rounds {
    /// The first round; nothing is put aside.
    #[allow(clippy::new_without_default, reason = "there is one for each device, made where that is made")]
    pub fn new() -> Self {
        Self {
            round: CachePadded::new(AtomicU32::new(0)),
            asleep: CachePadded::new(Sequential::new(0)),
            count: Sequential::new(0),
            aside: Mutex::new(Vec::new()),
        }
    }

    /// The round in which something is sent. Nothing hangs on it but when things are put aside, so no order is asked for: a thread that sends
    /// while another polls may find the round that has just ended.
    #[inline(always)]
    pub fn current(&self) -> u32 {
        let round = self.round.load(Ordering::Relaxed);
        if round & 1 == 0 {
            self.round.store(round | 1, Ordering::Relaxed);
        }
        round >> 1
    }

    /// A poll: the next round begins, if anything was sent in this one.
    #[inline(always)]
    pub fn advance(&self) {
        let round = self.round.load(Ordering::Relaxed);
        if round & 1 == 1 {
            self.round.store(round.wrapping_add(1), Ordering::Relaxed);
        }
    }

    /// Something was put aside at `place`. Whether the poller may be asleep, so that this thread has to take it up itself.
    #[must_use]
    pub fn put_aside(&self, place: u32) -> bool {
        let mut aside = self.aside();
        aside.push(place);
        self.count.store(aside.len() as u64);
        drop(aside);
        self.asleep.load() != 0
    }

    /// Whether anything is aside.
    #[inline(always)]
    pub fn has_aside(&self) -> bool {
        self.count.load() != 0
    }

    /// The places where something was put aside, to be taken up now.
    pub fn take_up(&self) -> Vec<u32> {
        let mut aside = self.aside();
        self.count.store(0);
        std::mem::take(&mut aside)
    }

    /// A poller is about to sleep; it has to look at [`has_aside`](Self::has_aside) once more.
    pub fn sleep(&self) {
        self.asleep.add(1);
    }

    /// It is up again.
    pub fn wake(&self) {
        self.asleep.add(u64::MAX);
    }

    /// Whether any poller sleeps.
    pub fn is_asleep(&self) -> bool {
        self.asleep.load() != 0
    }

    #[allow(clippy::unwrap_used, reason = "nothing panics under the lock")]
    fn aside(&self) -> MutexGuard<'_, Vec<u32>> {
        self.aside.lock().unwrap()
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
            let rounds = Arc::new(Rounds::new());
            let sender = {
                let rounds = rounds.clone();
                thread::spawn(move || rounds.put_aside(7))
            };
            rounds.sleep();
            let sleeps = !rounds.has_aside();
            let is_told = sender.join().unwrap();
            assert!(!sleeps || is_told, "nobody takes it up");
            assert_eq!(rounds.take_up(), [7]);
            assert!(!rounds.has_aside());
        });
    }

    #[test]
    fn loom_nothing_that_is_put_aside_is_left_out_or_taken_up_twice() {
        loom::model(|| {
            let rounds = Arc::new(Rounds::new());
            let sender = {
                let rounds = rounds.clone();
                thread::spawn(move || [rounds.put_aside(1), rounds.put_aside(2)])
            };
            let mut found = if rounds.has_aside() { rounds.take_up() } else { Vec::new() };
            sender.join().unwrap();
            if rounds.has_aside() {
                found.extend(rounds.take_up());
            }
            assert_eq!(found, [1, 2]);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_round_ends_with_a_poll_in_front_of_which_something_was_sent() {
        let rounds = Rounds::new();
        assert_eq!((rounds.current(), rounds.current()), (0, 0));
        rounds.advance();
        rounds.advance();
        assert_eq!(rounds.current(), 1);
        rounds.advance();
        assert_eq!(rounds.current(), 2);
    }

    #[test]
    fn whoever_puts_something_aside_is_told_whether_anybody_sleeps() {
        let rounds = Rounds::new();
        assert!(!rounds.put_aside(3));
        rounds.sleep();
        assert!(rounds.has_aside() && rounds.put_aside(5));
        rounds.wake();
        assert!(!rounds.is_asleep() && !rounds.put_aside(3));
        assert_eq!(rounds.take_up(), [3, 5, 3]);
        assert!(!rounds.has_aside() && rounds.take_up().is_empty());
    }
}
