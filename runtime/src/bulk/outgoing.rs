//! The sender's side.

use super::Bulk;
use super::ahead::Ahead;
use super::pull::abandon;
use super::staging::Staging;
use crate::comp::Completion;
use crate::deadline::{Deadline, Deadlines};
use crate::device::DeviceInner;
use crate::error::OpError;
use crate::names::{Rank, Tag};
use crate::op::{Ended, OpContext};
use crate::peer::route::Linked;
use crate::progress::Pass;
use crate::protocol::header::Message;
use crate::protocol::wire::{Mapped, Offer, Request, Verdict, encode_landing, word};
use crate::runtime::Inner;
use carrack_transports::contract::{
    DownCause, Header, Op, OpToken, RemotePlace, Submit, SubmitError,
};
use carrack_transports::mem::{Buffer, MemRef, PacketSource};
use std::sync::Arc;

/// Parts that one call of progress sends of one message, before others have their turn.
const PARTS: usize = 32;

/// A message that waits for its receiver to ask for it.
pub(crate) struct Offered {
    operation: OpContext,
    /// Its bytes: host memory that stays where it is, or memory of a GPU.
    pub(super) bytes: Buffer,
    /// The kind of transfer.
    matter: Matter,
    /// `true` if its operation has ended before it: the bytes stay for the peer.
    is_late: bool,
}

/// The kind of a transfer between ranks, which decides when it completes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Matter {
    /// A message: completes when the receiver has its bytes.
    Message,
    /// An operation on the receiver's memory, under this name: completes when the receiver says
    /// so.
    Memory(u64),
    /// Bytes that the receiver has asked for: no operation of this rank.
    Answer,
}

/// A message on its way, part by part.
pub(crate) struct Stream {
    offered: Offered,
    /// The receiver's name for it.
    landing: u64,
    sent: usize,
    /// Bytes that the receiver has granted.
    limit: usize,
    /// The copies of bytes that lie on a GPU.
    ahead: Option<Box<Ahead>>,
    /// The error that ends it as soon as no engine uses its buffer.
    failed: Option<OpError>,
    /// The place to which this rank's NIC writes all of it.
    place: Option<RemotePlace>,
}

/// The result of handing a message to the NIC.
enum Handed {
    /// The NIC writes it.
    Over,
    /// The link is full: try again later.
    NotYet,
    /// The NIC cannot write it: it goes part by part.
    Refused,
    Failed(OpError),
}

impl Offered {
    /// Returns a message that waits for its receiver.
    pub(super) fn message(operation: OpContext, bytes: Buffer) -> Self {
        Self { operation, bytes, matter: Matter::Message, is_late: false }
    }

    pub(super) fn rank(&self) -> Rank {
        self.operation.rank
    }

    /// Returns its bytes.
    pub(super) fn view(&self) -> MemRef<'_> {
        self.bytes.view()
    }

    pub(super) fn matter(&self) -> Matter {
        self.matter
    }

    /// Returns the other side, the tag, and the bytes.
    pub(super) fn about(&self) -> (Rank, Tag, u64) {
        (self.operation.rank, self.operation.tag, self.operation.size as u64)
    }

    /// Ends the operation if its deadline has passed. Its bytes stay, since the peer may still
    /// read them.
    pub(super) fn expire(&mut self, now: Deadline, left: &Deadlines) -> Option<Ended> {
        let operation = &mut self.operation;
        if !operation.deadline.has_passed(now) {
            left.note(operation.deadline);
            return None;
        }
        operation.deadline = Deadline::NEVER;
        self.is_late = true;
        let (gone, rank) = (operation.take(), operation.rank);
        Some(gone.end(Buffer::Empty, Some(OpError::TimedOut(rank))))
    }

    /// Ends it with an error and without its bytes, which the peer may be copying.
    pub(super) fn leave(mut self, error: &dyn Fn(Rank) -> OpError) -> Ended {
        abandon(Some(std::mem::take(&mut self.bytes)), self.rank());
        self.end(Some(error))
    }

    pub(super) fn end(self, error: Option<&dyn Fn(Rank) -> OpError>) -> Ended {
        if self.matter == Matter::Answer {
            // The bytes belong to this rank's region. A failed get signals no object of this rank.
            let comp = if error.is_none() { self.operation.comp.clone() } else { None };
            return OpContext { comp, ..self.operation }.end(Buffer::Empty, None);
        }
        let error = error.map(|error| error(self.operation.rank));
        self.operation.end(self.bytes, error)
    }
}

impl Stream {
    pub(super) fn rank(&self) -> Rank {
        self.offered.rank()
    }

    /// Waits for an engine that is at it: see `must_wait`.
    pub(super) fn end(mut self, error: Option<&dyn Fn(Rank) -> OpError>) -> Ended {
        if let Some(ahead) = &mut self.ahead {
            ahead.settle(&mut self.offered.bytes);
        }
        self.offered.end(error)
    }

    /// Returns `true` if an engine is still reading its bytes. The message then ends with the
    /// error when the engine is done.
    pub(super) fn must_wait(&mut self, error: &dyn Fn(Rank) -> OpError) -> bool {
        let is_busy = self.is_busy();
        if is_busy {
            self.failed = Some(error(self.rank()));
        }
        is_busy
    }

    fn is_busy(&mut self) -> bool {
        self.ahead.as_mut().is_some_and(|ahead| ahead.is_busy())
    }

    pub(super) fn about(&self) -> (Rank, Tag, u64) {
        self.offered.about()
    }

    pub(super) fn matter(&self) -> Matter {
        self.offered.matter
    }

    pub(super) fn sent(&self) -> usize {
        self.sent
    }

    fn of(offered: Offered, landing: u64, limit: usize) -> Self {
        Self::from(offered, landing, (0, limit))
    }

    /// Returns a stream for the rest of a message, behind the written bytes.
    pub(super) fn from(offered: Offered, landing: u64, (sent, limit): (usize, usize)) -> Self {
        let ahead = Ahead::of(&offered.bytes, sent);
        Self { offered, landing, sent, limit: limit.max(sent), ahead, failed: None, place: None }
    }

    /// Returns `true` if its receiver has room for more than was sent.
    fn is_wanted(&self) -> bool {
        self.sent < self.limit
    }

    /// Hands all of it to the NIC, which writes it to `to`. The link owns the operation then, and
    /// ends it.
    fn hand_over(&mut self, device: &DeviceInner, linked: &Linked, to: RemotePlace) -> Handed {
        let offered = &mut self.offered;
        if offered.matter != Matter::Message {
            return Handed::Refused;
        }
        let rank = offered.operation.rank;
        let token = match device.outstanding.insert(offered.operation.take()) {
            Ok(token) => token,
            Err(operation) => {
                offered.operation = operation;
                return Handed::NotYet;
            }
        };
        let op = Op::Put { to, buffer: &mut offered.bytes, token: OpToken(token) };
        let handed = match linked.link.submit(op) {
            Ok(Submit::Posted) => return Handed::Over,
            Ok(_) => Handed::NotYet,
            Err(SubmitError::Unregistered(why)) => {
                tracing::info!(%rank, why, "a message goes part by part");
                Handed::Refused
            }
            Err(error) => Handed::Failed(OpError::of_submit(&error, rank)),
        };
        if let Some(operation) = device.outstanding.take(token) {
            offered.operation = operation;
        }
        handed
    }

    /// Sends as many parts as the link and the receiver take now. Returns `Some` when it has
    /// ended.
    fn step(
        &mut self,
        linked: &Linked,
        part: usize,
        staging: &Staging,
        moved: &mut bool,
    ) -> Option<Result<(), OpError>> {
        let size = self.offered.operation.size;
        let limit = self.limit.min(size);
        if let Some(ahead) = &mut self.ahead {
            match ahead.step(&mut self.offered.bytes, limit, staging) {
                Ok(copied) => *moved |= copied,
                Err(error) => return Some(Err(OpError::Copy(error))),
            }
        }
        for _ in 0..PARTS {
            if self.sent == limit {
                break;
            }
            let bytes = match &self.ahead {
                None => self.offered.bytes.view().part(self.sent, part.min(limit - self.sent)),
                Some(ahead) => ahead.front()?.part(0, part),
            };
            let len = bytes.len();
            let header = Message::Part { landing: self.landing, offset: self.sent as u64 }.encode();
            match linked.link.submit(Op::AmCopied { header, bytes }) {
                Ok(Submit::Busy(_)) => return None,
                Ok(_) => {
                    self.sent += len;
                    *moved = true;
                    if let Some(ahead) = &mut self.ahead {
                        ahead.sent(len);
                    }
                }
                Err(error) => return Some(Err(OpError::of_submit(&error, self.rank()))),
            }
        }
        // Checked now and not at the next step, since the verdict on a put may arrive in between.
        (self.sent == size).then_some(Ok(()))
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

impl Bulk {
    /// Offers a message: `header` is the one that it would have travelled under, in one piece. The
    /// buffers are taken when the link has taken the offer, and left when it has not.
    pub(crate) fn offer(
        &self,
        linked: &Linked,
        header: Header,
        operation: OpContext,
        bytes: &mut Buffer,
        mapped: Option<Mapped>,
    ) -> Result<Submit, SubmitError> {
        let offer =
            Offer { size: bytes.len() as u64, token: self.name(), addr: address(bytes), mapped };
        let offered = Offered::message(operation, std::mem::take(bytes));
        // First: the answer may come on another thread before this call returns.
        let mut all = self.offered.lock();
        all.insert(offer.token, offered);
        self.offered.set_count(all.len());
        drop(all);
        let payload = offer.encode();
        let op = Op::AmCopied {
            header: Message::offering(header),
            bytes: MemRef::host(payload.as_slice()),
        };
        match linked.link.submit(op) {
            Ok(Submit::Busy(busy)) if self.take_back(offer.token, bytes) => Ok(Submit::Busy(busy)),
            Err(error) if self.take_back(offer.token, bytes) => Err(error),
            // The offer is sent; or another thread has ended it, with its buffer and completion
            // object.
            _ => Ok(Submit::Posted),
        }
    }

    /// Ends the operations whose deadline has passed.
    pub(crate) fn expire_outgoing(&self, now: Deadline, left: &Deadlines) -> Vec<Ended> {
        let mut ended: Vec<_> =
            self.offered.lock().values_mut().filter_map(|one| one.expire(now, left)).collect();
        ended
            .extend(self.streams.lock().iter_mut().filter_map(|one| one.offered.expire(now, left)));
        ended.extend(
            self.writings.lock().values_mut().filter_map(|one| one.offered.expire(now, left)),
        );
        ended
    }

    /// Takes back the buffer of an offer. Returns `true` if the offer was still there.
    fn take_back(&self, token: u64, bytes: &mut Buffer) -> bool {
        let Some(offered) = self.take_offered(token, None) else { return false };
        if offered.is_late {
            // Its completion object has been signaled already.
            return false;
        }
        *bytes = offered.bytes;
        true
    }

    pub(super) fn take_offered(&self, token: u64, by: Option<Rank>) -> Option<Offered> {
        let mut all = self.offered.lock();
        all.get(&token).filter(|one| by.is_none_or(|by| by == one.rank()))?;
        let offered = all.remove(&token);
        self.offered.set_count(all.len());
        offered
    }

    /// Handles the receiver's request for the parts, with `limit` bytes at first. Returns `true`
    /// if there is such an offer.
    pub(crate) fn clear(&self, by: Rank, token: u64, landing: u64, limit: usize) -> bool {
        // Both locks, so that no other thread finds it in neither place.
        let mut streams = self.streams.lock();
        let Some(offered) = self.take_offered(token, Some(by)) else { return false };
        streams.push(Stream::of(offered, landing, limit));
        self.streams.set_count(streams.len());
        true
    }

    /// Handles the receiver's request to write all of it to a place. Returns `true` if there is
    /// such an offer.
    pub(crate) fn clear_to_write(
        &self,
        by: Rank,
        token: u64,
        landing: u64,
        place: RemotePlace,
    ) -> bool {
        let mut streams = self.streams.lock();
        let Some(offered) = self.take_offered(token, Some(by)) else { return false };
        // No part may go before the receiver hears that the NIC cannot write.
        streams.push(Stream { place: Some(place), ahead: None, ..Stream::of(offered, landing, 0) });
        self.streams.set_count(streams.len());
        true
    }

    /// Handles a grant of more bytes. The message may have ended here already with an error of its
    /// source.
    pub(crate) fn grant(&self, by: Rank, landing: u64, limit: usize) {
        if self.grant_writing(by, landing, limit) {
            return;
        }
        let mut streams = self.streams.lock();
        if let Some(stream) =
            streams.iter_mut().find(|one| one.landing == landing && one.rank() == by)
        {
            stream.limit = stream.limit.max(limit);
        }
    }

    /// Handles the receiver's verdict. `None`: there is no such offer.
    pub(crate) fn finish(&self, by: Rank, token: u64, verdict: Verdict) -> Option<Ended> {
        let offered = self.take_offered(token, Some(by)).or_else(|| {
            // Another thread may be sending the last part of a put. It stands there once that
            // thread releases the lock.
            drop(self.streams.lock());
            self.take_offered(token, Some(by))
        });
        let mut offered = offered?;
        if let Verdict::Held(value) = verdict {
            offered.bytes = Buffer::Small(word(value));
        }
        Some(match verdict.error(by) {
            None => offered.end(None),
            Some(error) => offered.end(Some(&|_| error.clone())),
        })
    }

    /// Sends a request about the peer's memory, through the backlog if necessary. `bytes` is the
    /// data for the peer.
    pub(crate) fn request(
        &self,
        device: &DeviceInner,
        runtime: &Inner,
        message: Message,
        mut request: Request,
        operation: OpContext,
        bytes: Buffer,
    ) {
        request.token = self.name();
        if matches!(message, Message::OfferPut { .. } | Message::Pieces { .. }) {
            request.second = address(&bytes);
        }
        let peer = operation.rank;
        let matter = Matter::Memory(request.token);
        let deadline = operation.deadline;
        let mut all = self.offered.lock();
        all.insert(request.token, Offered { operation, bytes, matter, is_late: false });
        self.offered.set_count(all.len());
        drop(all);
        runtime.deadlines.note(deadline);
        device.control(runtime, peer, message, request.encode());
        device.end_if_gone(runtime, peer);
    }

    /// Sends the bytes that a peer has asked for, `limit` at first. Signals `comp` when all are
    /// sent.
    pub(crate) fn answer(
        &self,
        peer: Rank,
        (landing, limit): (u64, usize),
        bytes: Buffer,
        tag: Tag,
        comp: Option<Arc<dyn Completion>>,
    ) {
        let operation = OpContext::of_runtime(peer, tag, bytes.len(), comp);
        let offered = Offered { operation, bytes, matter: Matter::Answer, is_late: false };
        let mut streams = self.streams.lock();
        streams.push(Stream::of(offered, landing, limit));
        self.streams.set_count(streams.len());
    }

    /// Returns `true` if an operation that sends to a peer's memory is in flight and began before
    /// `name`.
    pub(super) fn sends_to_memory(&self, peer: Rank, before: u64) -> bool {
        let concerns = |one: &Offered| {
            one.rank() == peer && matches!(one.matter, Matter::Memory(name) if name < before)
        };
        // It may be moving from one list to the other.
        let streams = self.streams.lock();
        streams.iter().any(|stream| concerns(&stream.offered))
            || self.offered.lock().values().any(concerns)
    }

    /// Waits for the verdict on a put whose bytes are all sent. It completes when the owner has
    /// them in place.
    fn await_verdict(&self, name: u64, offered: Offered) {
        let mut all = self.offered.lock();
        all.insert(name, offered);
        self.offered.set_count(all.len());
    }
}

impl Pass<'_> {
    /// Sends parts of requested messages.
    #[cold]
    pub(crate) fn move_streams(&mut self) {
        let bulk = &self.device.bulk;
        let Some(mut streams) = bulk.streams.try_lock() else { return };
        let mut ended = Vec::new();
        let mut moved = false;
        let mut at = 0;
        let mut told = Vec::new();
        // One message of each peer at a time: the parts of several would only wait for each other.
        let mut served = Vec::new();
        while at < streams.len() {
            let stream = &mut streams[at];
            if served.contains(&stream.rank()) {
                at += 1;
                continue;
            }
            let rank = stream.rank();
            let mut over = match stream.failed.clone() {
                Some(error) => Some(Err(error)),
                None => match self.way_to(rank) {
                    Ok(None) => None,
                    Ok(Some(linked)) if let Some(place) = stream.place => {
                        let landing = stream.landing;
                        match stream.hand_over(self.device, linked, place) {
                            Handed::Over => {
                                moved = true;
                                told.push((rank, Message::Written { landing }, encode_landing(0)));
                                streams.remove(at);
                                continue;
                            }
                            Handed::NotYet => None,
                            Handed::Refused => {
                                stream.place = None;
                                stream.ahead = Ahead::of(&stream.offered.bytes, 0);
                                told.push((
                                    rank,
                                    Message::Unwritten { landing },
                                    encode_landing(0),
                                ));
                                continue;
                            }
                            Handed::Failed(error) => Some(Err(error)),
                        }
                    }
                    Ok(Some(linked)) => {
                        let part = part_size(self.device, linked);
                        stream.step(linked, part, &self.inner.staging, &mut moved)
                    }
                    Err(error) => Some(Err(error)),
                },
            };
            if let Some(Err(error)) = &over
                && stream.must_wait(&|_| error.clone())
            {
                over = None;
            }
            match over {
                None => {
                    // A message without room at its receiver delays no other.
                    if stream.is_wanted() {
                        served.push(rank);
                    }
                    at += 1;
                }
                Some(outcome) => {
                    let stream = streams.remove(at);
                    match (outcome, stream.offered.matter) {
                        // With the lock held, since another thread may have the owner's verdict
                        // already.
                        (Ok(()), Matter::Memory(name)) => {
                            let deadline = stream.offered.operation.deadline;
                            bulk.await_verdict(name, stream.offered);
                            self.inner.deadlines.note(deadline);
                        }
                        (outcome, _) => ended.push((stream, outcome)),
                    }
                }
            }
        }
        bulk.streams.set_count(streams.len());
        drop(streams);
        for (rank, message, payload) in told {
            // On the same link, so behind the bytes.
            self.device.control(self.inner, rank, message, payload);
        }
        self.moved |= moved || !ended.is_empty();
        for (stream, outcome) in ended {
            let (comp, status) = match outcome {
                Ok(()) => stream.end(None),
                Err(error) => {
                    if !matches!(error, OpError::PeerDown { .. }) {
                        // The source or the link's memory has failed: the receiver is told.
                        let message = Message::Finish { token: stream.landing };
                        let verdict = Verdict::Broken { sent: stream.sent as u64 };
                        self.device.control(self.inner, stream.rank(), message, verdict.encode());
                    }
                    stream.end(Some(&|_| error.clone()))
                }
            };
            self.signal(comp.as_ref(), status);
        }
    }
}

impl<'a> Pass<'a> {
    /// Returns the link to a rank, made if necessary: a rank that only answers may have had none.
    /// `None`: the link is not up yet.
    pub(super) fn way_to(&self, rank: Rank) -> Result<Option<&'a Linked>, OpError> {
        let device = self.device;
        let Some(route) = device.route(rank) else { return Ok(None) };
        match route.linked() {
            Some(linked) => Ok(Some(linked)),
            None => route.link(self.inner, device).map_err(|error| {
                let cause = DownCause::Refused(error.to_string());
                OpError::PeerDown { rank, cause: route.down().cloned().unwrap_or(cause) }
            }),
        }
    }
}

/// Returns the bytes of a part: the smaller packet size of both sides.
fn part_size(device: &DeviceInner, linked: &Linked) -> usize {
    linked.caps.am_copied.min(device.host_pool.packet_size()).max(1)
}
