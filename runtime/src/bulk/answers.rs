//! What progress does about the messages that large ones need.

use super::wire::{Offer, Verdict, decode_landing};
use super::{Target, fresh};
use crate::comp::Snapshot;
use crate::error::ProgressError;
use crate::names::{Rank, RemoteComp, Tag};
use crate::progress::{Deferred, Pass, guarded, panicked};
use crate::protocol::header::Message;
use carrack_transports::contract::Payload;

impl Pass<'_> {
    /// Finds a place for a large active message, and has it brought there.
    #[cold]
    #[allow(clippy::result_large_err, reason = "the error is the delivery that has to wait")]
    pub(crate) fn offered_am(
        &mut self,
        from: Rank,
        name: RemoteComp,
        tag: Tag,
        offer: Offer,
        comps: &Snapshot,
    ) -> Result<(), Deferred> {
        let size = usize::try_from(offer.size).unwrap_or(usize::MAX);
        let refuse = |verdict: Verdict| {
            let message = Message::Finish { token: offer.token };
            self.device.control(self.inner, from, message, verdict.encode());
        };
        let Some(comp) = comps.get(name) else {
            // As with a small one: the sender has done its part.
            refuse(Verdict::Done);
            self.complain(ProgressError::NoSuchCompletion { from, comp: name, size });
            return Ok(());
        };
        let named = guarded(|| comp.place(from, tag, size));
        let buffer = match named {
            Ok(Some(buffer)) if buffer.len() >= size => Some(buffer),
            Ok(_) => fresh(size),
            Err(panic) => {
                refuse(Verdict::Failed);
                self.complain(panicked(from, panic.as_ref()));
                return Ok(());
            }
        };
        let Some(buffer) = buffer else {
            refuse(Verdict::Failed);
            self.complain(ProgressError::NoMemory { from, size });
            return Ok(());
        };
        match self.device.accept(self.inner, from, offer, Target::Am { tag, buffer, comp: comp.clone() }) {
            Some((comp, status)) => self.signal(comp.as_ref(), status),
            None => Ok(()),
        }
    }

    /// One of the messages that large ones need.
    ///
    /// # Errors
    /// It makes no sense.
    #[cold]
    pub(crate) fn bulk(&mut self, from: Rank, message: Message, payload: &Payload) -> Result<(), String> {
        let small = match payload {
            Payload::Small(bytes) => bytes.as_slice(),
            _ => &[],
        };
        let unknown = || "it answers an offer that was not made to it".to_string();
        match message {
            Message::Part { landing, offset } => self.part(from, landing, offset, payload),
            Message::Clear { token } => {
                let landing = decode_landing(small).ok_or("it clears an offer for nothing")?;
                if self.device.bulk.clear(from, token, landing) { Ok(()) } else { Err(unknown()) }
            }
            Message::Finish { token } => {
                let verdict = Verdict::decode(small).ok_or("it ends an offer without a verdict")?;
                let (comp, status) = self.device.bulk.finish(from, token, verdict).ok_or_else(unknown)?;
                self.signal_or_defer(comp.as_ref(), status);
                Ok(())
            }
            other => Err(format!("{other:?} where none belongs")),
        }
    }
}
