//! Completion objects: the receivers of statuses.
//!
//! Any object goes with any operation, on either side. [`Handler`] calls a function, and
//! [`CompQueue`] keeps statuses until they are taken. [`Counter`] counts them, and
//! [`Synchronizer`] waits for a number of them. Streams of GPUs wait for a [`StreamCounter`]. A
//! type of your own implements [`Completion`].

mod counter;
mod handler;
mod queue;
mod registry;
mod status;
mod stream_counter;
mod synchronizer;

pub use counter::Counter;
pub use handler::Handler;
pub use queue::CompQueue;
use queue::Statuses;
pub(crate) use registry::{Registry, Snapshot};
pub use status::Status;
pub use stream_counter::StreamCounter;
pub(crate) use stream_counter::{Ranks, StreamCounterState};
pub(crate) use synchronizer::Gathered;
pub use synchronizer::Synchronizer;

use crate::names::{Rank, Tag};
use carrack_transports::mem::Buffer;
use std::sync::Arc;

/// A receiver of the statuses of operations.
///
/// `signal` runs on any thread that makes progress, outside all locks of the runtime. It should be
/// short. It may post operations, but not call progress. The progress call in which it panics
/// catches and reports the panic.
pub trait Completion: Send + Sync {
    /// Takes a status.
    ///
    /// # Errors
    /// The status itself, when there is no room for it now. The runtime keeps it, and later ones
    /// for the same object behind it, tells the user once
    /// ([`ProgressError::CompletionFull`](crate::ProgressError::CompletionFull)), and tries again.
    #[allow(clippy::result_large_err, reason = "the error is the status that did not fit")]
    fn signal(&self, status: Status) -> Result<(), Status>;

    /// Returns the buffer for a large active message of `size` bytes. Called before its bytes
    /// arrive, so that they go straight to their destination, also on a GPU. `None`, or a buffer
    /// that is too small, cannot be written or is a list: they go to a fresh `Vec`. The status
    /// returns the buffer.
    fn place(&self, from: Rank, tag: Tag, size: usize) -> Option<Buffer> {
        let _ = (from, tag, size);
        None
    }

    /// Returns `true` if active messages may be read in their sender's memory, as
    /// [`Buffer::Loan`], and not only from a packet of their own. That saves a copy if the handler
    /// copies the bytes anyway. The sender gets the place back when the status's buffer is
    /// dropped, and waits until then.
    fn takes_loans(&self) -> bool {
        false
    }

    /// Returns this object if a signal to it runs no user code and never waits. So the runtime may
    /// signal it under a device's lock, as soon as a message has met its receive.
    #[doc(hidden)]
    fn as_plain(&self) -> Option<Plain<'_>> {
        None
    }

    /// Returns the user's object that this one passes statuses on to. Deliveries for both wait in
    /// one queue.
    #[doc(hidden)]
    fn passes_on_to(&self) -> Option<&Arc<dyn Completion>> {
        None
    }

    /// Returns `true` if `signal` may run code of the user's: a handler, a waker, or the user's own
    /// object. Then it is called in progress only.
    #[doc(hidden)]
    fn runs_user_code(&self) -> bool {
        true
    }

    /// Returns `true` if the user has no handle to it any more: its statuses cannot be taken.
    #[doc(hidden)]
    fn is_abandoned(&self) -> bool {
        false
    }

    /// Describes the object in a word, for messages to the user.
    fn describe(&self) -> String {
        "a completion object of the user's".into()
    }
}

/// Object that the runtime may signal under a device's lock.
#[derive(Clone, Copy)]
#[doc(hidden)]
pub enum Plain<'a> {
    Queue(&'a Statuses),
    Synchronizer(&'a Gathered),
}

/// Parameter of a post that stands for a completion object: an object of this module, or an
/// `Arc<dyn Completion>`.
pub trait AsCompletion {
    /// Returns the object.
    fn as_completion(&self) -> &Arc<dyn Completion>;
}

impl AsCompletion for Arc<dyn Completion> {
    fn as_completion(&self) -> &Self {
        self
    }
}
