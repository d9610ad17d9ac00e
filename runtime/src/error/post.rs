//! The error of a post.

use crate::names::{Matching, Rank, Tag};
use carrack_transports::contract::DownCause;
use carrack_transports::gpu::GpuError;
use carrack_transports::mem::{AtomicError, CopyError, Freed, GpuUuid, MemKind, StridedError};

/// A post was refused, and nothing happened: fix the call. The operation still holds its buffer.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The job has no such rank.
    #[error("{rank} does not exist: name one of the job's ranks, 0 to {last}")]
    NoSuchRank {
        /// The rank asked for.
        rank: Rank,
        /// The highest there is.
        last: u32,
    },
    /// Tag or rank cannot be a wildcard here.
    #[error(
        "{0} is for receives and probes without a required path: name a rank, or a tag below \
        Tag::ANY, which is the largest"
    )]
    Wildcard(&'static str),
    /// A receive or a probe names a policy, and a wildcard for a property that the policy
    /// compares.
    #[error(
        "policy {policy:?} compares what {} leaves open: name the policy that the sender names, \
        or name none, and the wildcard chooses it",
        if policy.looks_at_rank() && *rank == Rank::ANY { "Rank::ANY" } else { "Tag::ANY" }
    )]
    Policy {
        /// The policy that was named.
        policy: Matching,
        /// The rank.
        rank: Rank,
        /// The tag.
        tag: Tag,
    },
    /// The buffer cannot be received into.
    #[error(
        "a receive needs a buffer that can be written: a Vec, a BytesMut, a packet or part of a \
        region, not {0}"
    )]
    ReadOnly(&'static str),
    /// The peer is known to be gone.
    #[error("{rank} is gone: {cause}; {}", .cause.remedy())]
    PeerDown {
        /// The peer.
        rank: Rank,
        /// The reason of its end.
        cause: DownCause,
    },
    /// No transport reaches the peer.
    #[error("{rank} cannot be reached: {why}")]
    Unreachable {
        /// The peer.
        rank: Rank,
        /// Each transport's reason.
        why: String,
    },
    /// This process lacks a descriptor or memory for a connection to the peer. The peer may be
    /// well. Close what is not needed, or raise the limit, and post again. `try_submit` returns
    /// this; an operation that is submitted waits, and [`Pending`](crate::Pending) tells for what.
    #[error("{rank} cannot be connected to now: {why}; make room for it, then post again")]
    Lacking {
        /// The peer.
        rank: Rank,
        /// The missing requirement.
        why: String,
    },
    /// The device or the matching engine is another runtime's.
    #[error("the device or matching engine belongs to another runtime; use one of this runtime")]
    Foreign,
    /// The required path is not the one to this peer.
    #[error(
        "the path to {rank} is {chosen}, not the required {required}: {why}; leave .require out to \
        allow another path"
    )]
    Path {
        /// The peer.
        rank: Rank,
        /// The path to it.
        chosen: &'static str,
        /// The required path.
        required: &'static str,
        /// The reason why the path is not that one.
        why: String,
    },
    /// The peer's backlog is full, or the peer takes only replies until its own have left.
    #[error(
        "{limit} operations wait for {rank} already, or as many replies there: call progress and \
        submit again, use try_submit or wait, or raise CARRACK_BACKLOG"
    )]
    BacklogFull {
        /// The peer.
        rank: Rank,
        /// Operations that wait.
        limit: usize,
    },
    /// Too many operations wait for their peers.
    #[error(
        "{limit} operations wait for {rank} and others to take them up already: call progress and \
        submit again, use try_submit or wait, or raise CARRACK_OFFERS"
    )]
    OffersFull {
        /// The peer.
        rank: Rank,
        /// Operations that wait.
        limit: usize,
    },
    /// The operation was posted already.
    #[error(
        "this operation is spent, as it was posted already: build another one, or give it a buffer \
        by refill(); one that sends borrowed bytes, or has no buffer, can be posted again()"
    )]
    Spent,
    /// A call that waits for its end was made inside a completion handler.
    #[error(
        "a completion handler may not wait for an operation: name a completion object with .comp, \
        and submit it"
    )]
    WouldBlock,
    /// Nothing makes progress, so an operation that is awaited would never end.
    #[error(
        "nothing makes progress, so this would never end: run Runtime::drive as a task of the \
        executor, set CARRACK_PROGRESS=thread, await it in Runtime::block_on, or call progress \
        before"
    )]
    Undriven,
    /// The operation has no completion object, so the program could not see its end.
    #[error(
        "{0} without a completion object would end unseen: name one with .comp, or wait for or \
        await the operation"
    )]
    NoCompletion(&'static str),
    /// Borrowed bytes are copied when they are submitted, and these are too many.
    #[error(
        "{len} borrowed bytes are more than a packet has ({max}): pass a buffer that the operation \
        owns, as a Vec, or wait for the operation"
    )]
    Borrowed {
        /// Bytes.
        len: usize,
        /// The bytes of a packet: `CARRACK_PACKET_SIZE`.
        max: usize,
    },
    /// A list of buffers holds a part that cannot be gathered.
    #[error("a list of buffers cannot hold {0}: send it as a message of its own")]
    Pieces(&'static str),
    /// A list of buffers is gathered before the event that orders it.
    #[error(
        "a list of buffers is gathered when it is posted, and cannot be sent in the order of an \
        event or stream: send one buffer"
    )]
    OrderedPieces,
    /// The event or stream of an operation cannot be used.
    #[error(
        "the event or stream that the operation is ordered by cannot be used: {0}; wait for it on \
        the host, and post without it"
    )]
    Stream(GpuError),
    /// The stream is in another GPU than the memory.
    #[error(
        "the stream is in GPU {stream}, and the buffer is {memory} memory: give a stream of that \
        GPU, or order the operation by .after(&stream.record()?)"
    )]
    OtherGpu {
        /// The stream's GPU.
        stream: GpuUuid,
        /// The buffer's memory.
        memory: MemKind,
    },
    /// A message between ranks of this process, in the order of a stream.
    #[error(
        "{0} is of this very process, and the other side of the message could stand behind it on \
        the same stream: order it by .after(&stream.record()?), and have the stream wait for a \
        StreamCounter once both sides are posted"
    )]
    OwnStream(Rank),
    /// Memory to gather a list of buffers in is short.
    #[error(
        "there is no host memory for the {0} bytes of a list of buffers: free some, or post the \
        buffers one by one"
    )]
    NoMemory(usize),
    /// The memory cannot be sent from or received into.
    #[error("{0}")]
    Memory(CopyError),
    /// The memory of the operation was freed.
    #[error(transparent)]
    Freed(Freed),
    /// The remote region belongs to another rank.
    #[error(
        "the remote region is {owner}'s, and the operation names {rank}: name the rank that \
        RemoteKey::owner returns"
    )]
    Owner {
        /// The rank that was named.
        rank: Rank,
        /// The region's.
        owner: Rank,
    },
    /// The operation reaches beyond the remote region.
    #[error(
        "{len} bytes at {offset} reach beyond the {room} bytes of the remote region: name a part \
        within it"
    )]
    Outside {
        /// The beginning of the range, in bytes.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes of the remote region.
        room: u64,
    },
    /// A piece of a batch reaches beyond the local region.
    #[error("bytes {} to {} are not within the {room} bytes of the local region: name a part \
        within it", range.start, range.end)]
    OutsideLocal {
        /// The part that was named, in bytes.
        range: std::ops::Range<usize>,
        /// Bytes of the region.
        room: usize,
    },
    /// One piece of a batch cannot be moved, and none was.
    #[error("piece {at} of the batch: {cause}; nothing was moved")]
    Piece {
        /// The number of the piece, counted from 0.
        at: usize,
        /// The error of the piece.
        cause: Box<Self>,
    },
    /// Two pieces of a batch write the same bytes.
    #[error(
        "pieces {first} and {second} of the batch write the same bytes, whose content would be \
        undefined: post them one after the other, with a flush between; nothing was moved"
    )]
    Overlap {
        /// One of them, counted from 0.
        first: usize,
        /// The other.
        second: usize,
    },
    /// A strided block has no valid shape, or is not within its memory.
    #[error("the {which} strided block: {cause}")]
    Strided {
        /// `local` or `remote`.
        which: &'static str,
        /// The error of the block.
        cause: StridedError,
    },
    /// The remote region is not registered any more.
    #[error(
        "the remote region of {0} is not registered any more: get a new remote key from its owner"
    )]
    Stale(Rank),
    /// The remote key is of another job's region: it was kept from an earlier run, or came from a
    /// rank of another job.
    #[error(
        "the region is not one of {0} in this job: its remote key (RemoteKey) was made in another \
        job; let its owner send the one that Mr::remote_key returns now"
    )]
    OtherJob(Rank),
    /// An atomic operation cannot be done there.
    #[error(transparent)]
    Atomic(AtomicError),
    /// The operation is posted after its own deadline.
    #[error(
        "the deadline of this operation on {0} has passed, so it was not posted: give it a later \
        one"
    )]
    TimedOut(Rank),
    /// The device was closed.
    #[error("the device is closed: post before its runtime is dropped")]
    Closed,
    /// The runtime belongs to another process.
    #[error(
        "this process is a fork of the one that started the runtime: post in that one, or fork \
        before the runtime starts"
    )]
    Forked,
    /// The launcher did not return the address of the peer.
    #[error("no address of {rank} has come: {why}")]
    Bootstrap {
        /// The peer.
        rank: Rank,
        /// The bootstrap's error.
        why: String,
    },
}

impl PostError {
    /// Returns the reason for which a peer counts as gone to which no link could be made.
    pub(crate) fn into_cause(self) -> DownCause {
        match self {
            Self::PeerDown { cause, .. } => cause,
            other => DownCause::Refused(other.to_string()),
        }
    }
}
