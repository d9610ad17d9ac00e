//! The actions of senders.

use super::ahead::Ahead;
use super::carrier::Carrier;
use super::in_flight::{Event, InFlight, Run};
use super::port::Port;
use super::{At, Transfers};
use crate::comp::Completion;
use crate::deadline::Deadline;
use crate::error::OpError;
use crate::names::{Rank, Tag};
use crate::op::{Continuation, Ended, Flow, OnLink, OpContext, OpKind, PendingOp};
use crate::peer::route::Linked;
use crate::protocol::header::Message;
use crate::protocol::rndv::{
    Actions, Duty, Limits, RndvSender, TxAction, TxEvent, Violation, name_of_answer,
};
use crate::protocol::wire::{Control, Mapped, Rts, TransferVerdict, word};
use carrack_transports::contract::{
    BufferChunk, DownCause, Header, Op, OpToken, PeerId, RemotePlace, Submit, SubmitError,
};
use carrack_transports::mem::{Buffer, MemRef, PacketSource};
use std::sync::Arc;

/// Fragments of one message that one call of progress sends, before others have their turn.
const FRAGMENTS: usize = 32;

/// A transfer to a peer (a message, a put, or the answer to a get), with its bytes.
pub(crate) struct TxOp {
    op: OpContext,
    bytes: TxBytes,
    tx: RndvSender,
    /// The copies of bytes that lie on a GPU.
    ahead: Option<Box<Ahead>>,
    /// `true` if its operation has ended first: the bytes stay for the peer.
    is_late: bool,
    is_listed: bool,
    /// The error that ends it as soon as no engine reads its bytes.
    failing: Option<Box<OpError>>,
}

/// The bytes of a message: host memory that stays where it is, or memory of a GPU.
enum TxBytes {
    Owned(Buffer),
    /// Chunks in flight share them.
    Shared(Arc<Buffer>),
}

impl TxBytes {
    fn view(&self) -> MemRef<'_> {
        match self {
            Self::Owned(buffer) => buffer.view(),
            Self::Shared(buffer) => buffer.view(),
        }
    }

    /// Returns the buffer, for engines and links that take it.
    fn owned(&mut self) -> &mut Buffer {
        if let Self::Shared(shared) = self {
            *self = Self::Owned(Arc::into_inner(std::mem::take(shared)).unwrap_or_default());
        }
        match self {
            Self::Owned(buffer) => buffer,
            Self::Shared(_) => unreachable!("it was replaced above"),
        }
    }

    fn shared(&mut self) -> &Arc<Buffer> {
        if let Self::Owned(buffer) = self {
            *self = Self::Shared(Arc::new(std::mem::take(buffer)));
        }
        match self {
            Self::Shared(shared) => shared,
            Self::Owned(_) => unreachable!("it was replaced above"),
        }
    }

    /// Takes the buffer: an empty one if a failed link still holds a chunk.
    fn take(&mut self) -> Buffer {
        std::mem::take(self.owned())
    }
}

/// Returns the address of bytes for the kernel's copy. It is 0 for inline bytes, which move with
/// their owner, and for bytes that no CPU reaches.
fn address(bytes: &Buffer) -> u64 {
    match bytes {
        Buffer::Small(_) | Buffer::Empty => 0,
        bytes if !bytes.kind().is_host() => 0,
        bytes => bytes.view().as_ptr() as usize as u64,
    }
}

/// Leaks a buffer that a peer's kernel may still be copying, and that cannot be waited for any
/// longer.
pub(super) fn abandon(buffer: Buffer, to: Rank) {
    tracing::warn!(
        rank = to.0,
        size = buffer.len(),
        "the memory of a buffer stays taken: a peer that is stopped may be copying it"
    );
    std::mem::forget(buffer);
}

impl TxOp {
    fn new(op: OpContext, bytes: Buffer, tx: RndvSender) -> Self {
        let (is_late, is_listed, failing, ahead) = (false, false, None, None);
        Self { op, bytes: TxBytes::Owned(bytes), tx, ahead, is_late, is_listed, failing }
    }

    /// Returns a transfer whose RTS is sent under `name`.
    fn offered(name: u64, op: OpContext, bytes: Buffer, duty: Duty) -> Self {
        // A region is registered as a whole, once.
        let in_one = matches!(bytes, Buffer::Region(_));
        let tx = RndvSender::offered(name, bytes.len(), duty, in_one);
        Self::new(op, bytes, tx)
    }

    pub(super) fn peer(&self) -> Rank {
        self.op.rank
    }

    pub(super) fn deadline(&self) -> Deadline {
        self.op.deadline
    }

    pub(super) fn kind(&self) -> OpKind {
        match self.tx.duty() {
            Duty::Memory => OpKind::Memory,
            Duty::Message | Duty::Answer => OpKind::Message,
        }
    }

    pub(super) fn pending(&self) -> PendingOp {
        let is_message = self.tx.duty() == Duty::Message;
        match (self.tx.is_offered(), is_message) {
            (true, true) => self.op.pending("message that was offered", "its receive"),
            (true, false) => self.op.pending("operation on a peer's memory", "its owner"),
            (false, _) => {
                let waits_for = format!("room at the peer, {} B are sent", self.tx.sent());
                self.op.pending("message on its way out", waits_for)
            }
        }
    }

    /// Returns the bytes, while the receiver may be copying them by itself.
    pub(super) fn offered_bytes(&self) -> Option<MemRef<'_>> {
        self.tx.is_offered().then(|| self.bytes.view())
    }

    pub(super) fn on(&mut self, run: &mut Run<'_>, event: Event) -> Flow {
        let event = match event {
            Event::Control(control) => match event_of(control) {
                Some(event) => event,
                None => {
                    run.violated(self.op.rank, Violation::Stray);
                    return Flow::Stays;
                }
            },
            Event::Go => {
                self.is_listed = false;
                if let Some(error) = self.failing.take() {
                    // The receiver was told at once, if it is there.
                    return self.fail(run, *error);
                }
                TxEvent::Go
            }
            Event::ChunkEnded { at, failed } => TxEvent::ChunkEnded { at, failed },
            Event::Expired => {
                self.expire(run);
                return Flow::Stays;
            }
            Event::Down(error) => {
                self.withdraw(run);
                if self.is_engine_busy() {
                    return self.fail(run, error);
                }
                TxEvent::Down(error)
            }
            Event::Begin => return self.stay(run),
            Event::Fragment { .. } => {
                let why = "it sent a fragment of a message that it was not asked for";
                run.violated(self.op.rank, Violation::Broken(why));
                return Flow::Stays;
            }
            Event::Unsent => {
                // The peer never hears of the transfer, whose operation has ended or ends now.
                self.end(run, Some(OpError::Refused(self.op.rank)));
                return Flow::Ends;
            }
            Event::Refused(_) | Event::Pulled(_) => return Flow::Stays,
        };
        self.handle(run, event)
    }

    /// Handles an event of the protocol, and carries out its actions.
    fn handle(&mut self, run: &mut Run<'_>, event: TxEvent) -> Flow {
        let (mut next, mut actions) = (Some(event), Actions::new());
        loop {
            if let Some(event) = next.take() {
                let (chunk, nics) = self.linked(run).map_or((usize::MAX, 1), |linked| {
                    (linked.caps.chunk.max(1), linked.link.nics())
                });
                let limits = Limits { chunk, nics };
                if let Err(violation) = self.tx.on(event, &limits, &mut actions) {
                    run.violated(self.op.rank, violation);
                }
            }
            let Some(action) = actions.pop_front() else { return self.stay(run) };
            next = match action {
                TxAction::Send(control) => {
                    run.device.control(run.carrier, self.op.rank, control);
                    None
                }
                TxAction::Fragments { rx, from, to } => self.send(run, rx, (from, to)),
                TxAction::Whole { place } => self.give_whole(run, place),
                TxAction::Chunk { place, at, len, window } => {
                    Some(self.give_chunk(run, place, (at, len), window))
                }
                TxAction::Judge(verdict) => {
                    if let TransferVerdict::Held(value) = verdict {
                        self.bytes = TxBytes::Owned(Buffer::Small(word(value)));
                    }
                    self.end(run, verdict.error(self.op.rank));
                    return Flow::Ends;
                }
                TxAction::End(Err(error)) if self.is_engine_busy() => return self.fail(run, error),
                TxAction::End(outcome) => {
                    self.end(run, outcome.err());
                    return Flow::Ends;
                }
                TxAction::Leave => return Flow::Ends,
            };
        }
    }

    /// Lists it for progress, if that can continue it.
    fn stay(&mut self, run: &Run<'_>) -> Flow {
        let wants = self.tx.wants_to_go() || self.failing.is_some();
        if wants && !std::mem::replace(&mut self.is_listed, true) {
            run.device.transfers.list((self.op.rank, self.tx.name()));
        }
        Flow::Stays
    }

    fn linked<'r>(&self, run: &Run<'r>) -> Option<&'r Linked> {
        run.device.known_route(self.op.rank)?.linked()
    }

    fn is_engine_busy(&mut self) -> bool {
        self.ahead.as_mut().is_some_and(|ahead| ahead.is_busy())
    }

    /// Ends it with an error, now or when the engine that reads its bytes is done.
    fn fail(&mut self, run: &mut Run<'_>, error: OpError) -> Flow {
        if self.is_engine_busy() {
            self.failing = Some(Box::new(error));
            return self.stay(run);
        }
        self.end(run, Some(error));
        Flow::Ends
    }

    /// Sends as many fragments as the link and the receiver take now. A second message of a peer
    /// waits for the first: their fragments would only wait for each other.
    fn send(&mut self, run: &mut Run<'_>, rx: u64, (from, to): (usize, usize)) -> Option<TxEvent> {
        let peer = self.op.rank;
        if run.sent_to.contains(&peer) {
            return None;
        }
        let linked = match run.way_to(peer) {
            Ok(linked) => linked?,
            Err(error) => return Some(TxEvent::Failed(error)),
        };
        if self.ahead.is_none() {
            self.ahead = Ahead::of(self.bytes.owned(), from);
        }
        if let Some(ahead) = &mut self.ahead {
            match ahead.step(self.bytes.owned(), to, &run.carrier.staging) {
                Ok(copied) => run.moved |= copied,
                Err(error) => return Some(TxEvent::Failed(OpError::Copy(error))),
            }
        }
        let most = fragment_size(run.device, linked);
        let mut at = from;
        for _ in 0..FRAGMENTS {
            if at == to {
                break;
            }
            let bytes = match &self.ahead {
                None => self.bytes.view().part(at, most.min(to - at)),
                Some(ahead) => match ahead.front() {
                    Some(front) => front.part(0, most),
                    None => break,
                },
            };
            let len = bytes.len();
            let header = Message::Fragment { rx, offset: at as u64 }.encode();
            match linked.link.submit(Op::AmCopied { header, bytes }) {
                Ok(Submit::Busy(_)) => break,
                Ok(_) => {
                    at += len;
                    run.moved = true;
                    if let Some(ahead) = &mut self.ahead {
                        ahead.sent(len);
                    }
                }
                // The fragments before it count; the error comes again with the next one.
                Err(_) if at > from => break,
                Err(error) => return Some(TxEvent::Failed(OpError::of_submit(&error, peer))),
            }
        }
        if at < to {
            run.sent_to.push(peer);
        }
        (at > from).then_some(TxEvent::Left(at - from))
    }

    /// Hands all of it to the NIC, which writes it to `to`. The link then has the operation.
    fn give_whole(&mut self, run: &mut Run<'_>, to: RemotePlace) -> Option<TxEvent> {
        let (device, rank) = (run.device, self.op.rank);
        let linked = match run.way_to(rank) {
            Ok(linked) => linked?,
            Err(error) => return Some(TxEvent::Failed(error)),
        };
        let on_link = OnLink::of(self.op.take());
        let token = match device.outstanding.insert(on_link) {
            Ok(token) => token,
            Err(OnLink { op, .. }) => {
                self.op = op;
                return None;
            }
        };
        let op = Op::Put { to, buffer: self.bytes.owned(), token: OpToken(token) };
        let submitted = linked.link.submit(op);
        if let Ok(Submit::Posted) = submitted {
            run.moved = true;
            return Some(TxEvent::WholeGiven);
        }
        if let Some(OnLink { op, .. }) = device.outstanding.take(token) {
            self.op = op;
        }
        match submitted {
            Ok(_) => None,
            Err(SubmitError::Unregistered(why)) => {
                tracing::info!(%rank, why, "a message goes in fragments");
                Some(TxEvent::Unregistered)
            }
            Err(error) => Some(TxEvent::Failed(OpError::of_submit(&error, rank))),
        }
    }

    /// Hands a chunk to the NIC.
    fn give_chunk(
        &mut self,
        run: &mut Run<'_>,
        place: RemotePlace,
        (at, len): (usize, usize),
        window: usize,
    ) -> TxEvent {
        let (device, rank) = (run.device, self.op.rank);
        let linked = match run.way_to(rank) {
            Ok(Some(linked)) => linked,
            Ok(None) => return TxEvent::ChunkBusy,
            Err(error) => return TxEvent::Failed(error),
        };
        let op = OpContext::of_runtime(rank, self.op.tag, len, None);
        let next = Continuation::Chunk { name: self.tx.name(), window };
        let Ok(token) = device.outstanding.insert(OnLink { op, next }) else {
            return TxEvent::ChunkBusy;
        };
        let chunk = BufferChunk { of: self.bytes.shared().clone(), at, len };
        let submitted = linked.link.put_chunk(place, &chunk, OpToken(token));
        if let Ok(Submit::Posted) = submitted {
            run.moved = true;
            return TxEvent::ChunkGiven { len, in_order: linked.link.puts_in_order(place) };
        }
        device.outstanding.take(token);
        match submitted {
            Ok(_) => TxEvent::ChunkBusy,
            Err(SubmitError::Unregistered(why)) => {
                tracing::info!(%rank, why, sent = at, "a message goes on in fragments");
                TxEvent::Unregistered
            }
            Err(error) => TxEvent::Failed(OpError::of_submit(&error, rank)),
        }
    }

    /// Ends the operation at its deadline. Its bytes stay, since the peer may still read them.
    fn expire(&mut self, run: &mut Run<'_>) {
        if self.is_late {
            return;
        }
        self.is_late = true;
        let (op, rank) = (self.op.take(), self.op.rank);
        run.end(op.end(Buffer::Empty, Some(OpError::TimedOut(rank))));
    }

    /// Withdraws the GPU memory from which a peer that is gone may be fetching. The fetched bytes
    /// do not count then; the peer would have to ask for fragments.
    fn withdraw(&self, run: &Run<'_>) {
        let Some(bytes) = self.offered_bytes().filter(|bytes| !bytes.place().is_host()) else {
            return;
        };
        let begin = bytes.as_ptr().addr();
        run.carrier.exposures.withdraw(&(begin..begin.saturating_add(bytes.len())));
    }

    /// Ends the operation, after waiting for an engine that reads its bytes.
    fn end(&mut self, run: &mut Run<'_>, error: Option<OpError>) {
        run.moved = true;
        if let (Some(error), OpKind::Memory) = (&error, self.kind()) {
            // Also of one whose deadline has passed: only a flush can tell of its loss.
            run.device.losses.note_error(error);
        }
        if let Some(ahead) = &mut self.ahead {
            ahead.settle(self.bytes.owned());
        }
        let mut bytes = self.bytes.take();
        let is_gone = matches!(error, Some(OpError::PeerDown { .. } | OpError::Closed));
        if is_gone && self.tx.is_offered() && !run.device.is_revoked(self.op.rank) {
            run.device.transfers.packed.forget(self.op.rank, bytes.view());
            abandon(std::mem::take(&mut bytes), self.op.rank);
        }
        if let Some(ended) = self.ended(bytes, error) {
            run.end(ended);
        }
    }

    fn ended(&mut self, bytes: Buffer, error: Option<OpError>) -> Option<Ended> {
        if self.is_late {
            return None;
        }
        if self.tx.duty() == Duty::Answer {
            // The bytes belong to this rank's region. A failed get signals no object of this rank.
            return error.is_none().then(|| self.op.take().end(Buffer::Empty, None));
        }
        Some(self.op.take().end(bytes, error))
    }

    /// Ends it when the runtime ends.
    pub(super) fn close(mut self, run: &mut Run<'_>) {
        self.end(run, Some(OpError::Closed));
    }
}

/// Returns the event that a control message is for a sender.
fn event_of(control: Control) -> Option<TxEvent> {
    let fits = |limit: u64| usize::try_from(limit).unwrap_or(usize::MAX);
    Some(match control {
        Control::Cts { rx, limit, .. } => TxEvent::Cts { rx, limit: fits(limit) },
        Control::CtsWrite { rx, place, .. } => TxEvent::CtsWrite { rx, place },
        Control::CtsChunk { rx, window, .. } => TxEvent::CtsChunk { rx, window },
        Control::Grant { limit, .. } => TxEvent::Grant { limit: fits(limit) },
        Control::Fin { verdict, .. } => TxEvent::Fin(verdict),
        _ => return None,
    })
}

/// Returns the bytes of a fragment: the smaller packet size of both sides.
fn fragment_size(device: &Port, linked: &Linked) -> usize {
    linked.caps.am_copied.min(device.host_pool.packet_size()).max(1)
}

impl<'a> Run<'a> {
    /// Returns the link to a rank, made if necessary: a rank that only answers may have had none.
    /// `None`: the link is not up yet.
    fn way_to(&self, rank: Rank) -> Result<Option<&'a Linked>, OpError> {
        let device = self.device;
        let Some(route) = device.route(rank) else { return Ok(None) };
        match route.linked() {
            Some(linked) => Ok(Some(linked)),
            None => route
                .link(self.carrier, device)
                .map_err(|error| OpError::PeerDown { rank, cause: error.into_cause() }),
        }
    }
}

impl Transfers {
    /// Sends the RTS of a message: `header` is the one that it would have travelled under, in one
    /// piece. The buffer is taken when the link has taken the RTS, and left when it has not.
    pub(crate) fn offer(
        &self,
        linked: &Linked,
        header: Header,
        op: OpContext,
        bytes: &mut Buffer,
        mapped: Option<Mapped>,
    ) -> Result<Submit, SubmitError> {
        let name = self.now();
        let rts = Rts { size: bytes.len() as u64, tx: name, addr: address(bytes), mapped };
        let at = (op.rank, name);
        let taken = std::mem::take(bytes);
        let transfer = InFlight::Tx(TxOp::offered(name, op, taken, Duty::Message));
        // The entry comes first: another thread may get the answer before this call returns.
        if let Err((transfer, cause)) = self.table.insert(name, transfer) {
            restore(*transfer, bytes);
            let cause = cause.unwrap_or(DownCause::Closed);
            return Err(SubmitError::Down { peer: PeerId(at.0.0), cause });
        }
        let payload = rts.encode();
        let header = Message::rts(header);
        let op = Op::AmCopied { header, bytes: MemRef::host(payload.as_slice()) };
        let submitted = linked.link.submit(op);
        if !matches!(submitted, Ok(Submit::Busy(_)) | Err(_)) {
            return Ok(Submit::Posted);
        }
        match self.take_back(at) {
            Some(transfer) => {
                restore(*transfer, bytes);
                submitted
            }
            // Another thread has ended it, with its buffer and completion object.
            None => Ok(Submit::Posted),
        }
    }

    /// Takes back a transfer whose RTS was not sent, unless its operation has ended.
    fn take_back(&self, at: At) -> Option<Box<InFlight>> {
        let transfer = self.take_unsent(at)?;
        self.remove(at);
        match &*transfer {
            // Its completion object has been signalled already.
            InFlight::Tx(tx) if tx.is_late => None,
            _ => Some(transfer),
        }
    }
}

/// Puts the bytes of a message back.
fn restore(transfer: InFlight, bytes: &mut Buffer) {
    if let InFlight::Tx(mut tx) = transfer {
        // The peer may have answered what was not sent to it.
        if let Some(ahead) = &mut tx.ahead {
            ahead.settle(tx.bytes.owned());
        }
        *bytes = tx.bytes.take();
    }
}

impl Port {
    /// Sends a request about the peer's memory, through the backlog if necessary. `request` gets
    /// the name of the operation, and the address of `bytes`, which are for the peer.
    pub(crate) fn request(
        &self,
        carrier: &Carrier,
        op: OpContext,
        bytes: Buffer,
        request: impl FnOnce(u64, u64) -> Control,
    ) {
        let (name, peer) = (self.transfers.now(), op.rank);
        let control = request(name, address(&bytes));
        let transfer = TxOp::offered(name, op, bytes, Duty::Memory);
        let mut run = Run::new(carrier, self);
        run.begin(name, InFlight::Tx(transfer), None);
        run.tell_later();
        self.control(carrier, peer, control);
    }

    /// Sends the bytes that a peer has asked for under the name `rx`, `limit` at first. Signals
    /// `comp` when all are sent.
    pub(crate) fn answer(
        &self,
        run: &mut Run<'_>,
        peer: Rank,
        (rx, limit): (u64, usize),
        bytes: Buffer,
        (tag, comp): (Tag, Option<Arc<dyn Completion>>),
    ) {
        let op = OpContext::of_runtime(peer, tag, bytes.len(), comp);
        let name = name_of_answer(rx);
        let tx = RndvSender::answer(name, bytes.len(), rx, limit);
        run.begin(name, InFlight::Tx(TxOp::new(op, bytes, tx)), Some(Event::Begin));
    }
}
