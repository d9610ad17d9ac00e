//! Results of polling a device.

use super::{Header, OpToken, PeerId};
use crate::mem::{Buffer, CopyError, HostViews, Loan, MemRef, Packet, SmallBytes};
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
        /// Bytes of the message.
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
    /// A packet of the device's source.
    Packet(Packet),
    /// A loan of the sender's memory, which the sender could still change. The receiver copies the
    /// bytes out and drops the loan, which gives the memory back.
    Loan(Loan),
    /// Bytes on the heap: the transport, or the thread that polled it, put them aside because
    /// packets are short.
    Aside(Vec<u8>),
}

impl Payload {
    /// Returns the length in bytes.
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

    /// Returns a view of the bytes, for the copy function.
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
    #[error("the device was closed before the operation completed: close it afterwards")]
    Closed,
}

/// Reason why a peer is gone.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum DownCause {
    /// The peer has closed its device in order.
    #[error("it has closed its device")]
    Closed,
    /// The peer's process is dead, or its end of the connection is.
    #[error("its process is gone ({0})")]
    Gone(String),
    /// The job has lost it, as its bootstrap says.
    #[error("{0}")]
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

impl DownCause {
    /// Returns what to do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Closed => {
                "let it call wait_drained, or await a reply, before it drops its runtime, and send \
                it nothing later"
            }
            Self::Gone(_) | Self::Lost(_) | Self::Refused(_) => "look for its own messages first",
            Self::Protocol(_) => {
                "run one version of Carrack on all ranks; if all do, please report this"
            }
            Self::Lacking(_) => "correct that, and start the job again",
        }
    }
}

/// Room for a note of the runtime about an arrival. A transport leaves the default in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mark(pub u16);

/// A message of a few bytes, the most frequent event of most batches. Plain data, one cache line
/// long: moving it copies the line, and dropping it does nothing.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct SmallArrival {
    /// The sender's header.
    pub header: Header,
    /// Bytes of the message.
    pub bytes: SmallBytes,
    /// The runtime's note.
    pub mark: Mark,
    /// The sender.
    pub from: PeerId,
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
    /// One place for each message that the batch has room for. The first `count` hold a message: a
    /// message is written field by field, and nothing grows.
    small: Box<[SmallArrival]>,
    count: usize,
    events: Vec<Event>,
    /// Kind of the messages that the matcher may take in place; `None`: of any kind.
    matched: Option<u8>,
}

impl Batch {
    /// Makes a list for up to `limit` events. Allocates once.
    pub fn new(limit: usize) -> Self {
        let limit = limit.max(1);
        let empty = SmallArrival::new(PeerId(0), Header([0; 2]), SmallBytes::empty());
        let (small, events) = (vec![empty; limit].into(), Vec::with_capacity(limit));
        Self { small, count: 0, events, matched: None }
    }

    /// Says that the matcher takes only messages whose header begins with this byte from their
    /// places: others are spared the call.
    pub fn with_matched(mut self, kind: u8) -> Self {
        self.matched = Some(kind);
        self
    }

    /// Returns `true` if the matcher may take a message in place.
    #[inline(always)]
    pub fn may_match(&self, header: Header) -> bool {
        self.matched.is_none_or(|kind| header.0[0] & 0xff == u64::from(kind))
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
        match self.next_small() {
            Some(place) => {
                *place = message;
                self.keep_small();
            }
            None => self.events.push(message.into()),
        }
    }

    /// Returns the place of the next small message in front, to be written in place. A message that
    /// is moved waits for the stores that made it. It is in the batch after
    /// [`keep_small`](Self::keep_small). `None`: it has to stand behind an event, or there is no
    /// room.
    #[inline(always)]
    pub fn next_small(&mut self) -> Option<&mut SmallArrival> {
        if !self.events.is_empty() {
            return None;
        }
        self.small.get_mut(self.count)
    }

    /// Adds the small message whose place [`next_small`](Self::next_small) has returned.
    #[inline(always)]
    pub fn keep_small(&mut self) {
        self.count = (self.count + 1).min(self.small.len());
    }

    /// Returns `true` if the limit is reached.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.len() >= self.small.len()
    }

    /// Returns the number of events that still fit.
    #[inline(always)]
    pub fn room(&self) -> usize {
        self.small.len().saturating_sub(self.len())
    }

    /// Returns the number of events.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.count + self.events.len()
    }

    /// Returns `true` if there are no events.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the small messages in front, in order.
    #[inline(always)]
    pub fn small_mut(&mut self) -> &mut [SmallArrival] {
        &mut self.small[..self.count]
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
        if count < self.count {
            self.small.copy_within(count..self.count, 0);
        }
        self.count = self.count.saturating_sub(count);
    }

    /// Drops the first `count` of the events, which the caller has handled in place.
    #[inline]
    pub fn forget_events(&mut self, count: usize) {
        self.events.drain(..count.min(self.events.len()));
    }

    /// Takes everything out, in order.
    #[inline]
    pub fn drain(&mut self) -> impl Iterator<Item = Event> + '_ {
        let count = std::mem::take(&mut self.count);
        self.small[..count].iter().copied().map(Event::from).chain(self.events.drain(..))
    }
}

/// Matcher of messages with receives, before another thread can poll the device of the messages.
pub trait Matcher {
    /// Takes a message that the transport has not copied into the batch, in which nothing is. Its
    /// sender may be able to write its bytes still. Returns `false` if more has to be done with it
    /// than to match it: it then goes into the batch.
    fn match_in_place(&mut self, from: PeerId, header: Header, bytes: MemRef<'_>) -> bool {
        let _ = (from, header, bytes);
        false
    }

    /// Takes messages of one sender and header, each as [`match_in_place`](Self::match_in_place)
    /// does. Returns the number of messages that were taken: those in front.
    fn match_run(&mut self, from: PeerId, header: Header, run: HostViews<'_>) -> usize {
        run.get(0).is_some_and(|bytes| self.match_in_place(from, header, bytes)).into()
    }

    /// Matches the messages of a batch.
    fn match_all(&mut self, batch: &mut Batch);
}

impl<F: FnMut(&mut Batch)> Matcher for F {
    fn match_all(&mut self, batch: &mut Batch) {
        self(batch);
    }
}

/// Outcome of a poll.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Polled {
    /// Events were found.
    Some,
    /// Nothing was there.
    Idle,
    /// Another thread is polling this device, or the device closes.
    Busy,
}

/// Answer to "may this thread sleep?".
#[derive(Debug)]
pub enum Armed<'a> {
    /// No: an event waits already, another thread is polling, or the device closes. Poll again.
    Ready,
    /// Yes: the descriptor becomes readable when there is something. Then, or after a timeout,
    /// disarm and poll.
    Wait(BorrowedFd<'a>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn small(number: u64) -> SmallArrival {
        SmallArrival::new(PeerId(1), Header([number, !number]), SmallBytes::empty())
    }

    /// Returns the number of what stands in a batch.
    fn number(event: &Event) -> u64 {
        match event {
            Event::Arrived { header, .. } => header.0[0],
            Event::Connected { peer } => u64::from(peer.0),
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        /// The model is one list of all, and the number of small messages in front.
        #[test]
        fn a_batch_keeps_the_order_and_loses_nothing(
            limit in 1_usize..6,
            steps in vec((0_u8..7, 0_usize..4), 0..60),
        ) {
            let mut batch = Batch::new(limit);
            let (mut model, mut front) = (Vec::new(), 0);
            for (at, (what, count)) in (0..).zip(steps) {
                let is_in_front = front == model.len() && front < limit;
                match what {
                    0 | 1 => {
                        batch.push_small(small(at));
                        model.push(at);
                        front += usize::from(is_in_front);
                    }
                    2 => match batch.next_small() {
                        Some(place) => {
                            prop_assert!(is_in_front);
                            *place = small(at);
                            // Without the second call it is not in the batch.
                            if count > 0 {
                                batch.keep_small();
                                model.push(at);
                                front += 1;
                            }
                        }
                        None => prop_assert!(!is_in_front),
                    },
                    3 => {
                        batch.push(Event::Connected { peer: PeerId(u32::try_from(at).unwrap()) });
                        model.push(at);
                    }
                    4 => {
                        batch.forget_small(count);
                        model.drain(..count.min(front));
                        front = front.saturating_sub(count);
                    }
                    5 => {
                        batch.forget_events(count);
                        model.drain(front..(front + count).min(model.len()));
                    }
                    _ => {
                        let drained: Vec<_> = batch.drain().map(|event| number(&event)).collect();
                        prop_assert_eq!(drained, std::mem::take(&mut model));
                        front = 0;
                    }
                }
                prop_assert_eq!(batch.len(), model.len());
                prop_assert_eq!(batch.room(), limit.saturating_sub(model.len()));
                let in_front = batch.small_mut().iter().map(|one| one.header.0[0]);
                prop_assert_eq!(&in_front.collect::<Vec<_>>()[..], &model[..front]);
                let behind: Vec<_> = batch.events_mut().iter().map(number).collect();
                prop_assert_eq!(&behind[..], &model[front..]);
            }
        }
    }
}
