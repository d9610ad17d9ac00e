//! The options that all operations share.

use super::order::Order;
use crate::buffer::SendBuffer;
use crate::comp::{AsCompletion, Completion, Status};
use crate::deadline::Deadline;
use crate::device::{Device, DeviceInner};
use crate::error::PostError;
use crate::matching::{MatchingEngine, Ticket};
use crate::names::{Matching, Rank, RemoteComp, Tag, UserContext};
use crate::runtime::Runtime;
use carrack_transports::contract::Busy;
use std::sync::Arc;
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
    /// Nothing happened: make progress, and call the operation again.
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

    /// Returns `true` if the operation has to be called again.
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
    /// The ring or queue to the peer is full: the peer has to go on first.
    Full,
    /// No packet is free: some have to come back first.
    NoPacket,
    /// The peer has not started, or has not answered yet.
    Connecting,
    /// Earlier operations wait for this peer, and are not overtaken.
    Backlog,
    /// Much was sent without listening: make progress, to hear whether the peer can take more.
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

/// A way to a peer, as [`require`](Post::require) demands it and `explain` names it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Path {
    /// Within this process.
    Loopback,
    /// Through memory that two processes share.
    Shm,
    /// GPU memory that is mapped from another process of the node, by CUDA's IPC.
    CudaIpc,
    /// RDMA between nodes.
    Verbs,
    /// The same over a NIC that is simulated on this machine.
    VerbsSimulated,
}

impl Path {
    /// Returns its transport's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Loopback => carrack_transports::loopback::NAME,
            Self::Shm => carrack_transports::shm::NAME,
            Self::CudaIpc => carrack_transports::cuda_ipc::NAME,
            Self::Verbs => carrack_transports::verbs::NAME,
            Self::VerbsSimulated => carrack_transports::verbs::SIMULATED,
        }
    }
}

/// An operation to post: its kind (`K`), and its options.
///
/// Options are named and chained, and all have defaults. [`call`](Post::call) posts it.
#[must_use = "nothing is posted until `call`"]
pub struct Post<'a, K> {
    pub(super) runtime: &'a Runtime,
    pub(super) rank: Rank,
    pub(super) tag: Tag,
    pub(super) device: Option<&'a Device>,
    pub(super) comp: Option<&'a Arc<dyn Completion>>,
    pub(super) user_context: UserContext,
    pub(super) allow: Allow,
    pub(super) required: Option<Path>,
    pub(super) deadline: Deadline,
    /// The order of the operation, if any.
    pub(super) order: Option<Box<Order>>,
    pub(super) kind: K,
}

/// A kind of operation. The kinds are those of this crate.
pub trait Kind: Sized {
    /// Posts it.
    #[doc(hidden)]
    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError>;

    /// Returns the ticket for `cancel`.
    #[doc(hidden)]
    fn ticket(&self) -> Option<Ticket> {
        None
    }
}

impl<K: Kind> Post<'_, K> {
    /// Posts the operation. Never blocks, except for operations that cannot signal their end:
    /// receives, gets and atomic operations without a completion object, flushes, and operations
    /// with `allow_posted(false)`. These make progress until they have completed.
    ///
    /// # Errors
    /// See [`PostError`]; the operation is as it was, its buffer included. After `Done` or `Posted`
    /// it is [`PostError::Spent`].
    #[inline]
    pub fn call(&mut self) -> Result<Outcome, PostError> {
        K::post(self)
    }

    /// Lets an operation be called once more after `Done` or `Posted`, to do the same again: one
    /// that sends borrowed bytes, or has no buffer. One that has given its buffer away stays
    /// [spent](PostError::Spent).
    #[inline]
    pub fn again(&mut self) -> &mut Self {
        self.allow.set(Allow::SPENT, false);
        self
    }

    /// Posts it, unless that was done before. Receives and gets need it not: they have no buffer
    /// any more.
    #[inline(always)]
    pub(super) fn once(
        &mut self,
        post: impl FnOnce(&mut Self) -> Result<Outcome, PostError>,
    ) -> Result<Outcome, PostError> {
        if self.allow.is_spent() {
            return Err(PostError::Spent);
        }
        let outcome = post(self);
        if matches!(outcome, Ok(Outcome::Done(_) | Outcome::Posted)) {
            self.allow.spend();
        }
        outcome
    }
}

/// A kind of operation that tells a completion object of the other rank: with an active message, or
/// by the signal of a put or get.
pub trait Tells: Kind {
    /// Names the object.
    #[doc(hidden)]
    fn tell(&mut self, comp: RemoteComp);
}

impl<K: Tells> Post<'_, K> {
    /// Sets the tag that the other rank gets: all 64 bits are the user's.
    pub fn tag(mut self, tag: Tag) -> Self {
        self.tag = tag;
        self
    }

    /// Sets the completion object of the other rank to signal. For an active message, when it
    /// arrives, in place of the first named one. For a put, when every byte is visible there. For
    /// a get, when the bytes have been read.
    ///
    /// The signal of a put or a get may come before messages that were sent earlier, if their
    /// receiver has no room for them.
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
        self
    }
}

/// The outcomes that the caller excludes, and rare options: a single test shows that there are
/// none.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Allow(u8);

impl Allow {
    /// The default of all operations.
    pub(super) const ALL: Self = Self(0);
    const NOT_DONE: u8 = 1;
    const NOT_POSTED: u8 = 2;
    const NOT_RETRY: u8 = 4;
    /// Others follow at once.
    const MORE: u8 = 8;
    /// It came to `Done` or `Posted`.
    const SPENT: u8 = 16;

    #[inline(always)]
    fn has(self, mark: u8) -> bool {
        self.0 & mark != 0
    }

    #[inline(always)]
    fn set(&mut self, mark: u8, is_set: bool) {
        self.0 = self.0 & !mark | if is_set { mark } else { 0 };
    }

    /// Returns `true` if no option is set, apart from `MORE`.
    #[inline(always)]
    pub(super) fn is_ordinary(self) -> bool {
        self.0 & !Self::MORE == 0
    }

    #[inline(always)]
    pub(super) fn done(self) -> bool {
        !self.has(Self::NOT_DONE)
    }

    #[inline(always)]
    pub(super) fn posted(self) -> bool {
        !self.has(Self::NOT_POSTED)
    }

    #[inline(always)]
    pub(super) fn retry(self) -> bool {
        !self.has(Self::NOT_RETRY)
    }

    #[inline(always)]
    pub(super) fn has_more(self) -> bool {
        self.has(Self::MORE)
    }

    #[inline(always)]
    pub(super) fn is_spent(self) -> bool {
        self.has(Self::SPENT)
    }

    #[inline(always)]
    pub(super) fn spend(&mut self) {
        self.set(Self::SPENT, true);
    }

    /// Excludes `Posted`, for a call that waits.
    pub(super) fn without_posted(mut self) -> Self {
        self.set(Self::NOT_POSTED, true);
        self
    }

    /// Excludes `Retry`.
    pub(super) fn without_retry(mut self) -> Self {
        self.set(Self::NOT_RETRY, true);
        self
    }

    /// Checks that a call that waits for its end may be `Done`.
    pub(super) fn check_waiting(self) -> Result<(), PostError> {
        if self.done() { Ok(()) } else { Err(PostError::NoOutcome) }
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

    /// Takes itself, and leaves a spent one.
    pub(super) fn take(&mut self) -> Self {
        Self { buffer: self.buffer.take() }
    }
}

impl<'a, K> Post<'a, K> {
    pub(super) fn new(runtime: &'a Runtime, rank: Rank, tag: Tag, kind: K) -> Self {
        Self {
            runtime,
            rank,
            tag,
            device: None,
            comp: None,
            user_context: UserContext::default(),
            allow: Allow::ALL,
            required: None,
            deadline: Deadline::NEVER,
            order: None,
            kind,
        }
    }

    /// Sets the completion object that is signalled when a `Posted` operation has completed. For a
    /// sending operation its buffer may then be reused; for a receive the message is there.
    ///
    /// Without one, a sending operation that was posted ends unseen. A receive then returns only
    /// when it has completed, and must be allowed to be `Done`.
    pub fn comp(mut self, comp: &'a impl AsCompletion) -> Self {
        self.comp = Some(comp.as_completion());
        self
    }

    /// Sets the device; the default is the runtime's default device.
    pub fn device(mut self, device: &'a Device) -> Self {
        self.device = Some(device);
        self
    }

    /// Sets a number that the status returns.
    pub fn user_context(mut self, context: UserContext) -> Self {
        self.user_context = context;
        self
    }

    /// Allows the outcome `Done` (the default). Otherwise the completion object is signalled even
    /// if the operation completes at once, and the outcome is `Posted`. A call that waits for its
    /// end is then an error: [`PostError::NoOutcome`].
    pub fn allow_done(mut self, allowed: bool) -> Self {
        self.allow.set(Allow::NOT_DONE, !allowed);
        self
    }

    /// Allows the outcome `Posted` (the default). Otherwise the call makes progress until the
    /// operation has completed, and returns `Done`. Not possible inside a completion handler.
    pub fn allow_posted(mut self, allowed: bool) -> Self {
        self.allow.set(Allow::NOT_POSTED, !allowed);
        self
    }

    /// Allows the outcome `Retry` (the default). Otherwise the operation waits in the peer's
    /// backlog, and the outcome is `Posted`. Beyond the limit of the backlog, or of operations on
    /// memory, the call fails; a call that waits for the end waits for room as well.
    pub fn allow_retry(mut self, allowed: bool) -> Self {
        self.allow.set(Allow::NOT_RETRY, !allowed);
        self
    }

    /// Announces that more short messages to the same rank follow at once. This one may wait, and
    /// go together with them: libfabric's `FI_MORE`, `MSG_MORE` of `send`(2). It goes with the
    /// first message to that rank over this device without this option, and at the latest with the
    /// next call of `progress` for the device. So post the last of several messages without it.
    ///
    /// Over verbs, messages of up to 40 bytes then share doorbell, packet and completion. Shared
    /// memory has nothing to share, and longer messages and other operations are not held back.
    pub fn more(mut self, more: bool) -> Self {
        self.set_more(more);
        self
    }

    /// Sets the same for an operation that is called [again](Self::again).
    #[inline]
    pub fn set_more(&mut self, more: bool) {
        self.allow.set(Allow::MORE, more);
    }

    /// Demands a path to the peer. If another one was chosen, the call is an error that says why;
    /// so is the status of a message that waited for its link. A receive that demands one has to
    /// name its rank.
    pub fn require(mut self, path: Path) -> Self {
        self.required = Some(path);
        self
    }

    /// Fails the operation, with [`OpError::TimedOut`](crate::OpError::TimedOut) in its status, if
    /// it has not completed within `after` from this call. It fails with [`PostError::TimedOut`]
    /// if it is posted later than that.
    ///
    /// Memory that the peer may still read or write stays with the runtime until the peer has
    /// released it or is gone. So a sender's status may come without its buffer, and a message may
    /// arrive although its sender has given up. An operation that an engine of a GPU is carrying
    /// out is waited for.
    pub fn deadline(mut self, after: Duration) -> Self {
        self.deadline = Deadline::after(after);
        self
    }

    /// Fails if the deadline has passed before the begin.
    pub(super) fn check_deadline(&self) -> Result<(), PostError> {
        if self.deadline.is_some() && self.deadline.has_passed(Deadline::now()) {
            return Err(PostError::TimedOut(self.rank));
        }
        Ok(())
    }

    #[inline]
    pub(super) fn device_inner(&self) -> &'a DeviceInner {
        match self.device {
            Some(device) => &device.0,
            None => &self.runtime.0.default_device().0,
        }
    }

    pub(super) fn check_rank(&self) -> Result<(), PostError> {
        if self.rank.0 < self.runtime.0.size {
            return Ok(());
        }
        if self.rank == Rank::ANY {
            return Err(PostError::Wildcard("Rank::ANY"));
        }
        Err(PostError::NoSuchRank { rank: self.rank, last: self.runtime.0.size - 1 })
    }
}
