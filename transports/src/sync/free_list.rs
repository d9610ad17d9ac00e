//! A stack of indices.

#![allow(
    clippy::cast_possible_truncation,
    reason = "the top is an index and a tag of 32 bits each"
)]

use super::primitives::{AtomicU32, AtomicU64, Ordering};
use crossbeam_utils::CachePadded;

/// A lock-free stack of the indices `0..capacity` (Treiber's, with a tag against reuse). Last in,
/// first out, so that the index whose memory is still warm comes first.
#[derive(Debug)]
pub struct FreeList {
    /// Upper half: a tag that grows with every pop; lower half: top index + 1, or 0 when empty.
    top: CachePadded<AtomicU64>,
    /// Index below each index: that index + 1, or 0.
    below: Box<[AtomicU32]>,
}

impl FreeList {
    /// Makes an empty list that can hold the indices `0..capacity`.
    pub fn new(capacity: usize) -> Self {
        Self {
            top: CachePadded::new(AtomicU64::new(0)),
            below: (0..capacity).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// Makes a full list: all of `0..capacity`, the lowest on top.
    pub fn full(capacity: usize) -> Self {
        let list = Self::new(capacity);
        for index in (0..u32::try_from(capacity).unwrap_or(u32::MAX)).rev() {
            list.push(index);
        }
        list
    }

    /// Puts an index on top. It must not be on the list already; one out of range is ignored.
    #[inline]
    pub fn push(&self, index: u32) {
        let Some(below) = self.below.get(index as usize) else { return };
        let mut top = self.top.load(Ordering::Relaxed);
        loop {
            below.store(top as u32, Ordering::Relaxed);
            let new = (top & !0xffff_ffff) | u64::from(index + 1);
            // Release: the thread that pops this index sees its last owner's writes.
            match self.top.compare_exchange_weak(top, new, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => top = now,
            }
        }
    }

    /// Takes the index on top.
    #[inline]
    pub fn pop(&self) -> Option<u32> {
        let mut top = self.top.load(Ordering::Acquire);
        loop {
            let index = (top as u32).checked_sub(1)?;
            let below = self.below[index as usize].load(Ordering::Relaxed);
            // The tag makes a top that was popped and pushed again in the meantime another value.
            let new = ((top >> 32).wrapping_add(1) << 32) | u64::from(below);
            match self.top.compare_exchange_weak(top, new, Ordering::Acquire, Ordering::Acquire) {
                Ok(_) => return Some(index),
                Err(now) => top = now,
            }
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_no_index_is_given_out_twice_and_none_is_lost() {
        loom::model(|| {
            let list = Arc::new(FreeList::full(2));
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let list = list.clone();
                    thread::spawn(move || {
                        // Pop, give back, pop again: the sequence that the tag is for.
                        if let Some(index) = list.pop() {
                            list.push(index);
                        }
                        list.pop()
                    })
                })
                .collect();
            let mut taken: Vec<u32> =
                threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect();
            taken.extend(std::iter::from_fn(|| list.pop()));
            taken.sort_unstable();
            assert_eq!(taken, [0, 1]);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_last_in_is_first_out() {
        let list = FreeList::full(3);
        assert_eq!([list.pop(), list.pop()], [Some(0), Some(1)]);
        list.push(0);
        assert_eq!([list.pop(), list.pop(), list.pop()], [Some(0), Some(2), None]);
        list.push(77);
        assert_eq!(list.pop(), None, "an index out of range is ignored");
    }

    #[test]
    fn miri_threads_share_it_without_losing_an_index() {
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        let list = FreeList::full(4);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..rounds {
                        if let Some(index) = list.pop() {
                            list.push(index);
                        }
                    }
                });
            }
        });
        let mut left: Vec<u32> = std::iter::from_fn(|| list.pop()).collect();
        left.sort_unstable();
        assert_eq!(left, [0, 1, 2, 3]);
    }
}
