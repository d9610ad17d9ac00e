//! The ring of one sender: its records, and the messages in them.

#![expect(unsafe_code, reason = "the end of a ring in shared memory")]

use super::answer;
use super::device::is_dead;
use super::handshake::{HandshakeMessage, MAX_MESSAGE};
use super::pending::AdmittedSender;
use super::segment::{Segment, SegmentSlots};
use crate::contract::{
    Batch, DownCause, Event, Header, Lender, Loan, Mark, Matcher, Payload, PeerId, SmallArrival,
};
use crate::mem::{HostViews, MemRef, PacketSource, SmallBytes};
use crate::net::is_shortage;
use crate::net::packets::{Channel, Received};
use crate::net::watched::Watched;
use crate::sync::ring::{Consumer, Corrupt, MAX_PAYLOAD, Record};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A record whose payload is the message.
pub(super) const KIND_INLINE: u8 = 1;
/// A record whose payload names the chunk with the message.
pub(super) const KIND_CHUNK: u8 = 2;

/// Records taken from one ring before the next ring.
const TURN: usize = 32;

/// Messages without a pause between them that make a stream, ...
const RUN: usize = 8;
/// ... and looks that are skipped when a stream's ring is found empty: 0.3 µs. Otherwise a receiver
/// that is quicker than its sender would always read the line that the sender is writing, and take
/// it away. A receiver that stays some messages behind halves the sender's cost of a message.
const REST: u32 = 32;

/// Content of a chunk record's payload.
#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct ChunkPlace {
    pub(super) chunk: U32,
    pub(super) len: U32,
}

/// The reading end of a sender's ring.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) from: PeerId,
    pub(super) bell: u32,
    pub(super) channel: Watched<Channel>,
    /// Descriptor that is readable when the sender's process is dead.
    pub(super) process: Option<Watched<OwnedFd>>,
    pub(super) segment: Arc<Segment>,
    pub(super) consumer: Consumer<SegmentSlots>,
    /// Empty looks since the last message.
    pub(super) silent: u32,
    /// The last look found its full number of messages: more are likely there.
    streams: bool,
    /// Messages since a look last found the ring empty.
    run: usize,
    /// Looks that are still skipped.
    pub(super) rest: u32,
    /// Set once the sender is known to send no more; messages in the ring still count.
    pub(super) ended: Option<DownCause>,
}

/// Result of one look at one ring.
pub(super) enum Look {
    Goes,
    /// The matcher took messages.
    Took,
    Ended(DownCause),
}

impl Source {
    pub(super) fn new(
        AdmittedSender { from, channel, segment, process }: AdmittedSender,
        bell: u32,
    ) -> Self {
        // SAFETY: the segment came with this hello, and this is the only consumer made for it
        // here. If a hostile sender sends one segment twice, two consumers write only `freed`.
        // Each reads memory that it does not trust anyway.
        let consumer = unsafe { Consumer::new(SegmentSlots::of(segment.clone())) };
        Self {
            from,
            bell,
            channel,
            process,
            segment,
            consumer,
            silent: 0,
            streams: false,
            run: 0,
            rest: 0,
            ended: None,
        }
    }

    /// Takes records off the ring.
    #[inline(always)]
    pub(super) fn look(
        &mut self,
        packets: &Arc<dyn PacketSource>,
        batch: &mut Batch,
        matcher: &mut dyn Matcher,
    ) -> Look {
        if self.rest > 0 {
            self.rest -= 1;
            return Look::Goes;
        }
        if !self.consumer.is_ready() {
            return self.nothing(false, batch);
        }
        if !self.streams && batch.is_empty() {
            return self.take_alone(packets, batch, matcher);
        }
        self.take(packets, batch, matcher)
    }

    /// Takes a single record. If it is a short message, the matcher gets it first.
    #[inline(always)]
    fn take_alone(
        &mut self,
        packets: &Arc<dyn PacketSource>,
        batch: &mut Batch,
        matcher: &mut dyn Matcher,
    ) -> Look {
        let Ok(Some(record)) = self.consumer.peek() else {
            return self.take(packets, batch, matcher);
        };
        if (record.kind, record.count) != (KIND_INLINE, 1) {
            return self.take(packets, batch, matcher);
        }
        let (header, bytes) = record.in_one_slot();
        // The matcher is not called in vain: that takes a tenth of a message's time.
        let is_taken = batch.may_match(Header(header))
            && matcher.match_in_place(self.from, Header(header), bytes);
        if !is_taken {
            let Some(message) = batch.next_small() else {
                return self.take(packets, batch, matcher);
            };
            fill(message, &record, self.from);
            batch.keep_small();
        }
        self.consumer.advance(1);
        (self.run, self.silent, self.streams) = (self.run.saturating_add(1), 0, true);
        answer::received(self.from);
        if is_taken { Look::Took } else { Look::Goes }
    }

    /// Takes records: of a stream up to `TURN`, else one. While nothing is in the batch, the
    /// matcher gets those that it may take from where they lie.
    #[inline(never)]
    fn take(
        &mut self,
        packets: &Arc<dyn PacketSource>,
        batch: &mut Batch,
        matcher: &mut dyn Matcher,
    ) -> Look {
        // A single message from a sender that does not stream. A look for a second one would fetch
        // the line that the sender is about to write.
        let limit = if self.streams { TURN.min(batch.room()) } else { batch.room().min(1) };
        let (mut look, mut taken) = (Look::Goes, 0);
        while taken < limit {
            let record = match self.consumer.peek() {
                Ok(Some(record)) => record,
                Ok(None) => {
                    let nothing = self.nothing(taken > 0, batch);
                    return if matches!(nothing, Look::Goes) { look } else { nothing };
                }
                Err(why) => return Look::Ended(corrupt(why)),
            };
            let count = record.count;
            if batch.is_empty() && batch.may_match(Header(record.header())) {
                let matched = self.match_some(&record, limit - taken, packets, matcher);
                if matched > 0 {
                    look = Look::Took;
                    self.has_taken(matched, count);
                    taken += matched;
                    continue;
                }
            }
            if record.kind == KIND_INLINE && count == 1 {
                match batch.next_small() {
                    Some(message) => {
                        fill(message, &record, self.from);
                        batch.keep_small();
                    }
                    None => batch.push(short(&record, self.from)),
                }
            } else {
                match receive(record, &self.segment, packets, batch.is_empty()) {
                    Ok(Some((header, payload))) => {
                        batch.push(Event::arrived(self.from, header, payload));
                    }
                    Ok(None) => break,
                    Err(why) => return Look::Ended(DownCause::Protocol(why)),
                }
            }
            self.has_taken(1, count);
            taken += 1;
        }
        if taken > 0 {
            answer::forget(self.from);
            (self.silent, self.streams) = (0, true);
        }
        look
    }

    /// Frees the slots of messages that were taken, `slots` each.
    #[inline(always)]
    fn has_taken(&mut self, messages: usize, slots: u8) {
        self.consumer.advance(messages * usize::from(slots));
        self.run = self.run.saturating_add(messages);
        if self.streams {
            self.consumer.fetch_ahead();
        }
    }

    /// Shows the matcher the message of a record, and of those behind it that are alike, at most
    /// `most`. Returns the number of those that it took.
    #[inline(never)]
    fn match_some(
        &self,
        record: &Record<'_, SegmentSlots>,
        most: usize,
        packets: &Arc<dyn PacketSource>,
        matcher: &mut dyn Matcher,
    ) -> usize {
        let Some(shape) = record.shape().filter(|_| record.kind == KIND_INLINE) else {
            return is_matched(record, self.from, &self.segment, packets, matcher).into();
        };
        let at = |number: usize| match number < most {
            true => self.consumer.alike(&shape, number),
            false => None,
        };
        // SAFETY: the payloads lie in the segment, host memory, mapped while it lives, and are as
        // long as the first.
        let run = unsafe { HostViews::new(shape.len(), &at) };
        matcher.match_run(self.from, Header(shape.header()), run).min(most)
    }

    #[inline(always)]
    fn nothing(&mut self, some: bool, batch: &Batch) -> Look {
        if self.run >= RUN {
            self.rest = REST;
        }
        (self.streams, self.run) = (false, 0);
        self.silent = if some { 0 } else { self.silent.saturating_add(1) };
        match &self.ended {
            None => Look::Goes,
            // One more look: the last messages may have come between the two looks.
            Some(_) if batch.is_full() || self.consumer.is_ready() => Look::Goes,
            Some(cause) => Look::Ended(cause.clone()),
        }
    }

    /// Handles a message on the sender's socket. Returns `true` if the sender has ended.
    pub(super) fn hear(&mut self) -> bool {
        if self.ended.is_none() {
            self.ended = self.last_words();
        }
        self.ended.is_some()
    }

    fn last_words(&self) -> Option<DownCause> {
        let mut bytes = [0; MAX_MESSAGE];
        match self.channel.receive(&mut bytes) {
            Ok(Received::Nothing) => {
                let process = self.process.as_ref()?;
                is_dead(process.as_fd()).then(|| DownCause::Gone("its process has ended".into()))
            }
            Ok(Received::Closed) => Some(DownCause::Gone("its socket hung up".into())),
            Ok(Received::Message(len, _)) => match HandshakeMessage::decode(&bytes[..len]) {
                Ok(HandshakeMessage::Bye) => Some(DownCause::Closed),
                Ok(other) => Some(DownCause::Protocol(format!("it sent {other:?} out of turn"))),
                Err(why) => Some(DownCause::Protocol(why)),
            },
            Err(error) if is_shortage(error) => None,
            Err(error) => Some(DownCause::Protocol(format!("its socket failed: {error}"))),
        }
    }
}

#[cold]
fn corrupt(why: Corrupt) -> DownCause {
    DownCause::Protocol(why.to_string())
}

/// Copies a record of one slot into its place.
#[inline(always)]
fn fill(message: &mut SmallArrival, record: &Record<'_, SegmentSlots>, from: PeerId) {
    let header = Header(record.copy_first_to(message.bytes.fill(record.len())));
    (message.header, message.mark, message.from) = (header, Mark::default(), from);
}

/// Returns a short message that has to stand behind an event.
#[cold]
#[inline(never)]
fn short(record: &Record<'_, SegmentSlots>, from: PeerId) -> Event {
    let mut bytes = SmallBytes::empty();
    let header = record.copy_first_to(bytes.fill(record.len()));
    Event::arrived(from, Header(header), Payload::Small(bytes))
}

/// Shows the matcher the message of a record that is not inline in one slot. Returns `true` if it
/// took it.
#[inline]
fn is_matched(
    record: &Record<'_, SegmentSlots>,
    from: PeerId,
    segment: &Arc<Segment>,
    packets: &Arc<dyn PacketSource>,
    matcher: &mut dyn Matcher,
) -> bool {
    let header = Header(record.header());
    if record.kind == KIND_CHUNK {
        let Ok((chunk, bytes)) = chunk_of(record, segment, packets) else { return false };
        let is_matched = matcher.match_in_place(from, header, bytes);
        if is_matched {
            segment.give_back(chunk);
        }
        return is_matched;
    }
    let mut bytes = [0; MAX_PAYLOAD];
    let bytes = &mut bytes[..record.len().min(MAX_PAYLOAD)];
    record.copy_to(bytes);
    record.kind == KIND_INLINE && matcher.match_in_place(from, header, MemRef::host(bytes))
}

/// Returns the message of a record that is not inline in one slot. `Ok(None)`: there is no packet
/// for it now, and it stays in the ring. While the program keeps all packets, such messages come
/// one at a time, the `first` of a batch.
#[inline(never)]
fn receive(
    record: Record<'_, SegmentSlots>,
    segment: &Arc<Segment>,
    packets: &Arc<dyn PacketSource>,
    first: bool,
) -> Result<Option<(Header, Payload)>, String> {
    let header = Header(record.header());
    match record.kind {
        KIND_INLINE => {
            let Some(mut packet) = packets.take() else {
                return Ok(first.then(|| {
                    let mut bytes = vec![0; record.len()];
                    record.copy_to(&mut bytes);
                    (header, Payload::Aside(bytes))
                }));
            };
            packet.set_len(record.len());
            match packet.as_mut_slice() {
                Some(bytes) if bytes.len() == record.len() => record.copy_to(bytes),
                // Not reached with correct settings: the device has host packets, which they make
                // large enough.
                _ => return Err(format!("{} bytes do not fit into a packet here", record.len())),
            }
            Ok(Some((header, Payload::Packet(packet))))
        }
        KIND_CHUNK => {
            let (chunk, bytes) = chunk_of(&record, segment, packets)?;
            let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
            // SAFETY: the bytes lie in the segment, host memory, mapped while the segment lives.
            let loan = unsafe { Loan::new(bytes.as_ptr(), len, chunk, segment.clone()) };
            Ok(Some((header, Payload::Loan(loan))))
        }
        kind => Err(format!("a record of unknown kind {kind}")),
    }
}

/// Returns the chunk that a record names, and the message in it.
fn chunk_of<'a>(
    record: &Record<'_, SegmentSlots>,
    segment: &'a Segment,
    packets: &Arc<dyn PacketSource>,
) -> Result<(u32, MemRef<'a>), String> {
    let mut place = ChunkPlace::new_zeroed();
    if record.len() != size_of_val(&place) {
        return Err(format!("a chunk record of {} bytes", record.len()));
    }
    record.copy_to(place.as_mut_bytes());
    let (chunk, len) = (place.chunk.get(), place.len.get());
    let Some(bytes) = segment.chunk(chunk, len) else {
        return Err(format!("{len} bytes in chunk {chunk}, which is not there"));
    };
    segment.will_read(bytes.as_ptr(), bytes.len());
    // The runtime needs a packet to take the message in. A message too long for any packet would
    // wait forever, and all other peers' messages behind it.
    if bytes.len() > packets.packet_size() {
        let room = packets.packet_size();
        return Err(format!(
            "a message of {len} bytes, where packets hold {room}: CARRACK_PACKET_SIZE must be the \
            same on all ranks"
        ));
    }
    Ok((chunk, bytes))
}

#[cfg(test)]
mod tests;
