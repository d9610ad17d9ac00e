//! Active messages.

use super::PostAm;
use super::options::{Outcome, Post, Sending, Tells};
use super::pieces::Carries;
use super::submit::Kind;
use super::transmit::{OutgoingMessage, submit_short, transmit, transmit_short};
use crate::api::Runtime;
use crate::api::buffer::{Buffer, SendBuffer};
use crate::error::PostError;
use crate::names::{Rank, RemoteComp, Tag};
use crate::protocol::header::Message;
use carrack_transports::contract::Header;

/// The parameters of an active message.
pub struct Am<'a> {
    comp: RemoteComp,
    sending: Sending<'a>,
}

impl Runtime {
    /// Posts an active message: `buffer` goes to the completion object that `rank` has registered
    /// as `comp`.
    pub fn post_am<'a>(
        &'a self,
        rank: Rank,
        buffer: impl Into<SendBuffer<'a>>,
        comp: RemoteComp,
    ) -> PostAm<'a> {
        Post::new(self, rank, Tag::default(), Am { comp, sending: Sending::of(buffer) })
    }
}

impl Tells for Am<'_> {
    fn tell(&mut self, comp: RemoteComp) {
        self.comp = comp;
    }
}

impl Kind for Am<'_> {
    const NAME: &'static str = "an active message";

    fn may_end_unseen(&self) -> bool {
        true
    }

    fn take_back(&mut self, buffer: Buffer) -> bool {
        self.sending.take_back(buffer)
    }

    #[inline]
    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError> {
        post.call_am()
    }
}

impl Post<'_, Am<'_>> {
    #[inline]
    fn call_am(&mut self) -> Result<Outcome, PostError> {
        let header = Message::Am { comp: self.kind.comp, tag: self.desc.tag }.encode();
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

impl Carries for Am<'_> {
    const IS_SENT: bool = true;

    fn owned(&mut self) -> Option<&mut Buffer> {
        self.sending.buffer.as_mut()?.owned()
    }

    fn hold(&mut self, buffer: Buffer) {
        self.sending.buffer = Some(SendBuffer::Owned(buffer));
    }

    fn take(&mut self) -> Self {
        Self { comp: self.comp, sending: self.sending.take() }
    }
}
