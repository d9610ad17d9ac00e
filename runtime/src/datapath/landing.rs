//! Messages that go into a buffer, by the CPU or by a GPU's engine.

use super::carrier::Carrier;
use super::port::Port;
use super::{Carried, Gathering, Moving, Target};
use crate::chores::{Chore, Chores, Waiting};
use crate::error::OpError;
use crate::matching::{Content, Receive, Unexpected};
use crate::names::{Rank, RemoteComp};
use crate::op::{Ended, Ending, Holder, OpContext, PendingOp};
use carrack_transports::contract::{Imported, Payload};
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{Buffer, Transfer};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Calls of progress of which one also asks for a copy that is not the oldest.
const EACH: usize = 4;

/// Copies that are taken out before their objects are signaled. More would allocate a larger list
/// each time.
pub(crate) const AT_ONCE: usize = 16;

/// A message on its way into memory that an engine has to write.
pub(crate) struct Landing {
    pub(crate) transfer: Moving,
    pub(crate) op: OpContext,
    /// Set if the source is the operation's buffer, as for a put.
    pub(crate) gives_source: bool,
    /// The object of the other rank to notify.
    pub(crate) notify: Option<RemoteComp>,
    /// The name of a put or a get: flushes wait for those with a smaller name than theirs. A
    /// message has the largest name, and is in no flush.
    pub(crate) name: u64,
    /// The message that the peer waits for.
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
            notify: None,
            name: u64::MAX,
            owed: None,
        }
    }

    /// Returns `true` unless it is a put or a get of this rank's.
    pub(crate) fn is_message(&self) -> bool {
        self.name == u64::MAX
    }

    /// Describes it, for diagnostics.
    pub(super) fn pending(&self) -> PendingOp {
        self.op.pending("copy", "an engine of a GPU")
    }

    pub(super) fn close(mut self) -> Ended {
        self.end(Some(OpError::Closed))
    }

    /// Closes a copy on a stream, which may not end. One that has not ended by then keeps its
    /// memory.
    pub(super) fn close_by(mut self, until: Instant) -> Ended {
        while self.transfer.poll(false).is_none() {
            if Instant::now() >= until {
                let Self { transfer, op, .. } = self;
                tracing::warn!(
                    rank = %op.rank,
                    size = op.size,
                    "a copy on a stream has not ended: its memory stays for the stream"
                );
                transfer.abandon();
                return op.end(Buffer::Empty, Some(OpError::Closed));
            }
            std::thread::yield_now();
        }
        self.close()
    }

    /// Takes out the object to signal, and the status. By reference, because a move would copy the
    /// rest as well.
    pub(crate) fn end(&mut self, error: Option<OpError>) -> Ended {
        let (target, source) = self.transfer.take_buffers();
        let buffer = if self.gives_source { source } else { target };
        (self.op.comp.take(), self.op.status(buffer, error))
    }
}

/// The copies of a device that engines are at, oldest first.
pub(crate) struct Landings {
    all: Waiting<VecDeque<Landing>>,
    /// The landing to poll next after the oldest one.
    turn: AtomicUsize,
}

impl Landings {
    pub(crate) fn new(chores: &Chores) -> Self {
        let all = Waiting::for_progress(chores, Chore::Landings);
        Self { all, turn: AtomicUsize::new(0) }
    }

    #[inline(always)]
    pub(crate) fn add(&self, landing: Landing) {
        let mut landings = self.all.lock();
        landings.push_back(landing);
        self.all.set_count(landings.len());
    }

    /// Returns `true` if a copy to or from a peer's memory is in flight that began before `name`.
    pub(crate) fn has_memory_operations(&self, peer: Rank, before: u64) -> bool {
        let by_engine = |landing: &Landing| landing.op.rank == peer && landing.name < before;
        !self.all.is_empty() && self.all.lock().iter().any(by_engine)
    }

    /// Takes the turn of one call of progress. Two threads may take the same one: it only selects
    /// the next landing to poll.
    pub(crate) fn take_turn(&self) -> PollTurn {
        let number = self.turn.load(Ordering::Relaxed);
        self.turn.store(number.wrapping_add(1), Ordering::Relaxed);
        PollTurn { number, asks_another: number.is_multiple_of(EACH) }
    }

    /// Takes out the copies that engines have finished, as long as `done` has room for them.
    /// Engines work in order, and polling an event takes as long as a small message. So only the
    /// oldest copy in flight is polled, and now and then one of the others in turn, since there are
    /// several engines. A copy that is known to end after the oldest is not polled.
    #[inline]
    pub(crate) fn take_done(&self, turn: &mut PollTurn, done: &mut Vec<Landing>) {
        let Some(mut landings) = self.all.try_lock() else { return };
        take_done(&mut landings, 0, done);
        if done.len() < AT_ONCE
            && std::mem::take(&mut turn.asks_another)
            && let Some(others @ 1..) = landings.len().checked_sub(1)
        {
            let at = 1 + turn.number / EACH % others;
            if let (Some(oldest), Some(other)) = (landings.front(), landings.get(at))
                && !other.transfer.is_behind(&oldest.transfer)
            {
                take_done(&mut landings, at, done);
            }
        }
        if !done.is_empty() {
            self.all.set_count(landings.len());
        }
    }
}

/// Each ends by its engine.
impl Holder for Landings {
    fn end(&self, why: &Ending<'_>, ended: &mut Vec<Ended>) {
        if matches!(why, Ending::Closing) {
            ended.extend(self.all.take().into_iter().map(Landing::close));
        }
    }

    fn list(&self, list: &mut dyn FnMut(PendingOp)) {
        self.all.lock().iter().for_each(|landing| list(landing.pending()));
    }

    fn count(&self) -> usize {
        self.all.count() as usize
    }
}

/// The turn of one call of progress.
pub(crate) struct PollTurn {
    number: usize,
    asks_another: bool,
}

/// Takes out the copies that are done, from one on to the first that is not, as long as there is
/// room for them. Those that stay are moved up once, for there may be thousands.
#[inline]
fn take_done(landings: &mut VecDeque<Landing>, at: usize, done: &mut Vec<Landing>) {
    let has_ended = |landing: &mut Landing| landing.transfer.has_ended(at == 0);
    // Most calls find that the first copy is not done.
    if !landings.get_mut(at).is_some_and(has_ended) {
        return;
    }
    let most = landings.len().min(at + AT_ONCE.saturating_sub(done.len()));
    let count = landings.range_mut(at..most).position(|landing| !has_ended(landing));
    done.extend(landings.drain(at..count.map_or(most, |count| at + count)));
}

impl Port {
    /// Puts a message into the buffer of the receive that it met. Returns the completion object
    /// and its status, or `None` if an engine or the kernel copies the bytes.
    pub(crate) fn land(
        &self,
        carrier: &Carrier,
        (message, receive): (Unexpected, Receive),
        gathering: Option<&mut Gathering>,
    ) -> Option<Ended> {
        let Unexpected { from, tag, content } = message;
        let Receive { mut buffer, op } = receive;
        let op = OpContext { rank: from, tag, ..op };
        let payload = match content {
            Content::Here(payload) => payload,
            Content::Offered(rts, _) => {
                let target = Target::Receive { buffer, op };
                return self.accept(carrier, (from, rts), target, gathering);
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
            // A loan must go back soon, and an engine takes time.
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
                self.landings.add(Landing::of_message(transfer, op));
                None
            }
            Err(refused) => Some(op.end(refused.dst, Some(OpError::Copy(refused.cause)))),
        }
    }
}
