//! Messages that are matched.

use super::PostSend;
use super::options::{Match, Matches, Outcome, Post, Sending};
use super::pieces::Carries;
use super::submit::Kind;
use super::transmit::{OutgoingMessage, submit_short, transmit, transmit_short};
use crate::api::Runtime;
use crate::api::buffer::{Buffer, SendBuffer};
use crate::error::PostError;
use crate::matching::MatchingEngine;
use crate::names::{DEFAULT_ENGINE, Rank, Tag};
use crate::protocol::header::Message;
use carrack_transports::contract::Header;

/// The parameters of a message.
pub struct Send<'a> {
    sending: Sending<'a>,
    matching: Match<'a>,
}

impl Runtime {
    /// Posts a message for a receive of `rank` that matches.
    pub fn post_send<'a>(
        &'a self,
        rank: Rank,
        buffer: impl Into<SendBuffer<'a>>,
        tag: Tag,
    ) -> PostSend<'a> {
        let (sending, matching) = (Sending::of(buffer), Match::default());
        Post::new(self, rank, tag, Send { sending, matching })
    }
}

impl<'a> Matches<'a> for Send<'a> {
    fn matching(&mut self) -> &mut Match<'a> {
        &mut self.matching
    }
}

impl Kind for Send<'_> {
    const NAME: &'static str = "a send";

    fn may_end_unseen(&self) -> bool {
        true
    }

    fn take_back(&mut self, buffer: Buffer) -> bool {
        self.sending.take_back(buffer)
    }

    #[inline]
    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError> {
        post.call_send()
    }
}

impl Post<'_, Send<'_>> {
    #[inline]
    fn call_send(&mut self) -> Result<Outcome, PostError> {
        let Match { policy, engine, .. } = self.kind.matching;
        if self.desc.tag == Tag::ANY && policy.looks_at_tag() {
            return Err(PostError::Wildcard("Tag::ANY"));
        }
        let engine = engine.map_or(DEFAULT_ENGINE, MatchingEngine::index);
        let header = Message::Send { engine, policy, tag: self.desc.tag }.encode();
        match transmit_short(self, self.kind.sending.borrowed(), header) {
            Some(outcome) => Ok(outcome),
            None => self.call_in_full(header),
        }
    }

    #[inline(never)]
    fn call_in_full(&mut self, header: Header) -> Result<Outcome, PostError> {
        if let Some(outcome) = submit_short(self, self.kind.sending.borrowed(), header) {
            return Ok(outcome);
        }
        self.once(|this| {
            if let Some(order) = &this.order {
                order.check_peer(&this.runtime.0, this.desc.rank)?;
            }
            if let Some(called) = this.in_pieces() {
                return called;
            }
            this.check_borrowed(this.kind.sending.borrowed())?;
            let order = this.order.take();
            let outcome = OutgoingMessage::of(this, order.as_deref(), header)
                .and_then(|outgoing| transmit(&outgoing, &mut this.kind.sending));
            this.order = order;
            outcome
        })
    }
}

impl Carries for Send<'_> {
    const IS_SENT: bool = true;

    fn owned(&mut self) -> Option<&mut Buffer> {
        self.sending.buffer.as_mut()?.owned()
    }

    fn hold(&mut self, buffer: Buffer) {
        self.sending.buffer = Some(SendBuffer::Owned(buffer));
    }

    fn take(&mut self) -> Self {
        Self { sending: self.sending.take(), matching: self.matching }
    }
}
