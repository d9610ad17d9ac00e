//! The verbs that post an operation.

use super::desc::Mode;
use super::options::{Outcome, Post};
use super::pieces::Carries;
use crate::api::buffer::Buffer;
use crate::comp::Status;
use crate::error::{AwaitError, PostError};
use crate::matching::ReceiveName;

/// A kind of operation. The kinds are those of this crate.
pub trait Kind: Sized {
    /// The name of the operation in errors.
    #[doc(hidden)]
    const NAME: &'static str;

    /// Posts it.
    #[doc(hidden)]
    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError>;

    /// Returns `true` if the operation may end without a completion object.
    #[doc(hidden)]
    fn may_end_unseen(&self) -> bool {
        false
    }

    /// Takes the buffer of a failed operation back. Returns `true` if the operation may be posted
    /// again.
    #[doc(hidden)]
    fn take_back(&mut self, buffer: Buffer) -> bool {
        let _ = buffer;
        true
    }

    /// Returns the name of a receive that waits.
    #[doc(hidden)]
    fn name(&self) -> Option<ReceiveName> {
        None
    }
}

impl<K: Kind> Post<'_, K> {
    /// Posts the operation if it can go now. Never blocks and never queues.
    ///
    /// Borrowed bytes are copied, up to the length of a packet. An operation other than a message
    /// that is sent, or a put, needs a completion object.
    ///
    /// # Errors
    /// See [`PostError`]; the operation is as it was, its buffer included. After `Done` or `Posted`
    /// it is [`PostError::Spent`].
    #[inline]
    pub fn try_submit(&mut self) -> Result<Outcome, PostError> {
        self.check_options()?;
        K::post(self)
    }

    /// Posts the operation; it waits in a queue of the runtime if it cannot go now. Never blocks.
    /// The completion object is always told, also of an operation that has completed within the
    /// call. Handlers, wakers and completion objects of the user's own run in progress only.
    ///
    /// Borrowed bytes are copied, up to the length of a packet. An operation other than a message
    /// that is sent, or a put, needs a completion object.
    ///
    /// # Errors
    /// See [`PostError`]; the operation is as it was, its buffer included. The queues are bounded:
    /// [`PostError::BacklogFull`], [`PostError::OffersFull`]. A message that a handler submits to
    /// the sender of its own message is always accepted.
    #[inline]
    pub fn submit(&mut self) -> Result<(), PostError> {
        self.check_options()?;
        // The outcome is looked at where it is: to move it, the processor would wait for the stores
        // that wrote it.
        match self.post_as(Mode::SUBMIT) {
            Ok(outcome) => {
                debug_assert!(outcome.is_posted(), "the object is told");
                // `Posted` has nothing to be dropped.
                std::mem::forget(outcome);
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Posts the operation, and makes progress until it has completed; none if it completes at
    /// once, as a receive does whose message is there. Sleeps when there is nothing to do. Borrowed
    /// bytes may have any length. The completion object, if one was named, is not told.
    ///
    /// # Errors
    /// [`AwaitError::Post`]: it could not be posted, and is as it was.
    /// [`PostError::WouldBlock`] in a completion handler, unless it completes at once.
    /// [`AwaitError::Op`]: it failed. If the runtime has given the buffer back, the operation has
    /// it again, and can be posted once more.
    pub fn wait(&mut self) -> Result<Status, AwaitError> {
        if self.desc.mode.is_foreign() {
            return Err(PostError::Foreign.into());
        }
        match self.post_as(Mode::WAIT)? {
            Outcome::Done(Status { error: Some(error), buffer, .. }) => {
                if self.kind.take_back(buffer) {
                    self.again();
                }
                Err(AwaitError::Op(*error))
            }
            Outcome::Done(status) => Ok(status),
            Outcome::Posted | Outcome::Retry(_) => Err(PostError::WouldBlock.into()),
        }
    }

    #[inline]
    fn post_as(&mut self, verb: u8) -> Result<Outcome, PostError> {
        self.desc.mode.set(verb, true);
        let outcome = K::post(self);
        self.desc.mode.set(verb, false);
        outcome
    }

    #[inline(always)]
    fn check_options(&self) -> Result<(), PostError> {
        if self.desc.mode.is_foreign() {
            return Err(PostError::Foreign);
        }
        match self.desc.comp.is_some() || self.kind.may_end_unseen() {
            true => Ok(()),
            false => Err(PostError::NoCompletion(K::NAME)),
        }
    }

    /// Lets an operation that sends borrowed bytes, or has no buffer, be posted again after `Done`
    /// or `Posted`. An operation that has given its buffer away stays [spent](PostError::Spent).
    #[inline]
    pub fn again(&mut self) -> &mut Self {
        self.desc.mode.set(Mode::SPENT, false);
        self
    }

    /// Posts it, unless that was done before. Receives and gets need it not: they have no buffer
    /// any more.
    #[inline(always)]
    pub(super) fn once(
        &mut self,
        post: impl FnOnce(&mut Self) -> Result<Outcome, PostError>,
    ) -> Result<Outcome, PostError> {
        if self.desc.mode.is_spent() {
            return Err(PostError::Spent);
        }
        let outcome = post(self);
        if matches!(outcome, Ok(Outcome::Done(_) | Outcome::Posted)) {
            self.desc.mode.spend();
        }
        outcome
    }
}

impl<K: Carries> Post<'_, K> {
    /// Sets the buffer, and lets the operation be posted again after `Done` or `Posted`, with the
    /// same options. A loop that refills one operation posts faster than one that builds one for
    /// each message.
    ///
    /// Drops the buffer of an operation that was not posted. The other options stay as
    /// they are: a deadline may have passed, and an event have fired.
    ///
    /// ```
    /// # use carrack::{CompQueue, Outcome, Rank, Runtime, Tag};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let runtime = Runtime::builder().start()?;
    /// let (me, tag, queue) = (runtime.rank(), Tag(1), CompQueue::new(4));
    /// let mut receive = runtime.post_recv(me, vec![0; 8], tag).comp(&queue);
    /// for number in 0..3_u64 {
    ///     receive.submit()?;
    ///     runtime.post_send(me, &number.to_le_bytes(), tag).submit()?;
    ///     let status = loop {
    ///         runtime.progress()?;
    ///         if let Some(status) = queue.pop() {
    ///             break status.ok()?;
    ///         }
    ///     };
    ///     assert_eq!(status.value(), Some(number));
    ///     receive.refill(status.buffer);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[inline]
    pub fn refill(&mut self, buffer: impl Into<Buffer>) -> &mut Self {
        self.kind.hold(buffer.into());
        // A receive or get without a buffer is what is spent.
        if K::IS_SENT { self.again() } else { self }
    }
}
