//! What progress has to look at beside its transports, in one word: so that a look which finds nothing costs one load, whatever
//! there could be.

use crate::wait::Sleepers;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A bit for each sort of thing that may be there to be done. Shared by all who put something there.
#[derive(Clone, Default)]
pub(crate) struct Chores {
    there: Arc<AtomicUsize>,
    /// Threads that may sleep while there is nothing.
    sleepers: Option<Arc<Sleepers>>,
}

/// A sort of thing that may be there to be done.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chore {
    /// Backlogs that are not empty.
    Backlogs = 1,
    /// Copies that engines are at.
    Landings = 1 << 1,
    /// Large messages on their way out.
    Streams = 1 << 2,
    /// Large messages that the kernel is to copy.
    Pulls = 1 << 3,
    /// Those who wait for operations on memory.
    Flushes = 1 << 4,
    /// What could not be delivered.
    Deferred = 1 << 5,
    /// Large messages that others copy from here.
    Helps = 1 << 10,
    /// Ranks to be told to hold, or to go on.
    Holds = 1 << 6,
    /// Of the whole runtime: deadlines.
    Deadlines = 1 << 7,
    /// Of the whole runtime: futures to be polled again.
    Retries = 1 << 8,
    /// Of the whole runtime: ranks that are silent.
    Suspects = 1 << 9,
}

impl Chores {
    /// Whose sleepers are woken when there is something.
    pub(crate) fn waking(sleepers: &Arc<Sleepers>) -> Self {
        Self { there: Arc::default(), sleepers: Some(sleepers.clone()) }
    }

    /// What there is.
    #[inline(always)]
    pub(crate) fn there(&self) -> Found {
        Found(self.there.load(Ordering::Acquire))
    }

    /// Notes whether there is something, says whoever holds the lock on it.
    pub(crate) fn set(&self, chore: Chore, is_there: bool) {
        if !is_there {
            self.there.fetch_and(!(chore as usize), Ordering::SeqCst);
        } else if self.there.fetch_or(chore as usize, Ordering::SeqCst) & chore as usize == 0 {
            self.wake();
        }
    }

    /// Wakes threads that sleep, to look at what there is.
    pub(crate) fn wake(&self) {
        if let Some(sleepers) = &self.sleepers {
            sleepers.wake();
        }
    }

    /// The word, for a signal handler that sets all its bits.
    pub(crate) fn word(&self) -> Arc<AtomicUsize> {
        self.there.clone()
    }

    /// Takes all bits, those included that no chore has: whoever does so puts back what is true.
    pub(crate) fn take_all(&self) {
        self.there.store(0, Ordering::SeqCst);
    }
}

/// What there was at some moment.
#[derive(Clone, Copy)]
pub(crate) struct Found(usize);

impl Found {
    #[inline(always)]
    pub(crate) fn any(self) -> bool {
        self.0 != 0
    }

    #[inline(always)]
    pub(crate) fn has(self, chore: Chore) -> bool {
        self.0 & chore as usize != 0
    }

    /// The same without one.
    pub(crate) fn but(self, chore: Chore) -> Self {
        Self(self.0 & !(chore as usize))
    }

    /// Whether a signal has set all bits: then also the highest, which no chore has.
    #[inline(always)]
    pub(crate) fn is_signalled(self) -> bool {
        self.0 > isize::MAX as usize
    }
}

/// A list behind a lock, with its length beside it for those who only want to know whether it is empty.
pub(crate) struct Waiting<T> {
    list: Mutex<T>,
    count: AtomicU32,
    chore: Option<(Chores, Chore)>,
}

impl<T: Default> Waiting<T> {
    /// Of which no progress needs to know.
    pub(crate) fn new() -> Self {
        Self { list: Mutex::default(), count: AtomicU32::new(0), chore: None }
    }

    /// Which is a chore of progress while it is not empty.
    pub(crate) fn for_progress(chores: &Chores, chore: Chore) -> Self {
        Self { chore: Some((chores.clone(), chore)), ..Self::new() }
    }
}

impl<T> Waiting<T> {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.count() == 0
    }

    #[inline]
    pub(crate) fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        self.list.try_lock().ok()
    }

    /// Puts its bit right, which somebody may have taken or set without its lock.
    pub(crate) fn correct(&self) {
        let _list = self.lock();
        if let Some((chores, chore)) = &self.chore {
            chores.set(*chore, !self.is_empty());
        }
    }

    /// Notes how many there are, says whoever holds the lock.
    pub(crate) fn set_count(&self, count: usize) {
        let before = self.count.swap(u32::try_from(count).unwrap_or(u32::MAX), Ordering::AcqRel);
        if let Some((chores, chore)) = &self.chore
            && (before == 0) != (count == 0)
        {
            chores.set(*chore, count != 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_is_not_empty_is_a_chore_and_others_are_not() {
        let chores = Chores::default();
        let list: Waiting<Vec<u8>> = Waiting::for_progress(&chores, Chore::Pulls);
        let other: Waiting<Vec<u8>> = Waiting::for_progress(&chores, Chore::Flushes);
        assert!(!chores.there().any());
        list.set_count(2);
        list.set_count(1);
        assert!(chores.there().has(Chore::Pulls) && !chores.there().has(Chore::Flushes));
        other.set_count(1);
        list.set_count(0);
        assert!(!chores.there().has(Chore::Pulls) && chores.there().has(Chore::Flushes));
        Waiting::<Vec<u8>>::new().set_count(1);
        other.set_count(0);
        assert!(!chores.there().any() && list.is_empty());
    }
}
