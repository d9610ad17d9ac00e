//! Pending work in one word: a look that finds none costs one load, for any number of kinds.
//!
//! The thread that adds work sets its bit afterwards; the thread that finds none left clears it.
//! Work behind a lock ([`Waiting`]) has its bit changed with the lock held. [`super::earliest`]
//! has no lock, and looks once more after it has cleared its bit. A signal handler sets a bit of
//! its own, and changes no other.

use super::Sleepers;
use super::primitives::{AtomicU32, AtomicUsize, Mutex, MutexGuard, Ordering};
use std::sync::Arc;

/// A bit for each kind of work that may be pending. Shared by all threads that add work.
#[derive(Clone, Default, Debug)]
pub struct Chores {
    there: Arc<AtomicUsize>,
    /// Threads that may sleep while no work is pending.
    sleepers: Option<Arc<Sleepers>>,
}

/// The bit of one kind of work.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bit(pub usize);

impl Chores {
    /// Makes a word that wakes `sleepers` when work is added.
    pub fn waking(sleepers: &Arc<Sleepers>) -> Self {
        Self { there: Arc::default(), sleepers: Some(sleepers.clone()) }
    }

    /// Returns the kinds of work that are pending.
    #[inline(always)]
    pub fn there(&self) -> PendingChores {
        PendingChores(self.there.load(Ordering::Acquire))
    }

    /// Notes that work of a kind is pending, or not. The holder of the lock on that work calls it.
    #[inline]
    pub fn set(&self, chore: impl Into<Bit>, is_there: bool) {
        let Bit(bit) = chore.into();
        if !is_there {
            // Acquire: work that was added before its bit was set is seen by a look after this.
            self.there.fetch_and(!bit, Ordering::AcqRel);
        } else if self.there.fetch_or(bit, Ordering::AcqRel) & bit == 0 {
            // Always written, even if the bit is set: the write makes the added work visible.
            self.wake();
        }
    }

    /// Wakes threads that sleep, to look for work.
    #[inline]
    pub fn wake(&self) {
        if let Some(sleepers) = &self.sleepers {
            sleepers.wake();
        }
    }

    /// Sets a bit and wakes no thread: a signal handler may do no more.
    pub(crate) fn raise(&self, chore: Bit) {
        self.there.fetch_or(chore.0, Ordering::AcqRel);
    }

    /// Clears a bit. Returns `true` for the one thread that found it set.
    pub fn take(&self, chore: impl Into<Bit>) -> bool {
        let Bit(bit) = chore.into();
        self.there.fetch_and(!bit, Ordering::AcqRel) & bit != 0
    }
}

/// Kinds of work that were pending at some moment.
#[derive(Clone, Copy, Debug)]
pub struct PendingChores(usize);

impl PendingChores {
    /// Returns `true` if work of any kind was pending.
    #[inline(always)]
    pub fn any(self) -> bool {
        self.0 != 0
    }

    /// Returns `true` if work of this kind was pending.
    #[inline(always)]
    pub fn has(self, chore: impl Into<Bit>) -> bool {
        self.0 & chore.into().0 != 0
    }

    /// Returns the same without one kind.
    #[inline(always)]
    pub fn but(self, chore: impl Into<Bit>) -> Self {
        Self(self.0 & !chore.into().0)
    }
}

/// A list behind a lock, with its length next to the lock, so that a check for emptiness needs no
/// lock.
#[derive(Debug)]
pub struct Waiting<T> {
    list: Mutex<T>,
    count: AtomicU32,
    chore: Option<(Chores, Bit)>,
}

impl<T: Default> Waiting<T> {
    /// Makes a list that is no chore of progress.
    #[allow(
        clippy::new_without_default,
        reason = "one is made for progress, or not: both are said"
    )]
    pub fn new() -> Self {
        Self { list: Mutex::new(T::default()), count: AtomicU32::new(0), chore: None }
    }

    /// Makes a list that is a chore of progress while it is not empty.
    pub fn for_progress(chores: &Chores, chore: impl Into<Bit>) -> Self {
        Self { chore: Some((chores.clone(), chore.into())), ..Self::new() }
    }

    /// Takes the list, and leaves an empty one.
    pub fn take(&self) -> T {
        let mut list = self.lock();
        self.set_count(0);
        std::mem::take(&mut *list)
    }
}

impl<T> Waiting<T> {
    /// Returns `true` if the list was empty a moment ago.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count() == 0
    }

    /// Returns the length of a moment ago.
    #[inline]
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Returns the list. A caller that changes its length calls [`set_count`](Self::set_count)
    /// before it releases the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.list.lock()
    }

    /// Returns the list, if no thread holds it at the moment.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.list.try_lock()
    }

    /// Wakes threads that sleep, for an entry that must not wait like the ones before it.
    pub fn wake(&self) {
        if let Some((chores, _)) = &self.chore {
            chores.wake();
        }
    }

    /// Sets the length. The holder of the lock calls it.
    pub fn set_count(&self, count: usize) {
        #[cfg(not(loom))]
        debug_assert!(self.list.is_locked(), "the length of a list is set without its lock");
        // No exchange: no other thread writes it meanwhile.
        let before = self.count.load(Ordering::Relaxed);
        self.count.store(u32::try_from(count).unwrap_or(u32::MAX), Ordering::Release);
        if let Some((chores, chore)) = &self.chore
            && (before == 0) != (count == 0)
        {
            chores.set(*chore, count != 0);
        }
    }
}

#[cfg(all(test, loom))]
mod models {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;

    const PULLS: Bit = Bit(1);
    const FLUSHES: Bit = Bit(1 << 1);
    const DUMP: Bit = Bit(1 << 2);

    type ByteList = Waiting<Vec<u8>>;

    fn put(list: &ByteList, what: u8) {
        let mut waiting = list.lock();
        waiting.push(what);
        list.set_count(waiting.len());
    }

    /// Does as progress does: looks at the bit first.
    fn take(chores: &Chores, list: &ByteList) -> Vec<u8> {
        if !chores.there().has(PULLS) {
            return Vec::new();
        }
        list.take()
    }

    #[test]
    fn loom_what_is_put_while_the_list_is_emptied_has_its_bit_or_was_taken() {
        loom::model(|| {
            let chores = Chores::default();
            let list = Arc::new(ByteList::for_progress(&chores, PULLS));
            let other = Arc::new(ByteList::for_progress(&chores, FLUSHES));
            put(&list, 1);
            let poster = {
                let (list, other) = (list.clone(), other.clone());
                thread::spawn(move || {
                    put(&list, 2);
                    put(&other, 3);
                })
            };
            let mut taken = take(&chores, &list);
            poster.join().unwrap();
            assert!(chores.there().has(FLUSHES), "the other list's bit is untouched");
            taken.extend(take(&chores, &list));
            taken.sort_unstable();
            assert_eq!(taken, [1, 2]);
            assert!(!chores.there().has(PULLS));
        });
    }

    #[test]
    fn loom_a_signal_that_comes_while_lists_are_filled_and_emptied_changes_no_bit_but_its_own() {
        loom::model(|| {
            let chores = Chores::default();
            let list = Arc::new(ByteList::for_progress(&chores, PULLS));
            let other = Arc::new(ByteList::for_progress(&chores, FLUSHES));
            put(&list, 1);
            let signal = {
                let chores = chores.clone();
                thread::spawn(move || chores.raise(DUMP))
            };
            put(&other, 2);
            let mut dumps = u32::from(chores.take(DUMP));
            assert_eq!(take(&chores, &list), [1]);
            signal.join().unwrap();
            dumps += u32::from(chores.take(DUMP));
            assert_eq!((dumps, chores.there().0), (1, FLUSHES.0));
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const PULLS: Bit = Bit(1);
    const FLUSHES: Bit = Bit(1 << 1);

    #[test]
    fn miri_a_list_that_is_not_empty_is_a_chore_and_others_are_not() {
        let chores = Chores::default();
        let list: Waiting<Vec<u8>> = Waiting::for_progress(&chores, PULLS);
        let other: Waiting<Vec<u8>> = Waiting::for_progress(&chores, FLUSHES);
        let set = |list: &Waiting<Vec<u8>>, count| {
            let _list = list.lock();
            list.set_count(count);
        };
        assert!(!chores.there().any());
        set(&list, 2);
        set(&list, 1);
        assert!(chores.there().has(PULLS) && !chores.there().has(FLUSHES));
        set(&other, 1);
        set(&list, 0);
        assert!(!chores.there().has(PULLS) && chores.there().has(FLUSHES));
        assert!(!chores.there().but(FLUSHES).any());
        set(&Waiting::new(), 1);
        set(&other, 0);
        assert!(!chores.there().any() && list.is_empty());
    }
}
