//! The sending half of a connection.
//!
//! A message is sent in packets, each with a number of its own, and each is answered. Packets that
//! were lost are sent again, from the first missing one on. They are read anew from the program's
//! memory, as a NIC does.
//!
//! Timeouts run only when the simulation knows of a loss ([`Body::Lost`], or a process that is
//! gone). A slow machine, or a peer that a debugger has stopped, fails no request: a real NIC
//! would answer for its program, too.

use super::super::completion::Depth;
use super::super::engine::Outbox;
use super::super::memory::Unreachable;
use super::super::receives::{Piece, gather, length};
use super::super::wire::{Body, Fragment, Notice, Packet, Refusal, Remote, Request, Sequence};
use super::attributes::{Attributes, rnr_delay};
use super::{PairParts, PairState, QueuePair, State};
use carrack_transports::verbs::sys::bindings::{self as ibv, ibv_wc_opcode, ibv_wc_status};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// Maximum packets of a connection in flight.
const WINDOW: u32 = 32;

/// Retry count without end, for receivers that are not ready only.
const FOR_EVER: u8 = 7;

/// Operation of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in super::super) enum Operation {
    Send(Notice),
    Write(Remote, Notice),
    Read(Remote),
    FetchAdd { word: Remote, add: u64 },
    CompareSwap { word: Remote, compare: u64, swap: u64 },
}

impl Operation {
    pub(super) fn completes_as(self) -> ibv_wc_opcode {
        match self {
            Self::Send(_) => ibv::IBV_WC_SEND,
            Self::Write(..) => ibv::IBV_WC_RDMA_WRITE,
            Self::Read(_) => ibv::IBV_WC_RDMA_READ,
            Self::FetchAdd { .. } => ibv::IBV_WC_FETCH_ADD,
            Self::CompareSwap { .. } => ibv::IBV_WC_COMP_SWAP,
        }
    }

    /// Returns `true` if data comes back.
    fn fetches(self) -> bool {
        matches!(self, Self::Read(_) | Self::FetchAdd { .. } | Self::CompareSwap { .. })
    }

    fn is_atomic(self) -> bool {
        matches!(self, Self::FetchAdd { .. } | Self::CompareSwap { .. })
    }
}

/// Bytes of a request.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in super::super) enum Data {
    /// Bytes in registered memory.
    Pieces(Vec<Piece>),
    /// Bytes that were copied when the request was posted.
    Inline(Vec<u8>),
}

/// A request that was posted.
#[derive(Clone, Debug)]
pub(in super::super) struct Work {
    pub(in super::super) id: u64,
    pub(in super::super) operation: Operation,
    pub(in super::super) data: Data,
    pub(in super::super) signalled: bool,
    pub(in super::super) fence: bool,
    /// Number of the request in its queue.
    pub(super) number: u64,
    pub(super) depth: Arc<Depth>,
    /// Number of the first packet, and the number of packets, once the work was begun.
    span: Option<(Sequence, u32)>,
    /// Status with which it ends when everything before it has ended.
    failed: Option<ibv_wc_status>,
}

impl Work {
    pub(in super::super) fn new(
        id: u64,
        operation: Operation,
        data: Data,
        (signalled, fence): (bool, bool),
    ) -> Self {
        let depth = Depth::new(0);
        Self { id, operation, data, signalled, fence, number: 0, depth, span: None, failed: None }
    }

    pub(super) fn len(&self) -> u64 {
        match &self.data {
            Data::Pieces(pieces) => length(pieces),
            Data::Inline(bytes) => bytes.len() as u64,
        }
    }

    /// Checks that a queue pair of this kind can do the request.
    ///
    /// # Errors
    /// EINVAL: a queue pair of this kind has no such request.
    pub(super) fn check(&self, parts: &PairParts) -> Result<(), Errno> {
        let fits = match &self.data {
            Data::Pieces(pieces) => pieces.len() <= parts.max_send_pieces as usize,
            Data::Inline(bytes) => {
                bytes.len() <= parts.max_inline as usize && !self.operation.fetches()
            }
        };
        let word = !self.operation.is_atomic() || self.len() == 8;
        if fits && word { Ok(()) } else { Err(Errno::INVAL) }
    }

    fn packets(&self, of: usize) -> u32 {
        u32::try_from(self.len().div_ceil(of as u64).max(1)).unwrap_or(u32::MAX)
    }
}

/// The send queue, and its progress.
#[derive(Debug)]
pub(super) struct Requester {
    queue: VecDeque<Work>,
    depth: Arc<Depth>,
    /// The first packet without an answer.
    answered: Sequence,
    /// The next packet to be sent, for the first time or again, and the index of its request.
    next: Sequence,
    at: usize,
    /// Number of requests in the queue that were begun.
    begun: usize,
    retries: u8,
    rnr_retries: u8,
    /// Time at which lost packets are sent again.
    deadline: Option<Instant>,
    /// Time until which the responder wants no packets.
    rest: Option<Instant>,
}

impl Requester {
    pub(super) fn new(max_send: u32) -> Self {
        Self {
            queue: VecDeque::new(),
            depth: Depth::new(max_send),
            answered: Sequence::new(0),
            next: Sequence::new(0),
            at: 0,
            begun: 0,
            retries: 0,
            rnr_retries: 0,
            deadline: None,
            rest: None,
        }
    }

    pub(super) fn start(&mut self, first: Sequence, attributes: &Attributes) {
        (self.answered, self.next) = (first, first);
        (self.retries, self.rnr_retries) = (attributes.retries, attributes.rnr_retries);
    }

    pub(super) fn clear(&mut self) {
        self.queue.clear();
        self.depth.clear();
        (self.at, self.begun, self.deadline, self.rest) = (0, 0, None, None);
    }

    /// Queues a request, and takes a place for it.
    ///
    /// # Errors
    /// ENOMEM: there is no place.
    pub(super) fn post(&mut self, mut work: Work) -> Result<(), Errno> {
        work.number = self.depth.take().ok_or(Errno::NOMEM)?;
        work.depth = Arc::clone(&self.depth);
        self.queue.push_back(work);
        Ok(())
    }

    pub(super) fn take_first(&mut self) -> Option<Work> {
        (self.at, self.begun) = (self.at.saturating_sub(1), self.begun.saturating_sub(1));
        (self.deadline, self.rest) = (None, None);
        self.queue.pop_front()
    }

    fn in_flight(&self) -> u32 {
        self.next.since(self.answered)
    }

    /// Returns `true` if the next request need not wait for reads and atomic operations before it.
    /// If none are allowed it does not wait either, but fails.
    fn may_begin(&self, attributes: &Attributes) -> bool {
        let Some(work) = self.queue.get(self.at) else { return false };
        let fetching =
            self.queue.iter().take(self.at).filter(|before| before.operation.fetches()).count();
        let has_room = attributes.reads == 0 || fetching < usize::from(attributes.reads);
        let waits = work.fence && fetching > 0 || work.operation.fetches() && !has_room;
        !waits
    }

    /// Sends again from the first packet without an answer on.
    fn go_back(&mut self) {
        self.next = self.answered;
        self.deadline = None;
        let unanswered = |work: &Work| {
            work.span.is_none_or(|(first, packets)| self.answered.is_before(first.plus(packets)))
        };
        self.at = self.queue.iter().position(unanswered).unwrap_or(self.queue.len());
    }

    /// Returns the request of a packet.
    fn of(&mut self, packet: Sequence) -> Option<&mut Work> {
        let begun = self.begun;
        self.queue
            .iter_mut()
            .take(begun)
            .find(|work| work.span.is_some_and(|(first, packets)| packet.since(first) < packets))
    }

    /// Notes that all requests up to and with this packet were carried out, except the data that
    /// comes back. The first flag is `true` if that was new, the second if such data is missing.
    fn carried_out(&mut self, last: Sequence) -> (bool, bool) {
        let mut news = false;
        while !last.is_before(self.answered) && self.answered.is_before(self.next) {
            let answered = self.answered;
            if self.of(answered).is_some_and(|work| work.operation.fetches()) {
                return (news, true);
            }
            self.answered = answered.plus(1);
            news = true;
        }
        (news, false)
    }
}

impl QueuePair {
    /// Sends the packets that may be sent, and ends failed requests.
    pub(super) fn transmit(self: &Arc<Self>, inner: &mut PairState, out: &mut Outbox) {
        self.settle(inner);
        if inner.is_ending {
            if self.device.faults.holds_last_receives() {
                return out.hold();
            }
            self.give_last_receive(inner);
        }
        if inner.state != State::ReadyToSend || self.device.is_removed() {
            return;
        }
        if self.device.faults.holds_queue(self.device.index, self.number) {
            return out.hold();
        }
        let Some((local, remote)) = inner.attributes.route else { return };
        let (source, target) = ((local, self.number), (remote, inner.attributes.peer));
        while let Some((sequence, request, payload)) = self.next_packet(inner) {
            let body = Body::Request(request);
            let packet = Packet { source, target, sequence, body, payload };
            if self.device.port_at(local).is_some_and(|port| port.is_up()) {
                out.send(packet);
            } else {
                self.note_loss(inner, out);
            }
        }
        self.settle(inner);
    }

    /// Returns the next packet, if one may be sent now.
    fn next_packet(&self, inner: &mut PairState) -> Option<(Sequence, Request, Vec<u8>)> {
        let PairState { attributes, requester, .. } = inner;
        if requester.rest.is_some() || requester.in_flight() >= WINDOW {
            return None;
        }
        let (size, at, sequence) = (self.device.packet, requester.at, requester.next);
        let may_begin = requester.may_begin(attributes);
        let work = requester.queue.get_mut(at)?;
        if work.failed.is_some() {
            return None;
        }
        let (first, packets) = match work.span {
            Some(span) => span,
            None if !may_begin => return None,
            None => {
                work.failed = self
                    .device
                    .faults
                    .next_send()
                    .or_else(|| self.wrong_from_the_start(work, attributes));
                if work.failed.is_some() {
                    return None;
                }
                let span = (sequence, work.packets(size));
                work.span = Some(span);
                requester.begun += 1;
                span
            }
        };
        let part = sequence.since(first);
        let offset = u64::from(part) * size as u64;
        let len = usize::try_from(work.len() - offset).map_or(size, |left| left.min(size));
        let Ok((request, payload)) = self.form(work, offset, len) else {
            work.failed = Some(ibv::IBV_WC_LOC_PROT_ERR);
            return None;
        };
        requester.next = sequence.plus(1);
        if part + 1 == packets {
            requester.at += 1;
        }
        Some((sequence, request, payload))
    }

    /// Returns the status of a request that fails before any packet of it is sent.
    fn wrong_from_the_start(&self, work: &Work, attributes: &Attributes) -> Option<ibv_wc_status> {
        if work.operation.fetches() && attributes.reads == 0 {
            return Some(ibv::IBV_WC_LOC_QP_OP_ERR);
        }
        (work.len() > u64::from(self.device.limits.message)).then_some(ibv::IBV_WC_LOC_LEN_ERR)
    }

    /// Builds a request's packet that begins at `offset`.
    fn form(
        &self,
        work: &Work,
        offset: u64,
        len: usize,
    ) -> Result<(Request, Vec<u8>), Unreachable> {
        let whole = u32::try_from(work.len()).unwrap_or(u32::MAX);
        let fragment = Fragment { offset: u32::try_from(offset).unwrap_or(u32::MAX), total: whole };
        let bytes = || match &work.data {
            Data::Inline(bytes) => {
                let start = fragment.offset as usize;
                Ok(bytes.get(start..start + len).unwrap_or_default().to_vec())
            }
            Data::Pieces(pieces) => {
                gather(&self.device.regions, self.parts.domain, pieces, offset, len)
            }
        };
        Ok(match work.operation {
            Operation::Send(notice) => (Request::Send { fragment, notice }, bytes()?),
            Operation::Write(to, notice) => (Request::Write { to, fragment, notice }, bytes()?),
            Operation::Read(from) => {
                let from = Remote { addr: from.addr.wrapping_add(offset), key: from.key };
                (Request::Read { from, len: u32::try_from(len).unwrap_or(u32::MAX) }, Vec::new())
            }
            Operation::FetchAdd { word, add } => (Request::FetchAdd { word, add }, Vec::new()),
            Operation::CompareSwap { word, compare, swap } => {
                (Request::CompareSwap { word, compare, swap }, Vec::new())
            }
        })
    }

    /// Completes finished requests, in order, and enters ERROR at the turn of a failed one.
    fn settle(self: &Arc<Self>, inner: &mut PairState) {
        while let Some(work) = inner.requester.queue.front() {
            let answered = inner.requester.answered;
            let done =
                work.span.is_some_and(|(first, packets)| !answered.is_before(first.plus(packets)));
            match work.failed {
                None if !done => return,
                // The answers to its packets do not matter any more.
                Some(status) if inner.state == State::ReadyToSend => {
                    if let Some(work) = inner.requester.take_first() {
                        self.complete_send(&work, status, 0);
                    }
                    return self.enter_error(inner);
                }
                Some(_) => return,
                None => {}
            }
            let (deadline, rest) = (inner.requester.deadline, inner.requester.rest);
            if let Some(work) = inner.requester.take_first() {
                let len = if work.operation.fetches() {
                    u32::try_from(work.len()).unwrap_or(u32::MAX)
                } else {
                    0
                };
                self.complete_send(&work, ibv::IBV_WC_SUCCESS, len);
            }
            (inner.requester.deadline, inner.requester.rest) = (deadline, rest);
        }
    }

    /// Handles an answer of the responder.
    pub(super) fn hear_answer(
        self: &Arc<Self>,
        inner: &mut PairState,
        packet: &mut Packet,
        out: &mut Outbox,
    ) {
        let known = inner.attributes.route == Some((packet.target.0, packet.source.0))
            && inner.attributes.peer == packet.source.1;
        let PairState { attributes, requester, .. } = inner;
        let sequence = packet.sequence;
        let in_flight =
            !sequence.is_before(requester.answered) && sequence.is_before(requester.next);
        if !known || inner.state != State::ReadyToSend || !in_flight {
            return;
        }
        if packet.body == Body::Lost {
            return self.note_loss(inner, out);
        }
        let (mut news, mut missing) = match packet.body {
            Body::Acknowledge => requester.carried_out(sequence),
            _ if sequence == requester.answered => (false, false),
            // An answer to this one implies that those before it were carried out.
            _ => requester.carried_out(sequence.plus(u32::MAX)),
        };
        match packet.body {
            Body::Answer | Body::Original(_) if !missing => {
                news |= self.take_answer(requester, packet);
            }
            Body::Refused(Refusal::OutOfSequence) => missing = true,
            Body::Refused(Refusal::NotReady(timer)) if !missing => {
                requester.go_back();
                match requester.rnr_retries {
                    0 => self.fail(requester, sequence, ibv::IBV_WC_RNR_RETRY_EXC_ERR),
                    left => {
                        requester.rnr_retries = if left == FOR_EVER { left } else { left - 1 };
                        let until = Instant::now() + rnr_delay(timer);
                        requester.rest = Some(until);
                        out.wake_at(until);
                    }
                }
                return;
            }
            Body::Refused(Refusal::InvalidRequest) => {
                self.fail(requester, sequence, ibv::IBV_WC_REM_INV_REQ_ERR);
            }
            Body::Refused(Refusal::Access) => {
                self.fail(requester, sequence, ibv::IBV_WC_REM_ACCESS_ERR)
            }
            Body::Refused(Refusal::Operation) => {
                self.fail(requester, sequence, ibv::IBV_WC_REM_OP_ERR)
            }
            _ => {}
        }
        if news {
            (requester.retries, requester.rnr_retries) =
                (attributes.retries, attributes.rnr_retries);
            requester.deadline = None;
        }
        if missing {
            requester.go_back();
        }
    }

    fn fail(&self, requester: &mut Requester, packet: Sequence, status: ibv_wc_status) {
        if let Some(work) = requester.of(packet) {
            work.failed = Some(status);
        }
    }

    /// Stores bytes that were read. Returns `true` if they were the ones due.
    fn take_answer(&self, requester: &mut Requester, packet: &Packet) -> bool {
        let (sequence, size) = (packet.sequence, self.device.packet as u64);
        if sequence != requester.answered {
            return false;
        }
        let Some(work) = requester.of(sequence) else { return false };
        let Some((first, _)) = work.span else { return false };
        let offset = u64::from(sequence.since(first)) * size;
        let word;
        let bytes: &[u8] = match packet.body {
            Body::Original(original) if work.operation.is_atomic() => {
                word = original.to_ne_bytes();
                &word
            }
            Body::Answer if matches!(work.operation, Operation::Read(_)) => &packet.payload,
            _ => return false,
        };
        let expected = (work.len() - offset).min(size.max(8));
        let Data::Pieces(pieces) = &work.data else { return false };
        if bytes.len() as u64 != expected {
            work.failed = Some(ibv::IBV_WC_BAD_RESP_ERR);
        } else if self.device.take_in(self.parts.domain, pieces, offset, bytes).is_err() {
            work.failed = Some(ibv::IBV_WC_LOC_PROT_ERR);
        }
        requester.answered = sequence.plus(1);
        true
    }

    /// Notes a packet that will not be answered: the timeout runs.
    pub(super) fn note_loss(&self, inner: &mut PairState, out: &mut Outbox) {
        let PairState { attributes, requester, .. } = inner;
        if requester.deadline.is_some() || requester.in_flight() == 0 {
            return;
        }
        if let Some(patience) = attributes.patience() {
            let deadline = Instant::now() + patience;
            requester.deadline = Some(deadline);
            out.wake_at(deadline);
        }
    }

    /// Handles deadlines that have passed.
    pub(super) fn expire(&self, inner: &mut PairState, now: Instant, _: &mut Outbox) {
        let requester = &mut inner.requester;
        if requester.rest.is_some_and(|until| until <= now) {
            requester.rest = None;
        }
        if requester.deadline.is_none_or(|deadline| deadline > now) {
            return;
        }
        let first = requester.answered;
        requester.go_back();
        match requester.retries.checked_sub(1) {
            Some(left) => requester.retries = left,
            None => self.fail(requester, first, ibv::IBV_WC_RETRY_EXC_ERR),
        }
    }
}
