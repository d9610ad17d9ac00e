//! A bounded queue for any number of producers and consumers.

#![expect(unsafe_code, reason = "a structure without locks shares cells between threads")]

use super::alone::Alone;
use super::primitives::{AtomicUsize, Ordering, UnsafeCell};
use crossbeam_utils::CachePadded;
use std::fmt;
use std::mem::MaybeUninit;

/// Vyukov's bounded queue: values in place, nothing allocated after the start. An operation takes
/// one atomic exchange, or none at an end that a single thread uses. A push into a full queue
/// returns the value: nothing is overwritten (LCI's array queue overwrites) and nothing is lost.
pub struct Queue<T> {
    cells: Cells<T>,
    tail: CachePadded<QueueEnd>,
    head: CachePadded<QueueEnd>,
    /// A position before which every push had ended when `len` last looked.
    filled: CachePadded<AtomicUsize>,
}

/// One end of the queue, where values come in or go out.
struct QueueEnd {
    /// The position of the next value.
    at: AtomicUsize,
    alone: Alone,
}

/// Readiness of a cell for an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Readiness {
    /// The cell is ready for it.
    Now,
    /// Another operation on the cell has to come first.
    Later,
    /// The operation was done.
    Past,
}

/// Cells; their number is a power of two.
struct Cells<T>(Box<[Cell<T>]>);

struct Cell<T> {
    /// `position` when free for that position's push, `position + 1` when filled for its pop.
    turn: AtomicUsize,
    value: UnsafeCell<MaybeUninit<T>>,
}

impl<T> Cells<T> {
    /// Returns the cell of a position.
    #[inline(always)]
    fn at(&self, position: usize) -> &Cell<T> {
        &self.0[position & (self.0.len() - 1)]
    }
}

impl<T> Cell<T> {
    /// Returns its readiness for the operation of this turn.
    #[inline(always)]
    fn stands_at(&self, turn: usize) -> Readiness {
        // Acquire: the operation before has ended, and is seen.
        match self.turn.load(Ordering::Acquire).wrapping_sub(turn) as isize {
            0 => Readiness::Now,
            ..0 => Readiness::Later,
            _ => Readiness::Past,
        }
    }

    /// Fills the cell. Only the thread that was given its position calls it.
    #[inline(always)]
    fn fill(&self, at: usize, value: T) {
        // SAFETY: the position was given to this thread alone, and the turn said that the pop of
        // the lap before has ended.
        self.value.with_mut(|slot| unsafe { (*slot).write(value) });
        self.turn.store(at.wrapping_add(1), Ordering::Release);
    }
}

// SAFETY: a value is handed from one thread to another, never shared; `turn` orders the hand-over.
unsafe impl<T: Send> Send for Queue<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Queue<T> {}

impl<T> Queue<T> {
    /// Makes a queue for at least `capacity` values (rounded up to a power of two, at least two).
    ///
    /// # Panics
    ///
    /// If no address space can hold as many. Without the memory for them the process aborts.
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(2).checked_next_power_of_two();
        let capacity = capacity.expect("a queue of more values than memory holds");
        let cell =
            |at| Cell { turn: AtomicUsize::new(at), value: UnsafeCell::new(MaybeUninit::uninit()) };
        let filled = CachePadded::new(AtomicUsize::new(0));
        Self {
            cells: Cells((0..capacity).map(cell).collect()),
            tail: QueueEnd::new(),
            head: QueueEnd::new(),
            filled,
        }
    }

    /// Returns the number of values that it can hold.
    pub fn capacity(&self) -> usize {
        self.cells.0.len()
    }

    /// Returns the number of values that can be taken now. While a single thread takes values, at
    /// least that many calls of [`pop`](Self::pop) succeed. Other consumers may take them first.
    ///
    /// Counts a value when its push has ended, and each value once: a further call begins where
    /// the last one stopped.
    pub fn len(&self) -> usize {
        let head = self.head.at.load(Ordering::Relaxed);
        // Acquire: a pop on this thread sees the pushes seen by the thread that stored this.
        let known = self.filled.load(Ordering::Acquire).wrapping_sub(head);
        // Consumers may have gone past the position.
        let known = if known <= self.capacity() { known } else { 0 };
        let is_filled = |&count: &usize| {
            let at = head.wrapping_add(count);
            self.cells.at(at).stands_at(at.wrapping_add(1)) == Readiness::Now
        };
        let count =
            (known..self.capacity()).find(|count| !is_filled(count)).unwrap_or(self.capacity());
        if count > known {
            // Threads may store in any order: the position holds for each of them.
            self.filled.store(head.wrapping_add(count), Ordering::Release);
        }
        count
    }

    /// Returns `true` if there is no value. While a single thread takes values, a `false` means
    /// that its next [`pop`](Self::pop) succeeds.
    pub fn is_empty(&self) -> bool {
        loop {
            let at = self.head.at.load(Ordering::Relaxed);
            match self.cells.at(at).stands_at(at.wrapping_add(1)) {
                Readiness::Now => return false,
                Readiness::Later => return true,
                // Another consumer has taken that value since.
                Readiness::Past => {}
            }
        }
    }

    /// Adds a value at the end, or returns it when the queue is full.
    #[inline]
    #[allow(clippy::result_large_err, reason = "the error is the value that did not fit")]
    pub fn push(&self, value: T) -> Result<(), T> {
        match self.tail.claim(&self.cells, 0) {
            Some((at, cell)) => {
                cell.fill(at, value);
                Ok(())
            }
            None => Err(value),
        }
    }

    /// Reserves the place of one value at the end. `None`: the queue is full. The value has to be
    /// given: otherwise the queue stops there.
    #[inline(always)]
    pub fn reserve(&self) -> Option<QueuePermit<'_, T>> {
        self.tail.claim(&self.cells, 0).map(|(at, cell)| QueuePermit { at, cell })
    }

    /// Takes the value at the front.
    #[inline(always)]
    pub fn pop(&self) -> Option<T> {
        let (at, cell) = self.head.claim(&self.cells, 1)?;
        // A guard, so that the value is moved once, to where the caller has room for it.
        let _free = FreedCell { cell, turn: at.wrapping_add(self.capacity()) };
        // SAFETY: the position was given to this thread alone, and the turn said that its push has
        // ended.
        Some(cell.value.with(|slot| unsafe { (*slot).assume_init_read() }))
    }
}

/// The place of a value in a queue.
#[must_use = "the queue stops at a place that stays empty"]
pub struct QueuePermit<'a, T> {
    at: usize,
    cell: &'a Cell<T>,
}

impl<T> QueuePermit<'_, T> {
    /// Gives the value.
    #[inline(always)]
    pub fn fill(self, value: T) {
        self.cell.fill(self.at, value);
    }
}

/// A cell that a push of a later turn may use from the drop on.
struct FreedCell<'a, T> {
    cell: &'a Cell<T>,
    turn: usize,
}

impl<T> Drop for FreedCell<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.cell.turn.store(self.turn, Ordering::Release);
    }
}

impl QueueEnd {
    fn new() -> CachePadded<Self> {
        CachePadded::new(Self { at: AtomicUsize::new(0), alone: Alone::new() })
    }

    /// Claims the next position, with its cell, for this thread alone. `None` when the cell is not
    /// ready for the turn `ahead` of the position.
    #[inline(always)]
    fn claim<'a, T>(&self, cells: &'a Cells<T>, ahead: usize) -> Option<(usize, &'a Cell<T>)> {
        if let Some(_alone) = self.alone.enter() {
            let at = self.at.load(Ordering::Relaxed);
            let cell = cells.at(at);
            if cell.stands_at(at.wrapping_add(ahead)) != Readiness::Now {
                return None;
            }
            self.at.store(at.wrapping_add(1), Ordering::Relaxed);
            return Some((at, cell));
        }
        self.claim_among_others(cells, ahead)
    }

    fn claim_among_others<'a, T>(
        &self,
        cells: &'a Cells<T>,
        ahead: usize,
    ) -> Option<(usize, &'a Cell<T>)> {
        let (same, any) = (Ordering::Relaxed, Ordering::Relaxed);
        let mut at = self.at.load(Ordering::Relaxed);
        loop {
            let cell = cells.at(at);
            match cell.stands_at(at.wrapping_add(ahead)) {
                Readiness::Now => {
                    match self.at.compare_exchange_weak(at, at.wrapping_add(1), same, any) {
                        Ok(_) => return Some((at, cell)),
                        Err(now) => at = now,
                    }
                }
                Readiness::Later => return None,
                Readiness::Past => at = self.at.load(Ordering::Relaxed),
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

    type Doing = fn(&Queue<u32>);

    /// Runs a push next to operations of other threads. The push comes first in the order from
    /// which loom departs. Otherwise loom would not try the interleaving in which a load falls
    /// between another thread's load and store of the same word.
    fn next_to_a_push<const N: usize>(others: [Doing; N]) {
        loom::model(move || {
            let queue = Arc::new(Queue::new(2));
            let others: Vec<_> = others
                .into_iter()
                .map(|other| {
                    let queue = queue.clone();
                    thread::spawn(move || other(&queue))
                })
                .collect();
            queue.push(1).unwrap();
            others.into_iter().for_each(|other| other.join().unwrap());
        });
    }

    fn takes_as_many_as_the_length_says(queue: &Queue<u32>) {
        for _ in 0..queue.len() {
            assert!(queue.pop().is_some());
        }
    }

    /// The push that begins later may end first.
    const PUSHES_TOO: Doing = |queue| queue.push(2).unwrap();

    #[test]
    fn loom_a_queue_that_is_not_empty_gives_its_one_consumer_a_value() {
        next_to_a_push([PUSHES_TOO, |queue| {
            if !queue.is_empty() {
                assert!(queue.pop().is_some());
            }
        }]);
    }

    #[test]
    fn loom_as_many_values_as_the_length_says_can_be_taken_by_one_consumer() {
        next_to_a_push([PUSHES_TOO, takes_as_many_as_the_length_says]);
    }

    #[test]
    fn loom_a_length_that_another_thread_has_looked_up_first_can_be_taken_too() {
        next_to_a_push([|queue| _ = queue.len(), takes_as_many_as_the_length_says]);
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
    fn miri_a_length_is_right_on_every_lap_however_often_it_is_asked_for() {
        for asks_each_time in [true, false] {
            let queue = Queue::new(4);
            for lap in 0..9 {
                let count = lap % 5;
                for have in 0..count {
                    assert!(!asks_each_time || queue.len() == have);
                    queue.push(lap).unwrap();
                }
                assert_eq!((queue.len(), queue.is_empty()), (count, count == 0));
                for left in (0..count).rev() {
                    assert_eq!(queue.pop(), Some(lap));
                    assert!(!asks_each_time || queue.len() == left);
                }
                assert_eq!((queue.len(), queue.is_empty()), (0, true));
            }
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
                        assert!(queue.len() <= queue.capacity());
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
