//! Receives.

use super::PostRecv;
use super::desc::OpDesc;
use super::options::{Match, Matches, Outcome, Post};
use super::pieces::Carries;
use super::submit::Kind;
use super::waiting::Waiter;
use crate::api::buffer::Buffer;
use crate::api::{Runtime, Ticket};
use crate::comp::Status;
use crate::datapath::Port;
use crate::error::PostError;
use crate::matching::{
    Content, HashedKey, MatchKey, MatchingEngine, Receive, ReceiveName, Unexpected,
};
use crate::names::{Matching, Rank, Tag};
use crate::op::{Ending, Holder, OpContext};
use crate::progress::{in_handler, told_or_cloned};

/// The parameters of a receive.
pub struct Recv<'a> {
    /// Empty once the receive was posted. Plain, and not an option: it is swapped with that of a
    /// place of the matching table, without a look at its variant.
    pub(super) buffer: Buffer,
    /// The buffer was given away.
    pub(super) is_spent: bool,
    pub(super) matching: Match<'a>,
    pub(super) name: Option<ReceiveName>,
    /// The place to wait in, once the receive was posted.
    target: Option<RecvTarget>,
}

/// The properties that a receive looks up when it is first posted.
#[derive(Clone, Copy)]
struct RecvTarget {
    key: HashedKey,
    policy: Matching,
    /// Number of the device that has a link to the awaited rank.
    watched_on: Option<u32>,
}

impl Runtime {
    /// Posts a receive of a message that matches: into a `Vec<u8>`, a `BytesMut`, a packet, or
    /// part of a region. The buffer's length is its room; the status has the length of the
    /// message.
    ///
    /// Whatever device it is posted on, a message comes by progress on the one that its sender has
    /// posted it on.
    ///
    /// With [`Rank::ANY`] or [`Tag::ANY`] the receive matches by the other property; its sender
    /// must have posted with that policy.
    ///
    /// From a rank that is down, it meets a message that has come, or ends as
    /// [`PeerDown`](crate::OpError::PeerDown).
    pub fn post_recv<'a>(
        &'a self,
        rank: Rank,
        buffer: impl Into<Buffer>,
        tag: Tag,
    ) -> PostRecv<'a> {
        Post::new(self, rank, tag, Recv::new(buffer.into(), Match::default()))
    }
}

impl<'a> Recv<'a> {
    pub(super) fn new(buffer: Buffer, matching: Match<'a>) -> Self {
        Self { buffer, is_spent: false, matching, name: None, target: None }
    }
}

impl<'a> Matches<'a> for Recv<'a> {
    fn matching(&mut self) -> &mut Match<'a> {
        self.target = None;
        &mut self.matching
    }
}

impl Kind for Recv<'_> {
    const NAME: &'static str = "a receive";

    fn take_back(&mut self, buffer: Buffer) -> bool {
        // A buffer that the peer may still write stays with the runtime.
        let is_back = !matches!(buffer, Buffer::Empty);
        if is_back {
            self.hold(buffer);
        }
        is_back
    }

    #[inline]
    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError> {
        let is_plain = !matches!(post.kind.buffer, Buffer::List(_) | Buffer::Region(_))
            && !post.desc.mode.waits()
            && post.desc.required.is_none()
            && post.order.is_none();
        if is_plain { post.post_now() } else { post.call_in_full() }
    }

    fn name(&self) -> Option<ReceiveName> {
        self.name
    }
}

impl Post<'_, Recv<'_>> {
    /// Posts it with all options that there are.
    #[cold]
    #[inline(never)]
    fn call_in_full(&mut self) -> Result<Outcome, PostError> {
        match self.in_pieces() {
            Some(called) => called,
            None if self.desc.mode.waits() => self.call_and_wait(),
            None => self.post(),
        }
    }

    #[inline(always)]
    fn post(&mut self) -> Result<Outcome, PostError> {
        if self.desc.required.is_some() {
            self.check_required()?;
        }
        let Some(order) = self.order.take() else { return self.post_now() };
        let outcome = self.post_in_order(&order);
        self.order = Some(order);
        outcome
    }

    pub(super) fn post_now(&mut self) -> Result<Outcome, PostError> {
        let device = self.device_inner();
        if device.is_closed() {
            return Err(device.why_closed());
        }
        self.check_deadline()?;
        if self.kind.target.is_none() {
            self.kind.target = Some(self.find_target()?);
        }
        let Self { desc, kind, runtime, .. } = self;
        let Recv { buffer, is_spent, matching, target: Some(target), .. } = kind else {
            return Err(PostError::Spent);
        };
        if *is_spent {
            return Err(PostError::Spent);
        }
        if !buffer.has_view_mut() {
            return Err(PostError::ReadOnly("Bytes"));
        }
        *is_spent = true;
        let OpDesc { rank, tag, user_context, deadline, comp, .. } = desc;
        let engine = matching.engine.unwrap_or_else(|| runtime.0.engines.default_engine());
        let met = engine.receive(&target.key, |receive| {
            // The fields are copied one by one: a load of all of them would wait for the stores of
            // each.
            std::mem::swap(&mut receive.buffer, buffer);
            let OpContext { rank: from, tag: with, size, user_context: context, .. } =
                &mut receive.op;
            (*from, *with, *size, *context) = (*rank, *tag, 0, *user_context);
            receive.op.deadline = *deadline;
            receive.op.comp = comp.map(told_or_cloned);
        });
        match met {
            Ok(message) => self.meets(device, message),
            Err(name) => {
                kind.name = Some(name);
                runtime.0.deadlines.note(*deadline);
                if target.policy.looks_at_rank() {
                    self.attend(device, engine);
                }
                Ok(Outcome::Posted)
            }
        }
    }

    /// Looks up and checks what stays the same when the receive is posted again.
    #[inline(always)]
    fn find_target(&self) -> Result<RecvTarget, PostError> {
        let (rank, tag, matching) = (self.desc.rank, self.desc.tag, &self.kind.matching);
        let policy = matching.of_receive(rank, tag)?;
        if policy.looks_at_rank() {
            self.check_rank()?;
        }
        let key = MatchKey::new(policy, rank, tag).into();
        Ok(RecvTarget { key, policy, watched_on: None })
    }

    /// Takes a message that came before its receive.
    #[inline(never)]
    fn meets(&mut self, device: &Port, message: Unexpected) -> Result<Outcome, PostError> {
        self.kind.name = None;
        let runtime = &self.runtime.0;
        let mut other = None;
        match &message.content {
            Content::Here(payload) => runtime.unexpected.sub(payload),
            Content::Offered(_, by) if *by != device.index => {
                // Only its sender's device of that number knows it.
                other = runtime.devices().get(*by as usize).cloned();
            }
            Content::Offered(..) => {}
        }
        let device = other.as_ref().map_or(device, |other| &*other.0);
        let buffer = std::mem::take(&mut self.kind.buffer);
        let mut receive = Receive { buffer, op: self.desc.context(0, None) };
        let needs_engine = match &message.content {
            Content::Here(payload) => {
                !(receive.buffer.kind().is_host() && payload.view().place().is_host())
            }
            Content::Offered(..) => true,
        };
        if needs_engine {
            // The receive will end later than this call.
            receive.op.comp = self.desc.comp.cloned();
        }
        match device.land(runtime, (message, receive), None) {
            Some((_, status)) => Ok(self.received(status)),
            None => Ok(Outcome::Posted),
        }
    }

    /// Returns the outcome of a receive whose message was there.
    fn received(&self, status: Status) -> Outcome {
        if !self.desc.mode.submits() {
            return Outcome::Done(status);
        }
        self.runtime.0.tell_received(self.device_inner(), self.desc.comp, status);
        self.runtime.0.sleepers.wake();
        Outcome::Posted
    }

    /// Ends the receive that waits now if its rank is gone, and has the rank's end noticed.
    #[inline(always)]
    fn attend(&mut self, device: &Port, engine: &MatchingEngine) {
        // No further message comes from a gone rank, and a receive must not wait for it for ever.
        // A rank's end is noted before the search for its receives in the table, which has this one
        // now.
        if self.runtime.0.any_down() {
            self.end_if_gone(device, engine);
        }
        let watched_on = self.kind.target.as_ref().and_then(|target| target.watched_on);
        if watched_on != Some(device.index) {
            self.watch(device);
        }
    }

    /// Ends the receives of the rank if it is gone.
    #[cold]
    #[inline(never)]
    fn end_if_gone(&self, device: &Port, engine: &MatchingEngine) {
        let (rank, runtime) = (self.desc.rank, &self.runtime.0);
        let Some(cause) = runtime.down().get(&rank).cloned() else { return };
        let mut ended = Vec::new();
        engine.end(&Ending::Gone(rank, &cause), &mut ended);
        for (comp, status) in ended {
            runtime.tell(device, comp.as_ref(), status);
        }
        runtime.sleepers.wake();
    }

    /// Returns the ticket for [`Runtime::cancel`] of a receive that was `Posted`. It has one if it
    /// waited for its message or for an event. It has none before it is posted, or if the message
    /// was there already.
    pub fn ticket(&self) -> Option<Ticket> {
        self.kind.name.map(|name| self.runtime.ticket(name))
    }

    /// Makes a link to an awaited rank, even if nothing was ever sent to it: the end of the rank
    /// must be noticed.
    #[cold]
    #[inline(never)]
    fn watch(&mut self, device: &Port) {
        let Some(route) = device.route(self.desc.rank) else { return };
        if route.linked().is_some() {
            if let Some(target) = &mut self.kind.target {
                target.watched_on = Some(device.index);
            }
            return;
        }
        // If the rank is gone, the receive has ended with the reason.
        if let Err(error) = self.make_link(route) {
            let rank = self.desc.rank.0;
            tracing::debug!(%error, rank, "no link to a rank that is received from");
        }
    }

    fn call_and_wait(&mut self) -> Result<Outcome, PostError> {
        if in_handler() {
            return Err(PostError::WouldBlock);
        }
        self.kind.name = None;
        let waiter = Waiter::new();
        let mut inner: PostRecv<'_> = Post {
            runtime: self.runtime,
            desc: self.desc.telling(waiter.as_completion()),
            order: self.order.take(),
            kind: self.kind.take(),
        };
        let outcome = inner.post();
        (self.kind.buffer, self.kind.is_spent) =
            (std::mem::take(&mut inner.kind.buffer), inner.kind.is_spent);
        self.order = inner.order.take();
        let status = match outcome? {
            Outcome::Done(status) => {
                waiter.spare();
                status
            }
            Outcome::Posted | Outcome::Retry(_) => waiter.status(self.runtime)?,
        };
        Ok(Outcome::Done(status))
    }
}

impl Carries for Recv<'_> {
    const IS_SENT: bool = false;

    #[inline]
    fn owned(&mut self) -> Option<&mut Buffer> {
        (!self.is_spent).then_some(&mut self.buffer)
    }

    #[inline]
    fn hold(&mut self, buffer: Buffer) {
        if std::mem::replace(&mut self.is_spent, false) {
            // There is nothing in it to be dropped, which only this line knows.
            std::mem::forget(std::mem::replace(&mut self.buffer, buffer));
        } else {
            self.buffer = buffer;
        }
    }

    fn take(&mut self) -> Self {
        let is_spent = std::mem::replace(&mut self.is_spent, true);
        let buffer = std::mem::take(&mut self.buffer);
        Self { buffer, is_spent, name: None, ..*self }
    }

    fn keep(&mut self, name: Option<ReceiveName>) {
        self.name = name;
    }
}
