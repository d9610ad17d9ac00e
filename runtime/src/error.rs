//! Errors: one enum for each reaction of a program.

use crate::bootstrap::BootstrapError;
use crate::names::{Matching, Rank, RemoteComp, Tag};
use crate::settings::SettingsError;
use carrack_transports::contract::{DownCause, OpFailure, SubmitError, Unavailable};
use carrack_transports::gpu::GpuError;
use carrack_transports::mem::{
    AllocError, AtomicError, CopyError, FaceError, Freed, GpuUuid, MemKind, RawError,
};

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
    #[error("no transport can be used: \
        {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    NoTransport(Vec<Unavailable>),
    /// The GPU driver that the settings ask for could not be started.
    #[error("CARRACK_GPU: {0}")]
    Gpu(#[from] GpuError),
    /// The system refused a resource that waiting threads need.
    #[error("the runtime could not start: {0}")]
    System(String),
}

/// A post was refused, and nothing happened: fix the call. The operation still holds its buffer.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// There is no such rank.
    #[error("{rank} does not exist: the job has ranks 0 to {last}")]
    NoSuchRank {
        /// The rank asked for.
        rank: Rank,
        /// The highest there is.
        last: u32,
    },
    /// Tag or rank cannot be a wildcard here.
    #[error(
        "{0} is reserved for receives from any: it cannot be used in a send, nor with a required \
        path"
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
    #[error("{rank} is gone: {cause}")]
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
    /// well. Close what is not needed, or raise the limit, and post again.
    #[error("{rank} cannot be connected to now: {why}")]
    Lacking {
        /// The peer.
        rank: Rank,
        /// The missing requirement.
        why: String,
    },
    /// The required path is not the one to this peer.
    #[error("the path to {rank} is {chosen}, not the required {required}: {why}")]
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
    /// The peer's backlog is full.
    #[error(
        "{limit} operations wait for {rank} already: call progress and submit again, use \
        try_submit or wait, or raise CARRACK_BACKLOG"
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
        "this operation is spent, as it was posted already: build another one; one that sends \
        borrowed bytes can be posted again() to send them once more"
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
    /// The end of the operation would be seen by no one.
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
    #[error("the event or stream that the operation is ordered by cannot be used: {0}")]
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
    /// There is no memory to gather a list of buffers in.
    #[error("there is no host memory for the {0} bytes of a list of buffers")]
    NoMemory(usize),
    /// The memory cannot be sent from or received into.
    #[error("{0}")]
    Memory(CopyError),
    /// The memory of the operation was freed.
    #[error(transparent)]
    Freed(Freed),
    /// The remote region belongs to another rank.
    #[error("the remote region is {owner}'s, and the operation names {rank}")]
    Owner {
        /// The rank that was named.
        rank: Rank,
        /// The region's.
        owner: Rank,
    },
    /// The operation reaches beyond the remote region.
    #[error("{len} bytes at {offset} reach beyond the {room} bytes of the remote region")]
    Outside {
        /// The beginning of the range, in bytes.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Bytes of the remote region.
        room: u64,
    },
    /// A piece of a batch reaches beyond the local region.
    #[error("bytes {} to {} are not within the {room} bytes of the local \
        region", range.start, range.end)]
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
    /// A face is none, or is not within its memory.
    #[error("the {which} face: {cause}")]
    Face {
        /// `local` or `remote`.
        which: &'static str,
        /// The error of the face.
        cause: FaceError,
    },
    /// The remote region is not registered any more.
    #[error(
        "the remote region of {0} is not registered any more: get a new remote key from its owner"
    )]
    Stale(Rank),
    /// The remote key is of another job's region: it was kept from an earlier run, or came from a
    /// rank of another job.
    #[error(
        "the region is not one of {0} in this job: its remote key (RemoteKey) was made in another job; \
        let its owner send the one that Mr::remote_key returns now"
    )]
    OtherJob(Rank),
    /// An atomic operation cannot be done there.
    #[error(transparent)]
    Atomic(AtomicError),
    /// It is posted after its own deadline.
    #[error("the deadline of this operation on {0} has passed: nothing was posted")]
    TimedOut(Rank),
    /// The device was closed.
    #[error("the device is closed")]
    Closed,
    /// The runtime belongs to another process.
    #[error(
        "this process is a fork of the one that started the runtime: start a runtime of its own, \
        before or after"
    )]
    Forked,
    /// The launcher did not return the address of the peer.
    #[error("the address of {rank} cannot be had: {why}")]
    Bootstrap {
        /// The peer.
        rank: Rank,
        /// The bootstrap's error.
        why: String,
    },
}

/// Bytes that are no [`RemoteKey`](crate::RemoteKey).
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{0} bytes that do not name a remote region: they were cut off, damaged, or made by another \
    version"
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
        /// Its bytes.
        len: usize,
    },
    /// The system refused.
    #[error("{len} bytes of shared memory cannot be had: {why}")]
    System {
        /// Bytes asked for.
        len: usize,
        /// The system's error.
        why: String,
    },
}

/// An operation failed. The status of its completion object has this error.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// The peer went first.
    #[error("{rank} is gone: {cause}")]
    PeerDown {
        /// The peer.
        rank: Rank,
        /// The reason of its end.
        cause: DownCause,
    },
    /// The message was longer than the buffer; the buffer was not written.
    #[error("a message of {message} bytes came for a receive of {buffer}; nothing was written")]
    Truncated {
        /// Bytes of the message.
        message: usize,
        /// Bytes of the buffer.
        buffer: usize,
    },
    /// A copy failed.
    #[error(transparent)]
    Copy(CopyError),
    /// The event that the operation waited for failed.
    #[error("the event that it was ordered after failed: {0}")]
    Event(GpuError),
    /// The operation was deferred, and refused at its begin.
    #[error("it could not begin at its turn: {0}")]
    Begin(Box<PostError>),
    /// The peer could not take the message in: it had no memory for it, or copying it failed there.
    #[error("the peer could not take the message in; its own log says why")]
    Refused,
    /// There is no memory for a large message.
    #[error("there is no host memory for the {0} bytes of a message")]
    Memory(usize),
    /// Copying from the peer failed.
    #[error("copying from {rank} failed: {why}")]
    Transfer {
        /// The peer.
        rank: Rank,
        /// The system's error.
        why: String,
    },
    /// The link refused the operation after it had been accepted.
    #[error("the link to {rank} refused the operation: {why}")]
    Link {
        /// The peer.
        rank: Rank,
        /// The link's error.
        why: String,
    },
    /// The remote region is not registered any more, or never was.
    #[error(
        "the remote region of {0} is not registered any more, or never was: get a new remote key \
        from its owner"
    )]
    Stale(Rank),
    /// The operation reaches beyond the remote region.
    #[error("the operation reaches beyond the region that {0} has registered")]
    Outside(Rank),
    /// The owner of the remote region does no atomic operation there.
    #[error("{0} does no atomic operation on that word: it has to be aligned to 8 bytes")]
    Word(Rank),
    /// The operation had not completed by its deadline.
    #[error("the operation with {0} did not complete by its deadline")]
    TimedOut(Rank),
    /// It was cancelled, before its message came.
    #[error("the receive was cancelled")]
    Cancelled,
    /// The device or the runtime was closed first.
    #[error("the runtime was closed before the operation completed")]
    Closed,
}

impl OpError {
    pub(crate) fn of_submit(error: &SubmitError, rank: Rank) -> Self {
        match error {
            SubmitError::Down { cause, .. } => Self::PeerDown { rank, cause: cause.clone() },
            other => {
                tracing::error!(error = %other, rank = rank.0, "a link refused what the plan had \
                    found possible");
                Self::Link { rank, why: other.to_string() }
            }
        }
    }

    /// Returns the error of an operation that is posted later than its call.
    pub(crate) fn of_post(error: PostError, rank: Rank) -> Self {
        match error {
            PostError::PeerDown { rank, cause } => Self::PeerDown { rank, cause },
            PostError::Stale(rank) => Self::Stale(rank),
            PostError::TimedOut(_) => Self::TimedOut(rank),
            PostError::Closed => Self::Closed,
            PostError::Memory(error) => Self::Copy(error),
            other => Self::Begin(Box::new(other)),
        }
    }

    pub(crate) fn of(failure: OpFailure, rank: Rank) -> Self {
        match failure {
            OpFailure::Down(cause) => Self::PeerDown { rank, cause },
            OpFailure::Copy(error) => Self::Copy(error),
            OpFailure::Event(error) => Self::Event(error),
            OpFailure::Closed => Self::Closed,
            other => Self::Link { rank, why: other.to_string() },
        }
    }
}

/// An operation that was awaited failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum AwaitError {
    /// It could not be posted.
    #[error(transparent)]
    Post(#[from] PostError),
    /// It failed.
    #[error(transparent)]
    Op(#[from] OpError),
}

/// Progress went as far as possible, and a problem needs attention.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ProgressError {
    /// A completion object has no room. Deliveries for it wait, in order, and nothing is lost;
    /// those for other objects pass. It is reported once for as long as any of them wait.
    #[error(
        "a completion object is full ({0}): take statuses out of it, or make it with more room; \
        {1} deliveries wait for it"
    )]
    CompletionFull(String, usize),
    /// There is no packet to put a message into. The message waits for its completion object, as
    /// with a full one, and nothing is lost.
    #[error(
        "no packet is left for a message: drop those that were kept, or raise CARRACK_PACKETS_MAX; \
        {0} deliveries wait"
    )]
    NoPacket(usize),
    /// There is no packet to put a message into, because there is no memory for more of them. It
    /// waits, and nothing is lost.
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
    /// There is no memory for a large active message. It was dropped, and its sender told.
    #[error("there is no memory for an active message of {size} bytes from {from}: {why}")]
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
    #[error("{from} sent a malformed message: {why}")]
    Malformed {
        /// The sender.
        from: Rank,
        /// The violation.
        why: String,
    },
    /// A completion handler panicked. Its status is gone, everything else goes on.
    #[error("a completion handler panicked on a status from {from}: {message}")]
    HandlerPanicked {
        /// The status's rank.
        from: Rank,
        /// The panic's message.
        message: String,
    },
    /// Called from a completion handler.
    #[error(
        "progress may not be called from a completion handler: return, and the caller will go on"
    )]
    InHandler,
    /// The runtime belongs to another process.
    #[error("this process is a fork of the one that started the runtime")]
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
    #[error("not there after {0:?}")]
    TimedOut(std::time::Duration),
}

/// A collective operation failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum CollectiveError {
    /// A message of it could not be posted.
    #[error("{what}: {cause}")]
    Post {
        /// The operation.
        what: &'static str,
        /// The error.
        cause: PostError,
    },
    /// A message of it failed.
    #[error("{what}: {cause}")]
    Op {
        /// The operation.
        what: &'static str,
        /// The error.
        cause: OpError,
    },
    /// Waiting failed.
    #[error("{what}: {cause}")]
    Wait {
        /// The operation.
        what: &'static str,
        /// The error.
        cause: WaitError,
    },
    /// Another member has failed in it.
    #[error("{what}: it failed at {rank}, whose own error says why")]
    Failed {
        /// The operation.
        what: &'static str,
        /// The rank.
        rank: Rank,
    },
    /// Another member takes part in another operation.
    #[error(
        "{rank} is in a {theirs}, this rank in a {ours}: all members of a group must make it \
        alike, and call its operations in the same order"
    )]
    Mismatch {
        /// The other member.
        rank: Rank,
        /// The operation of that rank.
        theirs: String,
        /// The operation of this rank.
        ours: String,
    },
    /// The root of a broadcast is no member.
    #[error("broadcast: {rank} is not a member of group {group}")]
    Root {
        /// The rank.
        rank: Rank,
        /// The group.
        group: u32,
    },
    /// A rank contributed bytes that are no remote key.
    #[error("exchange of remote keys: {rank} contributed {len} bytes that are no remote key")]
    Key {
        /// The rank.
        rank: Rank,
        /// Its bytes.
        len: usize,
    },
    /// A rank contributed another number of bytes.
    #[error(
        "allgather: {rank} contributed {theirs} bytes, this rank {ours}: all must contribute the \
        same number"
    )]
    Uneven {
        /// The rank.
        rank: Rank,
        /// Its bytes.
        theirs: usize,
        /// This rank's.
        ours: usize,
    },
}

/// A group could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GroupError {
    /// The name is that of the group of all ranks, or one of those that the library keeps for its
    /// own groups.
    #[error(
        "group {0}: 0 is the group of all ranks, and names from 2147483648 on are the library's: \
        name yours from 1 to 2147483647"
    )]
    Name(u32),
    /// A rank is in it twice.
    #[error("{0} is named twice")]
    Twice(Rank),
    /// A rank does not exist.
    #[error("{rank} does not exist: the job has ranks 0 to {last}")]
    NoSuchRank {
        /// The rank.
        rank: Rank,
        /// The highest there is.
        last: u32,
    },
    /// This rank is not in it.
    #[error("{0}, this rank, is not among its members: only members make a group")]
    NotMember(Rank),
    /// The name is that of a group of other ranks, or in another order.
    #[error("group {name} has been made already, of {count} ranks, and not of these in this order")]
    Taken {
        /// The name.
        name: u32,
        /// The number of its members.
        count: u32,
    },
    /// There are too many.
    #[error("all {0} groups are in use")]
    TooMany(usize),
}

/// A resource could not be made.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ResourceError {
    /// No transport could make a device.
    #[error("no device could be opened: \
        {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Device(Vec<Unavailable>),
    /// The address could not be published.
    #[error("the device's address could not be published: {0}")]
    Publish(String),
    /// The wire format cannot number more.
    #[error("all {limit} {what} are in use")]
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

macro_rules! any_error {
    ($(#[$of_all:meta])* ; $($(#[$of_one:meta])* $name:ident($error:ty),)+) => {
        $(#[$of_all])*
        #[derive(thiserror::Error)]
        #[non_exhaustive]
        pub enum Error {
            $($(#[$of_one])* #[error(transparent)] $name(Box<$error>),)+
        }

        $(impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::$name(Box::new(error))
            }
        })+
    };
}

any_error! {
    /// Any error of this crate, for programs that end with the first one. `main` prints its
    /// sentence.
    ///
    /// ```
    /// use carrack::prelude::*;
    ///
    /// fn main() -> Result<(), carrack::Error> {
    ///     let runtime = Runtime::start()?;
    ///     runtime.post_send(runtime.rank(), b"hello", Tag(1)).submit()?;
    ///     let status = runtime.post_recv(runtime.rank(), vec![0; 5], Tag(1)).wait()?;
    ///     assert_eq!(status.bytes(), Some(&b"hello"[..]));
    ///     Ok(())
    /// }
    /// ```
    ;
    /// The runtime could not start.
    Start(StartError),
    /// A post was refused.
    Post(PostError),
    /// An operation failed.
    Op(OpError),
    /// Progress needs attention.
    Progress(ProgressError),
    /// A wait ended before its condition was true.
    Wait(WaitError),
    /// A collective operation failed.
    Collective(CollectiveError),
    /// A group could not be made.
    Group(GroupError),
    /// Memory was not registered.
    Register(RegisterError),
    /// Bytes are no remote key.
    RemoteKey(RemoteKeyError),
    /// A resource could not be made.
    Resource(ResourceError),
    /// Memory could not be allocated.
    Alloc(AllocError),
}

impl From<AwaitError> for Error {
    fn from(error: AwaitError) -> Self {
        match error {
            AwaitError::Post(error) => error.into(),
            AwaitError::Op(error) => error.into(),
        }
    }
}

impl std::fmt::Debug for Error {
    /// Writes the sentence: `main` prints errors this way.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_a_program_prints_its_sentence() {
        let error = Error::from(AwaitError::from(PostError::Closed));
        assert_eq!(format!("{error:?}"), PostError::Closed.to_string());
    }

    #[test]
    fn a_link_that_refuses_what_was_planned_is_named_and_not_the_end_of_the_runtime() {
        let refused = SubmitError::TooLong { len: 9, max: 8 };
        let error = OpError::of_submit(&refused, Rank(3));
        assert!(matches!(&error, OpError::Link { rank: Rank(3), .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("rank 3") && text.contains(&refused.to_string()), "{text}");
    }
}
