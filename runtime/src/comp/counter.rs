//! A number that grows.

use super::{AsCompletion, Completion, Status};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts operations that have ended, and drops their statuses. Failures have a count of their
/// own, so that a failure cannot pass for a success.
#[derive(Clone)]
pub struct Counter {
    counts: Arc<CounterState>,
    object: Arc<dyn Completion>,
}

/// Two counts, on a cache line of their own: counters that were made one after the other may be
/// those of threads.
#[derive(Default)]
#[repr(align(64))]
struct CounterState {
    done: AtomicU64,
    failed: AtomicU64,
}

impl Completion for CounterState {
    #[inline]
    fn signal(&self, status: Status) -> Result<(), Status> {
        // Release: a thread that reads the count sees the operation's writes.
        match status.error {
            None => self.done.fetch_add(1, Ordering::Release),
            Some(_) => self.failed.fetch_add(1, Ordering::Release),
        };
        Ok(())
    }

    fn runs_user_code(&self) -> bool {
        false
    }

    fn describe(&self) -> String {
        "a counter".into()
    }
}

impl Counter {
    /// Returns a counter at zero.
    #[allow(clippy::new_without_default, reason = "all completion objects are made by `new`")]
    pub fn new() -> Self {
        let counts = Arc::new(CounterState::default());
        Self { object: counts.clone(), counts }
    }

    /// Returns the number of operations that succeeded.
    #[inline]
    pub fn get(&self) -> u64 {
        self.counts.done.load(Ordering::Acquire)
    }

    /// Returns the number of operations that failed.
    pub fn failed(&self) -> u64 {
        self.counts.failed.load(Ordering::Acquire)
    }

    /// Sets the count of those that succeeded.
    pub fn set(&self, count: u64) {
        self.counts.done.store(count, Ordering::Release);
    }
}

impl AsCompletion for Counter {
    fn as_completion(&self) -> &Arc<dyn Completion> {
        &self.object
    }
}

impl std::fmt::Debug for Counter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Counter({}, {} failed)", self.get(), self.failed())
    }
}
