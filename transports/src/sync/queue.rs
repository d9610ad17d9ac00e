//! A bounded queue for any number of producers and consumers.

use super::primitives::{AtomicUsize, Ordering, UnsafeCell};
use crossbeam_utils::CachePadded;
use std::fmt;
use std::mem::MaybeUninit;

/// Vyukov's bounded queue: one atomic exchange an operation, values in place, nothing allocated after
/// the start. When it is full a push gives the value back: nothing is overwritten (LCI's array queue
/// overwrites) and nothing is lost.
pub struct Queue<T> {
    cells: Box<[Cell<T>]>,
    mask: usize,
    tail: CachePadded<AtomicUsize>,
    head: CachePadded<AtomicUsize>,
}

struct Cell<T> {
    /// `position` when free for that position's push, `position + 1` when filled for its pop.
    turn: AtomicUsize,
    value: UnsafeCell<MaybeUninit<T>>,
}

impl<T> Cell<T> {
    /// Fills it, says whoever was given its position.
    #[inline(always)]
    fn fill(&self, at: usize, make: impl FnOnce() -> T) {
        // SAFETY: the position was given to this thread alone, and the turn said that the pop of the lap before is over.
        self.value.with_mut(|slot| unsafe { (*slot).write(make()) });
        self.turn.store(at.wrapping_add(1), Ordering::Release);
    }
}

// SAFETY: a value is handed from one thread to another, never shared; `turn` orders the hand-over.
unsafe impl<T: Send> Send for Queue<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Queue<T> {}

impl<T> Queue<T> {
    /// A queue for at least `capacity` values (rounded up to a power of two, two at least).
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(2).next_power_of_two();
        Self {
            cells: (0..capacity)
                .map(|at| Cell { turn: AtomicUsize::new(at), value: UnsafeCell::new(MaybeUninit::uninit()) })
                .collect(),
            mask: capacity - 1,
            tail: CachePadded::new(AtomicUsize::new(0)),
            head: CachePadded::new(AtomicUsize::new(0)),
        }
    }

    /// Values that it can hold.
    pub fn capacity(&self) -> usize {
        self.mask + 1
    }

    /// Values in it now, more or less: others push and pop meanwhile.
    pub fn len(&self) -> usize {
        let head = self.head.load(Ordering::Relaxed);
        self.tail.load(Ordering::Relaxed).wrapping_sub(head).min(self.capacity())
    }

    /// Whether there is nothing in it, more or less.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a value at the end, or gives it back when the queue is full.
    #[inline]
    #[allow(clippy::result_large_err, reason = "the error is the value that did not fit")]
    pub fn push(&self, value: T) -> Result<(), T> {
        match self.claim() {
            Some((cell, at)) => {
                cell.fill(at, || value);
                Ok(())
            }
            None => Err(value),
        }
    }

    /// Adds what `make` makes, in the place where it will stand: a large value is moved once less. `false`: the queue is full, and
    /// nothing was made. `make` must not panic: the queue would end there.
    #[inline(always)]
    pub fn push_made(&self, make: impl FnOnce() -> T) -> bool {
        let claimed = self.claim();
        if let Some((cell, at)) = claimed {
            cell.fill(at, make);
        }
        claimed.is_some()
    }

    /// A position at the end, and its cell, for this thread alone.
    #[inline(always)]
    fn claim(&self) -> Option<(&Cell<T>, usize)> {
        let mut at = self.tail.load(Ordering::Relaxed);
        loop {
            let cell = &self.cells[at & self.mask];
            let turn = cell.turn.load(Ordering::Acquire);
            if turn == at {
                match self.tail.compare_exchange_weak(
                    at,
                    at.wrapping_add(1),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => return Some((cell, at)),
                    Err(now) => at = now,
                }
            } else if (turn.wrapping_sub(at) as isize) < 0 {
                return None;
            } else {
                at = self.tail.load(Ordering::Relaxed);
            }
        }
    }

    /// Takes the value at the front.
    #[inline]
    pub fn pop(&self) -> Option<T> {
        let mut at = self.head.load(Ordering::Relaxed);
        loop {
            let cell = &self.cells[at & self.mask];
            let turn = cell.turn.load(Ordering::Acquire);
            if turn == at.wrapping_add(1) {
                match self.head.compare_exchange_weak(
                    at,
                    at.wrapping_add(1),
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => {
                        // SAFETY: the exchange gave this position to this thread alone, and the turn said
                        // that its push is over.
                        let value = cell.value.with(|slot| unsafe { (*slot).assume_init_read() });
                        cell.turn.store(at.wrapping_add(self.capacity()), Ordering::Release);
                        return Some(value);
                    }
                    Err(now) => at = now,
                }
            } else if (turn.wrapping_sub(at.wrapping_add(1)) as isize) < 0 {
                return None;
            } else {
                at = self.head.load(Ordering::Relaxed);
            }
        }
    }
}

impl<T> Drop for Queue<T> {
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

impl<T> fmt::Debug for Queue<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Queue({} of {})", self.len(), self.capacity())
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_every_value_is_taken_once_by_one_of_two_consumers() {
        loom::model(|| {
            let queue = Arc::new(Queue::new(2));
            let producers: Vec<_> = (0..2_u32)
                .map(|value| {
                    let queue = queue.clone();
                    thread::spawn(move || queue.push(value).unwrap())
                })
                .collect();
            let consumer = {
                let queue = queue.clone();
                thread::spawn(move || queue.pop())
            };
            let mut taken: Vec<u32> = consumer.join().unwrap().into_iter().collect();
            for producer in producers {
                producer.join().unwrap();
            }
            taken.extend(std::iter::from_fn(|| queue.pop()));
            taken.sort_unstable();
            assert_eq!(taken, [0, 1]);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_a_full_queue_gives_the_value_back_and_goes_on() {
        let queue = Queue::new(2);
        for lap in 0..5 {
            assert_eq!(queue.push(Box::new(lap)), Ok(()));
            assert_eq!(queue.push(Box::new(lap + 100)), Ok(()));
            assert_eq!(queue.push(Box::new(7)), Err(Box::new(7)));
            assert_eq!(queue.pop(), Some(Box::new(lap)));
            assert_eq!(queue.pop(), Some(Box::new(lap + 100)));
            assert_eq!(queue.pop(), None);
        }
    }

    #[test]
    fn miri_values_left_inside_are_dropped_with_it() {
        let value = std::sync::Arc::new(());
        let queue = Queue::new(4);
        queue.push(value.clone()).unwrap();
        drop(queue);
        assert_eq!(std::sync::Arc::strong_count(&value), 1);
    }

    #[test]
    fn miri_many_threads_move_every_value_exactly_once() {
        let each = if cfg!(miri) { 20 } else { 50_000_u64 };
        let queue = Queue::new(64);
        let sum = std::sync::atomic::AtomicU64::new(0);
        let count = std::sync::atomic::AtomicU64::new(0);
        std::thread::scope(|scope| {
            for producer in 0..2 {
                let queue = &queue;
                scope.spawn(move || {
                    for at in 0..each {
                        let mut value = producer * each + at;
                        while let Err(back) = queue.push(value) {
                            value = back;
                            std::thread::yield_now();
                        }
                    }
                });
            }
            for _ in 0..2 {
                scope.spawn(|| {
                    use std::sync::atomic::Ordering::Relaxed;
                    while count.load(Relaxed) < 2 * each {
                        match queue.pop() {
                            Some(value) => {
                                sum.fetch_add(value, Relaxed);
                                count.fetch_add(1, Relaxed);
                            }
                            None => std::thread::yield_now(),
                        }
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), (0..2 * each).sum::<u64>());
    }
}
