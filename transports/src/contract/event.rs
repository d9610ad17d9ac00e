//! What polling a device yields.

use super::{Header, OpToken, PeerId};
use crate::gpu::GpuError;
use crate::mem::{Buffer, CopyError, Loan, MemRef, Packet, SmallBytes};
use std::os::fd::BorrowedFd;

/// Something that happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// An operation that was posted is over.
    Completion {
        /// Which one.
        token: OpToken,
        /// The buffer that it had taken.
        buffer: Buffer,
        /// How it ended. A failure is rare, and boxed: events are moved, and shall be small.
        outcome: Result<(), Box<OpFailure>>,
    },
    /// A message came in.
    Arrived {
        /// From whom.
        from: PeerId,
        /// The sender's header.
        header: Header,
        /// Its bytes.
        payload: Payload,
    },
    /// A peer has answered: its link is up.
    Connected {
        /// Which peer.
        peer: PeerId,
    },
    /// A peer is known to be gone. Everything that it had sent before has been yielded already.
    PeerDown {
        /// Which peer.
        peer: PeerId,
        /// How it went.
        cause: DownCause,
    },
}

/// A message's bytes, wherever the transport has them.
#[derive(Debug)]
pub enum Payload {
    /// A few bytes, in place.
    Small(SmallBytes),
    /// In a packet of the device's source.
    Packet(Packet),
    /// In memory of the sender's, which the sender could still change: to be copied out, and given
    /// back by dropping it.
    Loan(Loan),
    /// On the heap, put aside by the transport or by who polled it, because packets are short.
    Aside(Vec<u8>),
}

impl Payload {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Small(bytes) => bytes.as_slice().len(),
            Self::Packet(packet) => packet.len(),
            Self::Loan(loan) => loan.len(),
            Self::Aside(bytes) => bytes.len(),
        }
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes, for the copy function.
    pub fn view(&self) -> MemRef<'_> {
        match self {
            Self::Small(bytes) => MemRef::host(bytes.as_slice()),
            Self::Packet(packet) => packet.view(),
            Self::Loan(loan) => loan.view(),
            Self::Aside(bytes) => MemRef::host(bytes),
        }
    }
}

/// How an operation failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpFailure {
    /// The peer went before the operation was over.
    #[error("the peer is gone: {0}")]
    Down(DownCause),
    /// A copy failed.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The event that the operation waited for failed.
    #[error("the event that the operation was ordered after failed: {0}")]
    Event(GpuError),
    /// The device was closed first.
    #[error("the device was closed before the operation was over")]
    Closed,
}

/// How a peer went.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DownCause {
    /// It closed its device in order.
    #[error("it has closed its device")]
    Closed,
    /// Its process is dead, or its end of the connection is.
    #[error("its process is gone ({0})")]
    Gone(String),
    /// It broke the protocol; what it wrote cannot be trusted.
    #[error("it broke the protocol: {0}")]
    Protocol(String),
    /// It would not let this rank in.
    #[error("it refused the connection: {0}")]
    Refused(String),
    /// This process lacked what a link takes. How the peer is, is not known.
    #[error("this process lacks what a link to it takes: {0}")]
    Lacking(String),
}

/// A message of a few bytes: what most batches hold most of. Plain data, one cache line long, moved
/// as such and dropped for nothing.
#[derive(Clone, Copy, Debug)]
pub struct SmallArrival {
    /// From whom.
    pub from: PeerId,
    /// The sender's header.
    pub header: Header,
    /// Its bytes.
    pub bytes: SmallBytes,
}

const _: () = assert!(size_of::<SmallArrival>() == 64, "as large as the slot of a ring");

impl From<SmallArrival> for Event {
    fn from(SmallArrival { from, header, bytes }: SmallArrival) -> Self {
        Self::Arrived { from, header, payload: Payload::Small(bytes) }
    }
}

/// Where polls put what they find: a list that the caller owns and uses again. In front stand small
/// messages, behind them all other events, and small messages that came after those.
#[derive(Debug)]
pub struct Batch {
    small: Vec<SmallArrival>,
    events: Vec<Event>,
    limit: usize,
}

impl Batch {
    /// A list for up to `limit` events; allocates once.
    pub fn new(limit: usize) -> Self {
        let limit = limit.max(1);
        Self { small: Vec::with_capacity(limit), events: Vec::with_capacity(limit), limit }
    }

    /// Adds an event. A transport looks at [`is_full`](Self::is_full) before it takes something off
    /// a ring.
    #[inline]
    pub fn push(&mut self, event: Event) {
        self.events.push(event);
    }

    /// Adds a small message, behind everything that is there.
    #[inline(always)]
    pub fn push_small(&mut self, message: SmallArrival) {
        if self.events.is_empty() {
            self.small.push(message);
        } else {
            self.events.push(message.into());
        }
    }

    /// Whether the limit is reached.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.len() >= self.limit
    }

    /// Events that it still has room for.
    #[inline(always)]
    pub fn room(&self) -> usize {
        self.limit.saturating_sub(self.len())
    }

    /// Events in it.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.small.len() + self.events.len()
    }

    /// Whether there are none.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The small messages in front, in order.
    #[inline(always)]
    pub fn small_mut(&mut self) -> &mut [SmallArrival] {
        &mut self.small
    }

    /// The events behind the small messages in front, in order.
    #[inline(always)]
    pub fn events_mut(&mut self) -> &mut [Event] {
        &mut self.events
    }

    /// Drops the first `count` of the small messages in front, which somebody has dealt with in
    /// place.
    #[inline(always)]
    pub fn forget_small(&mut self, count: usize) {
        if count >= self.small.len() {
            self.small.clear();
        } else {
            self.small.drain(..count);
        }
    }

    /// Takes everything out, in order.
    #[inline]
    pub fn drain(&mut self) -> impl Iterator<Item = Event> + '_ {
        self.small.drain(..).map(Event::from).chain(self.events.drain(..))
    }
}

/// What a poll came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Polled {
    /// Events were found.
    Some,
    /// Nothing was there.
    Idle,
    /// Another thread is polling this device.
    Busy,
}

/// Whether one may sleep.
#[derive(Debug)]
pub enum Armed<'a> {
    /// No: there is something already, or another thread is polling. Poll again.
    Ready,
    /// Yes: the descriptor becomes readable when there is something. Then, or when tired of
    /// waiting, disarm and poll.
    Wait(BorrowedFd<'a>),
}
