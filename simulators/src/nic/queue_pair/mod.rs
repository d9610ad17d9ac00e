//! Queue pairs.
//!
//! | module | one idea |
//! |---|---|
//! | `transitions` | permitted sequences of states |
//! | `attributes` | attributes of a queue pair: routes, keys, numbers, retries |
//! | `requester` | sending requests, in order, again when they are lost |
//! | `responder` | carrying out a peer's requests |
//!
//! A queue pair has one lock. Programs hold it to post and to modify, the engine's thread to work.
//! No thread holds two.

mod attributes;
mod requester;
mod responder;
mod transitions;

pub(super) use attributes::{AddressVector, Attributes};
pub(super) use requester::{Data, Operation, Work};
pub(super) use transitions::State;

use super::completion::{Completion, CompletionQueue, Frees};
use super::device::{AsyncEvent, AsyncEvents, NicDevice, Source};
use super::engine::Outbox;
use super::events::Unacknowledged;
use super::faults::{Call, Visibility};
use super::memory::Domain;
use super::receives::{Receive, ReceiveQueue};
use super::wire::{Body, Packet, QueueNumber};
use carrack_transports::verbs::sys::bindings::{
    self as ibv, ibv_event_type, ibv_qp_attr, ibv_wc, ibv_wc_status,
};
use parking_lot::Mutex;
use requester::Requester;
use responder::Responder;
use rustix::io::Errno;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// Parts of a queue pair.
#[derive(Debug)]
pub(super) struct PairParts {
    pub(super) domain: Domain,
    pub(super) send_cq: Arc<CompletionQueue>,
    pub(super) recv_cq: Arc<CompletionQueue>,
    pub(super) receives: Arc<ReceiveQueue>,
    /// Set if `receives` is shared with others.
    pub(super) shared: bool,
    /// Set if every request completes, requested or not.
    pub(super) signal_all: bool,
    pub(super) max_send: u32,
    pub(super) max_send_pieces: u32,
    pub(super) max_inline: u32,
    pub(super) events: AsyncEvents,
}

/// A queue pair.
#[derive(Debug)]
pub(super) struct QueuePair {
    pub(super) number: QueueNumber,
    pub(super) parts: PairParts,
    pub(super) device: Arc<NicDevice>,
    /// The program's name of it: the address of its `ibv_qp`.
    pub(super) handle: AtomicUsize,
    pub(super) given: Unacknowledged,
    /// Set if the engine has been told of new work and has not looked yet.
    rung: AtomicBool,
    inner: Mutex<PairState>,
}

#[derive(Debug)]
struct PairState {
    state: State,
    attributes: Attributes,
    requester: Requester,
    responder: Responder,
    /// Set if it is in error, and has not given back its last receive.
    is_ending: bool,
}

impl QueuePair {
    /// Creates a queue pair in RESET, known to its device.
    pub(super) fn new(device: &Arc<NicDevice>, parts: PairParts) -> Result<Arc<Self>, Errno> {
        device.queue_pairs.add()?;
        let inner = PairState {
            state: State::Reset,
            attributes: Attributes::default(),
            requester: Requester::new(parts.max_send),
            responder: Responder::default(),
            is_ending: false,
        };
        for queue in [&parts.send_cq, &parts.recv_cq] {
            queue.users.fetch_add(1, Ordering::SeqCst);
        }
        parts.receives.users.fetch_add(1, Ordering::SeqCst);
        let pair = Arc::new(Self {
            number: device.new_queue_number(),
            parts,
            device: Arc::clone(device),
            handle: AtomicUsize::new(0),
            given: Unacknowledged::default(),
            rung: AtomicBool::new(false),
            inner: Mutex::new(inner),
        });
        device.add_queue(&pair);
        Ok(pair)
    }

    /// Destroys it: no packet arrives any more, and its completions are removed.
    pub(super) fn destroy(&self) {
        self.device.remove_queue(self.number);
        let mut inner = self.inner.lock();
        self.reset(&mut inner);
        for queue in [&self.parts.send_cq, &self.parts.recv_cq] {
            queue.users.fetch_sub(1, Ordering::SeqCst);
        }
        self.parts.receives.users.fetch_sub(1, Ordering::SeqCst);
    }

    pub(super) fn attributes(&self) -> (State, Attributes) {
        let inner = self.inner.lock();
        (inner.state, inner.attributes.clone())
    }

    /// Changes the attributes in the mask, and the state.
    ///
    /// # Errors
    /// EINVAL: an invalid transition or value.
    pub(super) fn modify(
        self: &Arc<Self>,
        attr: &ibv_qp_attr,
        mask: u32,
        vector: Option<AddressVector>,
    ) -> Result<(), Errno> {
        let mut inner = self.inner.lock();
        let to = match mask & ibv::IBV_QP_STATE {
            0 => inner.state,
            _ => State::from_number(attr.qp_state).ok_or(Errno::INVAL)?,
        };
        if mask & ibv::IBV_QP_CUR_STATE != 0 && attr.cur_qp_state != inner.state.number() {
            return Err(Errno::INVAL);
        }
        transitions::check(inner.state, to, mask)?;
        let attributes = inner.attributes.with(attr, mask, vector, &self.device)?;
        inner.attributes = attributes;
        match to {
            State::Reset => self.reset(&mut inner),
            State::Error if inner.state != State::Reset => self.enter_error(&mut inner),
            _ => {}
        }
        let PairState { attributes, requester, responder, .. } = &mut *inner;
        if mask & ibv::IBV_QP_RQ_PSN != 0 {
            responder.start(attributes.first_received);
        }
        if mask & ibv::IBV_QP_SQ_PSN != 0 {
            requester.start(attributes.first_sent, attributes);
        }
        inner.state = to;
        Ok(())
    }

    fn reset(&self, inner: &mut PairState) {
        inner.state = State::Reset;
        inner.requester.clear();
        inner.responder = Responder::default();
        inner.is_ending = false;
        inner.attributes = Attributes::default();
        if !self.parts.shared {
            self.parts.receives.clear();
        }
        self.parts.send_cq.forget(self.number);
        self.parts.recv_cq.forget(self.number);
    }

    /// Enters ERROR: all posted work ends, flushed, in order.
    fn enter_error(self: &Arc<Self>, inner: &mut PairState) {
        inner.state = State::Error;
        while let Some(work) = inner.requester.take_first() {
            self.complete_send(&work, ibv::IBV_WC_WR_FLUSH_ERR, 0);
        }
        if self.parts.shared {
            if !self.device.faults.holds_last_receives() {
                return self.give_last_receive(inner);
            }
            inner.is_ending = true;
            let current = inner.responder.current.take();
            inner.responder.current = current.or_else(|| self.parts.receives.take());
            return self.ring();
        }
        if let Some(receive) = inner.responder.current.take() {
            self.complete_receive(&receive, ibv::IBV_WC_WR_FLUSH_ERR);
        }
        while let Some(receive) = self.parts.receives.take() {
            self.complete_receive(&receive, ibv::IBV_WC_WR_FLUSH_ERR);
        }
    }

    /// Sends the event that no shared receive is its own any more.
    fn give_last_receive(self: &Arc<Self>, inner: &mut PairState) {
        inner.is_ending = false;
        if let Some(receive) = inner.responder.current.take() {
            self.complete_receive(&receive, ibv::IBV_WC_WR_FLUSH_ERR);
        }
        if self.device.faults.tells_of_last_receives() {
            self.tell(ibv::IBV_EVENT_QP_LAST_WQE_REACHED);
        }
    }

    /// Handles the failure of its completion queue.
    pub(super) fn completions_are_lost(self: &Arc<Self>) {
        let mut inner = self.inner.lock();
        if !matches!(inner.state, State::Reset | State::Error) {
            self.enter_error(&mut inner);
            self.tell(ibv::IBV_EVENT_QP_FATAL);
        }
    }

    fn tell(self: &Arc<Self>, kind: ibv_event_type) {
        self.parts.events.push(AsyncEvent { kind, source: Source::Queue(Arc::clone(self)) });
    }

    /// Adds a receive.
    ///
    /// # Errors
    /// EINVAL: in RESET, or a shared queue, or too many pieces. ENOMEM: there is no place.
    pub(super) fn post_receive(self: &Arc<Self>, receive: Receive) -> Result<(), Errno> {
        self.device.faults.check(Call::PostRecv)?;
        let inner = self.inner.lock();
        if self.parts.shared || inner.state == State::Reset {
            return Err(Errno::INVAL);
        }
        self.parts.receives.post(receive)?;
        if inner.state == State::Error {
            while let Some(receive) = self.parts.receives.take() {
                self.complete_receive(&receive, ibv::IBV_WC_WR_FLUSH_ERR);
            }
        }
        Ok(())
    }

    /// Adds a request.
    ///
    /// # Errors
    /// EINVAL: not ready to send, or an invalid request. ENOMEM: there is no place.
    pub(super) fn post_send(self: &Arc<Self>, work: Work) -> Result<(), Errno> {
        self.device.faults.check(Call::PostSend)?;
        work.check(&self.parts)?;
        let mut inner = self.inner.lock();
        if !matches!(inner.state, State::ReadyToSend | State::Error) {
            return Err(Errno::INVAL);
        }
        inner.requester.post(work)?;
        if inner.state == State::Error {
            while let Some(work) = inner.requester.take_first() {
                self.complete_send(&work, ibv::IBV_WC_WR_FLUSH_ERR, 0);
            }
        }
        Ok(())
    }

    /// Tells the engine that there is work, unless it has been told.
    pub(super) fn ring(self: &Arc<Self>) {
        if !self.rung.swap(true, Ordering::AcqRel) {
            self.device.engine.work_is_there(self);
        }
    }

    /// Notes that the engine looks now: later posts have to signal again.
    pub(super) fn heard(&self) {
        self.rung.store(false, Ordering::Release);
    }

    /// Does all possible work.
    pub(super) fn proceed(self: &Arc<Self>, out: &mut Outbox) {
        let mut inner = self.inner.lock();
        self.transmit(&mut inner, out);
    }

    /// Handles a point in time that this queue pair had asked for.
    pub(super) fn wake(self: &Arc<Self>, now: Instant, out: &mut Outbox) {
        let mut inner = self.inner.lock();
        self.expire(&mut inner, now, out);
        self.transmit(&mut inner, out);
    }

    /// Handles a packet.
    pub(super) fn deliver(self: &Arc<Self>, packet: &mut Packet, out: &mut Outbox) {
        let mut inner = self.inner.lock();
        match packet.body {
            Body::Request(request) => self.respond(&mut inner, request, packet, out),
            _ => {
                self.hear_answer(&mut inner, packet, out);
                self.transmit(&mut inner, out);
            }
        }
    }

    /// Handles the end of the process with this block: packets to it are lost.
    pub(super) fn peer_is_gone(
        self: &Arc<Self>,
        block: super::address::PortBlock,
        out: &mut Outbox,
    ) {
        let mut inner = self.inner.lock();
        if inner.attributes.route.is_some_and(|(_, peer)| peer.block() == block) {
            self.note_loss(&mut inner, out);
        }
    }

    fn blank(&self, id: u64, status: ibv_wc_status) -> ibv_wc {
        ibv_wc {
            wr_id: id,
            status,
            // Only these fields of a failed completion are valid. The others have nonsense values,
            // to expose programs that use them.
            opcode: if status == ibv::IBV_WC_SUCCESS { 0 } else { u32::MAX },
            vendor_err: if status == ibv::IBV_WC_SUCCESS { 0 } else { 0x5300 | status },
            byte_len: 0,
            anon_1: ibv::ibv_wc__bindgen_ty_1 { imm_data: 0 },
            qp_num: self.number.0,
            src_qp: 0,
            wc_flags: 0,
            pkey_index: 0,
            slid: 0,
            sl: 0,
            dlid_path_bits: 0,
        }
    }

    fn complete_send(&self, work: &Work, status: ibv_wc_status, byte_len: u32) {
        if status == ibv::IBV_WC_SUCCESS && !work.signalled && !self.parts.signal_all {
            return;
        }
        let mut what = self.blank(work.id, status);
        if status == ibv::IBV_WC_SUCCESS {
            (what.opcode, what.byte_len) = (work.operation.completes_as(), byte_len);
        }
        let depth = Arc::clone(&work.depth);
        let completion =
            Completion { what, frees: Frees::UpTo(depth, work.number), solicited: false };
        self.parts.send_cq.push(completion, &self.device.engine);
    }

    fn complete_receive(&self, receive: &Receive, status: ibv_wc_status) {
        let what = self.blank(receive.id, status);
        self.push_receive(what, false);
    }

    fn push_receive(&self, what: ibv_wc, solicited: bool) {
        self.device.settle_writes(Visibility::WithCompletion);
        let frees = Frees::One(Arc::clone(&self.parts.receives.depth));
        self.parts.recv_cq.push(Completion { what, frees, solicited }, &self.device.engine);
    }
}
