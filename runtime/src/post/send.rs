//! Messages that are matched.

use super::PostSend;
use super::options::{Kind, Match, Outcome, Post, Sending};
use super::pieces::{Carries, take_list};
use super::transmit::{Outgoing, transmit, transmit_short};
use crate::buffer::{Buffer, SendBuffer};
use crate::error::PostError;
use crate::matching::{Engines, Matching, MatchingEngine};
use crate::names::{Rank, Tag};
use crate::protocol::header::Message;
use crate::runtime::Runtime;
use carrack_transports::contract::Header;
use carrack_transports::gpu::Event;

/// What a message is made of.
pub struct Send<'a> {
    sending: Sending<'a>,
    matching: Match<'a>,
}

impl Runtime {
    /// A message for a receive of `rank` that matches.
    pub fn post_send<'a>(&'a self, rank: Rank, buffer: impl Into<SendBuffer<'a>>, tag: Tag) -> PostSend<'a> {
        let sending = Sending { buffer: Some(buffer.into()), after: None };
        let matching = Match { policy: Matching::default(), engine: None };
        Post::new(self, rank, tag, Send { sending, matching })
    }
}

impl<'a> PostSend<'a> {
    /// What message and receive must agree on. The receive must name the same policy.
    pub fn matching(mut self, policy: Matching) -> Self {
        self.kind.matching.policy = policy;
        self
    }

    /// Where they meet. The receive must name the engine of the same number.
    pub fn matching_engine(mut self, engine: &'a MatchingEngine) -> Self {
        self.kind.matching.engine = Some(engine);
        self
    }

    /// Sends only once `event` has fired: after the kernel that writes the buffer, say.
    pub fn after(mut self, event: &Event) -> Self {
        self.kind.sending.after = Some(event.clone());
        self
    }
}

impl Kind for Send<'_> {
    #[inline]
    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError> {
        post.call_send()
    }
}

impl Post<'_, Send<'_>> {
    #[inline]
    fn call_send(&mut self) -> Result<Outcome, PostError> {
        let Match { policy, engine } = self.kind.matching;
        if self.tag == Tag::ANY && policy.looks_at_tag() {
            return Err(PostError::Wildcard("Tag::ANY"));
        }
        let engine = engine.map_or(Engines::DEFAULT, MatchingEngine::index);
        let header = Message::Send { engine, policy, tag: self.tag }.encode();
        let deaf = &self.device_inner().deaf;
        if !deaf.has_to_listen()
            && let Some(outcome) = transmit_short(self, &self.kind.sending, header)
        {
            if let Outcome::Done(status) = &outcome {
                deaf.sent(status.size);
            }
            return Ok(outcome);
        }
        self.call_in_full(header)
    }

    #[inline(never)]
    fn call_in_full(&mut self, header: Header) -> Result<Outcome, PostError> {
        if let Some(called) = self.in_pieces() {
            return called;
        }
        let outgoing = Outgoing::of(self, header)?;
        transmit(&outgoing, &mut self.kind.sending)
    }
}

impl Carries for Send<'_> {
    const SENDS: bool = true;

    fn take_list(&mut self) -> Option<Vec<Buffer>> {
        take_list(&mut self.sending.buffer)
    }

    fn give(&mut self, buffer: Buffer) {
        self.sending.buffer = Some(SendBuffer::Owned(buffer));
    }

    fn take(&mut self) -> Self {
        Self { sending: self.sending.take(), matching: self.matching }
    }
}
