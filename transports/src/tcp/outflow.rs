//! The bytes that a link owes its peer: copied messages and buffers of the user, in order.
//!
//! A byte is known by its offset since the link began. Bytes stay here until the peer has
//! acknowledged them, so that another connection can send them once more.

use super::frame::{Frame, HEAD};
use crate::contract::{BufferChunk, OpToken};
use crate::mem::copy::copy_now;
use crate::mem::{Buffer, MemMut, MemRef};
use std::collections::VecDeque;
use std::sync::Arc;

/// Bytes of memory that each list of a link at rest keeps.
pub(super) const KEPT: usize = 4096;

/// Bytes that are sent from where they lie.
#[derive(Debug)]
pub(super) struct Body {
    pub(super) bytes: BodyOwner,
    pub(super) token: OpToken,
}

/// Owner of the bytes of a body: host memory in one piece.
#[derive(Debug)]
pub(super) enum BodyOwner {
    Own(Buffer),
    Shared(BufferChunk),
}

impl BodyOwner {
    fn view(&self) -> MemRef<'_> {
        match self {
            Self::Own(buffer) => buffer.view(),
            Self::Shared(BufferChunk { of, at, len }) => of.view().part(*at, *len),
        }
    }

    /// Returns what an operation's completion brings: the buffer that it had taken.
    pub(super) fn into_buffer(self) -> Buffer {
        match self {
            Self::Own(buffer) => buffer,
            Self::Shared(chunk) => {
                drop::<Arc<_>>(chunk.of);
                Buffer::Empty
            }
        }
    }
}

#[derive(Debug)]
enum OutflowPiece {
    /// Number of the copied bytes.
    Copied(usize),
    Body(Body),
}

impl OutflowPiece {
    /// Returns the number of its bytes, and of the copied ones among them.
    fn lens(&self) -> (usize, usize) {
        match self {
            Self::Copied(len) => (*len, *len),
            Self::Body(body) => (body.bytes.view().len(), 0),
        }
    }
}

/// An acknowledgement of bytes that were never sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("it acknowledges {acked} bytes of {sent} that were sent")]
pub(super) struct UnsentAcknowledged {
    acked: u64,
    sent: u64,
}

/// The place of a piece.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    /// Pieces before it, and copied bytes in them.
    pieces: usize,
    copied: usize,
    /// Offset of its first byte.
    at: u64,
}

/// The bytes that are not acknowledged.
#[derive(Debug, Default)]
pub(super) struct Outflow {
    copied: VecDeque<u8>,
    /// Pieces from the offset `first` on.
    pieces: VecDeque<OutflowPiece>,
    first: u64,
    /// Place where the next send begins to look: at the first piece with unsent bytes, or the last.
    next: Cursor,
    acked: u64,
    sent: u64,
    end: u64,
    /// Bodies among the pieces.
    bodies: usize,
    /// Offsets of the ends of notes that are not acknowledged.
    notes: VecDeque<u64>,
}

impl Outflow {
    /// Returns the number of copied bytes that are not acknowledged, apart from notes.
    pub(super) fn copied(&self) -> usize {
        // A part of the first note may be acknowledged.
        self.copied.len().saturating_sub(self.notes.len() * HEAD)
    }

    /// Returns the number of bytes that were not sent.
    pub(super) fn unsent(&self) -> u64 {
        self.end - self.sent
    }

    /// Returns the number of bytes that were sent and are not acknowledged.
    pub(super) fn unacked(&self) -> u64 {
        self.sent - self.acked
    }

    /// Returns the number of bytes that the peer has acknowledged.
    pub(super) fn acked(&self) -> u64 {
        self.acked
    }

    /// Returns `true` if the end of an operation waits for the peer.
    pub(super) fn has_bodies(&self) -> bool {
        self.bodies > 0
    }

    /// Adds a copy of these bytes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.copied.extend(bytes);
        self.added(bytes.len());
    }

    /// Adds a frame about the link that goes the other way. It takes none of the window's room: a
    /// window that is full has to be acknowledged all the same.
    pub(super) fn push_note(&mut self, frame: Frame) {
        self.push(&frame.encode());
        self.notes.push_back(self.end);
    }

    /// Adds a copy of host memory, which peers may be writing at this moment.
    pub(super) fn push_memory(&mut self, bytes: MemRef<'_>) {
        let (at, len) = (self.copied.len(), bytes.len());
        // In place of the bytes, for the count.
        self.copied.resize(at + len, 0);
        let (front, back) = self.copied.as_mut_slices();
        let split = front.len();
        let front = &mut front[at.min(split)..];
        let own = front.len();
        // Host memory of those lengths.
        let _ = copy_now(MemMut::host(front), bytes.part(0, own));
        let back = &mut back[at.saturating_sub(split)..];
        let _ = copy_now(MemMut::host(back), bytes.part(own, len - own));
        self.added(len);
    }

    fn added(&mut self, len: usize) {
        self.end += len as u64;
        match self.pieces.back_mut() {
            Some(OutflowPiece::Copied(copied)) => *copied += len,
            _ => self.pieces.push_back(OutflowPiece::Copied(len)),
        }
    }

    /// Adds bytes that stay where they are.
    pub(super) fn push_body(&mut self, body: Body) {
        self.end += body.bytes.view().len() as u64;
        self.pieces.push_back(OutflowPiece::Body(body));
        self.bodies += 1;
    }

    /// Calls `each` with the unsent bytes, piece by piece, until it returns `false`.
    pub(super) fn unsent_pieces<'a>(&'a self, mut each: impl FnMut(MemRef<'a>) -> bool) {
        let (front, back) = self.copied.as_slices();
        let Cursor { pieces, copied: mut copy, mut at } = self.next;
        for piece in self.pieces.iter().skip(pieces) {
            let (len, copied) = piece.lens();
            let skip = usize::try_from(self.sent.saturating_sub(at)).unwrap_or(usize::MAX).min(len);
            let more = match piece {
                _ if skip == len => true,
                OutflowPiece::Copied(len) => {
                    let (from, to) = (copy + skip, copy + len);
                    let split = front.len();
                    let one = &front[from.min(split)..to.min(split)];
                    let other = &back[from.saturating_sub(split)..to.saturating_sub(split)];
                    [one, other]
                        .into_iter()
                        .filter(|part| !part.is_empty())
                        .all(|part| each(MemRef::host(part)))
                }
                OutflowPiece::Body(body) => each(body.bytes.view().part(skip, len - skip)),
            };
            if !more {
                return;
            }
            (at, copy) = (at + len as u64, copy + copied);
        }
    }

    /// Notes that as many bytes more were sent.
    pub(super) fn was_sent(&mut self, bytes: usize) {
        self.sent = self.end.min(self.sent + bytes as u64);
        while self.next.pieces + 1 < self.pieces.len() {
            let (len, copied) = self.pieces[self.next.pieces].lens();
            let Cursor { pieces, copied: before, at } = self.next;
            if at + len as u64 > self.sent {
                break;
            }
            let (pieces, copied) = (pieces + 1, before + copied);
            self.next = Cursor { pieces, copied, at: at + len as u64 };
        }
    }

    /// Drops what the peer has acknowledged. Calls `ended` with each body that is there as a whole.
    ///
    /// # Errors
    /// The peer acknowledges what was not sent.
    pub(super) fn acknowledge(
        &mut self,
        acked: u64,
        mut ended: impl FnMut(Body),
    ) -> Result<(), UnsentAcknowledged> {
        if acked > self.sent {
            return Err(UnsentAcknowledged { acked, sent: self.sent });
        }
        self.acked = self.acked.max(acked);
        while self.notes.front().is_some_and(|end| *end <= self.acked) {
            self.notes.pop_front();
        }
        let (pieces, copied) = (self.pieces.len(), self.copied.len());
        while let Some(piece) = self.pieces.pop_front() {
            let there = usize::try_from(self.acked - self.first).unwrap_or(usize::MAX);
            let (len, copied) = piece.lens();
            self.copied.drain(..there.min(copied));
            match piece {
                OutflowPiece::Copied(_) if there >= len => {}
                OutflowPiece::Body(body) if there >= len => {
                    self.bodies -= 1;
                    ended(body);
                }
                rest => {
                    self.first += there.min(copied) as u64;
                    let rest = if copied > 0 { OutflowPiece::Copied(len - there) } else { rest };
                    self.pieces.push_front(rest);
                    break;
                }
            }
            self.first += len as u64;
        }
        let (gone, copied) = (pieces - self.pieces.len(), copied - self.copied.len());
        self.next = match self.next.pieces.checked_sub(gone) {
            None | Some(0) => self.front(),
            Some(pieces) => Cursor { pieces, copied: self.next.copied - copied, ..self.next },
        };
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn bytes_of_memory(&self) -> usize {
        let pieces = self.pieces.capacity() * size_of::<OutflowPiece>();
        self.copied.capacity() + pieces + self.notes.capacity() * size_of::<u64>()
    }

    fn front(&self) -> Cursor {
        Cursor { at: self.first, ..Cursor::default() }
    }

    /// Goes back to the first byte that the peer does not have: the next connection begins there.
    ///
    /// # Errors
    /// The peer claims bytes that were not sent, or lacks some that it had acknowledged.
    pub(super) fn resume(
        &mut self,
        at: u64,
        ended: impl FnMut(Body),
    ) -> Result<(), UnsentAcknowledged> {
        if at < self.acked {
            return Err(UnsentAcknowledged { acked: at, sent: self.acked });
        }
        self.acknowledge(at, ended)?;
        (self.sent, self.next) = (at, self.front());
        Ok(())
    }

    /// Gives back the memory of a burst.
    pub(super) fn shrink(&mut self) {
        self.copied.shrink_to(KEPT);
        self.pieces.shrink_to(KEPT / size_of::<OutflowPiece>());
        self.notes.shrink_to(KEPT / size_of::<u64>());
    }

    /// Takes out all bodies: the peer is gone.
    pub(super) fn give_up(&mut self) -> Vec<Body> {
        let given_up = std::mem::take(self);
        let bodies = given_up.pieces.into_iter();
        bodies
            .filter_map(|piece| match piece {
                OutflowPiece::Body(body) => Some(body),
                OutflowPiece::Copied(_) => None,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bytes_of(view: MemRef<'_>) -> Vec<u8> {
        let mut bytes = vec![0; view.len()];
        copy_now(MemMut::host(&mut bytes), view).unwrap();
        bytes
    }

    /// Sends up to `most` bytes into `wire`.
    fn send(flow: &mut Outflow, most: usize, wire: &mut Vec<u8>) {
        let mut sent = 0;
        flow.unsent_pieces(|piece| {
            let len = piece.len().min(most - sent);
            wire.extend(&bytes_of(piece)[..len]);
            sent += len;
            sent < most
        });
        flow.was_sent(sent);
    }

    #[derive(Clone, Debug)]
    enum OutflowStep {
        Copy(usize),
        Note,
        Body(usize),
        Send(usize),
        Acknowledge(f64),
        Cut(f64),
    }

    fn step() -> impl Strategy<Value = OutflowStep> {
        prop_oneof![
            (0..50_usize).prop_map(OutflowStep::Copy),
            Just(OutflowStep::Note),
            (0..200_usize).prop_map(OutflowStep::Body),
            (1..150_usize).prop_map(OutflowStep::Send),
            (0.0..1.0).prop_map(OutflowStep::Acknowledge),
            (0.0..1.0).prop_map(OutflowStep::Cut),
        ]
    }

    proptest! {
        #[test]
        fn the_peer_gets_each_byte_once_and_bodies_end_in_order_whatever_is_cut(
            steps in proptest::collection::vec(step(), 0..60),
        ) {
            let (mut flow, mut wanted, mut wire) = (Outflow::default(), Vec::new(), Vec::new());
            let (mut ends, mut done, mut acked) = (Vec::new(), Vec::new(), 0_u64);
            let mut next = 0_u8;
            let mut fresh = |len| (0..len).map(|_| { next = next.wrapping_add(1); next }).collect();
            for step in steps {
                match step {
                    OutflowStep::Copy(len) => {
                        let bytes: Vec<u8> = fresh(len);
                        flow.push_memory(MemRef::host(&bytes));
                        wanted.extend(bytes);
                    }
                    OutflowStep::Note => {
                        flow.push_note(Frame::Bye);
                        wanted.extend(Frame::Bye.encode());
                    }
                    OutflowStep::Body(len) => {
                        let bytes: Vec<u8> = fresh(len);
                        wanted.extend(&bytes);
                        ends.push(wanted.len() as u64);
                        let token = OpToken(ends.len() as u64);
                        flow.push_body(Body { bytes: BodyOwner::Own(bytes.into()), token });
                    }
                    OutflowStep::Send(most) => {
                        send(&mut flow, most, &mut wire);
                        // The next one passes no piece that was sent, however many there are.
                        let (at, next) = (flow.next.at, flow.next.pieces);
                        let len = flow.pieces.get(next).map_or(0, |it| it.lens().0 as u64);
                        prop_assert!(at <= flow.sent);
                        prop_assert!(flow.sent < at + len || next + 1 >= flow.pieces.len());
                    }
                    OutflowStep::Acknowledge(part) => {
                        acked += ((wire.len() as u64 - acked) as f64 * part) as u64;
                        flow.acknowledge(acked, |body| done.push(body.token.0)).unwrap();
                    }
                    OutflowStep::Cut(part) => {
                        // The bytes behind are lost on their way.
                        let arrived = acked + ((wire.len() as u64 - acked) as f64 * part) as u64;
                        wire.truncate(usize::try_from(arrived).unwrap());
                        acked = arrived;
                        flow.resume(arrived, |body| done.push(body.token.0)).unwrap();
                    }
                }
                prop_assert_eq!(&wire[..], &wanted[..wire.len()]);
                prop_assert_eq!(flow.unsent(), (wanted.len() - wire.len()) as u64);
                prop_assert_eq!(flow.unacked(), wire.len() as u64 - acked);
                prop_assert!(flow.copied() as u64 <= flow.unsent() + flow.unacked());
            }
            while flow.unsent() > 0 {
                send(&mut flow, 100, &mut wire);
            }
            flow.acknowledge(wire.len() as u64, |body| done.push(body.token.0)).unwrap();
            prop_assert_eq!(wire, wanted);
            prop_assert_eq!(done, (1..=ends.len() as u64).collect::<Vec<_>>());
            prop_assert_eq!((flow.copied(), flow.has_bodies()), (0, false));
        }
    }

    #[test]
    fn what_was_not_sent_cannot_be_acknowledged_and_what_was_acknowledged_cannot_be_lost() {
        let mut flow = Outflow::default();
        flow.push(b"four");
        assert!(flow.acknowledge(1, drop).is_err());
        flow.was_sent(4);
        flow.acknowledge(3, drop).unwrap();
        assert!(flow.resume(2, drop).is_err());
        assert!(flow.resume(5, drop).is_err());
        flow.resume(3, drop).unwrap();
        assert_eq!((flow.unsent(), flow.copied()), (1, 1));
    }
}
