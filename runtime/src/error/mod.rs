//! Errors: one enum for each reaction of a program.

mod any;
mod collective;
mod op;
mod post;

pub use any::Error;
pub(crate) use any::other_error;
pub use collective::{CollectiveError, GroupError};
pub use op::OpError;
pub use post::PostError;

use crate::bootstrap::BootstrapError;
use crate::names::{Rank, RemoteComp};
use crate::settings::SettingsError;
use carrack_transports::contract::Unavailable;
use carrack_transports::gpu::GpuError;
use carrack_transports::mem::{AllocError, RawError};

/// A runtime could not start: fix the environment.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// A setting is wrong.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The launcher could not be reached, or its answer was invalid.
    #[error(transparent)]
    Bootstrap(#[from] BootstrapError),
    /// None of the transports that the settings allow can be opened.
    #[error("no transport can be used: {}; correct one of these, or name another in \
        CARRACK_TRANSPORT", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NoTransport(Vec<Unavailable>),
    /// The GPU driver that the settings ask for could not be started.
    #[error("CARRACK_GPU: {0}; CARRACK_GPU=auto starts without a GPU")]
    Gpu(#[from] GpuError),
    /// The system refused a resource that waiting threads need.
    #[error("the runtime could not start: {0}")]
    System(String),
}

/// Bytes that are no [`RemoteKey`](crate::RemoteKey).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{0} bytes that do not name a remote region: they were cut off, damaged, or made by another \
    version; get them anew from RemoteKey::to_bytes at the owner"
)]
pub struct RemoteKeyError(pub usize);

/// Memory was not registered.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// The table is full.
    #[error("{0} regions are registered already: deregister some")]
    TooMany(usize),
    /// The memory is not of the kind that the hint says, or cannot be registered.
    #[error(transparent)]
    Raw(#[from] RawError),
    /// No NIC of this rank's can do the atomic operations on the region's words.
    #[error(
        "no NIC can do the atomic operations on this region's words: {0}; register it without that \
        wish (AtomicAgent::Owner), and its owner does them"
    )]
    NoAtomics(String),
    /// The words of a part of it have another coherence owner.
    #[error(
        "a part of the {len} bytes at {addr:#x} is registered, and the atomic operations on its \
        words are done by another agent than this registration names: a word has one agent, so \
        end that registration first, or name the same AtomicAgent"
    )]
    OtherAgent {
        /// The address of the region.
        addr: usize,
        /// Bytes of the region.
        len: usize,
    },
    /// The system refused.
    #[error(
        "the system gave no {len} bytes of shared memory: {why}; ask for less, or raise the limits \
        on memory, files and their sizes (`ulimit -a`)"
    )]
    System {
        /// Bytes asked for.
        len: usize,
        /// The system's error.
        why: String,
    },
}

/// An operation that was awaited failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum AwaitError {
    /// The operation could not be posted.
    #[error(transparent)]
    Post(#[from] PostError),
    /// The operation failed.
    #[error(transparent)]
    Op(#[from] OpError),
}

/// Progress went as far as possible, and a problem needs attention.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ProgressError {
    /// The device is another runtime's.
    #[error("the device belongs to another runtime; use one of this runtime")]
    Foreign,
    /// A completion object has no room. Deliveries for it wait, in order, and nothing is lost;
    /// those for other objects pass. It is reported once for as long as any of them wait.
    #[error(
        "a completion object is full ({0}): take statuses out of it, or make it with more room; \
        {1} deliveries wait for it"
    )]
    CompletionFull(String, usize),
    /// No packet is free to put a message into. The message waits for its completion object, as
    /// with a full one, and nothing is lost.
    #[error(
        "no packet is left for a message: drop those that were kept, or raise CARRACK_PACKETS_MAX; \
        {0} deliveries wait"
    )]
    NoPacket(usize),
    /// No packet is free to put a message into, because memory for more of them is short. The
    /// message waits, and nothing is lost.
    #[error("a message waits for a packet, and the pool cannot grow: {0}; {1} deliveries wait")]
    NoPacketMemory(Box<AllocError>, usize),
    /// A message named a completion object that this rank does not have. It was dropped.
    #[error(
        "{from} sent a message of {size} bytes to completion {comp:?}, which is not registered \
        here, or not any more: register it before its peers send, deregister it after their last \
        message (a barrier in between)"
    )]
    NoSuchCompletion {
        /// The sender.
        from: Rank,
        /// The object that it named.
        comp: RemoteComp,
        /// Bytes dropped.
        size: usize,
    },
    /// Memory for a large active message is short. The message was dropped, and its sender told.
    #[error(
        "an active message of {size} bytes from {from} was dropped for lack of memory: {why}; make \
        room here, and let {from} send it again"
    )]
    NoMemory {
        /// The sender.
        from: Rank,
        /// Bytes dropped.
        size: usize,
        /// The memory, and the driver's error.
        why: Box<AllocError>,
    },
    /// A message was malformed. It was dropped. If an operation may have waited for it, all
    /// operations with the sender end with [`OpError::PeerDown`].
    #[error(
        "{from} sent a malformed message: {why}; run one version of Carrack on all ranks; if all \
        do, please report this"
    )]
    Malformed {
        /// The sender.
        from: Rank,
        /// The violation.
        why: String,
    },
    /// A completion handler panicked. Its status is lost; everything else continues.
    #[error(
        "a completion handler panicked on a status from {from}, which is lost: {message}; correct \
        the handler"
    )]
    HandlerPanicked {
        /// The status's rank.
        from: Rank,
        /// The panic's message.
        message: String,
    },
    /// A completion handler has called progress.
    #[error(
        "progress may not be called from a completion handler: return, and the caller will go on"
    )]
    InHandler,
    /// The runtime belongs to another process.
    #[error(
        "this process is a fork of the one that started the runtime: make progress in that one, or \
        fork before the runtime starts"
    )]
    Forked,
}

/// A wait ended before its condition was true.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// Progress needs attention that the waiting thread cannot give.
    #[error(transparent)]
    Progress(#[from] ProgressError),
    /// The time was up.
    #[error(
        "the condition was still false after {0:?}: wait longer, or look for what holds it up in \
        Runtime::pending"
    )]
    TimedOut(std::time::Duration),
}

/// A resource could not be made.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// No transport could make a device.
    #[error("no device could be opened: {}; correct one of these, or name another transport in \
        CARRACK_TRANSPORT", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Device(Vec<Unavailable>),
    /// The address could not be published.
    #[error(
        "the device's address could not be published: {0}; correct that, and start the job again"
    )]
    Publish(String),
    /// The wire format cannot number more.
    #[error("a rank has {limit} {what} at most: use one of them again, or ask for fewer")]
    TooMany {
        /// The resource.
        what: &'static str,
        /// The limit.
        limit: usize,
    },
    /// A slot was asked for that is taken, or was never reserved.
    #[error("slot {slot:?} {why}")]
    Slot {
        /// The slot.
        slot: RemoteComp,
        /// The error of the slot.
        why: &'static str,
    },
    /// A name by text is taken, by an object of the same text or of one with the same hash.
    #[error(
        "the name {text:?} is taken by an object that was registered as {by:?}: choose another \
        text, or deregister that object first"
    )]
    Name {
        /// The text.
        text: String,
        /// The text of the object that has the name.
        by: String,
    },
    /// Packets could not be allocated.
    #[error(transparent)]
    Packets(#[from] AllocError),
}
