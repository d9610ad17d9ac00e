//! Counts what is over.

use super::landing::Landing;
use super::memory::Memory;
use carrack::comp::{AsCompletion, Completion, Status};
use carrack::{Buffer, Rank, Tag};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A completion object that counts and throws the statuses away.
///
/// A [`Counter`](carrack::Counter) does the same for any number of threads, at the price of a
/// locked instruction for each message. Here one thread at a time makes progress on a device (see
/// `seat`), so that a load and a store are enough: the least that any program could do with a
/// message.
pub(super) struct Tally {
    counts: Arc<Counts>,
    object: Arc<dyn Completion>,
}

struct Counts {
    arrived: AtomicU64,
    /// `true` if several threads may signal at a time.
    shared: AtomicBool,
    failed: OnceLock<String>,
    /// Memory for large messages.
    landing: Option<Landing>,
}

impl Completion for Counts {
    #[inline]
    fn signal(&self, status: Status) -> Result<(), Status> {
        if let Some(error) = &status.error {
            let _ = self.failed.set(error.to_string());
        } else if self.shared.load(Ordering::Relaxed) {
            self.arrived.fetch_add(1, Ordering::Release);
        } else {
            self.arrived.store(self.arrived.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
        Ok(())
    }

    fn place(&self, _from: Rank, _tag: Tag, size: usize) -> Option<Buffer> {
        self.landing.as_ref()?.place(size)
    }

    fn describe(&self) -> String {
        "a tally of perf".into()
    }
}

impl Tally {
    /// At zero, for any number of threads: of what has no bytes, or brings its own memory.
    pub(super) fn new() -> Self {
        Self::with(None)
    }

    /// The same, of messages that land in this memory.
    pub(super) fn of_messages(memory: &Memory) -> Self {
        Self::with(Some(Landing::new(memory)))
    }

    fn with(landing: Option<Landing>) -> Self {
        let (shared, failed) = (AtomicBool::new(true), OnceLock::new());
        let counts = Arc::new(Counts { arrived: AtomicU64::new(0), shared, failed, landing });
        Self { object: counts.clone(), counts }
    }

    /// Sets whether several threads may make progress on its device at a time. Called while nothing
    /// is in flight.
    pub(super) fn set_shared(&self, shared: bool) {
        self.counts.shared.store(shared, Ordering::Relaxed);
    }

    /// Returns the number of successes since the start.
    #[inline]
    pub(super) fn get(&self) -> u64 {
        self.counts.arrived.load(Ordering::Acquire)
    }

    /// Returns the reason of the first failure, if there was one.
    pub(super) fn failed(&self) -> Option<&str> {
        self.counts.failed.get().map(String::as_str)
    }
}

impl AsCompletion for Tally {
    fn as_completion(&self) -> &Arc<dyn Completion> {
        &self.object
    }
}
