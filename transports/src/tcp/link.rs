//! A link, as the runtime has it: operations become bytes of its sending end.
//!
//! Messages are copied behind each other, and one call sends many of them. A message that follows a
//! call of the socket closely waits. The next poll sends it, or the flusher's thread, or the
//! message with which [`FULL`] bytes have gathered. Any other leaves at once, and so does one
//! behind something that came.

use super::device::TcpDevice;
use super::frame::{Frame, HEAD};
use super::outflow::{Body, BodyOwner};
use super::outgoing::{Line, Outgoing, Sending};
use super::shared::TcpShared;
use crate::clock::TICKS_PER_MICROSECOND;
use crate::contract::{
    BufferChunk, Busy, DownCause, Exposed, ExposedChunks, Header, Link, Op, OpToken, RemotePlace,
    Short, Submit, SubmitError,
};
use crate::mem::{Buffer, MemRef};
use parking_lot::MutexGuard;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// Unsent bytes that are sent without waiting for more.
const FULL: u64 = 16 << 10;

/// A message that follows a call of the socket within this time waits for others.
const CLOSE: u64 = 20 * TICKS_PER_MICROSECOND;

/// A link, as the runtime has it.
pub(super) struct TcpLink {
    pub(super) outgoing: Arc<Outgoing>,
    pub(super) shared: Arc<TcpShared>,
    pub(super) device: Weak<TcpDevice>,
}

impl TcpLink {
    /// Returns the state, if an operation can be taken now.
    #[inline]
    fn ready(&self) -> Result<Result<MutexGuard<'_, Sending>, Busy>, SubmitError> {
        if !self.outgoing.is_up.load(Ordering::Acquire) {
            return self.not_up();
        }
        if !self.shared.owner.is_here() {
            return Err(self.down(DownCause::Closed));
        }
        match self.outgoing.sending.try_lock() {
            // It has ended since.
            Some(sending) if matches!(sending.line, Line::Ended(_)) => {
                drop(sending);
                self.not_up()
            }
            Some(sending) => Ok(Ok(sending)),
            None => Ok(Err(Busy::Lock)),
        }
    }

    #[cold]
    fn not_up(&self) -> Result<Result<MutexGuard<'_, Sending>, Busy>, SubmitError> {
        match &self.outgoing.sending.lock().line {
            Line::Ended(cause) => Err(self.down(cause.clone())),
            _ => Ok(Err(Busy::Connecting)),
        }
    }

    fn down(&self, cause: DownCause) -> SubmitError {
        SubmitError::Down { peer: self.outgoing.peer, cause }
    }

    /// Returns `true` if the window has room for a message. An empty one has room for any.
    #[inline]
    fn has_room(&self, sending: &Sending, len: usize) -> bool {
        let copied = sending.flow.copied();
        copied == 0 || copied + HEAD + len <= self.shared.options.window
    }

    fn message(
        &self,
        header: Header,
        bytes: MemRef<'_>,
        more: bool,
    ) -> Result<Submit, SubmitError> {
        let (len, max) = (bytes.len(), self.shared.packets.packet_size());
        if len > max {
            return Err(SubmitError::TooLong { len, max });
        }
        if !bytes.place().is_host() {
            return Err(SubmitError::Kind(bytes.place().kind()));
        }
        let mut sending = match self.ready()? {
            Ok(sending) => sending,
            Err(busy) => return Ok(Submit::Busy(busy)),
        };
        if !self.has_room(&sending, len) {
            drop(sending);
            self.hear();
            sending = match self.ready()? {
                Ok(sending) => sending,
                Err(busy) => return Ok(Submit::Busy(busy)),
            };
            if !self.has_room(&sending, len) {
                self.outgoing.flush(&mut sending, &self.shared);
                return Ok(Submit::Busy(Busy::Full));
            }
        }
        sending.flow.push(&Frame::Message { header, len }.encode());
        sending.flow.push_memory(bytes);
        self.send(sending, more);
        Ok(Submit::Done)
    }

    /// Takes the acknowledgements that have come: a caller that tries again need not poll.
    #[cold]
    fn hear(&self) {
        if let Some(device) = self.device.upgrade() {
            device.read_ahead(self.outgoing.index);
        }
    }

    fn put(
        &self,
        to: RemotePlace,
        len: usize,
        body: impl FnOnce() -> Body,
    ) -> Result<Submit, SubmitError> {
        let mut sending = match self.ready()? {
            Ok(sending) => sending,
            Err(busy) => return Ok(Submit::Busy(busy)),
        };
        if !self.has_room(&sending, 0) {
            return Ok(Submit::Busy(Busy::Full));
        }
        let put = Frame::Put { window: to.key, at: to.addr, len: len as u64 };
        sending.flow.push(&put.encode());
        sending.flow.push_body(body());
        self.shared.expects(self.outgoing.index);
        self.send(sending, false);
        Ok(Submit::Posted)
    }

    /// Sends what was added, or leaves it to the next poll.
    #[inline]
    fn send(&self, mut sending: MutexGuard<'_, Sending>, more: bool) {
        let unsent = sending.flow.unsent();
        let waits = more || self.outgoing.since_sent() < CLOSE;
        if unsent >= FULL || !waits {
            self.outgoing.flush(&mut sending, &self.shared);
        } else if !sending.is_listed {
            sending.is_listed = true;
            drop(sending);
            self.shared.leaves(self.outgoing.index);
        }
    }
}

/// Checks that a buffer is host memory in one piece.
fn can_send(buffer: &Buffer) -> Result<(), SubmitError> {
    if buffer.kind().is_host() && !matches!(buffer, Buffer::List(_)) {
        return Ok(());
    }
    let why = match buffer.kind() {
        kind if kind.is_host() => "a socket sends a buffer in one piece only".into(),
        kind => format!("a socket cannot send {kind} memory as it lies"),
    };
    Err(SubmitError::Unregistered(why))
}

impl Link for TcpLink {
    fn submit(&self, op: Op<'_>) -> Result<Submit, SubmitError> {
        match op {
            Op::AmCopied { header, bytes } => self.message(header, bytes, false),
            Op::AmOwned { header, buffer, .. } if !matches!(buffer, Buffer::List(_)) => {
                self.message(header, buffer.view(), false)
            }
            // The caps say so.
            Op::AmOwned { buffer, .. } => Err(SubmitError::TooLong { len: buffer.len(), max: 0 }),
            Op::Put { to, buffer, token } => {
                can_send(buffer)?;
                let len = buffer.len();
                self.put(to, len, || Body { bytes: BodyOwner::Own(std::mem::take(buffer)), token })
            }
            Op::Get { .. } | Op::Atomic { .. } => Err(SubmitError::no_remote_memory()),
        }
    }

    fn am_more(&self, header: (u64, u64), bytes: &[u8]) -> Short {
        match self.message(Header(header.into()), MemRef::host(bytes), true) {
            Ok(Submit::Done) => Short::Done,
            Ok(Submit::Busy(busy)) => Short::Busy(busy),
            _ => Short::Ask,
        }
    }

    fn expose(&self, buffer: Buffer) -> Result<Box<dyn Exposed>, (String, Buffer)> {
        Ok(Box::new(self.shared.windows.open(self.outgoing.peer, buffer)?))
    }

    fn expose_chunks(&self, buffer: Buffer) -> Result<Box<dyn ExposedChunks>, (String, Buffer)> {
        Ok(Box::new(self.shared.windows.open(self.outgoing.peer, buffer)?))
    }

    fn put_chunk(
        &self,
        to: RemotePlace,
        chunk: &BufferChunk,
        token: OpToken,
    ) -> Result<Submit, SubmitError> {
        can_send(&chunk.of)?;
        self.put(to, chunk.len, || Body { bytes: BodyOwner::Shared(chunk.clone()), token })
    }

    fn is_up(&self) -> bool {
        self.outgoing.is_up.load(Ordering::Acquire)
    }
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        if !self.shared.owner.is_here() {
            return;
        }
        let mut sending = self.outgoing.sending.lock();
        sending.bye();
        self.outgoing.flush(&mut sending, &self.shared);
    }
}
