//! Active messages whose place is memory of a GPU.
//!
//! An engine copies each message into a packet there, which takes time. To deliver messages in
//! order of arrival, each waits in the device's *reorder queue*, even if it needs no copy. Only the
//! engine of the first one is polled. A message without a packet cannot enter the queue, and waits
//! with its completion object (`undelivered`).

use super::landing::Landing;
use super::port::Port;
use crate::chores::{Chore, Chores, Waiting};
use crate::comp::{Completion, Status};
use crate::error::OpError;
use crate::names::{Rank, Tag};
use crate::op::{Ended, Ending, Holder, OpContext, PendingOp};
use crate::undelivered::object_of;
use carrack_transports::contract::Payload;
use carrack_transports::mem::{AllocError, Buffer, MemRef, PacketSource, Transfer};
use std::collections::VecDeque;
use std::sync::Arc;

/// An active message that waits for its turn.
enum ReorderEntry {
    /// An engine is at it.
    Landing(Box<Landing>),
    /// The bytes are in place; the completion object has to be signaled.
    There(Arc<dyn Completion>, Status),
}

/// The outcome for an active message that is to enter the reorder queue.
pub(crate) enum Reordered {
    /// The message is in the queue.
    Queued,
    /// The message need not enter the queue: its object has to be signaled at once.
    There(Status),
    /// No packet is free for the message. The reason is given if memory is short.
    NoRoom(Payload, Option<AllocError>),
}

impl ReorderEntry {
    /// Returns `true` if only the signal is left. Never blocks.
    fn is_there(&mut self) -> bool {
        match self {
            Self::Landing(landing) => landing.transfer.poll(true).is_some(),
            Self::There(..) => true,
        }
    }

    /// Returns the object to signal.
    fn comp(&self) -> Option<&Arc<dyn Completion>> {
        match self {
            Self::Landing(landing) => landing.op.comp.as_ref(),
            Self::There(comp, _) => Some(comp),
        }
    }

    /// Returns the object to signal, and the status.
    fn end(self) -> Ended {
        match self {
            Self::Landing(mut landing) => {
                let outcome = landing.transfer.poll(false).unwrap_or(Ok(()));
                landing.end(outcome.err().map(OpError::Copy))
            }
            Self::There(comp, status) => (Some(comp), status),
        }
    }

    /// Ends it when the runtime ends, also during a copy.
    fn close(self) -> Ended {
        match self {
            Self::Landing(landing) => landing.close(),
            Self::There(comp, status) => (Some(comp), status),
        }
    }

    /// Returns the copy in flight, for diagnostics.
    fn landing(&self) -> Option<&Landing> {
        match self {
            Self::Landing(landing) => Some(landing),
            Self::There(..) => None,
        }
    }
}

/// The reorder queue of a device.
pub(crate) struct ReorderQueue(Waiting<VecDeque<ReorderEntry>>);

impl ReorderQueue {
    pub(crate) fn new(chores: &Chores) -> Self {
        Self(Waiting::for_progress(chores, Chore::Reorder))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a message at the end, unless its bytes are in place and the queue is empty.
    fn add(&self, next: ReorderEntry) -> Reordered {
        let mut queue = self.0.lock();
        match next {
            ReorderEntry::There(_, status) if queue.is_empty() => Reordered::There(status),
            next => {
                queue.push_back(next);
                self.0.set_count(queue.len());
                Reordered::Queued
            }
        }
    }

    /// Takes the first message out, if only its signal is left.
    pub(crate) fn take_first(&self) -> Option<Ended> {
        let mut queue = self.0.try_lock()?;
        if !queue.front_mut().is_some_and(ReorderEntry::is_there) {
            return None;
        }
        let first = queue.pop_front()?;
        self.0.set_count(queue.len());
        drop(queue);
        Some(first.end())
    }

    /// Returns `true` if messages for this object are in the queue.
    pub(crate) fn has_for(&self, comp: &Arc<dyn Completion>) -> bool {
        let object = object_of(comp);
        let is_for = |one: &ReorderEntry| {
            one.comp().is_some_and(|comp| Arc::ptr_eq(object_of(comp), object))
        };
        !self.is_empty() && self.0.lock().iter().any(is_for)
    }
}

/// Each ends at its turn.
impl Holder for ReorderQueue {
    fn end(&self, why: &Ending<'_>, ended: &mut Vec<Ended>) {
        if matches!(why, Ending::Closing) {
            ended.extend(self.0.take().into_iter().map(ReorderEntry::close));
        }
    }

    fn list(&self, list: &mut dyn FnMut(PendingOp)) {
        let queue = self.0.lock();
        queue.iter().filter_map(ReorderEntry::landing).for_each(|landing| list(landing.pending()));
    }

    fn count(&self) -> usize {
        self.0.count() as usize
    }
}

impl Port {
    /// Allocates memory of the pool's kind for an active message of any length. An error without a
    /// reason: all packets are in use.
    fn place_for(&self, size: usize) -> Result<Buffer, Option<AllocError>> {
        if size <= self.pool.packet_size() {
            return self.pool.take_with_len(size).map(Buffer::Packet).ok_or(None);
        }
        self.place_for_large(size).map_err(Some)
    }

    /// Allocates memory of the pool's kind for an active message that no packet holds.
    ///
    /// # Errors
    /// There is not so much.
    pub(crate) fn place_for_large(&self, size: usize) -> Result<Buffer, AllocError> {
        let out = AllocError::OutOfMemory { bytes: size, kind: self.pool.kind() };
        if self.lands_on_host || size == 0 {
            return fresh(size).ok_or(out);
        }
        self.pool.region(size).map(|region| Buffer::Region(region.whole()))
    }

    /// Returns the source for an engine: bytes at a constant address, near the engine if there is
    /// room. Gives the payload back if there is no room.
    fn source_of(&self, payload: Payload) -> Result<Buffer, Payload> {
        let kept = |bytes: MemRef<'_>| self.host_pool.take_copy(bytes).map(Buffer::Packet);
        match payload {
            Payload::Packet(packet) => Ok(Buffer::Packet(packet)),
            Payload::Small(small) => {
                Ok(kept(MemRef::host(small.as_slice())).unwrap_or(Buffer::Small(small)))
            }
            Payload::Aside(bytes) => Ok(Buffer::Vec(bytes)),
            // Loans are returned soon, because the sender has a limited number of pieces.
            Payload::Loan(loan) => kept(loan.view()).ok_or(Payload::Loan(loan)),
        }
    }

    /// Lets an engine copy an active message to the device's pool.
    #[cold]
    pub(crate) fn reorder(
        &self,
        (from, tag): (Rank, Tag),
        comp: &Arc<dyn Completion>,
        payload: Payload,
    ) -> Reordered {
        let size = payload.len();
        // Those without bytes need no packet, and are not to pile up either.
        if self.reorder_queue.count() >= self.pool.limit() {
            return Reordered::NoRoom(payload, None);
        }
        let next = match payload {
            Payload::Packet(packet) if packet.kind() == self.pool.kind() => {
                ReorderEntry::There(comp.clone(), arrival(from, tag, size, Buffer::Packet(packet)))
            }
            payload if size == 0 => {
                drop(payload);
                ReorderEntry::There(comp.clone(), arrival(from, tag, size, Buffer::Empty))
            }
            payload => {
                let place = match self.place_for(size) {
                    Ok(place) => place,
                    Err(why) => return Reordered::NoRoom(payload, why),
                };
                let source = match self.source_of(payload) {
                    Ok(source) => source,
                    Err(payload) => return Reordered::NoRoom(payload, None),
                };
                match Transfer::start(place, source) {
                    Ok(transfer) => {
                        let op = OpContext::of_runtime(from, tag, size, Some(comp.clone()));
                        ReorderEntry::Landing(Box::new(Landing::of_message(transfer, op)))
                    }
                    Err(refused) => {
                        let mut status = arrival(from, tag, size, refused.src);
                        status.error = Some(Box::new(OpError::Copy(refused.cause)));
                        ReorderEntry::There(comp.clone(), status)
                    }
                }
            }
        };
        self.reorder_queue.add(next)
    }
}

/// Returns the status of an active message.
pub(crate) fn arrival(rank: Rank, tag: Tag, size: usize, buffer: Buffer) -> Status {
    OpContext::of_runtime(rank, tag, size, None).status(buffer, None)
}

/// Returns fresh host memory, or `None` if there is not enough.
pub(crate) fn fresh(size: usize) -> Option<Buffer> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(size).ok()?;
    bytes.resize(size, 0);
    Some(Buffer::Vec(bytes))
}
