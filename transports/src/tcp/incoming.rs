//! The receiving end of a connection: bytes become messages, and puts are scattered into windows.
//!
//! It outlives a connection. The bytes that it has taken off one are counted, and the next one
//! goes on behind them.

use super::frame::{Frame, HEAD};
use super::outflow::KEPT;
use super::outgoing::Outgoing;
use super::shared::{TcpShared, WatchedStream};
use super::socket::{acknowledge_now, drain, receive};
use super::windows::{Window, Windows};
use crate::contract::{Batch, Event, Header, Payload, PeerId, SmallArrival};
use crate::mem::{MemMut, MemRef, PacketSource, SmallBytes, copy::copy_now};
use rustix::io::Errno;
use std::sync::Arc;

/// Bytes that are taken off a connection in one poll, so that others have their turn.
const TURN: usize = 8 << 20;

/// Bytes of acknowledgements that are acknowledged by themselves. If none were, their sender would
/// keep all of them; if each were, there would be no end of it.
const NOTES: u64 = 4096;

/// Target of arrivals.
pub(super) struct Receiving<'a> {
    pub(super) packets: &'a dyn PacketSource,
    pub(super) windows: &'a Windows,
    pub(super) batch: &'a mut Batch,
    /// Bytes for one call of the socket.
    pub(super) scratch: &'a mut [u8],
    /// Messages are dropped, and puts that have not begun.
    pub(super) drops: bool,
}

/// A put whose bytes are coming in.
#[derive(Debug)]
struct Landing {
    /// `None`: it was taken back, and its bytes are dropped.
    window: Option<Arc<Window>>,
    at: u64,
    left: u64,
}

/// State of the receiving end.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) peer: PeerId,
    /// Bytes that were taken off its connections, which another one need not send again.
    pub(super) received: u64,
    /// Bytes that were taken up since the last acknowledgement, apart from acknowledgements.
    fresh: u64,
    /// Bytes after which an acknowledgement is due.
    ack_at: u64,
    /// Bytes of frames that are not whole, or found no room in the batch.
    pending: Vec<u8>,
    landing: Option<Landing>,
    /// Set if the sender of a put waits for its acknowledgement.
    owes_ack: bool,
    /// Bytes of acknowledgements since the last one that was sent.
    notes: u64,
    /// The last acknowledgement that is not taken up.
    acked: Option<u64>,
    /// The end of the link was read.
    pub(super) has_ended: bool,
}

/// The result of reading a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Read {
    /// Nothing had come.
    Nothing,
    /// Some bytes were taken.
    Some,
    /// The other side sends no more on this connection.
    End,
}

impl Incoming {
    /// Makes the receiving end of a link. `window`: bytes that the sender sends without an
    /// acknowledgement. `longest`: bytes of the longest message.
    pub(super) fn new(peer: PeerId, window: u64, longest: usize) -> Self {
        // What is not acknowledged leaves room for any message.
        let rest = window.saturating_sub((HEAD + longest) as u64);
        Self {
            ack_at: (window / 4).min(rest).max(1),
            peer,
            received: 0,
            fresh: 0,
            pending: Vec::new(),
            landing: None,
            owes_ack: false,
            notes: 0,
            acked: None,
            has_ended: false,
        }
    }

    /// Returns `true` if an acknowledgement is due: a put has ended, or much has come; or, for that
    /// of all bytes, anything.
    #[inline]
    pub(super) fn owes_ack(&self, all: bool) -> bool {
        let due = if all { 1 } else { self.ack_at };
        self.owes_ack || self.fresh >= due || self.notes >= NOTES
    }

    /// Notes that all bytes were acknowledged.
    pub(super) fn was_acked(&mut self) {
        (self.owes_ack, self.fresh, self.notes) = (false, 0, 0);
    }

    /// Takes the last acknowledgement.
    #[inline]
    pub(super) fn take_acked(&mut self) -> Option<u64> {
        self.acked.take()
    }

    /// Takes in what has come.
    ///
    /// # Errors
    /// The sender's violation of the protocol, or the connection's error.
    pub(super) fn read(
        &mut self,
        socket: Option<&WatchedStream>,
        to: &mut Receiving<'_>,
    ) -> Result<Read, ReadFault> {
        if !self.pending.is_empty() {
            let pending = std::mem::take(&mut self.pending);
            let taken = self.parse(&pending, to).map_err(ReadFault::Protocol)?;
            self.pending = pending;
            self.pending.drain(..taken);
            if to.batch.is_full() {
                return Ok(Read::Some);
            }
        }
        let (Some(socket), mut turn) = (socket, 0) else { return Ok(Read::Nothing) };
        let longest = to.packets.packet_size();
        // Whole frames are only left where the batch is full, or no packet is free.
        while turn < TURN && !self.has_ended && !to.batch.is_full() && !self.has_whole(longest) {
            let (received, room) = match &mut self.landing {
                Some(Landing { window: Some(window), at, left }) => {
                    let room = usize::try_from(*left).unwrap_or(usize::MAX).min(TURN);
                    match window.write(*at, room, |mut to| receive(socket, &mut to)) {
                        Some(received) => (received, room),
                        None => {
                            self.landing.iter_mut().for_each(|landing| landing.window = None);
                            continue;
                        }
                    }
                }
                _ => (receive(socket, &mut MemMut::host(to.scratch)), to.scratch.len()),
            };
            let received = match received {
                Ok(0) => return Ok(Read::End),
                Ok(received) => received,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => break,
                Err(error) => return Err(ReadFault::Broken(error)),
            };
            self.received += received as u64;
            turn += received;
            if let Some(landing) = self.landing.as_mut().filter(|landing| landing.window.is_some())
            {
                landing.came(received as u64);
                self.fresh += received as u64;
                self.land();
            } else {
                let scratch = std::mem::take(&mut to.scratch);
                let taken = self.take_in(&scratch[..received], to);
                to.scratch = scratch;
                taken.map_err(ReadFault::Protocol)?;
            }
            if received < room {
                break;
            }
        }
        Ok(if turn > 0 { Read::Some } else { Read::Nothing })
    }

    /// Returns `true` if a whole frame waits, or a part of a put. `longest`: bytes of the longest
    /// message.
    pub(super) fn has_whole(&self, longest: usize) -> bool {
        if self.landing.is_some() {
            return !self.pending.is_empty();
        }
        let Some((head, rest)) = self.pending.split_first_chunk::<HEAD>() else { return false };
        match Frame::decode(*head, longest) {
            Ok(Frame::Message { len, .. }) => rest.len() >= len,
            _ => true,
        }
    }

    /// Adds bytes that were read elsewhere.
    pub(super) fn append(&mut self, bytes: &[u8]) {
        self.received += bytes.len() as u64;
        self.pending.extend(bytes);
    }

    /// Takes in bytes behind those that wait.
    fn take_in(&mut self, bytes: &[u8], to: &mut Receiving<'_>) -> Result<(), String> {
        if self.pending.is_empty() {
            let taken = self.parse(bytes, to)?;
            self.pending.extend(&bytes[taken..]);
            return Ok(());
        }
        let mut pending = std::mem::take(&mut self.pending);
        pending.extend(bytes);
        let taken = self.parse(&pending, to)?;
        pending.drain(..taken);
        self.pending = pending;
        Ok(())
    }

    /// Takes frames off the front, and returns their bytes.
    fn parse(&mut self, bytes: &[u8], to: &mut Receiving<'_>) -> Result<usize, String> {
        let mut rest = bytes;
        loop {
            if let Some(landing) = &mut self.landing {
                let behind = landing.copy(rest);
                self.fresh += (rest.len() - behind.len()) as u64;
                rest = behind;
                self.land();
                if self.landing.is_some() {
                    break;
                }
            }
            if to.batch.is_full() || self.has_ended {
                break;
            }
            let Some((head, body)) = rest.split_first_chunk::<HEAD>() else { break };
            match Frame::decode(*head, to.packets.packet_size())? {
                Frame::Message { header, len } => {
                    let Some((payload, behind)) = body.split_at_checked(len) else { break };
                    if !self.arrive(header, payload, to) {
                        break;
                    }
                    self.fresh += (HEAD + len) as u64;
                    rest = behind;
                }
                Frame::Put { window, at, len } => {
                    let window = to.windows.find(window, self.peer, (at, len))?;
                    let window = window.filter(|_| !to.drops);
                    self.landing = Some(Landing { window, at, left: len });
                    rest = body;
                }
                Frame::Bye => {
                    self.has_ended = true;
                    self.fresh += HEAD as u64;
                    rest = body;
                }
                Frame::Ack { received } => {
                    self.notes += HEAD as u64;
                    self.acked = Some(received);
                    rest = body;
                }
            }
        }
        Ok(bytes.len() - rest.len())
    }

    /// Delivers a message. Returns `false` if there is no packet for it.
    fn arrive(&self, header: Header, payload: &[u8], to: &mut Receiving<'_>) -> bool {
        if to.drops {
            return true;
        }
        let payload = if let Some(mut small) = SmallBytes::zeroed(payload.len()) {
            // Both are host memory of that length.
            let _ = copy_now(MemMut::host(small.as_mut_slice()), MemRef::host(payload));
            to.batch.push_small(SmallArrival::new(self.peer, header, small));
            return true;
        } else if let Some(mut packet) = to.packets.take() {
            packet.set_len(payload.len());
            // Both are host memory of that length.
            let _ = copy_now(packet.view_mut(), MemRef::host(payload));
            Payload::Packet(packet)
        } else if to.batch.is_empty() {
            // While the user keeps all packets, messages come one at a time.
            Payload::Aside(payload.to_vec())
        } else {
            return false;
        };
        to.batch.push(Event::arrived(self.peer, header, payload));
        true
    }

    /// Ends the put if all of it has come.
    fn land(&mut self) {
        if self.landing.as_ref().is_some_and(|landing| landing.left == 0) {
            self.landing = None;
            self.owes_ack = true;
        }
    }
}

/// A receiving end, with its connection.
#[derive(Debug)]
pub(super) struct Inbound {
    pub(super) incoming: Incoming,
    /// The sending end, which has the same place.
    pub(super) link: Arc<Outgoing>,
    pub(super) socket: Option<Arc<WatchedStream>>,
}

impl Inbound {
    /// Acknowledges the bytes: all of them, or if that is due.
    pub(super) fn acknowledge(&mut self, shared: &TcpShared, all: bool) {
        let received = self.incoming.received;
        if self.incoming.owes_ack(all)
            && let Some(socket) = &self.socket
            && self.link.note(shared, socket, Frame::Ack { received })
        {
            self.incoming.was_acked();
        }
    }

    /// Acknowledges all bytes, and gives back the memory of a burst.
    pub(super) fn rest(&mut self, shared: &TcpShared) {
        self.acknowledge(shared, true);
        self.incoming.pending.shrink_to(KEPT);
    }

    /// Has the kernel acknowledge what was read: a peer that closes waits for it.
    pub(super) fn hurry(&self) {
        if let Some(socket) = &self.socket {
            acknowledge_now(socket);
        }
    }

    /// Drops the bytes that have come. The device takes no more messages.
    ///
    /// # Errors
    /// The connection has ended.
    pub(super) fn drain(&self) -> Result<(), Errno> {
        self.socket.as_ref().map_or(Ok(()), |socket| drain(socket))
    }
}

/// The reason why a connection was not read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ReadFault {
    /// The sender did something against the protocol.
    Protocol(String),
    /// The connection has ended.
    Broken(Errno),
}

impl Landing {
    fn came(&mut self, bytes: u64) {
        self.at += bytes;
        self.left -= bytes;
    }

    /// Copies as much as is its own, and returns the rest.
    fn copy<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let len = usize::try_from(self.left).unwrap_or(usize::MAX).min(bytes.len());
        let (own, rest) = bytes.split_at(len);
        if let Some(window) = &self.window {
            window.write(self.at, len, |to| {
                // Both are host memory of that length.
                let _ = copy_now(to, MemRef::host(own));
            });
        }
        self.came(len as u64);
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::{HostAllocator, PacketPool};
    use proptest::prelude::*;

    const PEER: PeerId = PeerId(1);

    /// Returns what arrives of these bytes, in pieces of this length, with batches of this limit.
    fn arrivals(
        stream: &[u8],
        cut: usize,
        limit: usize,
    ) -> Result<(Vec<Vec<u8>>, Incoming), String> {
        let pool = PacketPool::new(Arc::new(HostAllocator), 256, 4);
        let (windows, mut batch) = (Windows::default(), Batch::new(limit));
        let mut incoming = Incoming::new(PEER, 4000, 256);
        let mut got = Vec::new();
        let mut pieces = stream.chunks(cut);
        loop {
            let mut to = Receiving {
                packets: &pool,
                windows: &windows,
                batch: &mut batch,
                scratch: &mut [],
                drops: false,
            };
            let piece = pieces.next();
            incoming.take_in(piece.unwrap_or(&[]), &mut to)?;
            let is_idle = batch.is_empty();
            for event in batch.drain() {
                let Event::Arrived { payload, .. } = event else { panic!("{event:?}") };
                let mut bytes = vec![0; payload.len()];
                copy_now(MemMut::host(&mut bytes), payload.view()).unwrap();
                got.push(bytes);
            }
            if piece.is_none() && is_idle {
                return Ok((got, incoming));
            }
        }
    }

    proptest! {
        #[test]
        fn messages_come_whole_and_in_order_however_the_stream_is_cut(
            lens in proptest::collection::vec(0..=256_usize, 0..20),
            cut in 1..300_usize,
            limit in 1..9_usize,
        ) {
            let sent: Vec<Vec<u8>> =
                lens.iter().enumerate().map(|(at, len)| vec![at as u8; *len]).collect();
            let mut stream = Vec::new();
            for bytes in &sent {
                stream.extend(Frame::Message { header: Header([1, 2]), len: bytes.len() }.encode());
                stream.extend(bytes);
            }
            stream.extend(Frame::Bye.encode());
            let (got, incoming) = arrivals(&stream, cut, limit).unwrap();
            prop_assert_eq!(got, sent);
            prop_assert!(incoming.has_ended && incoming.pending.is_empty());
        }

        #[test]
        fn any_bytes_are_messages_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            kind in 0..5_u8,
            len in 0..300_u64,
        ) {
            let head = u64::from(kind) << 56 | len;
            let stream = [&head.to_le_bytes()[..], &bytes].concat();
            let _ = arrivals(&stream, 7, 4);
        }
    }

    #[test]
    fn a_message_is_acknowledged_behind_words_that_were_acknowledged_before_they_were_read() {
        let pool = PacketPool::new(Arc::new(HostAllocator), 256, 4);
        let windows = Windows::default();
        let mut incoming = Incoming::new(PEER, 100, 256);
        let take = |incoming: &mut Incoming, bytes: &[u8], limit| {
            let mut batch = Batch::new(limit);
            let batch = &mut batch;
            let mut to = Receiving {
                packets: &pool,
                windows: &windows,
                batch,
                scratch: &mut [],
                drops: false,
            };
            incoming.take_in(bytes, &mut to).unwrap();
        };
        let message = Frame::Message { header: Header([1, 2]), len: 0 }.encode();
        let word = Frame::Ack { received: 2 }.encode();
        // The batch has room for the first message only.
        take(&mut incoming, &[message, word, word, word].concat(), 1);
        assert!(incoming.owes_ack(false));
        incoming.was_acked();
        take(&mut incoming, &[], 1);
        assert!(!incoming.owes_ack(true), "words alone are not acknowledged");
        take(&mut incoming, &message, 1);
        assert!(incoming.owes_ack(false));
    }

    #[test]
    fn a_put_lands_in_its_window_and_is_acknowledged_at_its_end() {
        let pool = PacketPool::new(Arc::new(HostAllocator), 256, 4);
        let (windows, mut batch) = (Arc::new(Windows::default()), Batch::new(4));
        let open = Box::new(windows.open(PEER, vec![0; 10].into()).unwrap());
        let mut incoming = Incoming::new(PEER, 4000, 256);
        let mut stream = Frame::Put { window: 1, at: 2, len: 5 }.encode().to_vec();
        stream.extend(b"bytes");
        let (packets, windows) = (&pool, &windows);
        let mut to =
            Receiving { packets, windows, batch: &mut batch, scratch: &mut [], drops: false };
        let (most, last) = stream.split_at(27);
        for (at, piece) in most.chunks(3).enumerate() {
            incoming.take_in(piece, &mut to).unwrap();
            assert!(!incoming.owes_ack(false), "piece {at}");
        }
        // These come with the first messages of the next connection.
        incoming.append(last);
        assert!(incoming.has_whole(256), "nothing more will come");
        assert_eq!(incoming.read(None, &mut to), Ok(Read::Nothing));
        assert!(incoming.owes_ack(false));
        let buffer = crate::contract::Exposed::take_back(open);
        assert_eq!(buffer.as_slice(), Some(&b"\0\0bytes\0\0\0"[..]));
    }
}
