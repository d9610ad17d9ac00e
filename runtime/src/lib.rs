//! Carrack: a communication runtime for HPC. Ranks exchange host and GPU memory with
//! [`post_send`](Runtime::post_send), [`post_recv`](Runtime::post_recv) and
//! [`post_am`](Runtime::post_am). Each message takes the cheapest path between two ranks;
//! [`explain`](Runtime::explain) names it, and gives the reasons against the others.
//!
//! | for | see |
//! |---|---|
//! | a start | [`Runtime::start`]; [`settings`], [`bootstrap`] |
//! | operations | the `post_` methods of [`Runtime`]; [`post`], [`buffer`], [`matching`] |
//! | their ends | [`comp`]: handler, queue, counters, synchronizer, your own |
//! | memory that other ranks reach | [`Runtime::register_memory`]; [`region`] |
//! | GPUs | [`transports::gpu`]; [`alloc`], [`ipc`], [`packet`], [`trial`] |
//! | groups of ranks | [`Group`] |
//! | a transport, GPU driver or allocator of your own | [`transports`] |
//! | reports | [`explain`], [`Runtime::pending`], [`Runtime::peer_state`] |
//!
//! [`prelude`] has the items that most programs use.
//!
//! Two ranks in one process, over loopback:
//!
//! ```
//! use carrack::{Counter, CompQueue, Rank, Runtime, Tag};
//!
//! let [zero, one]: [Runtime; 2] = Runtime::in_process(2)?.try_into().map_err(|_| "two ranks")?;
//! let arrived = CompQueue::new(16);
//! // Both register in the same order, so that the name is the same on both.
//! let name = one.register_comp(&arrived)?;
//! zero.register_comp(&Counter::new())?;
//!
//! zero.post_am(Rank(1), b"hello", name).tag(Tag(7)).submit()?;
//! let status = loop {
//!     one.progress()?;
//!     if let Some(status) = arrived.pop() {
//!         break status;
//!     }
//! };
//! assert_eq!((status.rank, status.tag, status.bytes()), (Rank(0), Tag(7), Some(&b"hello"[..])));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

pub mod alloc;
mod api;
mod boards;
pub mod bootstrap;
mod chores;
mod collective;
pub mod comp;
mod datapath;
mod deadline;
mod error;
pub mod explain;
pub mod ipc;
mod local;
pub mod matching;
mod names;
mod op;
pub mod packet;
mod peer;
mod progress;
mod protocol;
pub mod region;
pub mod settings;
mod simulators;
mod staging;
mod streams;
pub mod transports;
mod undelivered;

pub use carrack_transports::trial;

pub use api::buffer::{self, Buffer, SendBuffer};
pub use api::post::{self, Operation, Outcome, Piece, RetryReason};
pub use api::{DeviceBuilder, Drive, Probe, Runtime, RuntimeBuilder, Ticket};
pub use carrack_transports::mem::{MR_DEVICE, MR_HOST, MR_UNKNOWN, MemHint, Strided, StridedError};
pub use collective::Group;
#[doc(inline)]
pub use comp::{
    AsCompletion, CompQueue, Completion, Counter, Handler, Status, StreamCounter, Synchronizer,
};
pub use datapath::Device;
pub use error::{
    AwaitError, CollectiveError, Error, GroupError, OpError, PostError, ProgressError,
    RegisterError, RemoteKeyError, ResourceError, StartError, WaitError,
};
#[doc(inline)]
pub use matching::{Envelope, Matching, MatchingEngine};
pub use names::{Rank, RemoteComp, Tag, UserContext};
pub use op::PendingOp;
pub use peer::PeerState;
pub use progress::Pending;
#[doc(inline)]
pub use region::{AtomicAgent, Mr, Registration, RemoteKey, StillInUse};

/// The items that most programs use.
pub mod prelude {
    pub use crate::api::Runtime;
    pub use crate::api::buffer::{Buffer, Region};
    pub use crate::api::post::{Operation, Outcome, RetryReason};
    pub use crate::comp::{AsCompletion, CompQueue, Counter, Handler, Status, Synchronizer};
    pub use crate::error::{AwaitError, OpError, PostError, ProgressError, WaitError};
    pub use crate::matching::Matching;
    pub use crate::names::{Rank, RemoteComp, Tag, UserContext};
    pub use crate::region::{Mr, RemoteKey};
    pub use crate::{Device, Group, MR_DEVICE, MR_HOST, MR_UNKNOWN, Piece};
}
