//! Messages that go into a buffer, by the CPU or by a GPU's engine.

use super::{Found, Meeting, Met, found};
use crate::comp::Status;
use crate::datapath::{Carried, Moving, Target};
use crate::device::DeviceInner;
use crate::error::OpError;
use crate::matching::{Content, Receive, Unexpected};
use crate::names::{Rank, RemoteComp, Tag};
use crate::op::{Ended, OpContext};
use crate::runtime::Inner;
use carrack_transports::contract::{Imported, Payload};
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{Buffer, MemRef, SmallBytes, Transfer};

/// A message on its way into memory that an engine has to write.
pub(crate) struct Landing {
    pub(crate) transfer: Moving,
    pub(crate) op: OpContext,
    /// Set if the source is the operation's buffer, as for a put.
    pub(crate) gives_source: bool,
    /// The object of the other rank to signal.
    pub(crate) signal: Option<RemoteComp>,
    /// The name of a put or a get: flushes wait for those with a smaller name than theirs. A
    /// message has the largest name, and is in no flush.
    pub(crate) name: u64,
    /// The message that the peer will get.
    pub(crate) owed: Option<Box<Owed>>,
}

/// The peer's reason to wait for the end of a copy of this rank.
pub(crate) enum Owed {
    /// The fetch of its message.
    Fetched(Fetched),
    /// The copy of pieces of this rank's memory. Boxed, so that the common variant is small to
    /// move.
    Pieces(Box<Carried>),
}

/// Further facts about a message that is fetched from its sender's memory.
pub(crate) struct Fetched {
    /// The sender's name for the message. The sender waits for its end.
    pub(crate) tx: u64,
    pub(crate) from: Imported,
}

impl Landing {
    /// Returns the landing of a message in its buffer.
    pub(crate) fn of_message(transfer: impl Into<Moving>, op: OpContext) -> Self {
        Self {
            transfer: transfer.into(),
            op,
            gives_source: false,
            signal: None,
            name: u64::MAX,
            owed: None,
        }
    }

    pub(crate) fn into_status(mut self, error: OpError) -> Ended {
        self.end(Some(error))
    }

    /// Takes out the object to signal, and the status. By reference, since the rest of it would be
    /// moved along.
    pub(super) fn end(&mut self, error: Option<OpError>) -> Ended {
        let (target, source) = self.transfer.take_buffers();
        let buffer = if self.gives_source { source } else { target };
        (self.op.comp.take(), self.op.status(buffer, error))
    }
}

impl Receive {
    pub(crate) fn into_status(self, error: OpError) -> Ended {
        self.op.end(self.buffer, Some(error))
    }

    /// Takes a message of a few bytes, if that is a matter of copying them; else they stay a pair.
    /// `at_once`: its completion object is told now, if that can be.
    #[inline(always)]
    pub(super) fn take_small(
        &mut self,
        (from, tag, bytes): (Rank, Tag, &SmallBytes),
        met: &mut Met,
        at_once: bool,
    ) -> Found {
        let source = MemRef::host(bytes.as_slice());
        let size = source.len();
        // Refused where it is too long, or where an engine is needed.
        let is_there =
            self.buffer.view_mut().is_some_and(|target| copy_now(target, source).is_ok());
        if !is_there {
            let content = Content::Here(Payload::Small(*bytes));
            return found(met, Meeting::Pair(Unexpected { from, tag, content }, self.take()));
        }
        let comp = self.op.comp.take();
        let user_context = self.op.user_context;
        let mut status = || {
            let buffer = std::mem::take(&mut self.buffer);
            Status { rank: from, tag, size, user_context, buffer, error: None }
        };
        match comp {
            Some(queue)
                if at_once
                    && queue.as_queue().is_some_and(|queue| queue.push_made(&mut status)) =>
            {
                met.told.push(queue);
                Found::Kept
            }
            comp => found(met, Meeting::Over(comp, status())),
        }
    }
}

impl std::fmt::Debug for Receive {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Receive({} B from {}, {:?})", self.buffer.len(), self.op.rank, self.op.tag)
    }
}

impl DeviceInner {
    /// Returns `true` if an operation on a peer's memory is in flight that began before `name`.
    pub(crate) fn has_memory_operations(&self, peer: Rank, before: u64) -> bool {
        let by_engine = |landing: &Landing| landing.op.rank == peer && landing.name < before;
        self.transfers.has_memory_operations(peer, before)
            || self.outstanding.has_on_memory(peer, before)
            || (!self.landing.is_empty() && self.landing.lock().iter().any(by_engine))
    }

    #[inline(always)]
    pub(crate) fn add_landing(&self, landing: Landing) {
        let mut landings = self.landing.lock();
        landings.push_back(landing);
        self.landing.set_count(landings.len());
    }

    /// Puts a message into the buffer of the receive that it met. Returns the completion object
    /// and its status, or `None` if an engine copies the bytes.
    pub(crate) fn land(
        &self,
        runtime: &Inner,
        message: Unexpected,
        receive: Receive,
    ) -> Option<Ended> {
        let Unexpected { from, tag, content } = message;
        let Receive { mut buffer, op } = receive;
        let op = OpContext { rank: from, tag, ..op };
        let payload = match content {
            Content::Here(payload) => payload,
            Content::Offered(rts, _) => {
                let target = Target::Receive { buffer, op };
                return self.accept(runtime, from, rts, target);
            }
        };
        let size = payload.len();
        let op = OpContext { size, ..op };
        if size > buffer.len() {
            let error = OpError::Truncated { message: size, buffer: buffer.len() };
            return Some(op.end(buffer, Some(error)));
        }
        if buffer.kind().is_host() && payload.view().place().is_host() {
            let copied = match buffer.view_mut() {
                Some(target) => copy_now(target, payload.view()),
                None => Ok(()),
            };
            drop(payload);
            return Some(op.end(buffer, copied.err().map(OpError::Copy)));
        }
        let source = match payload {
            Payload::Small(small) => Buffer::Small(small),
            Payload::Packet(packet) => Buffer::Packet(packet),
            Payload::Aside(bytes) => Buffer::Vec(bytes),
            // An engine takes time, and a loan must go back soon.
            Payload::Loan(loan) => {
                let mut kept = match self.host_pool.take_with_len(size) {
                    Some(packet) => Buffer::Packet(packet),
                    None => Buffer::Vec(vec![0; size]),
                };
                if let Some(target) = kept.view_mut()
                    && let Err(error) = copy_now(target, loan.view())
                {
                    return Some(op.end(buffer, Some(OpError::Copy(error))));
                }
                kept
            }
        };
        match Transfer::start(buffer, source) {
            Ok(transfer) => {
                self.add_landing(Landing::of_message(transfer, op));
                None
            }
            Err(refused) => Some(op.end(refused.dst, Some(OpError::Copy(refused.cause)))),
        }
    }
}
