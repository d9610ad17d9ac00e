//! Statuses that wait to be taken.

use super::{AsCompletion, Completion, Plain, Status};
use carrack_transports::sync::{Queue, QueuePermit};
use std::sync::{Arc, Weak};

/// Queue that keeps statuses in order until they are taken. Any number of threads may push and pop.
/// The queue never overwrites. Deliveries to a full queue wait for room, in order, and progress
/// reports [`CompletionFull`](crate::ProgressError::CompletionFull) whenever waiting begins;
/// everything else goes on.
#[derive(Clone)]
pub struct CompQueue {
    queue: Arc<Statuses>,
    object: Arc<dyn Completion>,
    /// Counts handles: only they can take statuses.
    _handle: Arc<()>,
}

/// The shared state of all handles to a queue.
pub struct Statuses {
    queue: Queue<Status>,
    handles: Weak<()>,
}

impl Statuses {
    /// Reserves the place of one status. `None`: there is no room.
    #[inline(always)]
    pub(crate) fn reserve(&self) -> Option<QueuePermit<'_, Status>> {
        self.queue.reserve()
    }
}

impl Completion for Statuses {
    #[inline]
    fn signal(&self, status: Status) -> Result<(), Status> {
        self.queue.push(status)
    }

    fn as_plain(&self) -> Option<Plain<'_>> {
        Some(Plain::Queue(self))
    }

    fn is_abandoned(&self) -> bool {
        self.handles.strong_count() == 0
    }

    fn runs_user_code(&self) -> bool {
        false
    }

    fn describe(&self) -> String {
        format!("a queue of {} entries", self.queue.capacity())
    }
}

impl CompQueue {
    /// Returns a queue for at least `length` statuses, rounded up to a power of two, at least two.
    ///
    /// # Panics
    ///
    /// If no address space can hold as many. Without the memory for them the process aborts.
    pub fn new(length: usize) -> Self {
        let handle = Arc::new(());
        let queue =
            Arc::new(Statuses { queue: Queue::new(length), handles: Arc::downgrade(&handle) });
        Self { object: queue.clone(), queue, _handle: handle }
    }

    /// Takes the oldest status.
    // Not inlined, so that a status is moved as a whole. Inlined, the compiler loads its first byte
    // alone and the others across the stores that wrote them, for which the processor waits.
    #[inline(never)]
    pub fn pop(&self) -> Option<Status> {
        self.queue.queue.pop()
    }

    /// Returns how many statuses can be taken now. While one thread alone calls [`pop`](Self::pop),
    /// at least as many calls succeed.
    pub fn len(&self) -> usize {
        self.queue.queue.len()
    }

    /// Returns `true` if there is nothing to be taken. While one thread alone calls
    /// [`pop`](Self::pop), a `false` means that its next one succeeds.
    pub fn is_empty(&self) -> bool {
        self.queue.queue.is_empty()
    }

    /// Returns the number of statuses that it can hold.
    pub fn capacity(&self) -> usize {
        self.queue.queue.capacity()
    }
}

impl AsCompletion for CompQueue {
    fn as_completion(&self) -> &Arc<dyn Completion> {
        &self.object
    }
}

impl std::fmt::Debug for CompQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "CompQueue({} of {})", self.len(), self.capacity())
    }
}
