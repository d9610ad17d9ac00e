//! Values under a token that carries a generation.

#![allow(
    clippy::cast_possible_truncation,
    reason = "a token is an index and a generation of 32 bits each"
)]

use super::primitives::{AtomicU32, Ordering};
use super::{FreeList, TryLock};
use std::fmt;

/// A bounded table of values in flight. A token names a slot and the slot's generation, so that a
/// late, repeated or forged token finds no value.
pub struct Slab<T> {
    entries: Box<[SlabEntry<T>]>,
    free: FreeList,
}

struct SlabEntry<T> {
    generation: AtomicU32,
    value: TryLock<Option<T>>,
}

impl<T> Slab<T> {
    /// Makes a table for `capacity` values.
    pub fn new(capacity: usize) -> Self {
        let entry = || SlabEntry { generation: AtomicU32::new(0), value: TryLock::new(None) };
        Self { entries: (0..capacity).map(|_| entry()).collect(), free: FreeList::full(capacity) }
    }

    /// Stores a value and returns its token, or returns the value when the table is full.
    #[allow(clippy::result_large_err, reason = "the error is the value that did not fit")]
    pub fn insert(&self, value: T) -> Result<u64, T> {
        let Some(index) = self.free.pop() else { return Err(value) };
        let entry = &self.entries[index as usize];
        *entry.value.lock() = Some(value);
        Ok(u64::from(entry.generation.load(Ordering::Acquire)) << 32 | u64::from(index))
    }

    /// Removes and returns the value of a token, once. `None` for any other token.
    pub fn take(&self, token: u64) -> Option<T> {
        let index = token as u32;
        let entry = self.entries.get(index as usize)?;
        let mut value = entry.value.lock();
        if entry.generation.load(Ordering::Acquire) != (token >> 32) as u32 {
            return None;
        }
        let taken = value.take()?;
        // From here on the token finds nothing, even when the slot is in use again.
        entry.generation.fetch_add(1, Ordering::AcqRel);
        drop(value);
        self.free.push(index);
        Some(taken)
    }

    /// Lets `read` see the value of a token. `None` for any other token.
    pub fn read<R>(&self, token: u64, read: impl FnOnce(&T) -> R) -> Option<R> {
        let entry = self.entries.get(token as u32 as usize)?;
        let value = entry.value.lock();
        let is_its = entry.generation.load(Ordering::Acquire) == (token >> 32) as u32;
        value.as_ref().filter(|_| is_its).map(read)
    }

    /// Returns the number of values now; visits every slot.
    pub fn len(&self) -> usize {
        self.entries.iter().filter(|entry| entry.value.lock().is_some()).count()
    }

    /// Returns `true` if there are no values now; visits every slot.
    pub fn is_empty(&self) -> bool {
        self.entries.iter().all(|entry| entry.value.lock().is_none())
    }

    /// Returns `true` if a value is `meant`; visits every slot until it finds one.
    pub fn any(&self, is_meant: impl Fn(&T) -> bool) -> bool {
        self.entries.iter().any(|entry| entry.value.lock().as_ref().is_some_and(&is_meant))
    }

    /// Takes all values out, for shutting down.
    pub fn drain(&self) -> Vec<T> {
        (0..self.entries.len())
            .filter_map(|index| {
                let generation = self.entries[index].generation.load(Ordering::Acquire);
                self.take(u64::from(generation) << 32 | index as u64)
            })
            .collect()
    }
}

impl<T> fmt::Debug for Slab<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slab(of {})", self.entries.len())
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    #[test]
    fn loom_a_token_is_taken_by_exactly_one_of_two_threads() {
        loom::model(|| {
            let slab = Arc::new(Slab::new(1));
            let token = slab.insert(7).unwrap();
            let threads: Vec<_> = (0..2)
                .map(|_| {
                    let slab = slab.clone();
                    thread::spawn(move || slab.take(token).is_some())
                })
                .collect();
            let taken = threads.into_iter().map(|t| usize::from(t.join().unwrap())).sum::<usize>();
            assert_eq!(taken, 1);
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn miri_a_stale_token_finds_nothing_even_when_its_slot_is_used_again() {
        let slab = Slab::new(1);
        let old = slab.insert("a").unwrap();
        assert_eq!(slab.insert("b"), Err("b"), "a full table gives the value back");
        assert_eq!(slab.take(old), Some("a"));
        let new = slab.insert("c").unwrap();
        assert_eq!(slab.take(old), None);
        assert_eq!(slab.take(new ^ 1 << 40), None);
        assert_eq!(slab.take(u64::MAX), None);
        assert_eq!(slab.take(new), Some("c"));
    }

    #[test]
    fn draining_gives_back_what_is_left() {
        let slab = Slab::new(4);
        let token = slab.insert(1).unwrap();
        slab.insert(2).unwrap();
        slab.take(token);
        assert_eq!(slab.drain(), [2]);
    }
}
