//! Numbers that only grow, one for each step of an algorithm, with listeners.

use super::primitives::Sequential;

/// Progress of several steps. A thread that raises a step's number learns if there are listeners
/// to tell. A thread that begins to wait announces it, and looks once more. So at least one of
/// them sees the other.
#[derive(Debug)]
pub struct Ticks<const STEPS: usize> {
    /// One more than the highest number that each step has had.
    steps: [Sequential; STEPS],
    listeners: Sequential,
}

impl<const STEPS: usize> Default for Ticks<STEPS> {
    fn default() -> Self {
        Self { steps: std::array::from_fn(|_| Sequential::new(0)), listeners: Sequential::new(0) }
    }
}

impl<const STEPS: usize> Ticks<STEPS> {
    /// Raises the number of a step; numbers may come in any order. Returns `true` if there are
    /// listeners to tell. `None`: there is no such step, or no number beyond this one.
    #[inline]
    pub fn raise(&self, step: u32, number: u64) -> Option<bool> {
        self.steps.get(step as usize)?.fetch_max(number.checked_add(1)?);
        Some(self.listeners.load() != 0)
    }

    /// Returns `true` if a step has had this number, or a higher one.
    #[inline]
    pub fn has(&self, step: u32, number: u64) -> bool {
        self.steps.get(step as usize).is_some_and(|next| next.load() > number)
    }

    /// Returns a step at which this number was the last.
    pub fn last_was(&self, number: u64) -> Option<u32> {
        let at = self.steps.iter().position(|next| next.load().checked_sub(1) == Some(number))?;
        u32::try_from(at).ok()
    }

    /// Sets the number of listeners. The holder of their list's lock calls it. New listeners look
    /// at the steps once more afterwards.
    pub fn set_listeners(&self, count: usize) {
        self.listeners.store(count as u64);
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::{Arc, Mutex};
    use loom::thread;

    /// A board: steps, and the list of listeners.
    #[derive(Default)]
    struct TickBoard {
        ticks: Ticks<2>,
        listeners: Mutex<Vec<()>>,
    }

    impl TickBoard {
        /// Returns `true` if a listener was told.
        fn tick(&self, step: u32) -> bool {
            if !self.ticks.raise(step, 0).unwrap() {
                return false;
            }
            let mut listeners = self.listeners.lock().unwrap();
            self.ticks.set_listeners(0);
            !std::mem::take(&mut *listeners).is_empty()
        }

        fn listen(&self) {
            let mut listeners = self.listeners.lock().unwrap();
            listeners.push(());
            self.ticks.set_listeners(listeners.len());
        }
    }

    #[test]
    fn loom_a_tick_while_a_thread_goes_to_wait_is_seen_or_told() {
        loom::model(|| {
            let board = Arc::new(TickBoard::default());
            let teller = {
                let board = board.clone();
                thread::spawn(move || board.tick(0))
            };
            board.listen();
            let seen = board.ticks.has(0, 0);
            let told = teller.join().unwrap();
            assert!(seen || told);
            assert!(board.ticks.has(0, 0) && !board.ticks.has(1, 0) && !board.ticks.has(0, 1));
        });
    }

    #[test]
    fn loom_a_listener_that_comes_while_others_are_told_is_told_of_the_next_tick() {
        loom::model(|| {
            let board = Arc::new(TickBoard::default());
            board.listen();
            let teller = {
                let board = board.clone();
                thread::spawn(move || board.tick(0))
            };
            board.listen();
            assert!(teller.join().unwrap(), "one was there all the time");
            // The second was told with the first, or still waits.
            let waits = !board.listeners.lock().unwrap().is_empty();
            assert_eq!(board.tick(1), waits);
        });
    }

    #[test]
    fn loom_of_two_numbers_the_higher_one_stays() {
        loom::model(|| {
            let ticks = Arc::new(Ticks::<1>::default());
            let other = {
                let ticks = ticks.clone();
                thread::spawn(move || ticks.raise(0, 7))
            };
            assert_eq!(ticks.raise(0, 6), Some(false));
            assert_eq!(other.join().unwrap(), Some(false));
            assert_eq!(ticks.last_was(7), Some(0));
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_a_step_has_had_all_numbers_up_to_its_highest() {
        let ticks = Ticks::<3>::default();
        assert!(!ticks.has(1, 0));
        assert_eq!(ticks.raise(1, 4), Some(false));
        assert_eq!(
            ticks.raise(1, 2),
            Some(false),
            "two threads may deliver two of them in any order"
        );
        assert!(ticks.has(1, 4) && ticks.has(1, 0) && !ticks.has(1, 5) && !ticks.has(0, 0));
        assert_eq!((ticks.last_was(4), ticks.last_was(2)), (Some(1), None));
        assert_eq!([ticks.raise(3, 0), ticks.raise(0, u64::MAX)], [None, None]);
        assert!(!ticks.has(3, 0) && !ticks.has(0, u64::MAX));
        ticks.set_listeners(1);
        assert_eq!(ticks.raise(0, 0), Some(true));
    }
}
