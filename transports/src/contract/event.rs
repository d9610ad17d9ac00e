//! Results of polling a device.

use super::{Header, OpToken, PeerId};
use crate::mem::{Buffer, CopyError, Loan, MemRef, Packet, SmallBytes};
use std::os::fd::BorrowedFd;

/// Something that happened.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A posted operation has ended.
    Completion {
        /// The operation.
        token: OpToken,
        /// The buffer that the operation had taken.
        buffer: Buffer,
        /// The outcome. A failure is rare, and boxed, because events are moved and have to be
        /// small.
        outcome: Result<(), Box<OpFailure>>,
    },
    /// A message came in.
    Arrived {
        /// The sender.
        from: PeerId,
        /// The sender's header.
        header: Header,
        /// Its bytes.
        payload: Payload,
        /// The runtime's note.
        mark: Mark,
    },
    /// A peer has answered: its link is up.
    Connected {
        /// The peer.
        peer: PeerId,
    },
    /// A peer is known to be gone. Everything that it had sent before was yielded earlier.
    PeerDown {
        /// The peer.
        peer: PeerId,
        /// The reason.
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
    /// In the sender's memory, which the sender could still change. The receiver copies the bytes
    /// out and drops the loan, which gives the memory back.
    Loan(Loan),
    /// On the heap: the transport, or the thread that polled it, put the bytes aside because
    /// packets are short.
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

    /// Returns `true` if there are no bytes.
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

/// Reason why an operation failed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpFailure {
    /// The peer went before the operation ended.
    #[error("the peer is gone: {0}")]
    Down(DownCause),
    /// A copy failed.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The device was closed first.
    #[error("the device was closed before the operation was over")]
    Closed,
}

/// Reason why a peer is gone.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DownCause {
    /// It closed its device in order.
    #[error("it has closed its device")]
    Closed,
    /// Its process is dead, or its end of the connection is.
    #[error("its process is gone ({0})")]
    Gone(String),
    /// The job has lost it, as its bootstrap says.
    #[error("it {0}")]
    Lost(String),
    /// The peer broke the protocol; what it wrote cannot be trusted.
    #[error("it broke the protocol: {0}")]
    Protocol(String),
    /// The peer refused this rank's connection.
    #[error("it refused the connection: {0}")]
    Refused(String),
    /// This process lacked a resource that a link takes. The peer's state is unknown.
    #[error("this process lacks what a link to it takes: {0}")]
    Lacking(String),
}

/// Room for a note of the runtime about an arrival. A transport leaves the default in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mark(pub u16);

/// A message of a few bytes, the most frequent event of most batches. Plain data, one cache line
/// long: moving it copies the line, and dropping it does nothing.
#[derive(Clone, Copy, Debug)]
pub struct SmallArrival {
    /// The sender.
    pub from: PeerId,
    /// The sender's header.
    pub header: Header,
    /// Its bytes.
    pub bytes: SmallBytes,
    /// The runtime's note.
    pub mark: Mark,
}

impl SmallArrival {
    /// Returns the arrival of a message.
    #[inline(always)]
    pub fn new(from: PeerId, header: Header, bytes: SmallBytes) -> Self {
        Self { from, header, bytes, mark: Mark::default() }
    }
}

const _: () = assert!(size_of::<SmallArrival>() == 64, "as large as the slot of a ring");

impl Event {
    /// Returns the arrival of a message.
    #[inline]
    pub fn arrived(from: PeerId, header: Header, payload: Payload) -> Self {
        Self::Arrived { from, header, payload, mark: Mark::default() }
    }
}

impl From<SmallArrival> for Event {
    fn from(SmallArrival { from, header, bytes, mark }: SmallArrival) -> Self {
        Self::Arrived { from, header, payload: Payload::Small(bytes), mark }
    }
}

/// List in which polls put the events they find; the caller owns it and uses it again. Small
/// messages stand in front. Behind them stand all other events, and small messages that came after
/// those.
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

    /// Adds an event. A transport looks at [`is_full`](Self::is_full) before it takes something
    /// off a ring.
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

    /// Returns `true` if the limit is reached.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.len() >= self.limit
    }

    /// Returns the number of events that still fit.
    #[inline(always)]
    pub fn room(&self) -> usize {
        self.limit.saturating_sub(self.len())
    }

    /// Returns the number of events.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.small.len() + self.events.len()
    }

    /// Returns `true` if there are no events.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the small messages in front, in order.
    #[inline(always)]
    pub fn small_mut(&mut self) -> &mut [SmallArrival] {
        &mut self.small
    }

    /// Returns the events behind the small messages in front, in order.
    #[inline(always)]
    pub fn events_mut(&mut self) -> &mut [Event] {
        &mut self.events
    }

    /// Drops the first `count` of the small messages in front, which the caller has handled in
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

/// Outcome of a poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Polled {
    /// Events were found.
    Some,
    /// Nothing was there.
    Idle,
    /// Another thread is polling this device.
    Busy,
}

/// Answer to "may this thread sleep?".
#[derive(Debug)]
pub enum Armed<'a> {
    /// No: an event waits already, or another thread is polling. Poll again.
    Ready,
    /// Yes: the descriptor becomes readable when there is something. Then, or after a timeout,
    /// disarm and poll.
    Wait(BorrowedFd<'a>),
}
