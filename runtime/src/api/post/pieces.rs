//! Operations on several buffers at once.
//!
//! A list of buffers ([`Buffer::List`]) is sent as one message, and filled by one. Its bytes are
//! gathered into one place before they are sent, and spread over the list when they have come. That
//! is one copy more than from a buffer in one piece. The list comes back in the status.

use super::desc::OpDesc;
use super::options::{Outcome, Post};
use super::submit::Kind;
use crate::api::buffer::Buffer;
use crate::comp::{Completion, Status};
use crate::datapath::fresh;
use crate::error::PostError;
use crate::matching::ReceiveName;
use carrack_transports::mem::copy::copy_now;
use parking_lot::Mutex;
use std::sync::Arc;

/// A kind of operation that has a buffer: a message, a receive, a put or a get.
pub trait Carries: Kind {
    /// `true` if the buffer is sent; else it is filled.
    #[doc(hidden)]
    const IS_SENT: bool;

    /// Returns the buffer, unless the bytes are only borrowed, or the operation was posted.
    #[doc(hidden)]
    fn owned(&mut self) -> Option<&mut Buffer>;

    /// Holds a buffer.
    #[doc(hidden)]
    fn hold(&mut self, buffer: Buffer);

    /// Takes the operation itself, and leaves a spent one.
    #[doc(hidden)]
    fn take(&mut self) -> Self;

    /// Keeps the name for `cancel`.
    #[doc(hidden)]
    fn keep(&mut self, name: Option<ReceiveName>) {
        let _ = name;
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
        // Signaled once more, since the inner object had no room: the bytes are in place already.
        let Some(mut list) = self.list.lock().take() else {
            return status;
        };
        if self.fills && status.error.is_none() {
            let mut done = 0;
            for piece in &mut list {
                let len = piece.len().min(status.size - done);
                // All pieces are writable host memory, as checked before.
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

    fn passes_on_to(&self) -> Option<&Arc<dyn Completion>> {
        self.inner.as_ref()
    }

    fn runs_user_code(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.runs_user_code())
    }

    fn describe(&self) -> String {
        self.inner.as_ref().map_or_else(|| "nothing".into(), |inner| inner.describe())
    }
}

/// Returns one buffer for the bytes of all pieces.
fn gather(list: &mut [Buffer], sends: bool) -> Result<Buffer, PostError> {
    for piece in &mut *list {
        if let Buffer::List(_) = piece {
            return Err(PostError::Pieces("a list within a list"));
        }
        if !piece.kind().is_host() {
            return Err(PostError::Pieces("memory of a GPU"));
        }
        if !sends && !piece.has_view_mut() {
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
    /// Posts the operation if its buffer is a list. Also rechecks memory that the program may have
    /// freed, since every operation with a buffer passes here.
    #[inline]
    pub(super) fn in_pieces(&mut self) -> Option<Result<Outcome, PostError>> {
        match self.kind.owned()? {
            Buffer::List(_) => Some(self.call_in_pieces()),
            Buffer::Region(slice) => {
                slice.region().recheck().err().map(|freed| Err(PostError::Freed(freed)))
            }
            _ => None,
        }
    }

    #[cold]
    fn call_in_pieces(&mut self) -> Result<Outcome, PostError> {
        self.kind.keep(None);
        let is_sent = K::IS_SENT;
        let mut list = match self.kind.owned().map(std::mem::take) {
            Some(Buffer::List(list)) => list.into_vec(),
            _ => Vec::new(),
        };
        if is_sent && self.order.is_some() {
            self.kind.hold(list.into());
            return Err(PostError::OrderedPieces);
        }
        let whole = match gather(&mut list, is_sent) {
            Ok(whole) => whole,
            Err(error) => {
                self.kind.hold(list.into());
                return Err(error);
            }
        };
        let spread = Arc::new(Spread {
            inner: self.desc.comp.cloned(),
            list: Mutex::new(Some(list)),
            fills: !is_sent,
        });
        let comp: Arc<dyn Completion> = spread.clone();
        self.kind.hold(whole);
        let mut post = Post {
            runtime: self.runtime,
            desc: OpDesc { comp: Some(&comp), ..self.desc },
            order: self.order.clone(),
            kind: self.kind.take(),
        };
        match K::post(&mut post) {
            Ok(Outcome::Done(status)) => Ok(Outcome::Done(spread.finish(status))),
            Ok(Outcome::Posted) => {
                self.kind.keep(post.kind.name());
                Ok(Outcome::Posted)
            }
            other => {
                self.kind = post.kind;
                if let Some(list) = spread.list.lock().take() {
                    self.kind.hold(list.into());
                }
                other
            }
        }
    }
}
