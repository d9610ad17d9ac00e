//! Carries out what events ask for, outside all locks.

use super::signal::{SignalError, guarded, panicked, signal};
use super::{Meeting, Met, Pass, Scratch};
use crate::bulk::wire::{Offer, word};
use crate::collective::Note;
use crate::comp::{Completion, Snapshot, Status};
use crate::device::DeviceInner;
use crate::error::{OpError, ProgressError};
use crate::matching::{Receive, Unexpected};
use crate::names::{Rank, RemoteComp, Tag, UserContext};
use crate::protocol::header::{Found, Message};
use crate::runtime::Inner;
use carrack_transports::contract::{DownCause, Event, Header, Loan, OpFailure, Payload, SmallArrival};
use carrack_transports::mem::Buffer;
use std::sync::Arc;

/// What is still to be done about an event.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "deferred deliveries are few; boxing one would allocate in every receive"
)]
pub(crate) enum Delivery {
    /// An active message.
    Am { from: Rank, comp: RemoteComp, tag: Tag, payload: Payload },
    /// A message that has met its receive.
    Matched(Unexpected, Receive),
    /// The offer of a large active message.
    OfferedAm { from: Rank, comp: RemoteComp, tag: Tag, offer: Offer },
    /// One of the messages that large ones, and operations on memory, need.
    Bulk { from: Rank, message: Message, payload: Payload },
    /// An operation that a link had is over.
    Ended { token: u64, buffer: Buffer, outcome: Result<(), Box<OpFailure>> },
    /// A peer is gone.
    Down { rank: Rank, cause: DownCause },
    /// A peer sent nonsense.
    Fault(ProgressError),
}

/// What could not be delivered.
pub(crate) enum Deferred {
    /// All of it.
    Delivery(Delivery),
    /// The last step: its completion object had no room.
    Status(Arc<dyn Completion>, Status),
}

impl Deferred {
    /// The status with which an operation of this rank's ends that could not be told of so far, if it is
    /// about one: for shutting down.
    pub(crate) fn into_status(
        self,
        runtime: &Inner,
        device: &DeviceInner,
    ) -> Option<(Option<Arc<dyn Completion>>, Status)> {
        match self {
            Self::Status(comp, status) => Some((Some(comp), status)),
            Self::Delivery(Delivery::Matched(message, receive)) => device.land(runtime, message, receive),
            Self::Delivery(Delivery::Ended { token, buffer, outcome }) => {
                let operation = device.outstanding.take(token)?;
                let error = outcome.err().map(|failure| OpError::of(*failure, operation.rank));
                Some(operation.end(buffer, error))
            }
            Self::Delivery(_) => None,
        }
    }
}

impl Pass<'_> {
    /// Delivers what was found, in order; defers what cannot be delivered now and all that is behind it.
    #[inline]
    pub(super) fn deliver_all(&mut self, scratch: &mut Scratch) {
        if scratch.batch.is_empty() {
            return;
        }
        let mut stuck = !self.device.deferred.is_empty();
        if !stuck && self.device.lands_on_host {
            stuck = !self.deliver_small(scratch);
        }
        let Scratch { batch, met, comps, .. } = scratch;
        if batch.is_empty() {
            met.meetings.clear();
            return;
        }
        for event in batch.drain() {
            let delivered =
                if stuck { self.as_delivery(event, met) } else { self.deliver_event(event, met, comps) };
            if let Err(deferred) = delivered {
                self.defer(deferred);
                stuck = true;
            }
        }
        met.meetings.clear();
    }

    /// The small messages at the front of the batch: the path where each nanosecond counts. They are handed over
    /// without leaving the batch, under one guard against panics for all of them. Stops at the first
    /// message about which there is more to be done. Whether nothing was deferred.
    #[inline(always)]
    fn deliver_small(&mut self, scratch: &mut Scratch) -> bool {
        let Scratch { batch, comps, met, .. } = scratch;
        let mut next = 0;
        let mut full = None;
        let messages = batch.small_mut();
        while next < messages.len() {
            let begun = next;
            let guarded = guarded(|| {
                while let Some(SmallArrival { from, header, bytes }) = messages.get(next) {
                    if Message::is_am(*header) {
                        let (name, tag) = Message::am(*header);
                        let Some(comp) = comps.get(name) else { return };
                        let size = bytes.as_slice().len();
                        let status = arrival(self.device.rank_of(*from), tag, size, Buffer::Small(*bytes));
                        next += 1;
                        if let Err(status) = comp.signal(status) {
                            full = Some(Deferred::Status(comp.clone(), status));
                            return;
                        }
                        continue;
                    }
                    if let Some((group, number)) = Message::note(*header) {
                        let from = self.device.rank_of(*from);
                        let note = Note::decode(from, number, bytes.as_slice());
                        if !note.is_some_and(|note| self.inner.boards.tick(group, &note)) {
                            return;
                        }
                        next += 1;
                        continue;
                    }
                    match Found::decode(*header) {
                        Some(Found::Kept) => next += 1,
                        Some(Found::Met(at)) => {
                            let Some(place @ Some(Meeting::Over(..))) = met.meetings.get_mut(at) else {
                                return;
                            };
                            next += 1;
                            if let Some(Meeting::Over(Some(comp), status)) = place.take()
                                && let Err(status) = comp.signal(status)
                            {
                                full = Some(Deferred::Status(comp, status));
                                return;
                            }
                        }
                        Some(Found::Nonsense) | None => return,
                    }
                }
            });
            let Err(panic) = guarded else { break };
            // The message that users' code panicked on is gone; those behind it are not.
            next = next.max(begun + 1);
            let from = messages.get(next - 1).map_or(self.inner.rank, |last| self.device.rank_of(last.from));
            self.complain(panicked(from, panic.as_ref()));
        }
        batch.forget_small(next);
        match full {
            None => true,
            Some(deferred) => {
                self.defer(deferred);
                false
            }
        }
    }

    /// The path of every event; an active message goes straight through.
    #[inline(always)]
    #[allow(clippy::result_large_err, reason = "the error is the delivery that has to wait")]
    fn deliver_event(&mut self, event: Event, met: &mut Met, comps: &Snapshot) -> Result<(), Deferred> {
        match event {
            Event::Arrived { from, header, payload } if Message::is_am(header) => {
                let (comp, tag) = Message::am(header);
                self.deliver_am(self.device.rank_of(from), comp, tag, payload, comps)
            }
            other => self.deliver_other(other, met, comps),
        }
    }

    #[allow(clippy::result_large_err, reason = "the error is the delivery that has to wait")]
    fn deliver_other(&mut self, event: Event, met: &mut Met, comps: &Snapshot) -> Result<(), Deferred> {
        // What large messages need, and what has met its receive, goes from hand to hand no more often than it must.
        if let Event::Arrived { from, header, payload } = &event {
            match Found::decode(*header) {
                Some(Found::Met(at)) => {
                    return match met.take(at) {
                        Some(Meeting::Pair(message, receive)) => self.land(message, receive),
                        Some(Meeting::Over(comp, status)) => self.signal(comp.as_ref(), status),
                        None => Ok(()),
                    };
                }
                Some(Found::Kept) => return Ok(()),
                Some(Found::Nonsense) => {}
                None => {
                    if let Ok(message) = Message::decode(*header)
                        && message.is_bulk()
                    {
                        self.deliver_bulk(self.device.rank_of(*from), message, payload, comps);
                        return Ok(());
                    }
                }
            }
        }
        match self.as_delivery(event, met) {
            Ok(()) => Ok(()),
            Err(Deferred::Delivery(delivery)) => self.deliver(delivery, comps),
            Err(Deferred::Status(comp, status)) => self.signal(Some(&comp), status),
        }
    }

    /// A message that has met its receive.
    #[allow(clippy::result_large_err, reason = "the error is the delivery that has to wait")]
    fn land(&mut self, message: Unexpected, receive: Receive) -> Result<(), Deferred> {
        match self.device.land(self.inner, message, receive) {
            Some((comp, status)) => self.signal(comp.as_ref(), status),
            None => Ok(()),
        }
    }

    /// One of the messages that large ones, and operations on memory, need.
    fn deliver_bulk(&mut self, from: Rank, message: Message, payload: &Payload, comps: &Snapshot) {
        // Of a peer that is gone everything has been ended, maybe while this was on its way, on another thread.
        let is_gone =
            |device: &DeviceInner| device.known_route(from).is_some_and(|route| route.down().is_some());
        if let Err(why) = self.bulk(from, message, payload, comps)
            && !is_gone(self.device)
        {
            self.complain(ProgressError::Malformed { from, why });
        }
    }

    /// What an event asks for, as something that can wait. `Ok` when it asks for nothing.
    #[allow(clippy::result_large_err, reason = "the error is the delivery that has to wait")]
    fn as_delivery(&mut self, event: Event, met: &mut Met) -> Result<(), Deferred> {
        let delivery = match event {
            Event::Arrived { from, header, payload } => {
                let from = self.device.rank_of(from);
                match Found::decode(header) {
                    None => unmatched(from, header, payload),
                    Some(Found::Kept) => return Ok(()),
                    Some(Found::Met(at)) => match met.take(at) {
                        Some(Meeting::Pair(message, receive)) => Delivery::Matched(message, receive),
                        Some(Meeting::Over(Some(comp), status)) => {
                            return Err(Deferred::Status(comp, status));
                        }
                        Some(Meeting::Over(None, _)) | None => return Ok(()),
                    },
                    Some(Found::Nonsense) => nonsense(from),
                }
            }
            Event::Completion { token, buffer, outcome } => {
                Delivery::Ended { token: token.0, buffer, outcome }
            }
            Event::PeerDown { peer, cause } => Delivery::Down { rank: self.device.rank_of(peer), cause },
            // Connected, and whatever later transports report: the backlog is looked at in any case.
            _ => return Ok(()),
        };
        Err(Deferred::Delivery(delivery))
    }

    fn defer(&self, what: Deferred) {
        let mut deferred = self.device.deferred.lock();
        deferred.push_back(what);
        self.device.deferred.set_count(deferred.len());
    }

    /// Whether nothing is deferred any more.
    #[cold]
    pub(super) fn retry_deferred(&mut self, comps: &mut Snapshot) -> bool {
        self.inner.comps.refresh(comps);
        loop {
            // One at a time, outside the lock: delivering calls users' code.
            let Some(mut deferred) = self.device.deferred.try_lock() else { return false };
            let Some(next) = deferred.pop_front() else { return true };
            let behind = deferred.len() + 1;
            drop(deferred);
            let retried = match next {
                Deferred::Delivery(delivery) => self.deliver(delivery, comps),
                Deferred::Status(comp, status) => self.signal(Some(&comp), status),
            };
            let mut deferred = self.device.deferred.lock();
            match retried {
                Ok(()) => {
                    self.moved = true;
                    self.device.deferred.set_count(deferred.len());
                }
                Err(again) => {
                    let error = match &again {
                        Deferred::Status(comp, _) => {
                            Some(ProgressError::CompletionFull(comp.describe(), behind))
                        }
                        Deferred::Delivery(_) => self.why_no_packet(behind),
                    };
                    deferred.push_front(again);
                    self.device.deferred.set_count(deferred.len());
                    if let Some(error) = error {
                        self.complain(error);
                    }
                    return false;
                }
            }
        }
    }

    pub(crate) fn complain(&mut self, error: ProgressError) {
        if self.error.is_none() {
            self.error = Some(error);
        }
    }

    #[allow(clippy::result_large_err, reason = "the error is the delivery that has to wait")]
    pub(crate) fn signal(
        &mut self,
        comp: Option<&Arc<dyn Completion>>,
        status: Status,
    ) -> Result<(), Deferred> {
        if let Some(OpError::PeerDown { rank, cause }) = status.error.as_deref()
            && let Some(route) = self.device.route(*rank)
        {
            route.tell_down(cause);
        }
        match signal(comp, status) {
            Ok(()) => Ok(()),
            Err(SignalError::Full(comp, status)) => Err(Deferred::Status(comp, *status)),
            Err(SignalError::Panicked(error)) => {
                self.complain(error);
                Ok(())
            }
        }
    }

    /// As `signal`, for what is in no order with the device's messages.
    pub(crate) fn signal_or_defer(&mut self, comp: Option<&Arc<dyn Completion>>, status: Status) {
        if let Err(deferred) = self.signal(comp, status) {
            self.defer(deferred);
        }
    }

    #[allow(clippy::result_large_err, reason = "the error is the delivery that has to wait")]
    fn deliver(&mut self, delivery: Delivery, comps: &Snapshot) -> Result<(), Deferred> {
        match delivery {
            Delivery::Am { from, comp, tag, payload } => self.deliver_am(from, comp, tag, payload, comps),
            Delivery::OfferedAm { from, comp, tag, offer } => self.offered_am(from, comp, tag, offer, comps),
            Delivery::Bulk { from, message, payload } => {
                self.deliver_bulk(from, message, &payload, comps);
                Ok(())
            }
            Delivery::Matched(message, receive) => self.land(message, receive),
            Delivery::Ended { token, buffer, outcome } => {
                let Some(operation) = self.device.outstanding.take(token) else {
                    tracing::error!(token, "a transport ended an operation that it did not have");
                    return Ok(());
                };
                let signal = self.device.forget_direct(token);
                if let Some((comp, tag)) = signal.filter(|_| outcome.is_ok()) {
                    let message = Message::Signal { comp, tag };
                    self.device.control(self.inner, operation.rank, message, word(operation.size as u64));
                }
                let error = outcome.err().map(|failure| OpError::of(*failure, operation.rank));
                let (comp, status) = operation.end(buffer, error);
                self.signal(comp.as_ref(), status)
            }
            Delivery::Down { rank, cause } => {
                self.peer_down(rank, cause);
                Ok(())
            }
            Delivery::Fault(error) => {
                tracing::warn!(%error, "a message was dropped");
                self.complain(error);
                Ok(())
            }
        }
    }

    #[inline]
    #[allow(clippy::result_large_err, reason = "the error is the delivery that has to wait")]
    fn deliver_am(
        &mut self,
        from: Rank,
        name: RemoteComp,
        tag: Tag,
        payload: Payload,
        comps: &Snapshot,
    ) -> Result<(), Deferred> {
        let Some(comp) = comps.get(name) else {
            self.complain(ProgressError::NoSuchCompletion { from, comp: name, size: payload.len() });
            return Ok(());
        };
        if !self.device.lands_on_host {
            return self.line_up((from, tag), (name, comp), payload);
        }
        let size = payload.len();
        let wait = |payload| Err(Deferred::Delivery(Delivery::Am { from, comp: name, tag, payload }));
        let buffer = match payload {
            Payload::Small(small) => Buffer::Small(small),
            Payload::Packet(packet) => Buffer::Packet(packet),
            Payload::Aside(bytes) => Buffer::Vec(bytes),
            Payload::Loan(loan) if comp.takes_loans() => Buffer::Loan(loan),
            Payload::Loan(loan) => match self.copy_out(&loan) {
                Some(buffer) => buffer,
                None => return wait(Payload::Loan(loan)),
            },
        };
        self.signal(Some(comp), arrival(from, tag, size, buffer))
    }

    /// Copies what was lent into a packet.
    fn copy_out(&self, loan: &Loan) -> Option<Buffer> {
        self.device.host_pool.take_copy(loan.view()).map(Buffer::Packet)
    }
}

/// What a message asks for that is not matched.
fn unmatched(from: Rank, header: Header, payload: Payload) -> Delivery {
    match Message::decode(header) {
        Ok(Message::Am { comp, tag }) => Delivery::Am { from, comp, tag, payload },
        Ok(Message::OfferAm { comp, tag }) => match &payload {
            Payload::Small(bytes) => match Offer::decode(bytes.as_slice()) {
                Some(offer) => Delivery::OfferedAm { from, comp, tag, offer },
                None => nonsense(from),
            },
            _ => nonsense(from),
        },
        Ok(Message::Send { .. } | Message::OfferSend { .. }) | Err(_) => nonsense(from),
        Ok(message) => Delivery::Bulk { from, message, payload },
    }
}

#[cold]
fn nonsense(from: Rank) -> Delivery {
    let why = "its header names no operation, engine or policy that there is".into();
    Delivery::Fault(ProgressError::Malformed { from, why })
}

/// What a completion object is told of an active message.
pub(super) fn arrival(rank: Rank, tag: Tag, size: usize, buffer: Buffer) -> Status {
    Status { rank, tag, size, user_context: UserContext::default(), buffer, error: None }
}
