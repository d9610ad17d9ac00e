//! The objects of libibverbs as owned values.
//!
//! | module | one idea |
//! |---|---|
//! | `handle` | why the library's pointers may go from thread to thread |
//! | `context` | a device that is open, what it can do, and its ports |
//! | `extended` | what only newer libraries have in their contexts |
//! | `gids` | the addresses of a port |
//! | `events` | what a device tells unasked |
//! | `domain` | protection domains, of several threads and of one |
//! | `memory` | registered memory |
//! | `completion` | completion queues, and the channels that wake sleepers |
//! | `receive` | receives that many queue pairs share |
//! | `queue_pair` | queue pairs |
//!
//! # Ends
//!
//! libibverbs refuses, or worse, to destroy what something else still stands on. Here nothing can
//! be destroyed too early: whatever is made in another object holds it, by `Arc`, so an object's
//! end comes when the last that stands on it has ended. Each is destroyed in its `Drop`, before the
//! fields are, so first the child and then what it held. A refusal there is logged and the object
//! left to the process's end. In a forked child nothing is destroyed: the device's file is shared
//! with the parent, and so is all that was made through it.

mod completion;
mod context;
mod domain;
mod events;
mod extended;
mod gids;
mod handle;
mod memory;
mod queue_pair;
mod receive;

pub use completion::{CompletionChannel, CompletionQueue, PollFailure};
pub use context::{Context, DeviceName};
pub use domain::ProtectionDomain;
pub use events::{AsyncEvent, Subject};
pub use gids::{GidEntry, GidIndex, GidKind};
pub use memory::{Access, MemoryRegion};
pub use queue_pair::{QueuePair, QueuePairSpec};
pub use receive::{PostFailure, SharedReceiveQueue};

#[cfg(test)]
mod tests;
