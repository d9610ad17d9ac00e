//! Memory for active messages that are too long for a packet.

use super::memory::Memory;
use carrack::buffer::RegionSlice;
use carrack::comp::{AsCompletion, Completion, Status};
use carrack::{Buffer, CompQueue, Rank, Tag};
use parking_lot::Mutex;
use std::sync::Arc;

/// One piece of memory for all messages in flight, as in `ucx_perftest`.
pub(super) struct Landing {
    memory: Memory,
    room: Mutex<Option<RegionSlice>>,
}

impl Landing {
    /// In this memory.
    pub(super) fn new(memory: &Memory) -> Self {
        Self { memory: memory.clone(), room: Mutex::default() }
    }

    /// Memory for a message. None when the driver has no more: then it lands in memory of the
    /// runtime's.
    pub(super) fn place(&self, size: usize) -> Option<Buffer> {
        let mut room = self.room.lock();
        let whole = match room.take() {
            Some(whole) if whole.len() >= size => whole,
            _ => self.memory.room(size).ok()?,
        };
        room.insert(whole).region().slice(0, size).map(Buffer::Region)
    }
}

/// The object of a queue whose messages land where those land that are measured.
pub(super) fn landing_queue(queue: &CompQueue, memory: &Memory) -> Arc<dyn Completion> {
    Arc::new(LandingQueue { queue: queue.as_completion().clone(), landing: Landing::new(memory) })
}

struct LandingQueue {
    queue: Arc<dyn Completion>,
    landing: Landing,
}

impl Completion for LandingQueue {
    fn signal(&self, status: Status) -> Result<(), Status> {
        self.queue.signal(status)
    }

    fn place(&self, _from: Rank, _tag: Tag, size: usize) -> Option<Buffer> {
        self.landing.place(size)
    }

    fn describe(&self) -> String {
        "a queue of perf".into()
    }
}
