//! Posting: one builder for each operation, and four verbs that post it.
//!
//! ```text
//! try_submit   Done(status) | Posted | Retry(reason); never blocks, never queues
//! submit       never blocks; queued if it cannot go now; the completion object is always told
//! wait         blocks, making progress; returns the status
//! await        a future; returns the status
//!
//! Done     completed: the status is returned, and no completion object is signalled
//! Posted   in flight: the completion object will be signalled, exactly once
//! Retry    nothing happened; make progress and try again
//! ```
//!
//! After an error or a retry the operation, its buffer included, is still the caller's. After
//! `Done` or `Posted` it is spent: a further call is an error, and does nothing.

mod am;
mod atomic;
mod batch;
mod desc;
mod nic;
mod operation;
mod options;
mod order;
mod ordered;
mod park;
mod pieces;
mod place;
mod recv;
mod rma;
mod send;
mod submit;
mod transmit;
mod waiting;
mod words;

pub use batch::Piece;
pub use operation::Operation;
pub use options::{Outcome, Post, RetryReason};
pub use pieces::Carries;
pub use submit::Kind;

/// An active message to be posted. Made by [`Runtime::post_am`](crate::Runtime::post_am).
pub type PostAm<'a> = Post<'a, am::Am<'a>>;
/// A message to be sent to a matching receive. Made by
/// [`Runtime::post_send`](crate::Runtime::post_send).
pub type PostSend<'a> = Post<'a, send::Send<'a>>;
/// A receive to be posted. Made by [`Runtime::post_recv`](crate::Runtime::post_recv).
pub type PostRecv<'a> = Post<'a, recv::Recv<'a>>;
/// A put to be posted. Made by [`Runtime::post_put`](crate::Runtime::post_put).
pub type PostPut<'a> = Post<'a, rma::Put<'a>>;
/// A get to be posted. Made by [`Runtime::post_get`](crate::Runtime::post_get).
pub type PostGet<'a> = Post<'a, rma::Get<'a>>;
/// Many puts or gets to be posted as one. Made by
/// [`Runtime::post_put_batch`](crate::Runtime::post_put_batch),
/// [`post_get_batch`](crate::Runtime::post_get_batch),
/// [`post_put_strided`](crate::Runtime::post_put_strided) and
/// [`post_get_strided`](crate::Runtime::post_get_strided).
pub type PostBatch<'a> = Post<'a, batch::Batch<'a>>;
/// An atomic operation to be posted. Made by
/// [`Runtime::post_fetch_add`](crate::Runtime::post_fetch_add) and
/// [`Runtime::post_compare_swap`](crate::Runtime::post_compare_swap).
pub type PostAtomic<'a> = Post<'a, atomic::Atomic<'a>>;
/// A flush to be posted. Made by [`Runtime::post_flush`](crate::Runtime::post_flush).
pub type PostFlush<'a> = Post<'a, atomic::ToFlush>;
