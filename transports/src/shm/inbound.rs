//! The rings that lead here: which of them polls look at, and the messages in them.
//!
//! A ring that was busy lately is *warm*: each poll looks at it. A *cold* one costs nothing until
//! its sender rings its bell. Silent rings cool when many are warm, and all rings cool before the
//! device sleeps.

#![expect(unsafe_code, reason = "the ends of a ring in shared memory")]

use super::device::{Shared, is_dead};
use super::handshake::Message;
use super::segment::{Segment, SegmentSlots};
use super::stranger::{Guest, Heard, NotIn, Stranger};
use crate::contract::{
    Batch, DownCause, Event, Header, Loan, Mark, Matcher, Payload, PeerId, SmallArrival,
};
use crate::mem::{PacketSource, SmallBytes};
use crate::net::is_shortage;
use crate::net::packets::{Channel, Received};
use crate::net::pending::Pending;
use crate::net::watched::Watched;
use crate::sync::attention::settle;
use crate::sync::barrier::Barrier;
use crate::sync::bells::Bells;
use crate::sync::ring::{Consumer, Corrupt, Record};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// A record whose payload is the message.
pub(super) const KIND_INLINE: u8 = 1;
/// A record whose payload names the chunk with the message.
pub(super) const KIND_CHUNK: u8 = 2;

/// Bound of senders that have not proved themselves, or twice the number of ranks if that is more.
const MOST_STRANGERS: usize = 1024;
/// Time in which a sender has to prove itself. A rank that computes for longer calls again.
const STRANGERS_TIME: Duration = Duration::from_secs(600);

/// Warm rings that are too few to be worth cooling one.
const FEW: usize = 8;
/// Empty looks after which one of many warm rings cools.
const PATIENCE: u32 = 4096;
/// Records taken from one ring before the next ring.
const TURN: usize = 32;

/// Messages without a pause between them that make a stream, ...
const RUN: u32 = 8;
/// ... and looks that are skipped when a stream's ring is found empty: 0.3 µs. A receiver that is
/// quicker than its sender would otherwise read, each time, the very line that the sender is
/// writing, and take it away from the sender. A receiver that stays some messages behind halves
/// the sender's cost of a message.
const REST: u32 = 32;

/// Content of a chunk record's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChunkPlace {
    pub(super) chunk: u32,
    pub(super) len: u32,
}

impl ChunkPlace {
    pub(super) fn encode(self) -> [u8; 8] {
        (u64::from(self.chunk) | u64::from(self.len) << 32).to_le_bytes()
    }

    fn decode(bytes: [u8; 8]) -> Self {
        let word = u64::from_le_bytes(bytes);
        Self { chunk: (word & 0xffff_ffff) as u32, len: (word >> 32) as u32 }
    }
}

/// All incoming links of a device.
#[derive(Debug)]
pub(super) struct Inbound {
    /// By bell.
    links: Vec<Option<Incoming>>,
    /// Senders that have connected and were not welcomed so far.
    strangers: Pending<Stranger>,
    /// Senders whose rings are polled. Here and not in `links`, so that a poll follows no pointer.
    warm: Vec<Sender>,
    /// Index at which the next poll begins, so that no ring is always last.
    turn: usize,
    /// Pending connections wait for a resource that is short.
    owes_welcomes: bool,
}

#[derive(Debug)]
enum Incoming {
    /// It is not looked at.
    Cold(Box<Sender>),
    /// Its sender is in `warm`.
    Warm,
}

#[derive(Debug)]
struct Sender {
    from: PeerId,
    bell: u32,
    channel: Watched<Channel>,
    /// Readable when the sender's process is dead.
    process: Option<Watched<OwnedFd>>,
    segment: Arc<Segment>,
    consumer: Consumer<SegmentSlots>,
    /// Empty looks since the last message.
    silent: u32,
    /// The last look found its full number of messages: more are likely there.
    streams: bool,
    /// Messages since a look last found the ring empty.
    run: u32,
    /// Looks that are still skipped.
    rest: u32,
    /// Set once the sender is known to send no more; messages in the ring still count.
    ended: Option<DownCause>,
}

/// Result of one look at one ring.
enum Look {
    Goes,
    /// The matcher took the message.
    Took,
    Ended(DownCause),
}

impl Inbound {
    /// Creates the state for a job of this number of ranks, all of which may call at the same time.
    pub(super) fn of(ranks: u32) -> Self {
        let most = MOST_STRANGERS.max(2 * ranks as usize);
        let strangers = Pending::new(most, STRANGERS_TIME);
        Self { links: Vec::new(), strangers, warm: Vec::new(), turn: 0, owes_welcomes: false }
    }

    /// Returns `true` if any polled ring has something, or any bell has rung.
    pub(super) fn has_something(&self, bells: &Bells) -> bool {
        bells.any() || self.warm.iter().any(|sender| sender.consumer.is_ready())
    }

    /// Takes messages from the warm rings, and warms rings whose bells have rung.
    /// Returns `true` if the matcher took a message.
    #[inline(always)]
    pub(super) fn poll(
        &mut self,
        shared: &Shared,
        batch: &mut Batch,
        matcher: &mut dyn Matcher,
    ) -> bool {
        let took = self.look(shared, batch, matcher);
        if shared.page.bells().any() {
            return self.answer(shared, batch, matcher) || took;
        }
        took
    }

    #[cold]
    fn answer(&mut self, shared: &Shared, batch: &mut Batch, matcher: &mut dyn Matcher) -> bool {
        self.answer_bells(shared);
        self.look_in_turn(shared, batch, matcher)
    }

    #[inline(always)]
    fn look(&mut self, shared: &Shared, batch: &mut Batch, matcher: &mut dyn Matcher) -> bool {
        let [sender] = &mut self.warm[..] else {
            return self.look_in_turn(shared, batch, matcher);
        };
        // One ring takes no turns, and is too few to be cooled.
        match sender.look(&shared.packets, batch, matcher) {
            Look::Goes => false,
            Look::Took => true,
            Look::Ended(cause) => {
                self.remove(shared, 0, cause, batch);
                false
            }
        }
    }

    #[inline(never)]
    fn look_in_turn(
        &mut self,
        shared: &Shared,
        batch: &mut Batch,
        matcher: &mut dyn Matcher,
    ) -> bool {
        let count = self.warm.len();
        let (mut tired, mut took) = (0, false);
        let mut at = self.turn;
        for _ in 0..count {
            if at >= count {
                at = 0;
            }
            let Some(sender) = self.warm.get_mut(at) else { break };
            match sender.look(&shared.packets, batch, matcher) {
                Look::Took => took = true,
                Look::Goes => tired += usize::from(sender.silent > PATIENCE),
                Look::Ended(cause) => {
                    self.remove(shared, at, cause, batch);
                    break;
                }
            }
            at += 1;
        }
        self.turn = if self.turn + 1 < count { self.turn + 1 } else { 0 };
        if tired > 0 && count > FEW || tired >= FEW {
            self.cool(shared.barrier, |sender| sender.silent > PATIENCE);
        }
        took
    }

    /// Removes a sender that has ended.
    #[cold]
    fn remove(&mut self, shared: &Shared, at: usize, cause: DownCause, batch: &mut Batch) {
        let sender = self.warm.remove(at);
        let mut incoming = shared.incoming();
        let copies_no_more =
            sender.process.as_ref().is_some_and(|process| is_dead(process.as_fd()))
                || sender.segment.access().revoke();
        if copies_no_more
            && incoming
                .get(&sender.from)
                .is_some_and(|segment| Arc::ptr_eq(segment, &sender.segment))
        {
            incoming.remove(&sender.from);
        }
        drop(incoming);
        self.links[sender.bell as usize] = None;
        batch.push(Event::PeerDown { peer: sender.from, cause });
    }

    /// Stops looking at the rings that `which` selects, without losing a message published
    /// meanwhile.
    #[cold]
    fn cool(&mut self, barrier: Barrier, which: impl Fn(&Sender) -> bool) {
        let mut cooled = Vec::new();
        for sender in self.warm.extract_if(.., |sender| which(sender) && sender.ended.is_none()) {
            sender.segment.attention().cool();
            let bell = sender.bell;
            cooled.push(bell);
            self.links[bell as usize] = Some(Incoming::Cold(Box::new(sender)));
        }
        if cooled.is_empty() {
            return;
        }
        settle(barrier);
        for bell in cooled {
            let Some(Some(Incoming::Cold(sender))) = self.links.get(bell as usize) else {
                continue;
            };
            if sender.consumer.is_ready() {
                self.warm_up(bell);
            }
        }
    }

    /// Stops looking at all rings, before sleep.
    pub(super) fn cool_all(&mut self, barrier: Barrier) {
        self.cool(barrier, |_| true);
    }

    /// Begins to look at a ring.
    fn warm_up(&mut self, bell: u32) {
        let Some(place) = self.links.get_mut(bell as usize) else { return };
        match place.take() {
            Some(Incoming::Cold(mut sender)) => {
                sender.silent = 0;
                sender.segment.attention().warm();
                self.warm.push(*sender);
                *place = Some(Incoming::Warm);
            }
            other => *place = other,
        }
    }

    #[cold]
    fn answer_bells(&mut self, shared: &Shared) {
        let mut rang = Vec::new();
        shared.page.bells().collect(|bell| rang.push(bell));
        for bell in rang {
            self.warm_up(bell);
        }
    }

    /// Lets a stranger prove itself. Its first words are there already, most likely; if not the
    /// epoll set tells.
    pub(super) fn admit(&mut self, shared: &Shared, channel: Channel) -> Result<(), Errno> {
        let stranger = Stranger::new(shared, channel)?;
        let now = Instant::now();
        self.strangers.expire(now);
        if let Some(oldest) = self.strangers.crowded() {
            // It may have something to say by now.
            self.hear_stranger(shared, oldest);
        }
        let place = self.strangers.admit(stranger, now);
        self.hear_stranger(shared, place);
        Ok(())
    }

    /// Takes in what a stranger says, and lets it in when that is enough.
    pub(super) fn hear_stranger(&mut self, shared: &Shared, place: u32) {
        let Some(stranger) = self.strangers.get_mut(place) else { return };
        let heard = stranger.hear(shared, place);
        if stranger.is_proven() {
            self.strangers.proved(place);
        }
        let why = match heard {
            Ok(Heard::Silent) => return,
            Ok(Heard::Short(error)) => return self.lacks(shared, error),
            Ok(Heard::Gone) => return drop(self.strangers.take(place)),
            Ok(Heard::Hello) => match self.free_bell() {
                Some(bell) => return self.welcome(shared, place, bell),
                None => format!("{} links lead here already", Bells::COUNT),
            },
            Err(why) => why,
        };
        self.refuse(place, why);
    }

    fn lacks(&mut self, shared: &Shared, error: Errno) {
        shared.tell_of_shortage(error);
        self.owes_welcomes = true;
    }

    fn refuse(&mut self, place: u32, why: String) {
        let Some(stranger) = self.strangers.take(place) else { return };
        let whom = stranger.channel.peer();
        let whom = whom.map_or_else(|_| "a process".into(), |it| format!("process {}", it.pid));
        self.strangers.refused(&whom, &why, Instant::now());
        let _ = stranger.channel.send(&Message::Refusal(why).encode(), &[]);
    }

    /// Returns a bell that no link has.
    fn free_bell(&mut self) -> Option<u32> {
        let free = self.links.iter().position(Option::is_none);
        let bell = u32::try_from(free.unwrap_or(self.links.len())).ok()?;
        ((bell as usize) < Bells::COUNT).then_some(bell)
    }

    fn welcome(&mut self, shared: &Shared, place: u32, bell: u32) {
        let Some(stranger) = self.strangers.take(place) else { return };
        let guest = match stranger.enter(shared, bell) {
            Ok(guest) => guest,
            Err((stranger, not_in)) => {
                // The place that it has left is the next to be given out, and it is watched by it.
                let place = self.strangers.admit(stranger, Instant::now());
                self.strangers.proved(place);
                return match not_in {
                    NotIn::Short(error) => self.lacks(shared, error),
                    NotIn::Refused(why) => self.refuse(place, why),
                };
            }
        };
        let sender = Sender::new(guest, bell);
        shared.nothing_is_short();
        shared.incoming().insert(sender.from, sender.segment.clone());
        let link = Some(Incoming::Cold(Box::new(sender)));
        match self.links.get_mut(bell as usize) {
            Some(free) => *free = link,
            None => self.links.push(link),
        }
        // A sleeper is woken by its bell. This poll, which finds no message, may be the thread's
        // last.
        if shared.sleepers.load(Ordering::SeqCst) == 0 {
            self.warm_up(bell);
        }
    }

    /// Takes in what the other end of an incoming link says.
    pub(super) fn listen(&mut self, bell: u32) {
        let Some(place) = self.links.get_mut(bell as usize) else { return };
        match place {
            None => {}
            Some(Incoming::Cold(sender)) => {
                let ended = sender.hear();
                if ended {
                    // Its ring is looked at once more before it is removed.
                    self.warm_up(bell);
                }
            }
            Some(Incoming::Warm) => {
                if let Some(sender) = self.warm.iter_mut().find(|sender| sender.bell == bell) {
                    sender.hear();
                }
            }
        }
    }

    /// Returns `true` if pending connections wait for a resource that is short.
    pub(super) fn owes_welcomes(&self) -> bool {
        self.owes_welcomes
    }

    /// Tries again to welcome pending connections that wait for a resource.
    pub(super) fn welcome_again(&mut self, shared: &Shared) {
        if !std::mem::take(&mut self.owes_welcomes) {
            return;
        }
        for place in self.strangers.places() {
            if self.strangers.get_mut(place).is_some_and(|stranger| stranger.waits()) {
                self.hear_stranger(shared, place);
            }
        }
    }

    /// Ends a peer that is known to have gone. Returns `true` if rings of the peer lead here: its
    /// end is then reported when they are empty.
    pub(super) fn end(&mut self, shared: &Shared, peer: PeerId, cause: &DownCause) -> bool {
        for place in self.strangers.places() {
            self.hear_stranger(shared, place);
        }
        for bell in 0..u32::try_from(self.links.len()).unwrap_or(u32::MAX) {
            match self.links.get_mut(bell as usize) {
                Some(Some(Incoming::Cold(sender))) if sender.from == peer => self.warm_up(bell),
                _ => {}
            }
        }
        let mut any = false;
        for sender in self.warm.iter_mut().filter(|sender| sender.from == peer) {
            sender.rest = 0;
            sender.ended.get_or_insert_with(|| cause.clone());
            any = true;
        }
        any
    }

    /// Tells all senders that this device closes, and closes the channels.
    pub(super) fn close(&mut self) {
        let others = self.links.drain(..).flatten().filter_map(|link| match link {
            Incoming::Cold(sender) => Some(sender.channel),
            Incoming::Warm => None,
        });
        let strangers = self.strangers.drain().into_iter().map(|stranger| stranger.channel);
        let others = others.chain(strangers);
        for channel in self.warm.drain(..).map(|sender| sender.channel).chain(others) {
            let _ = channel.send(&Message::Bye.encode(), &[]);
        }
    }
}

impl Sender {
    fn new(Guest { from, channel, segment, process }: Guest, bell: u32) -> Self {
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
    fn look(
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
        self.take(packets, batch)
    }

    /// Takes a single record. If it is a short message, the matcher gets it first.
    #[inline(always)]
    fn take_alone(
        &mut self,
        packets: &Arc<dyn PacketSource>,
        batch: &mut Batch,
        matcher: &mut dyn Matcher,
    ) -> Look {
        let (Ok(Some(record)), Some(message)) = (self.consumer.peek(), batch.next_small()) else {
            return self.take(packets, batch);
        };
        if record.kind != KIND_INLINE || record.count != 1 {
            return self.take(packets, batch);
        }
        fill(message, &record, self.from);
        let is_taken = matcher.match_alone(message);
        if !is_taken {
            batch.keep_small();
        }
        self.consumer.advance(1);
        (self.run, self.silent, self.streams) = (self.run.saturating_add(1), 0, true);
        if is_taken { Look::Took } else { Look::Goes }
    }

    #[inline(never)]
    fn take(&mut self, packets: &Arc<dyn PacketSource>, batch: &mut Batch) -> Look {
        // A single message from a sender that does not stream: a look for a second one would fetch
        // the line that the sender is about to write.
        let limit = if self.streams { TURN } else { 1 };
        for taken in 0..limit {
            if batch.is_full() {
                return Look::Goes;
            }
            let record = match self.consumer.peek() {
                Ok(Some(record)) => record,
                Ok(None) => return self.nothing(taken > 0, batch),
                Err(why) => return Look::Ended(corrupt(why)),
            };
            let count = record.count;
            if record.kind == KIND_INLINE && count == 1 {
                match batch.next_small() {
                    Some(message) => {
                        fill(message, &record, self.from);
                        batch.keep_small();
                    }
                    None => batch.push(short(&record, self.from)),
                }
            } else {
                match receive(record, &self.segment, packets) {
                    Ok(Some((header, payload))) => {
                        batch.push(Event::arrived(self.from, header, payload));
                    }
                    Ok(None) => return Look::Goes,
                    Err(why) => return Look::Ended(DownCause::Protocol(why)),
                }
            }
            self.consumer.advance(count);
            self.run = self.run.saturating_add(1);
            if self.streams {
                self.consumer.fetch_ahead();
            }
        }
        self.silent = 0;
        self.streams = true;
        Look::Goes
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
    fn hear(&mut self) -> bool {
        if self.ended.is_none() {
            self.ended = self.last_words();
        }
        self.ended.is_some()
    }

    fn last_words(&self) -> Option<DownCause> {
        let mut bytes = [0; super::handshake::MAX_MESSAGE];
        match self.channel.receive(&mut bytes) {
            Ok(Received::Nothing) => {
                let process = self.process.as_ref()?;
                is_dead(process.as_fd()).then(|| DownCause::Gone("its process has ended".into()))
            }
            Ok(Received::Closed) => Some(DownCause::Gone("its socket hung up".into())),
            Ok(Received::Message(len, _)) => match Message::decode(&bytes[..len]) {
                Ok(Message::Bye) => Some(DownCause::Closed),
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
    message.header = Header(record.copy_first_to(message.bytes.fill(record.len())));
    (message.mark, message.from) = (Mark::default(), from);
}

/// Returns a short message that has to stand behind an event.
#[cold]
#[inline(never)]
fn short(record: &Record<'_, SegmentSlots>, from: PeerId) -> Event {
    let mut bytes = SmallBytes::empty();
    let header = record.copy_first_to(bytes.fill(record.len()));
    Event::arrived(from, Header(header), Payload::Small(bytes))
}

/// Returns the message of a record that is not inline in one slot. `Ok(None)`: there is no packet
/// for it now, and it stays in the ring.
#[inline(never)]
fn receive(
    record: Record<'_, SegmentSlots>,
    segment: &Arc<Segment>,
    packets: &Arc<dyn PacketSource>,
) -> Result<Option<(Header, Payload)>, String> {
    let header = Header(record.header());
    match record.kind {
        KIND_INLINE => {
            let Some(mut packet) = packets.take() else { return Ok(None) };
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
            let mut place = [0; 8];
            if record.len() != place.len() {
                return Err(format!("a chunk record of {} bytes", record.len()));
            }
            record.copy_to(&mut place);
            let ChunkPlace { chunk, len } = ChunkPlace::decode(place);
            let Some(bytes) = segment.chunk(chunk, len) else {
                return Err(format!("{len} bytes in chunk {chunk}, which is not there"));
            };
            segment.will_read(bytes.as_ptr(), bytes.len());
            // The runtime needs a packet to take the message in. A message too long for any packet
            // would wait forever, and all other peers' messages behind it.
            if bytes.len() > packets.packet_size() {
                let room = packets.packet_size();
                return Err(format!(
                    "a message of {len} bytes, where packets hold {room}: CARRACK_PACKET_SIZE must \
                    be the same on all ranks"
                ));
            }
            // SAFETY: the bytes lie in the segment, host memory, mapped while the segment lives.
            let loan = unsafe { Loan::new(bytes.as_ptr(), len, chunk, segment.clone()) };
            Ok(Some((header, Payload::Loan(loan))))
        }
        kind => Err(format!("a record of unknown kind {kind}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::contract::{Identity, Op, Polled, Submit, Transport as _};
    use crate::mem::allocator::HostAllocator;
    use crate::mem::copy::copy_now;
    use crate::mem::{MemMut, MemRef, PacketPool};
    use crate::shm::{Geometry, Shm};
    use proptest::collection::vec;
    use proptest::prelude::*;

    /// Keeps numbers and bytes of messages in the order in which it gets them.
    #[derive(Default)]
    struct Receiver {
        takes: bool,
        has_batch: bool,
        alone: usize,
        got: Vec<(u64, Vec<u8>)>,
    }

    impl Matcher for Receiver {
        fn match_alone(&mut self, message: &SmallArrival) -> bool {
            assert!(!self.has_batch, "it is not alone");
            if self.takes {
                self.alone += 1;
                self.got.push((message.header.0[0], message.bytes.as_slice().to_vec()));
            }
            self.takes
        }

        fn match_all(&mut self, batch: &mut Batch) {
            for event in batch.drain() {
                if let Event::Arrived { header, payload, .. } = event {
                    let mut bytes = vec![0; payload.len()];
                    copy_now(MemMut::host(&mut bytes), payload.view()).unwrap();
                    self.got.push((header.0[0], bytes));
                }
            }
            self.has_batch = true;
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]

        #[test]
        fn messages_that_come_alone_and_others_come_once_and_in_order(
            steps in vec((vec(0_usize..9, 0..3), any::<bool>()), 2000),
        ) {
            let transport = Shm::new(Geometry { slots: 64, chunks: 4, chunk_size: 4096 });
            let info = transport.devices().unwrap().remove(0);
            let [zero, one] = [0, 1].map(|me| {
                let identity = Identity { me: PeerId(me), ranks: 2, secret: [7; 16] };
                let packets = PacketPool::new(Arc::new(HostAllocator), 4096, 64);
                transport.open(&info, identity).unwrap().device(Arc::new(packets)).unwrap()
            });
            let link = zero.connect(&one.address(), PeerId(1)).unwrap();
            let (mut batch, begun) = (Batch::new(4), Instant::now());
            while !link.is_up() {
                assert!(begun.elapsed() < Duration::from_secs(60), "not connected");
                one.poll(&mut batch, &mut |batch: &mut Batch| _ = batch.drain());
                zero.poll(&mut batch, &mut |batch: &mut Batch| _ = batch.drain());
            }
            let (mut receiver, mut sent) = (Receiver::default(), Vec::new());
            for (lengths, takes) in steps {
                for length in lengths {
                    let length = [0, 8, 8, 8, 40, 41, 200, 300, 4000][length];
                    let number = sent.len() as u64;
                    let bytes = vec![(number & 0xff) as u8; length];
                    let header = Header([number, 0]);
                    let op = Op::AmCopied { header, bytes: MemRef::host(&bytes) };
                    if matches!(link.submit(op).unwrap(), Submit::Done) {
                        sent.push((number, bytes));
                    }
                }
                (receiver.takes, receiver.has_batch) = (takes, false);
                let before = receiver.got.len();
                let polled = one.poll(&mut batch, &mut receiver);
                prop_assert_eq!(polled == Polled::Some, receiver.got.len() > before);
                prop_assert!(batch.is_empty());
            }
            while receiver.got.len() < sent.len() {
                assert!(begun.elapsed() < Duration::from_secs(60), "{}", receiver.got.len());
                receiver.has_batch = false;
                one.poll(&mut batch, &mut receiver);
            }
            prop_assert_eq!(receiver.got, sent);
            prop_assert!(receiver.alone > 100, "{}", receiver.alone);
        }
    }
}
