//! Waiting for all that was done to a peer's memory.

use super::{Bulk, Ended};
use crate::buffer::Buffer;
use crate::deadline::{Deadline, Deadlines};
use crate::device::Outstanding;
use crate::error::OpError;
use crate::names::Rank;
use crate::progress::Pass;
use crate::protocol::header::Message;
use crate::runtime::Inner;
use carrack_transports::mem::SmallBytes;

/// Somebody who waits.
pub(crate) struct Flush {
    /// What began before this name has to end.
    pub(crate) before: u64,
    pub(crate) operation: Outstanding,
    /// A region of the peer's that this rank uses no more, and whose owner is told so then.
    pub(crate) lets_go: Option<u64>,
}

impl Flush {
    pub(super) fn rank(&self) -> Rank {
        self.operation.rank
    }

    pub(super) fn end(self, error: Option<OpError>) -> Ended {
        self.operation.end(Buffer::Empty, error)
    }
}

impl Bulk {
    /// Ends those that have waited too long.
    pub(crate) fn expire_flushes(&self, now: Deadline, left: &Deadlines) -> Vec<Ended> {
        let mut flushes = self.flushes.lock();
        let over = |flush: &mut Flush| {
            let deadline = flush.operation.deadline;
            if !deadline.has_passed(now) {
                left.note(deadline);
            }
            deadline.has_passed(now)
        };
        let late: Vec<_> = flushes.extract_if(.., over).collect();
        self.flushes.set_count(flushes.len());
        drop(flushes);
        late.into_iter()
            .map(|flush| {
                let rank = flush.rank();
                flush.end(Some(OpError::TimedOut(rank)))
            })
            .collect()
    }

    /// Waits.
    pub(crate) fn flush(&self, runtime: &Inner, flush: Flush) {
        let deadline = flush.operation.deadline;
        let mut flushes = self.flushes.lock();
        flushes.push(flush);
        self.flushes.set_count(flushes.len());
        drop(flushes);
        runtime.deadlines.note(deadline);
    }
}

impl Pass<'_> {
    /// Looks who has waited long enough.
    #[cold]
    pub(crate) fn move_flushes(&mut self) {
        let bulk = &self.device.bulk;
        let Some(mut flushes) = bulk.flushes.try_lock() else { return };
        let over =
            |flush: &mut Flush| !self.device.has_memory_operations(flush.rank(), flush.before);
        let ended: Vec<_> = flushes.extract_if(.., over).collect();
        bulk.flushes.set_count(flushes.len());
        drop(flushes);
        for flush in ended {
            self.moved = true;
            if let Some(region) = flush.lets_go {
                let message = Message::LetGo { region };
                self.device.control(self.inner, flush.rank(), message, SmallBytes::empty());
            }
            let (comp, status) = flush.end(None);
            self.signal(comp.as_ref(), status);
        }
    }
}
