//! The objects of libibverbs as owned values.
//!
//! | module | one idea |
//! |---|---|
//! | `handle` | the reason why the library's pointers may be sent to other threads |
//! | `context` | a device that is open, what it can do, and its ports |
//! | `extended` | functions of a context that only newer libraries have |
//! | `gids` | the addresses of a port |
//! | `events` | asynchronous events of a device |
//! | `domain` | protection domains, of several threads and of one |
//! | `memory` | registered memory |
//! | `completion` | completion queues, and the channels that wake sleepers |
//! | `receive` | receives that many queue pairs share |
//! | `queue_pair` | queue pairs |
//!
//! # Ends
//!
//! libibverbs forbids to destroy an object that others depend on. Here each object holds the one
//! that it was made in, by `Arc`, so an object ends after all that depend on it. Each is destroyed
//! in its `Drop`, before the fields are dropped, so the child comes first. A refusal there is
//! logged, and the object is left to the process's end. In a forked child nothing is destroyed: the
//! device's file, and all that was made through it, is shared with the parent.

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
pub use memory::{AccessFlags, MemoryRegion};
pub use queue_pair::{QueuePair, QueuePairSpec};
pub use receive::{PostFailure, SharedReceiveQueue};

#[cfg(test)]
mod tests;
