//! Flushes: waits until all operations on a peer's memory have completed.

use super::Bulk;
use crate::buffer::Buffer;
use crate::deadline::{Deadline, Deadlines};
use crate::error::OpError;
use crate::names::Rank;
use crate::op::{Ended, OpContext};
use crate::progress::Pass;
use crate::protocol::header::Message;
use crate::runtime::Inner;
use carrack_transports::mem::SmallBytes;

/// A flush that waits.
pub(crate) struct Flush {
    /// Operations that began before this name have to complete.
    pub(crate) before: u64,
    pub(crate) operation: OpContext,
    /// A region of the peer that this rank does not use any more: its owner is told after the
    /// flush.
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
    /// Ends the flushes whose deadline has passed.
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

    /// Begins a flush.
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
    /// Ends the flushes that have no operation left to wait for.
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
