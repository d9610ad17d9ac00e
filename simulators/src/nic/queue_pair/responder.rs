//! The receiving half of a connection: carries out the peer's requests, in the order of its
//! packets, and answers each.

use super::super::engine::Outbox;
use super::super::faults::Visibility;
use super::super::memory::{Access, Unreachable};
use super::super::receives::{Receive, length, scatter};
use super::super::wire::{Body, Fragment, Notice, Packet, Refusal, Remote, Request, Sequence};
use super::{PairState, QueuePair, State};
use carrack_transports::verbs::sys::bindings as ibv;
use std::collections::VecDeque;
use std::sync::Arc;

/// Progress through the peer's requests.
#[derive(Debug)]
pub(super) struct Responder {
    /// Number of the packet that comes next.
    expected: Sequence,
    /// Receive of the message that is arriving.
    pub(super) current: Option<Receive>,
    /// Set if the peer knows that a packet is missing.
    complained: bool,
    /// Results of the last atomic operations, for a peer that has missed the answer.
    originals: VecDeque<(Sequence, u64)>,
    /// Set once a packet has come.
    established: bool,
}

impl Default for Responder {
    fn default() -> Self {
        Self {
            expected: Sequence::new(0),
            current: None,
            complained: false,
            originals: VecDeque::new(),
            established: false,
        }
    }
}

impl Responder {
    pub(super) fn start(&mut self, first: Sequence) {
        *self = Self { expected: first, ..Self::default() };
    }
}

/// Reason why a request is not carried out.
enum Failure {
    /// The peer has to try again.
    NotReady,
    /// The connection ends with this answer to the peer. The receive of the request ends with this
    /// status.
    Broken(Refusal, u32),
}

impl From<Unreachable> for Failure {
    fn from(why: Unreachable) -> Self {
        let refusal = match why {
            Unreachable::Key => Refusal::Access,
            Unreachable::Alignment => Refusal::InvalidRequest,
            Unreachable::Engine => Refusal::Operation,
        };
        Self::Broken(refusal, ibv::IBV_WC_WR_FLUSH_ERR)
    }
}

impl QueuePair {
    /// Handles a request.
    pub(super) fn respond(
        self: &Arc<Self>,
        inner: &mut PairState,
        request: Request,
        packet: &mut Packet,
        out: &mut Outbox,
    ) {
        let from_peer = inner.attributes.route == Some((packet.target.0, packet.source.0))
            && inner.attributes.peer == packet.source.1;
        if !from_peer || !inner.state.receives() || self.device.is_removed() {
            return out.send(packet.reply(Body::Lost, Vec::new()));
        }
        self.note_first(inner);
        let expected = inner.responder.expected;
        if packet.sequence.is_before(expected) {
            return self.answer_again(inner, request, packet, out);
        }
        if packet.sequence != expected {
            if !std::mem::replace(&mut inner.responder.complained, true) {
                // The answer names the expected packet, so that earlier ones count as answered.
                let mut reply = packet.reply(Body::Refused(Refusal::OutOfSequence), Vec::new());
                reply.sequence = expected;
                out.send(reply);
            }
            return;
        }
        inner.responder.complained = false;
        match self.carry_out(inner, request, packet) {
            Ok((body, payload)) => {
                inner.responder.expected = expected.plus(1);
                out.send(packet.reply(body, payload));
            }
            Err(Failure::NotReady) => {
                // The packets behind it are repeated, too, without another complaint.
                inner.responder.complained = true;
                let timer = inner.attributes.min_rnr_timer;
                out.send(packet.reply(Body::Refused(Refusal::NotReady(timer)), Vec::new()));
            }
            Err(Failure::Broken(refusal, status)) => {
                out.send(packet.reply(Body::Refused(refusal), Vec::new()));
                if let Some(receive) = inner.responder.current.take() {
                    self.complete_receive(&receive, status);
                }
                self.enter_error(inner);
                match refusal {
                    Refusal::Access => self.tell(ibv::IBV_EVENT_QP_ACCESS_ERR),
                    Refusal::InvalidRequest => self.tell(ibv::IBV_EVENT_QP_REQ_ERR),
                    _ => self.tell(ibv::IBV_EVENT_QP_FATAL),
                }
            }
        }
    }

    /// Handles the first packet before the program has gone to RTS: it gets the event of an
    /// established connection.
    fn note_first(self: &Arc<Self>, inner: &mut PairState) {
        let first = !std::mem::replace(&mut inner.responder.established, true);
        if first && inner.state == State::ReadyToReceive {
            self.tell(ibv::IBV_EVENT_COMM_EST);
        }
    }

    /// Repeats an answer that the peer has missed.
    fn answer_again(&self, inner: &PairState, request: Request, packet: &Packet, out: &mut Outbox) {
        let (body, payload) = match request {
            Request::Read { from, len } => match self.read_for_peer(inner, from, len) {
                Ok(bytes) => (Body::Answer, bytes),
                Err(_) => (Body::Refused(Refusal::Access), Vec::new()),
            },
            Request::FetchAdd { .. } | Request::CompareSwap { .. } => {
                let found =
                    inner.responder.originals.iter().find(|(number, _)| *number == packet.sequence);
                let body = found.map_or(Body::Refused(Refusal::InvalidRequest), |(_, word)| {
                    Body::Original(*word)
                });
                (body, Vec::new())
            }
            Request::Send { .. } | Request::Write { .. } => (Body::Acknowledge, Vec::new()),
        };
        out.send(packet.reply(body, payload));
    }

    fn carry_out(
        self: &Arc<Self>,
        inner: &mut PairState,
        request: Request,
        packet: &mut Packet,
    ) -> Result<(Body, Vec<u8>), Failure> {
        let payload = std::mem::take(&mut packet.payload);
        match request {
            Request::Send { fragment, notice } => {
                self.receive_fragment(inner, fragment, &payload)?;
                if fragment.ends_with(payload.len()) {
                    self.received(inner, ibv::IBV_WC_RECV, fragment.total, notice);
                }
                Ok((Body::Acknowledge, Vec::new()))
            }
            Request::Write { to, fragment, notice } => {
                self.may(inner, Access::REMOTE_WRITE)?;
                let last = fragment.ends_with(payload.len());
                if fragment.offset == 0 && fragment.total > 0 {
                    let (domain, total) = (self.parts.domain, u64::from(fragment.total));
                    self.device.regions.check(domain, to, total, Access::REMOTE_WRITE)?;
                }
                if last && notice.immediate.is_some() {
                    inner.responder.current = Some(self.next_receive()?);
                }
                if !payload.is_empty() {
                    let addr = to.addr.wrapping_add(u64::from(fragment.offset));
                    self.device.write_for_peer(
                        self.parts.domain,
                        Remote { addr, key: to.key },
                        payload,
                    )?;
                }
                if last && notice.immediate.is_some() {
                    self.received(inner, ibv::IBV_WC_RECV_RDMA_WITH_IMM, fragment.total, notice);
                }
                Ok((Body::Acknowledge, Vec::new()))
            }
            Request::Read { from, len } => {
                Ok((Body::Answer, self.read_for_peer(inner, from, len)?))
            }
            Request::FetchAdd { word, add } => {
                self.change(inner, packet, word, |old| old.wrapping_add(add))
            }
            Request::CompareSwap { word, compare, swap } => {
                self.change(inner, packet, word, |old| if old == compare { swap } else { old })
            }
        }
    }

    /// Checks that the queue pair permits this access to its peer.
    fn may(&self, inner: &PairState, wanted: Access) -> Result<(), Failure> {
        let reads_allowed = wanted == Access::REMOTE_WRITE || inner.attributes.peer_reads > 0;
        let is_done = wanted != Access::REMOTE_ATOMIC || self.device.limits.atomics;
        if inner.attributes.access.allows(wanted) && reads_allowed && is_done {
            return Ok(());
        }
        Err(Failure::Broken(Refusal::InvalidRequest, ibv::IBV_WC_WR_FLUSH_ERR))
    }

    fn read_for_peer(&self, inner: &PairState, from: Remote, len: u32) -> Result<Vec<u8>, Failure> {
        self.may(inner, Access::REMOTE_READ)?;
        self.device.settle_writes(Visibility::WithRead);
        let mut bytes = vec![0; len as usize];
        if len > 0 {
            self.device.regions.read(self.parts.domain, from, Access::REMOTE_READ, &mut bytes)?;
        }
        Ok(bytes)
    }

    fn change(
        &self,
        inner: &mut PairState,
        packet: &Packet,
        word: Remote,
        change: impl Fn(u64) -> u64,
    ) -> Result<(Body, Vec<u8>), Failure> {
        self.may(inner, Access::REMOTE_ATOMIC)?;
        if !word.addr.is_multiple_of(8) {
            return Err(Unreachable::Alignment.into());
        }
        self.device.settle_writes(Visibility::WithRead);
        let original = self.device.regions.change(self.parts.domain, word, change)?;
        let originals = &mut inner.responder.originals;
        originals.push_back((packet.sequence, original));
        if originals.len() > usize::from(self.device.limits.reads) {
            originals.pop_front();
        }
        Ok((Body::Original(original), Vec::new()))
    }

    fn next_receive(&self) -> Result<Receive, Failure> {
        self.parts.receives.take().ok_or(Failure::NotReady)
    }

    fn receive_fragment(
        &self,
        inner: &mut PairState,
        fragment: Fragment,
        payload: &[u8],
    ) -> Result<(), Failure> {
        if fragment.offset == 0 {
            inner.responder.current = Some(self.next_receive()?);
            if let Some(status) = self.device.faults.next_receive() {
                return Err(Failure::Broken(Refusal::Operation, status));
            }
        }
        let Some(receive) = &inner.responder.current else {
            return Err(Failure::Broken(Refusal::InvalidRequest, ibv::IBV_WC_WR_FLUSH_ERR));
        };
        let (offset, room) = (u64::from(fragment.offset), length(&receive.pieces));
        if offset + payload.len() as u64 > room {
            return Err(Failure::Broken(Refusal::InvalidRequest, ibv::IBV_WC_LOC_LEN_ERR));
        }
        let domain = self.parts.receives.domain;
        scatter(&self.device.regions, domain, &receive.pieces, offset, payload)
            .map_err(|_| Failure::Broken(Refusal::Operation, ibv::IBV_WC_LOC_PROT_ERR))
    }

    /// Completes a received message.
    fn received(&self, inner: &mut PairState, opcode: u32, len: u32, notice: Notice) {
        let Some(receive) = inner.responder.current.take() else { return };
        let mut what = self.blank(receive.id, ibv::IBV_WC_SUCCESS);
        (what.opcode, what.byte_len, what.src_qp) = (opcode, len, inner.attributes.peer.0);
        if let Some(immediate) = notice.immediate {
            what.anon_1 = ibv::ibv_wc__bindgen_ty_1 { imm_data: immediate };
            what.wc_flags = ibv::IBV_WC_WITH_IMM;
        }
        self.push_receive(what, notice.solicited);
    }
}
