//! A number of operations, waited for together.

use super::{AsCompletion, Completion, Plain, Status};
use parking_lot::{Mutex, MutexGuard};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Completion object that waits for a number of operations, its threshold, like an MPI request. It
/// can be used again once their statuses are taken.
///
/// It takes at most as many statuses as its threshold at a time: further ones wait, as for a full
/// queue.
#[derive(Clone)]
pub struct Synchronizer {
    inner: Arc<Gathered>,
    object: Arc<dyn Completion>,
    /// Counts handles: only they can take statuses.
    _handle: Arc<()>,
}

/// The statuses of a synchronizer.
pub struct Gathered {
    threshold: usize,
    /// The number of statuses, for tests without a lock.
    count: AtomicUsize,
    statuses: Mutex<Vec<Status>>,
    handles: Weak<()>,
}

impl Gathered {
    fn lock(&self) -> MutexGuard<'_, Vec<Status>> {
        self.statuses.lock()
    }

    /// Adds the status that `make` makes. Returns `false` if there is no room, or another thread
    /// has the lock; `make` was not called then.
    #[inline(never)]
    pub(crate) fn push_made(&self, make: &mut dyn FnMut() -> Status) -> bool {
        let statuses = self.statuses.try_lock();
        let Some(mut statuses) = statuses.filter(|it| it.len() < self.threshold) else {
            return false;
        };
        statuses.push(make());
        self.count.store(statuses.len(), Ordering::Release);
        true
    }
}

impl Completion for Gathered {
    fn signal(&self, status: Status) -> Result<(), Status> {
        let mut statuses = self.lock();
        if statuses.len() >= self.threshold {
            return Err(status);
        }
        statuses.push(status);
        self.count.store(statuses.len(), Ordering::Release);
        Ok(())
    }

    fn as_plain(&self) -> Option<Plain<'_>> {
        Some(Plain::Synchronizer(self))
    }

    fn is_abandoned(&self) -> bool {
        self.handles.strong_count() == 0
    }

    fn runs_user_code(&self) -> bool {
        false
    }

    fn describe(&self) -> String {
        format!("a synchronizer with threshold {}", self.threshold)
    }
}

impl Synchronizer {
    /// Returns a synchronizer for `threshold` operations, at least one.
    ///
    /// # Panics
    ///
    /// If no address space can hold as many. Without the memory for them the process aborts.
    pub fn new(threshold: usize) -> Self {
        let threshold = threshold.max(1);
        let statuses = Mutex::new(Vec::with_capacity(threshold));
        let handle = Arc::new(());
        let (count, handles) = (AtomicUsize::new(0), Arc::downgrade(&handle));
        let inner = Arc::new(Gathered { threshold, count, statuses, handles });
        Self { object: inner.clone(), inner, _handle: handle }
    }

    /// Returns `true` if all operations have completed. Does not reset it.
    #[inline]
    pub fn test(&self) -> bool {
        self.inner.count.load(Ordering::Acquire) >= self.inner.threshold
    }

    /// Takes the statuses, in the order in which the operations ended, if all have. The count then
    /// starts again from zero.
    pub fn take(&self) -> Option<Vec<Status>> {
        let mut statuses = self.inner.lock();
        if statuses.len() < self.inner.threshold {
            return None;
        }
        self.inner.count.store(0, Ordering::Release);
        let room = Vec::with_capacity(self.inner.threshold);
        Some(std::mem::replace(&mut statuses, room))
    }
}

impl AsCompletion for Synchronizer {
    fn as_completion(&self) -> &Arc<dyn Completion> {
        &self.object
    }
}

impl std::fmt::Debug for Synchronizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "Synchronizer({} of {})",
            self.inner.count.load(Ordering::Relaxed),
            self.inner.threshold
        )
    }
}
