//! Completion objects of perf: they count, and lay large messages where those land that are
//! measured.

use super::memory::Memory;
use carrack::buffer::RegionSlice;
use carrack::comp::{AsCompletion, Completion, Status};
use carrack::{Buffer, CompQueue, Rank, Tag};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// A completion object that counts and throws the statuses away.
///
/// A [`Counter`](carrack::Counter) does the same for any number of threads, at the price of a
/// locked instruction for each message. Here one thread at a time makes progress on a device (see
/// `seat`), so a load and a store are enough. That is the least that any program could do with a
/// message.
pub(super) struct Tally {
    counts: Arc<Landing<Counts>>,
    object: Arc<dyn Completion>,
}

struct Counts {
    arrived: AtomicU64,
    /// `true` if several threads may signal at a time.
    shared: AtomicBool,
    failed: OnceLock<String>,
}

/// An object whose messages land in this memory if they are too long for a packet. One piece of
/// memory serves all messages in flight, as in `ucx_perftest`.
///
/// Threads have their own, which share no pair of cache lines.
#[repr(align(128))]
struct Landing<T> {
    to: T,
    memory: Option<Memory>,
    room: Mutex<Option<RegionSlice>>,
}

impl<T> Landing<T> {
    fn new(to: T, memory: Option<&Memory>) -> Arc<Self> {
        Arc::new(Self { to, memory: memory.cloned(), room: Mutex::default() })
    }

    /// Returns memory for a message. `None` when the driver has no more: the message then lands in
    /// memory of the runtime.
    fn room(&self, size: usize) -> Option<Buffer> {
        let memory = self.memory.as_ref()?;
        let mut room = self.room.lock();
        let whole = match room.take() {
            Some(whole) if whole.len() >= size => whole,
            _ => memory.room(size).ok()?,
        };
        room.insert(whole).region().slice(0, size).map(Buffer::Region)
    }
}

impl Completion for Landing<Counts> {
    #[inline]
    fn signal(&self, status: Status) -> Result<(), Status> {
        let Counts { arrived, shared, failed } = &self.to;
        if let Some(error) = &status.error {
            let _ = failed.set(error.to_string());
        } else if shared.load(Ordering::Relaxed) {
            arrived.fetch_add(1, Ordering::Release);
        } else {
            arrived.store(arrived.load(Ordering::Relaxed) + 1, Ordering::Release);
        }
        Ok(())
    }

    fn place(&self, _from: Rank, _tag: Tag, size: usize) -> Option<Buffer> {
        self.room(size)
    }

    fn describe(&self) -> String {
        "a tally of perf".into()
    }
}

impl Completion for Landing<CompQueue> {
    fn signal(&self, status: Status) -> Result<(), Status> {
        self.to.as_completion().signal(status)
    }

    fn place(&self, _from: Rank, _tag: Tag, size: usize) -> Option<Buffer> {
        self.room(size)
    }

    fn describe(&self) -> String {
        "a queue of perf".into()
    }
}

/// Returns the completion object of a queue whose messages land in this memory.
pub(super) fn landing_queue(queue: CompQueue, memory: &Memory) -> Arc<dyn Completion> {
    Landing::new(queue, Some(memory))
}

impl Tally {
    /// Creates a counter at zero, for any number of threads. Messages land in this memory; without
    /// it they have no bytes, or bring their own.
    pub(super) fn new(memory: Option<&Memory>) -> Self {
        let (arrived, shared) = (AtomicU64::new(0), AtomicBool::new(true));
        let counts = Landing::new(Counts { arrived, shared, failed: OnceLock::new() }, memory);
        Self { object: counts.clone(), counts }
    }

    /// Sets whether several threads may make progress on its device at a time. Called while nothing
    /// is in flight.
    pub(super) fn set_shared(&self, shared: bool) {
        self.counts.to.shared.store(shared, Ordering::Relaxed);
    }

    /// Returns the number of successes since the start.
    #[inline]
    pub(super) fn get(&self) -> u64 {
        self.counts.to.arrived.load(Ordering::Acquire)
    }

    /// Returns the reason of the first failure, if there was one.
    pub(super) fn failed(&self) -> Option<&str> {
        self.counts.to.failed.get().map(String::as_str)
    }
}

impl AsCompletion for Tally {
    fn as_completion(&self) -> &Arc<dyn Completion> {
        &self.object
    }
}
