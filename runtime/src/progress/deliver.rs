//! The actions of events, outside all locks.

use super::signal::{guarded, handles_message_of, panicked};
use super::{Found, Meeting, Met, Pass, Scratch};
use crate::boards::Note;
use crate::comp::{Completion, Snapshot};
use crate::datapath::{self, Reordered, arrival};
use crate::error::{OpError, ProgressError};
use crate::matching::{Receive, Unexpected};
use crate::names::{Rank, RemoteComp, Tag};
use crate::op::{Continuation, OnLink};
use crate::protocol::header::Message;
use crate::protocol::wire::{Control, Rts};
use crate::undelivered::About;
use carrack_transports::contract::{Event, Header, OpFailure, Payload, PeerId, SmallArrival};
use carrack_transports::mem::{Buffer, SmallBytes};
use std::sync::Arc;

impl Pass<'_> {
    /// Delivers the matches and events, in order.
    #[inline]
    pub(super) fn deliver_all(&mut self, scratch: &mut Scratch, transport: &'static str) {
        if scratch.batch.is_empty() {
            return;
        }
        if self.device.undelivered.is_empty() && self.device.lands_on_host {
            self.deliver_small(scratch);
            if !scratch.batch.is_empty() {
                self.deliver_packets(scratch);
            }
        }
        let Scratch { batch, met, comps, gathering: kept, .. } = scratch;
        // The batch is empty most of the time, and an empty drain takes as long as a message.
        if !batch.is_empty() {
            let mut gathering = kept.take().unwrap_or_default();
            gathering.begin(batch.len());
            self.gathering = Some(gathering);
            for event in batch.drain() {
                self.deliver_event(event, transport, met, comps);
            }
            *kept = self.gathering.take();
            if let Some(gathering) = kept.as_deref_mut().filter(|it| !it.is_empty()) {
                let mut run = self.transfers();
                run.pull_gathered(gathering);
                self.report(run);
            }
        }
        met.meetings.clear();
    }

    /// Delivers the small messages at the front of the batch, the fast path. The messages stay in
    /// the batch, under one guard against panics for all of them. Stops at the first message that
    /// needs more work, and at the first completion object without room.
    #[inline(always)]
    fn deliver_small(&mut self, scratch: &mut Scratch) {
        let Scratch { batch, comps, met, .. } = scratch;
        let mut next = 0;
        let mut full = None;
        let messages = batch.small_mut();
        while next < messages.len() {
            let begun = next;
            let guarded = guarded(|| {
                while let Some(SmallArrival { from, header, bytes, mark }) = messages.get(next) {
                    if Message::is_am(*header) {
                        let (name, tag) = Message::am(*header);
                        let Some(comp) = comps.get(name) else { return };
                        let size = bytes.as_slice().len();
                        let from = self.device.rank_of(*from);
                        let status = arrival(from, tag, size, Buffer::Small(*bytes));
                        next += 1;
                        handles_message_of(from);
                        if let Err(status) = comp.signal(status) {
                            full = Some((comp.clone(), status, About::Whole));
                            return;
                        }
                        continue;
                    }
                    if let Some((name, tag, size)) =
                        Control::notification(*header, bytes.as_slice())
                    {
                        let Some(comp) = comps.get(name) else { return };
                        // The bytes of the put may lie in GPU memory.
                        if self.inner.regions.flush().is_err() {
                            return;
                        }
                        let from = self.device.rank_of(*from);
                        let size = usize::try_from(size).unwrap_or(usize::MAX);
                        next += 1;
                        handles_message_of(from);
                        if let Err(status) = comp.signal(arrival(from, tag, size, Buffer::Empty)) {
                            full = Some((comp.clone(), status, About::Arrival));
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
                    match Found::of(*mark) {
                        Some(Found::Kept) => next += 1,
                        Some(Found::Met(at)) => {
                            let Some(place @ Some(Meeting::InPlace(..))) = met.meetings.get_mut(at)
                            else {
                                return;
                            };
                            next += 1;
                            if let Some(Meeting::InPlace(Some(comp), status)) = place.take() {
                                handles_message_of(status.rank);
                                if let Err(status) = comp.signal(status) {
                                    full = Some((comp, status, About::Received));
                                    return;
                                }
                            }
                        }
                        Some(Found::Nonsense) | None => return,
                    }
                }
            });
            let Err(panic) = guarded else { break };
            // The message on which the user's code panicked is lost; the messages behind it are
            // not.
            next = next.max(begun + 1);
            let from = messages
                .get(next - 1)
                .map_or(self.inner.rank, |last| self.device.rank_of(last.from));
            self.complain(panicked(from, panic.as_ref()));
        }
        batch.forget_small(next);
        if let Some((comp, status, about)) = full {
            self.keep_refused(&comp, status, about);
        }
    }

    /// Delivers the active messages at the front of the batch that are in packets, or fit into
    /// some. They stay in the batch meanwhile: to move one takes as long as the rest. Stops at the
    /// first message that needs more work, and when a completion object has no room.
    #[inline(never)]
    fn deliver_packets(&mut self, scratch: &mut Scratch) {
        let Scratch { batch, comps, .. } = scratch;
        if !batch.small_mut().is_empty() {
            return;
        }
        let mut next = 0;
        for event in batch.events_mut() {
            let Event::Arrived { from, header, payload, .. } = event else { break };
            if !Message::is_am(*header) || !self.device.undelivered.is_empty() {
                break;
            }
            let (name, tag) = Message::am(*header);
            let (Some(comp), size) = (comps.get(name), payload.len()) else { break };
            let nothing = Payload::Small(SmallBytes::empty());
            let packet = match payload {
                Payload::Loan(loan) if !comp.takes_loans() => {
                    let Some(packet) = self.device.host_pool.take_copy(loan.view()) else { break };
                    *payload = nothing;
                    packet
                }
                Payload::Packet(_) => match std::mem::replace(payload, nothing) {
                    Payload::Packet(packet) => packet,
                    _ => break,
                },
                _ => break,
            };
            next += 1;
            let from = self.device.rank_of(*from);
            self.signal_am(comp, arrival(from, tag, size, Buffer::Packet(packet)));
        }
        batch.forget_events(next);
    }

    /// Delivers any event; an active message takes the direct way.
    #[inline(always)]
    fn deliver_event(
        &mut self,
        event: Event,
        transport: &'static str,
        met: &mut Met,
        comps: &Snapshot,
    ) {
        match event {
            Event::Arrived { from, header, payload, .. } if Message::is_am(header) => {
                let (comp, tag) = Message::am(header);
                self.deliver_am(self.device.rank_of(from), comp, tag, payload, comps);
            }
            other => self.deliver_other(other, transport, met, comps),
        }
    }

    /// Handles an event that is no active message. Its payload is not moved before the check,
    /// since a move takes as long as the rest.
    fn deliver_other(
        &mut self,
        event: Event,
        transport: &'static str,
        met: &mut Met,
        comps: &Snapshot,
    ) {
        let Event::Arrived { from, header, payload, mark } = &event else {
            return self.deliver_end(event, transport);
        };
        let (from, header) = (self.device.rank_of(*from), *header);
        match Found::of(*mark) {
            Some(Found::Met(at)) => match met.take(at) {
                Some(Meeting::Pair(message, receive)) => self.land(message, receive),
                Some(Meeting::InPlace(comp, status)) => self.signal_received(comp.as_ref(), status),
                None => {}
            },
            Some(Found::Kept) => {}
            Some(Found::Nonsense) => self.nonsense(from),
            None => match Message::decode(header) {
                Ok(Message::RtsAm { comp, tag }) => match payload {
                    Payload::Small(bytes) => match Rts::decode(bytes.as_slice()) {
                        Some(rts) => self.offered_am(from, comp, tag, rts, comps),
                        None => self.nonsense(from),
                    },
                    _ => self.nonsense(from),
                },
                Ok(Message::Send { .. } | Message::RtsSend { .. } | Message::Am { .. })
                | Err(_) => {
                    self.nonsense(from);
                }
                Ok(message) => {
                    if let Event::Arrived { payload, .. } = event {
                        self.deliver_of_runtime(from, message, header, payload, comps);
                    }
                }
            },
        }
    }

    /// Handles an event that is no message: the end of an operation, or of a peer.
    fn deliver_end(&mut self, event: Event, transport: &'static str) {
        match event {
            Event::Completion { token, buffer, outcome } => {
                self.end_operation(token.0, buffer, outcome)
            }
            // The link of messages reports the peer's end, behind the last message.
            Event::PeerDown { peer, .. } if self.is_for_words(transport, peer) => {}
            Event::PeerDown { peer, cause } => self.peer_down(self.device.rank_of(peer), cause),
            // Nothing else to do, since progress checks the backlog in any case.
            Event::Connected { peer } if !self.is_for_words(transport, peer) => {
                let route = self.device.known_route(self.device.rank_of(peer));
                route.into_iter().for_each(|route| route.connected());
            }
            _ => {}
        }
    }

    /// Returns `true` if a transport has a connection to a peer only for words whose coherence
    /// owner is a NIC.
    #[cold]
    fn is_for_words(&self, transport: &str, peer: PeerId) -> bool {
        let route = self.device.known_route(self.device.rank_of(peer));
        route.is_some_and(|route| route.is_for_words(transport))
    }

    /// Lands a message that has met its receive.
    fn land(&mut self, message: Unexpected, receive: Receive) {
        let ended = self.device.land(self.inner, (message, receive), self.gathering.as_deref_mut());
        if let Some((comp, status)) = ended {
            self.signal_received(comp.as_ref(), status);
        }
    }

    /// Handles one of the runtime's own messages.
    fn deliver_of_runtime(
        &mut self,
        from: Rank,
        message: Message,
        header: Header,
        payload: Payload,
        comps: &Snapshot,
    ) {
        if let Err(why) = self.of_runtime(from, message, header, payload, comps) {
            self.broken(from, why);
        }
    }

    /// Breaks with a peer that breaks the protocol.
    pub(crate) fn broken(&mut self, from: Rank, why: String) {
        if !self.is_gone(from) {
            // The operation that it named gets no answer, so all operations with that rank end.
            self.device.break_with(from, why.clone());
            self.complain(ProgressError::Malformed { from, why });
        }
    }

    /// Returns `true` for a peer that is gone. Another thread may have ended all its operations
    /// while its message arrived.
    fn is_gone(&self, peer: Rank) -> bool {
        self.device.known_route(peer).is_some_and(|route| route.down().is_some())
    }

    /// Reports an answer to an offer that was not made. No operation waits for it.
    #[cold]
    pub(crate) fn stray(&mut self, from: Rank) {
        if !self.is_gone(from) {
            let why = "it answers an offer that was not made to it".into();
            self.complain(ProgressError::Malformed { from, why });
        }
    }

    /// Ends an operation that a link had.
    fn end_operation(&mut self, token: u64, buffer: Buffer, outcome: Result<(), Box<OpFailure>>) {
        let outstanding = &self.device.outstanding;
        if let Err(failure) = &outcome
            && let OpFailure::Down(cause) = &**failure
            && let Some(peer) = outstanding.peer_of_memory(token)
        {
            self.device.losses.note(peer, cause);
        }
        let Some(OnLink { op, next }) = outstanding.take(token) else {
            tracing::error!(token, "a transport ended an operation that it did not have");
            return;
        };
        let error = outcome.err().map(|failure| OpError::of(*failure, op.rank));
        match next {
            Continuation::Chunk { name, window: at } => {
                self.on((op.rank, name), datapath::Event::ChunkEnded { at, failed: error });
                return;
            }
            Continuation::Memory { notify: Some((comp, tag)), .. } if error.is_none() => {
                let notify = Control::Notify { comp, tag, size: op.size as u64 };
                self.device.control(self.inner, op.rank, notify);
            }
            Continuation::Memory { .. } | Continuation::Complete => {}
        }
        let (comp, status) = op.end(buffer, error);
        self.signal(comp.as_ref(), status);
    }

    #[cold]
    fn nonsense(&mut self, from: Rank) {
        let why = "its header names no operation, engine or policy that there is".into();
        self.complain(ProgressError::Malformed { from, why });
    }

    /// Notes an error for this call of progress to return, or for a later one if it is not the
    /// first.
    pub(crate) fn complain(&mut self, error: ProgressError) {
        if self.error.is_none() {
            self.error = Some(error);
        } else {
            self.inner.complaints.keep(error);
        }
    }

    #[inline]
    fn deliver_am(
        &mut self,
        from: Rank,
        name: RemoteComp,
        tag: Tag,
        payload: Payload,
        comps: &Snapshot,
    ) {
        let Some(comp) = comps.get(name) else {
            self.complain(ProgressError::NoSuchCompletion {
                from,
                comp: name,
                size: payload.len(),
            });
            return;
        };
        let Err(payload) = self.queue_am(comp, from, tag, payload) else { return };
        if !self.device.lands_on_host {
            return match self.device.reorder((from, tag), comp, payload) {
                Reordered::Queued => {}
                Reordered::There(status) => self.signal_reordered(Some(comp), status),
                Reordered::NoRoom(payload, why) => self.keep_am(comp, (from, tag), payload, why),
            };
        }
        let size = payload.len();
        match self.buffer_for(comp, payload) {
            Ok(buffer) => self.signal_am(comp, arrival(from, tag, size, buffer)),
            Err(payload) => self.keep_am(comp, (from, tag), payload, None),
        }
    }

    /// Returns the buffer in which a completion object gets a message. Gives the message back if
    /// it needs a packet and none is left.
    #[inline]
    pub(super) fn buffer_for(
        &self,
        comp: &Arc<dyn Completion>,
        payload: Payload,
    ) -> Result<Buffer, Payload> {
        match payload {
            Payload::Small(small) => Ok(Buffer::Small(small)),
            Payload::Packet(packet) => Ok(Buffer::Packet(packet)),
            Payload::Loan(loan) if comp.takes_loans() => Ok(Buffer::Loan(loan)),
            other => match self.device.host_pool.take_copy(other.view()) {
                Some(packet) => Ok(Buffer::Packet(packet)),
                None => Err(other),
            },
        }
    }
}
