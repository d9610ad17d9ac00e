//! What can go wrong with memory of several ranks.

use crate::error::{CollectiveError, GroupError};
use crate::names::Rank;
use carrack_transports::contract::DownCause;

/// Memory was not allocated for several ranks. All ranks of the scope get an error; unless it is
/// said otherwise, the allocator works as before, and nothing of the attempt is left.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SharedAllocError {
    /// That many bytes cannot be allocated at all.
    #[error(
        "{len} bytes cannot be allocated: ask for at least 1, and for less than half of the \
        address space"
    )]
    Len {
        /// Bytes that were asked for.
        len: usize,
    },
    /// A rank cannot take part; no allocator was made.
    #[error("{rank} cannot have memory together with others: {why}")]
    Unable {
        /// Which rank.
        rank: Rank,
        /// Why.
        why: String,
    },
    /// The group of the scope cannot be made at this rank; the others get [`Unable`](Self::Unable).
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The ranks have made different calls.
    #[error(
        "{rank} has made {theirs}, this rank {ours}: all ranks of the scope must make the same calls of an allocator and its pools in the same order"
    )]
    Differ {
        /// Whose call differs.
        rank: Rank,
        /// What it has called.
        theirs: String,
        /// What this rank has.
        ours: String,
    },
    /// The leader, which allocates for all, could not.
    #[error("{leader}, which allocates for {ranks} ranks, could not: {why}")]
    Leader {
        /// The leader.
        leader: Rank,
        /// Ranks of the scope.
        ranks: u32,
        /// The driver's reason.
        why: String,
    },
    /// A rank could not map what the leader has allocated.
    #[error("{rank} cannot map memory of {leader}'s {gpu}: {why}")]
    NotMapped {
        /// Which rank.
        rank: Rank,
        /// The leader, whose GPU the memory lies on.
        leader: Rank,
        /// That GPU.
        gpu: String,
        /// Why, as the driver and each transport say.
        why: String,
    },
    /// The leader is gone. This allocator is at its end; what it has allocated stays mapped until
    /// it is dropped.
    #[error(
        "{leader}, whose memory it is, is gone ({cause}): nothing more is allocated; what is \
        mapped stays until it is dropped. Make an allocator over a group without it"
    )]
    LeaderGone {
        /// The leader.
        leader: Rank,
        /// How it went.
        cause: DownCause,
    },
    /// The ranks do not hear each other any more. This allocator is at its end.
    #[error(
        "the ranks of the scope cannot agree any more: {0}; nothing more is allocated, what is \
        mapped stays until it is dropped"
    )]
    Ended(Box<CollectiveError>),
    /// Called inside of a completion handler, which waits for nothing. Only this rank gets it, and
    /// has told nobody: the others wait for its call.
    #[error(
        "memory of several ranks cannot be had inside of a completion handler, which may wait for \
        nobody: have the handler tell the thread that calls progress, and call it there"
    )]
    InHandler,
    /// A rank has said something that makes no sense.
    #[error(
        "{rank} has sent what no rank of this version sends: run one version of Carrack on all \
        ranks"
    )]
    Garbled {
        /// Which rank.
        rank: Rank,
    },
}
