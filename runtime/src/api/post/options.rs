//! The options that all operations share.

use super::desc::{Mode, OpDesc};
use super::order::Order;
use super::submit::Kind;
use crate::api::Runtime;
use crate::api::buffer::{Buffer, SendBuffer};
use crate::comp::{AsCompletion, Status};
use crate::datapath::{Device, Port};
use crate::deadline::Deadline;
use crate::error::PostError;
use crate::matching::MatchingEngine;
use crate::names::{Matching, Rank, RemoteComp, Tag, UserContext};
use carrack_transports::contract::Busy;
use std::time::Duration;

/// The outcome of a post.
#[derive(Debug)]
#[must_use = "a retry means that nothing was posted"]
pub enum Outcome {
    /// The operation has completed. The status holds its buffer; no completion object is
    /// signalled.
    Done(Status),
    /// The operation is in flight. The completion object will be signalled once.
    Posted,
    /// Nothing happened: make progress, and try again.
    Retry(RetryReason),
}

impl Outcome {
    /// Returns `true` if the operation has completed.
    pub fn is_done(&self) -> bool {
        matches!(self, Self::Done(_))
    }

    /// Returns `true` if the operation is in flight.
    pub fn is_posted(&self) -> bool {
        matches!(self, Self::Posted)
    }

    /// Returns `true` if the operation has to be tried again.
    pub fn is_retry(&self) -> bool {
        matches!(self, Self::Retry(_))
    }
}

/// The reason of a retry.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum RetryReason {
    /// Another thread is using the link at this moment.
    Lock,
    /// The ring or queue to the peer is full: the peer has to make progress first.
    Full,
    /// No packet is free: some have to return to the pool first.
    NoPacket,
    /// The peer has not started, or has not answered yet.
    Connecting,
    /// Earlier operations wait for this peer, and this one must not overtake them. Or the peer
    /// takes only replies until its own have left.
    Backlog,
    /// This device has sent much without making progress, which tells if the peer can take more.
    Unheard,
    /// The limit of operations that wait for their peers (`CARRACK_OFFERS`) is reached. Or a put
    /// or a get should notify a peer that keeps too many notifications.
    Unanswered,
}

impl RetryReason {
    pub(crate) fn of(busy: Busy) -> Self {
        match busy {
            Busy::Lock => Self::Lock,
            Busy::Full => Self::Full,
            Busy::NoPacket => Self::NoPacket,
            Busy::Connecting => Self::Connecting,
        }
    }
}

/// An operation to post: its kind (`K`), and its options.
///
/// Options are named and chained, and all have defaults. [`try_submit`](Post::try_submit),
/// [`submit`](Post::submit), [`wait`](Post::wait) and `await` post it.
#[must_use = "nothing is posted until `try_submit`, `submit`, `wait` or `await`"]
pub struct Post<'a, K> {
    pub(super) runtime: &'a Runtime,
    pub(super) desc: OpDesc<'a>,
    /// The order of the operation, if any.
    pub(super) order: Option<Box<Order>>,
    pub(super) kind: K,
}

/// A kind of operation that tells a completion object of the other rank. It is an active message,
/// or a put or get with a notification.
pub trait Tells: Kind {
    /// Names the object.
    #[doc(hidden)]
    fn tell(&mut self, comp: RemoteComp);
}

impl<K: Tells> Post<'_, K> {
    /// Sets the tag that the other rank gets: all 64 bits are the user's.
    pub fn tag(mut self, tag: Tag) -> Self {
        self.desc.tag = tag;
        self
    }

    /// Sets the completion object of the other rank to notify. For an active message, when it
    /// arrives, in place of the first named one. For a put, when every byte is visible there. For
    /// a get, when the bytes have been read.
    ///
    /// The notification of a put or a get may come before messages that were sent earlier, if
    /// their receiver has no room for them.
    pub fn remote_comp(mut self, comp: RemoteComp) -> Self {
        self.kind.tell(comp);
        self
    }
}

/// A kind of operation that is matched: a message, or its receive.
pub trait Matches<'a>: Kind {
    /// Returns the parameters of its matching.
    #[doc(hidden)]
    fn matching(&mut self) -> &mut Match<'a>;
}

impl<'a, K: Matches<'a>> Post<'a, K> {
    /// Sets the matching policy: both sides must name the same. A receive with a policy has no
    /// wildcard for the properties in it.
    pub fn matching(mut self, policy: Matching) -> Self {
        let matching = self.kind.matching();
        (matching.policy, matching.is_named) = (policy, true);
        self
    }

    /// Sets the matching engine: both sides must name the engine of the same number.
    pub fn matching_engine(mut self, engine: &'a MatchingEngine) -> Self {
        self.kind.matching().engine = Some(engine);
        self.desc.mode.set(Mode::FOREIGN_ENGINE, !self.runtime.0.engines.has(engine));
        self
    }
}

/// Options of operations that are matched.
#[derive(Clone, Copy, Default)]
pub struct Match<'a> {
    pub(super) policy: Matching,
    /// The program named the policy.
    pub(super) is_named: bool,
    pub(super) engine: Option<&'a MatchingEngine>,
}

impl Match<'_> {
    /// Returns the policy of a receive of this rank and tag.
    #[inline(always)]
    pub(super) fn of_receive(&self, rank: Rank, tag: Tag) -> Result<Matching, PostError> {
        self.policy.of_receive(self.is_named, rank, tag)
    }
}

/// Options of operations that send.
pub(super) struct Sending<'a> {
    /// `None` once it was posted.
    pub(super) buffer: Option<SendBuffer<'a>>,
}

impl<'a> Sending<'a> {
    pub(super) fn of(buffer: impl Into<SendBuffer<'a>>) -> Self {
        Self { buffer: Some(buffer.into()) }
    }

    /// Returns the bytes, if they are only borrowed.
    #[inline(always)]
    pub(super) fn borrowed(&self) -> Option<&'a [u8]> {
        match &self.buffer {
            Some(SendBuffer::Borrowed(bytes)) => Some(bytes),
            _ => None,
        }
    }

    /// Takes the buffer of a failed message back, if it comes back. Returns `true` if it has one.
    pub(super) fn take_back(&mut self, buffer: Buffer) -> bool {
        if !matches!(buffer, Buffer::Empty) {
            self.buffer = Some(SendBuffer::Owned(buffer));
        }
        self.buffer.is_some()
    }

    /// Takes itself, and leaves a spent one.
    pub(super) fn take(&mut self) -> Self {
        Self { buffer: self.buffer.take() }
    }
}

impl<'a, K> Post<'a, K> {
    pub(super) fn new(runtime: &'a Runtime, rank: Rank, tag: Tag, kind: K) -> Self {
        Self { runtime, desc: OpDesc::new(rank, tag), order: None, kind }
    }

    /// Sets the completion object that is signalled when a submitted operation has completed. For
    /// a sending operation its buffer may then be reused; for a receive the message is there.
    ///
    /// Without one, a message that is sent and a put end unseen, and all other operations have to
    /// be waited for or awaited.
    pub fn comp(mut self, comp: &'a impl AsCompletion) -> Self {
        self.desc.comp = Some(comp.as_completion());
        self
    }

    /// Sets the device; the default is the runtime's default device.
    pub fn device(mut self, device: &'a Device) -> Self {
        self.desc.device = Some(device);
        self.desc.mode.set(Mode::FOREIGN_DEVICE, device.0.runtime != self.runtime.0.id);
        self
    }

    /// Sets a number that the status returns.
    pub fn user_context(mut self, context: UserContext) -> Self {
        self.desc.user_context = context;
        self
    }

    /// Announces that more short messages to the same rank follow at once. This one may wait, and
    /// go together with them: libfabric's `FI_MORE`, `MSG_MORE` of `send`(2). It goes with the
    /// first message to that rank over this device without this option. The next call of `progress`
    /// for the device sends it in any case. So post the last of several messages without it.
    ///
    /// Over verbs, messages of up to 40 bytes then share doorbell, packet and completion. Shared
    /// memory has nothing to share, and longer messages and other operations are not held back.
    pub fn more(mut self, more: bool) -> Self {
        self.set_more(more);
        self
    }

    /// Sets the same for an operation that is posted [again](Self::again).
    #[inline]
    pub fn set_more(&mut self, more: bool) {
        self.desc.mode.set(Mode::MORE, more);
    }

    /// Demands a path to the peer, by the name of its transport: `shm`, `cuda_ipc`, or that of a
    /// transport of the program's own. If another one was chosen, the call is an error that says
    /// why; so is the status of a message that waited for its link. A receive that demands one has
    /// to name its rank.
    pub fn require(mut self, transport: &'static str) -> Self {
        self.desc.required = Some(transport);
        self
    }

    /// Fails the operation, with [`OpError::TimedOut`](crate::OpError::TimedOut) in its status, if
    /// it has not completed within `after` from this call. It fails with [`PostError::TimedOut`]
    /// if it is posted later than that.
    ///
    /// Memory that the peer may still read or write stays with the runtime until the peer has
    /// released it or is gone. So a sender's status may come without its buffer, and a message may
    /// arrive although its sender has given up. A receive whose message was on its way takes that
    /// message with it: the status has a size then. An operation that an engine of a GPU is
    /// carrying out is waited for.
    pub fn deadline(mut self, after: Duration) -> Self {
        self.desc.deadline = Deadline::after(after);
        self
    }

    /// Fails if the deadline has passed before the begin.
    pub(super) fn check_deadline(&self) -> Result<(), PostError> {
        if self.desc.deadline.is_some() && self.desc.deadline.has_passed(Deadline::now()) {
            return Err(PostError::TimedOut(self.desc.rank));
        }
        Ok(())
    }

    #[inline]
    pub(super) fn device_inner(&self) -> &'a Port {
        match self.desc.device {
            Some(device) => &device.0,
            None => &self.runtime.0.default_device().0,
        }
    }

    pub(super) fn check_rank(&self) -> Result<(), PostError> {
        if self.desc.rank.0 < self.runtime.0.size {
            return Ok(());
        }
        if self.desc.rank == Rank::ANY {
            return Err(PostError::Wildcard("Rank::ANY"));
        }
        Err(PostError::NoSuchRank { rank: self.desc.rank, last: self.runtime.0.size - 1 })
    }
}
