//! Work requests of one queue pair, and the resources that they hold until they complete.

mod gathering;
mod moving;
mod words;

use super::bounces::{Bounce, Bounces, Filled, HEADER};
use super::memory::CreditWords;
use super::sys::bindings::{
    IBV_QP_STATE, IBV_QPS_ERR, IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WR_RDMA_WRITE, IBV_WR_SEND,
    IBV_WR_SEND_WITH_IMM, ibv_qp_attr, ibv_send_wr, ibv_sge,
};
use super::sys::{PostFailure, QueuePair};
use super::together::Aggregate;
use super::transfers::{Finished, RdmaTransfer};
use super::wire::QueuePairEnd;
use super::wr_id::WrId;
use crate::contract::{Busy, Header, OpToken};
use crate::mem::{Buffer, MemRef};
use std::collections::VecDeque;
use std::sync::Arc;

/// Requests of a queue that messages leave free: for credits, the last message, and the request
/// behind all others.
const RESERVE: u32 = 4;

/// Immediate of the last message: nothing comes after it.
pub(super) const BYE: u32 = 1;

/// Reason why a message was not sent.
#[derive(Debug)]
pub(super) enum Unsent {
    /// A temporary shortage.
    Busy(Busy),
    /// The peer has written an impossible credit.
    Wrong(String),
    /// The queue pair, or a registration, has failed.
    Failed(String),
    /// The memory cannot be registered with the NIC.
    Unregistered(String),
}

impl Unsent {
    /// Drops an error after which the caller may try again.
    fn unless_busy(self) -> Result<(), Self> {
        if matches!(self, Self::Busy(_)) { Ok(()) } else { Err(self) }
    }
}

/// Resource that a request holds until it completes.
#[derive(Debug)]
enum Held {
    Bounce(Bounce),
    Transfer(RdmaTransfer),
}

/// The sending half of a connection.
#[derive(Debug)]
pub(super) struct SendingHalf {
    /// `None` once it is closed.
    queue: Option<Arc<QueuePair>>,
    connection: u32,
    depth: u32,
    /// Bytes that go inline.
    inline: usize,
    /// Sequence number of the last request that was posted, and of the last signalled one.
    posted: u32,
    signalled: u32,
    /// Messages sent, and the number of them that the peer has credited.
    sent: u64,
    returned: u64,
    /// Send window: messages that may be in flight.
    window: u64,
    /// The peer's credit word, and its key.
    word: (u64, u32),
    /// Resources of requests, in the order of the requests.
    held: VecDeque<(u32, Held)>,
    /// Messages that wait for more, behind all that were sent. They count as one request and one
    /// message already.
    aggregate: Option<Aggregate>,
    /// Set if the poller knows of messages that wait.
    pub(super) is_listed: bool,
}

#[expect(unsafe_code, reason = "structures of libibverbs, and memory by address")]
impl SendingHalf {
    /// Creates the sending half for a queue of `asked` requests. The device may grant more, but
    /// the completion queue has no room for them.
    pub(super) fn new(queue: Arc<QueuePair>, asked: u32, connection: u32) -> Self {
        Self {
            connection,
            depth: queue.send_depth().min(asked),
            inline: queue.inline(),
            queue: Some(queue),
            posted: 0,
            signalled: 0,
            sent: 0,
            returned: 0,
            window: 0,
            word: (0, 0),
            held: VecDeque::new(),
            aggregate: None,
            is_listed: false,
        }
    }

    /// Returns the queue pair, until it is closed.
    pub(super) fn queue(&self) -> Option<&Arc<QueuePair>> {
        self.queue.as_ref()
    }

    /// Stores the peer's end, so that it can be sent to.
    pub(super) fn open(&mut self, end: &QueuePairEnd) {
        (self.window, self.word) = (u64::from(end.window), (end.word_addr, end.word_key));
    }

    /// Sends a message of host memory, no longer than the bounce buffers. `completed` is the
    /// sequence number of the last request that is known to be complete.
    #[inline(always)]
    pub(super) fn message(
        &mut self,
        (header, bytes): (Header, MemRef<'_>),
        completed: u32,
        words: &CreditWords,
        bounces: &Bounces,
    ) -> Result<(), Unsent> {
        if self.aggregate.is_some() {
            return self.behind_gathered((header, bytes), completed, words, bounces);
        }
        self.room(completed, words)?;
        self.alone((header, bytes), completed, bounces)
    }

    /// Checks that the queue and the peer have room for one more message, while none waits.
    #[inline(always)]
    fn room(&mut self, completed: u32, words: &CreditWords) -> Result<(), Unsent> {
        if self.posted.wrapping_sub(completed) + RESERVE >= self.depth {
            return Err(Unsent::Busy(Busy::Full));
        }
        if self.sent - self.returned >= self.window {
            self.look_at_credits(words)?;
        }
        Ok(())
    }

    /// Sends a message by itself.
    #[inline(always)]
    fn alone(
        &mut self,
        (header, bytes): (Header, MemRef<'_>),
        completed: u32,
        bounces: &Bounces,
    ) -> Result<(), Unsent> {
        if HEADER + bytes.len() <= self.inline {
            self.inline_message(header, bytes)?;
        } else {
            self.bounced_message((header, bytes), completed, bounces)?;
        }
        self.sent += 1;
        Ok(())
    }

    /// Returns `true` if the peer has returned too few credits for one more message.
    pub(super) fn lacks_credits(&self, words: &CreditWords) -> bool {
        self.sent.wrapping_sub(words.received()) >= self.window
    }

    #[cold]
    fn look_at_credits(&mut self, words: &CreditWords) -> Result<(), Unsent> {
        let returned = words.received();
        if returned > self.sent || returned < self.returned {
            return Err(Unsent::Wrong(format!(
                "it says that it has taken in {returned} messages, of {} that were sent, after {}",
                self.sent, self.returned
            )));
        }
        self.returned = returned;
        match self.sent - returned < self.window {
            true => Ok(()),
            false => Err(Unsent::Busy(Busy::Full)),
        }
    }

    #[inline]
    fn inline_message(&mut self, header: Header, bytes: MemRef<'_>) -> Result<(), Unsent> {
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let mut parts = [
            ibv_sge { addr: header.0.as_ptr() as u64, length: 16, lkey: 0 },
            ibv_sge { addr: bytes.as_ptr() as u64, length: len, lkey: 0 },
        ];
        let count = if len == 0 { 1 } else { 2 };
        let mut request = self.request(&mut parts[..count], IBV_WR_SEND);
        request.send_flags = IBV_SEND_INLINE;
        // Signalled rarely: a completion gives room back.
        let due = self.posted.wrapping_sub(self.signalled) >= self.depth / 4;
        // SAFETY: the call copies inline bytes; header and bytes are host memory, borrowed during
        // it.
        unsafe { self.post(&mut request, due) }
    }

    fn bounced_message(
        &mut self,
        (header, bytes): (Header, MemRef<'_>),
        completed: u32,
        bounces: &Bounces,
    ) -> Result<(), Unsent> {
        self.give_back(completed, bounces);
        let Some(bounce) = bounces.take() else { return Err(Unsent::Busy(Busy::NoPacket)) };
        let posted = match bounces.fill(&bounce, header, bytes) {
            Ok(Filled { addr, len, key }) => {
                let mut part = [ibv_sge { addr, length: len, lkey: key }];
                let mut request = self.request(&mut part, IBV_WR_SEND);
                // Always signalled, since the last bounces must come back also when no more is
                // sent.
                // SAFETY: the bounce has no other user until the request completes.
                unsafe { self.post(&mut request, true) }
            }
            Err(error) => Err(Unsent::Failed(error.to_string())),
        };
        match posted {
            Ok(()) => self.held.push_back((self.posted, Held::Bounce(bounce))),
            Err(_) => bounces.give_back(bounce),
        }
        posted
    }

    /// Tells the peer how many of its messages were taken in.
    pub(super) fn credit(
        &mut self,
        taken: u64,
        completed: u32,
        words: &CreditWords,
    ) -> Result<(), Unsent> {
        if self.outstanding(completed) + RESERVE / 2 >= self.depth {
            return Err(Unsent::Busy(Busy::Full));
        }
        let mut part = [ibv_sge { addr: words.to_be_sent(taken), length: 8, lkey: words.key() }];
        let mut request = self.request(&mut part, IBV_WR_RDMA_WRITE);
        request.send_flags = if self.inline >= 8 { IBV_SEND_INLINE } else { 0 };
        let (remote_addr, rkey) = self.word;
        request.wr.rdma.remote_addr = remote_addr;
        request.wr.rdma.rkey = rkey;
        let due = self.posted.wrapping_sub(self.signalled) >= self.depth / 4;
        // SAFETY: the words stay registered as long as the connection. If the value changes before
        // the NIC reads it, a later count goes, which is valid too.
        unsafe { self.post(&mut request, due) }
    }

    /// Posts the last message, behind all others. Returns `true` if it was posted.
    pub(super) fn bye(&mut self, bounces: &Bounces) -> bool {
        if self.send_off(bounces).is_err() {
            return false;
        }
        let mut request = self.request(&mut [], IBV_WR_SEND_WITH_IMM);
        request.anon_1.imm_data = BYE.to_be();
        request.wr_id = WrId::Bye { connection: self.connection }.encode();
        request.send_flags = IBV_SEND_SIGNALED;
        // SAFETY: it names no memory.
        unsafe { self.post_named(&mut request) }.is_ok()
    }

    /// Moves the queue pair to the error state: everything outstanding comes back flushed. Returns
    /// `true` if a last request was posted behind it.
    pub(super) fn fail(&mut self, was_up: bool) -> bool {
        let Some(queue) = &self.queue else { return false };
        let mut attr = ibv_qp_attr { qp_state: IBV_QPS_ERR, ..Default::default() };
        if let Err(error) = queue.modify(&mut attr, IBV_QP_STATE) {
            tracing::warn!(%error, "a queue pair cannot be ended");
            return false;
        }
        if !was_up {
            return false;
        }
        let mut request = self.request(&mut [], IBV_WR_SEND);
        request.wr_id = WrId::Last { connection: self.connection }.encode();
        request.send_flags = IBV_SEND_SIGNALED;
        // SAFETY: it names no memory.
        unsafe { self.post_named(&mut request) }.is_ok()
    }

    /// Closes the queue pair and releases what requests held. Returns the operations on memory
    /// that had not ended.
    pub(super) fn close(&mut self, bounces: &Bounces) -> Vec<(OpToken, Buffer)> {
        // First: after this no request reads a bounce or a buffer.
        self.queue = None;
        if let Some(Aggregate { bounce, .. }) = self.aggregate.take() {
            bounces.give_back(bounce);
        }
        let mut ended = Vec::new();
        for (_, held) in self.held.drain(..) {
            match held {
                Held::Bounce(bounce) => bounces.give_back(bounce),
                Held::Transfer(transfer) => ended.push(transfer.fail(bounces)),
            }
        }
        ended
    }

    /// Keeps the resources of the last request.
    fn hold(&mut self, transfer: RdmaTransfer) {
        self.held.push_back((self.posted, Held::Transfer(transfer)));
    }

    /// Returns the operations on memory that have ended, in order.
    pub(super) fn ended(&mut self, completed: u32, bounces: &Bounces) -> Vec<Finished> {
        let mut ended = Vec::new();
        while let Some((sequence, _)) = self.held.front()
            && completed.wrapping_sub(*sequence) < 1 << 31
            && let Some((_, held)) = self.held.pop_front()
        {
            match held {
                Held::Bounce(bounce) => bounces.give_back(bounce),
                Held::Transfer(transfer) => ended.push(transfer.end(bounces)),
            }
        }
        ended
    }

    /// Returns the number of incomplete requests, with the one reserved for messages that wait.
    fn outstanding(&self, completed: u32) -> u32 {
        self.posted.wrapping_sub(completed) + u32::from(self.aggregate.is_some())
    }

    fn give_back(&mut self, completed: u32, bounces: &Bounces) {
        // Behind what is completed, in a circle of sequence numbers. The poller ends operations on
        // memory.
        while let Some((sequence, Held::Bounce(_))) = self.held.front()
            && completed.wrapping_sub(*sequence) < 1 << 31
            && let Some((_, Held::Bounce(bounce))) = self.held.pop_front()
        {
            bounces.give_back(bounce);
        }
    }

    /// Builds a request of those parts, which have to stay in place until it is posted.
    #[inline(always)]
    fn request(&self, parts: &mut [ibv_sge], opcode: u32) -> ibv_send_wr {
        ibv_send_wr {
            sg_list: parts.as_mut_ptr(),
            num_sge: i32::try_from(parts.len()).unwrap_or(0),
            opcode,
            ..Default::default()
        }
    }

    /// Posts a request under the next sequence number.
    ///
    /// # Safety
    /// Its parts are memory that stays until it completes, or go inline.
    #[inline(always)]
    unsafe fn post(&mut self, request: &mut ibv_send_wr, signalled: bool) -> Result<(), Unsent> {
        // SAFETY: promised by the caller.
        unsafe { self.post_as(request, signalled, false) }
    }

    /// Posts a request as [`post`](Self::post) does. With `ends`, its completion tells the poller
    /// that an operation on memory has ended.
    ///
    /// # Safety
    /// As of [`post`](Self::post).
    #[inline(always)]
    unsafe fn post_as(
        &mut self,
        request: &mut ibv_send_wr,
        signalled: bool,
        ends: bool,
    ) -> Result<(), Unsent> {
        let (connection, sequence) = (self.connection, self.posted.wrapping_add(1));
        let name = match ends {
            false => WrId::Send { connection, sequence },
            true => WrId::Transfer { connection, sequence },
        };
        request.wr_id = name.encode();
        if signalled {
            request.send_flags |= IBV_SEND_SIGNALED;
        }
        // SAFETY: promised by the caller.
        unsafe { self.post_named(request) }?;
        self.posted = sequence;
        if signalled {
            self.signalled = sequence;
        }
        Ok(())
    }

    /// Posts a request under the name that it has.
    ///
    /// # Safety
    /// As of [`post`](Self::post).
    #[inline(always)]
    unsafe fn post_named(&mut self, request: &mut ibv_send_wr) -> Result<(), Unsent> {
        let Some(queue) = &self.queue else { return Err(Unsent::Failed("it is closed".into())) };
        // SAFETY: promised by the caller.
        unsafe { queue.post_send(request) }.map_err(|PostFailure { errno, .. }| Self::why(errno))
    }

    #[cold]
    fn why(errno: i32) -> Unsent {
        match errno {
            // Some providers' queues hold less than they say, since a request may take several
            // places.
            libc::ENOMEM | libc::EAGAIN => Unsent::Busy(Busy::Full),
            errno => Unsent::Failed(std::io::Error::from_raw_os_error(errno).to_string()),
        }
    }
}
