//! Active messages.

use super::PostAm;
use super::options::{Kind, Outcome, Post, Sending, Tells};
use super::pieces::{Carries, take_list};
use super::transmit::{Outgoing, transmit, transmit_short};
use crate::buffer::{Buffer, SendBuffer};
use crate::error::PostError;
use crate::names::{Rank, RemoteComp, Tag};
use crate::protocol::header::Message;
use crate::runtime::Runtime;
use carrack_transports::contract::Header;
use carrack_transports::gpu::Event;

/// What an active message is made of.
pub struct Am<'a> {
    comp: RemoteComp,
    sending: Sending<'a>,
}

impl Runtime {
    /// An active message: `buffer` goes to the completion object that `rank` has registered as `comp`.
    pub fn post_am<'a>(
        &'a self,
        rank: Rank,
        buffer: impl Into<SendBuffer<'a>>,
        comp: RemoteComp,
    ) -> PostAm<'a> {
        let sending = Sending { buffer: Some(buffer.into()), after: None };
        Post::new(self, rank, Tag::default(), Am { comp, sending })
    }
}

impl PostAm<'_> {
    /// Sends only once `event` has fired: after the kernel that writes the buffer, say.
    pub fn after(mut self, event: &Event) -> Self {
        self.kind.sending.after = Some(event.clone());
        self
    }
}

impl Tells for Am<'_> {
    fn tell(&mut self, comp: RemoteComp) {
        self.comp = comp;
    }
}

impl Kind for Am<'_> {
    #[inline]
    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError> {
        post.call_am()
    }
}

impl Post<'_, Am<'_>> {
    #[inline]
    fn call_am(&mut self) -> Result<Outcome, PostError> {
        let header = Message::Am { comp: self.kind.comp, tag: self.tag }.encode();
        if let Some(outcome) = transmit_short(self, &self.kind.sending, header) {
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

impl Carries for Am<'_> {
    const SENDS: bool = true;

    fn take_list(&mut self) -> Option<Vec<Buffer>> {
        take_list(&mut self.sending.buffer)
    }

    fn give(&mut self, buffer: Buffer) {
        self.sending.buffer = Some(SendBuffer::Owned(buffer));
    }

    fn take(&mut self) -> Self {
        Self { comp: self.comp, sending: self.sending.take() }
    }
}
