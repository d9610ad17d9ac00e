//! Operations on several buffers at once.
//!
//! A list of buffers ([`Buffer::List`]) is sent as one message, and filled by one. Its bytes are gathered into one place before they
//! are sent, and spread over the list when they have come: one copy more than from a buffer in one piece. The list comes back in the
//! status.

use super::options::{Allow, Kind, Outcome, Post};
use crate::buffer::{Buffer, SendBuffer, fresh};
use crate::comp::{Completion, Status};
use crate::error::PostError;
use crate::matching::Ticket;
use carrack_transports::mem::copy::copy_now;
use std::sync::{Arc, Mutex, PoisonError};

/// A kind of operation that has a buffer.
pub trait Carries: Kind {
    /// Whether the buffer is sent; else it is filled.
    const SENDS: bool;

    /// Takes the buffer out, if it is a list.
    fn take_list(&mut self) -> Option<Vec<Buffer>>;

    /// Puts a buffer in.
    fn give(&mut self, buffer: Buffer);

    /// The operation itself, and leaves a spent one.
    fn take(&mut self) -> Self;

    /// Keeps what names it to `cancel`.
    fn keep(&mut self, ticket: Option<Ticket>) {
        let _ = ticket;
    }
}

/// Takes a buffer that is to be sent out of its place, if it is a list.
pub(super) fn take_list(place: &mut Option<SendBuffer<'_>>) -> Option<Vec<Buffer>> {
    match place {
        Some(SendBuffer::Owned(buffer)) => take_list_of(buffer),
        _ => None,
    }
}

/// Takes the buffers out of a list.
pub(super) fn take_list_of(buffer: &mut Buffer) -> Option<Vec<Buffer>> {
    match buffer {
        Buffer::List(_) => match std::mem::take(buffer) {
            Buffer::List(list) => Some(list.into_vec()),
            _ => None,
        },
        _ => None,
    }
}

/// Signals another object, once the bytes are where they belong.
struct Spread {
    inner: Option<Arc<dyn Completion>>,
    list: Mutex<Option<Vec<Buffer>>>,
    fills: bool,
}

impl Spread {
    fn finish(&self, mut status: Status) -> Status {
        // Told once more, because the inner object had no room, there is nothing left to be done.
        let Some(mut list) = self.list.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return status;
        };
        if self.fills && status.error.is_none() {
            let mut done = 0;
            for piece in &mut list {
                let len = piece.len().min(status.size - done);
                // All are host memory that can be written: that was looked at before.
                if let Some(room) = piece.view_mut() {
                    let _ = copy_now(room.part(0, len), status.buffer.view().part(done, len));
                }
                done += len;
            }
        }
        status.buffer = list.into();
        status
    }
}

impl Completion for Spread {
    fn signal(&self, status: Status) -> Result<(), Status> {
        let status = self.finish(status);
        match &self.inner {
            Some(inner) => inner.signal(status),
            None => Ok(()),
        }
    }

    fn describe(&self) -> String {
        self.inner.as_ref().map_or_else(|| "nothing".into(), |inner| inner.describe())
    }
}

/// One place for all the bytes.
fn gather(list: &mut [Buffer], sends: bool) -> Result<Buffer, PostError> {
    for piece in &mut *list {
        if let Buffer::List(_) = piece {
            return Err(PostError::Pieces("a list within a list"));
        }
        if !piece.kind().is_host() {
            return Err(PostError::Pieces("memory of a GPU"));
        }
        if !sends && piece.view_mut().is_none() {
            return Err(PostError::ReadOnly("Bytes"));
        }
    }
    let size = list.iter().map(Buffer::len).sum();
    let mut whole = fresh(size).ok_or(PostError::NoMemory(size))?;
    let mut done = 0;
    for piece in list.iter().filter(|_| sends) {
        if let Some(room) = whole.view_mut() {
            copy_now(room.part(done, piece.len()), piece.view()).map_err(PostError::Memory)?;
        }
        done += piece.len();
    }
    Ok(whole)
}

impl<K: Carries> Post<'_, K> {
    /// Posts it, if its buffer is a list.
    #[inline]
    pub(super) fn in_pieces(&mut self) -> Option<Result<Outcome, PostError>> {
        let list = self.kind.take_list()?;
        Some(self.call_in_pieces(list))
    }

    #[cold]
    fn call_in_pieces(&mut self, mut list: Vec<Buffer>) -> Result<Outcome, PostError> {
        let whole = match gather(&mut list, K::SENDS) {
            Ok(whole) => whole,
            Err(error) => {
                self.kind.give(list.into());
                return Err(error);
            }
        };
        let spread =
            Arc::new(Spread { inner: self.comp.cloned(), list: Mutex::new(Some(list)), fills: !K::SENDS });
        let comp: Arc<dyn Completion> = spread.clone();
        self.kind.give(whole);
        // Without a completion object an operation may have to wait for its end: that stays so.
        let waits = self.comp.is_none() && !K::SENDS || !self.allow.posted;
        let allow = if waits { Allow { posted: false, done: true, ..self.allow } } else { self.allow };
        let mut post = Post {
            runtime: self.runtime,
            rank: self.rank,
            tag: self.tag,
            device: self.device,
            comp: Some(&comp),
            user_context: self.user_context,
            allow,
            required: self.required,
            deadline: self.deadline,
            kind: self.kind.take(),
        };
        match K::post(&mut post) {
            Ok(Outcome::Done(status)) => {
                let status = spread.finish(status);
                if self.allow.done {
                    return Ok(Outcome::Done(status));
                }
                self.outcome(super::rma::Begun::Over(status))
            }
            Ok(Outcome::Posted) => {
                self.kind.keep(post.kind.ticket());
                Ok(Outcome::Posted)
            }
            other => {
                self.kind = post.kind;
                if let Some(list) = spread.list.lock().unwrap_or_else(PoisonError::into_inner).take() {
                    self.kind.give(list.into());
                }
                other
            }
        }
    }
}
