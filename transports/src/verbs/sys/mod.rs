//! libibverbs, opened at run time: a program with this module also runs on machines without RDMA.
//!
//! | module | one idea |
//! |---|---|
//! | [`bindings`] | structures and numbers of rdma-core's headers, made by `cargo xtask bindings` |
//! | `library` | opening `libibverbs.so.1` |
//! | `table` | the functions of libibverbs, each of which may be missing: [`Verbs`] |
//! | [`objects`] | contexts, domains, memory and queues as owned values, with a safe drop order |
//! | `interop` | objects that a program has from other crates: features `rdma-sys` and `ibverbs` |
//! | `error` | failed calls, and the remedies: [`VerbsError`] |

#![expect(unsafe_code, reason = "functions and structures of libibverbs")]

pub mod bindings;
mod error;
#[cfg(any(feature = "rdma-sys", feature = "ibverbs"))]
mod interop;
mod library;
pub mod objects;
mod table;

pub use error::VerbsError;
pub use objects::{
    AccessFlags, AsyncEvent, CompletionChannel, CompletionQueue, Context, DeviceName, GidEntry,
    GidIndex, GidKind, MemoryRegion, PollFailure, PostFailure, ProtectionDomain, QueuePair,
    QueuePairSpec, SharedReceiveQueue, Subject,
};
pub use table::{Answer, Functions, Verbs};
