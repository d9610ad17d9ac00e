//! Errors of memory that several ranks share.

use crate::error::{CollectiveError, GroupError, other_error};
use crate::names::Rank;
use carrack_transports::contract::DownCause;

/// Memory was not allocated for several ranks. All ranks of the scope get an error. The allocator
/// still works, unless the variant says otherwise, and nothing of the attempt is left.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SharedAllocError {
    /// No allocator can return that many bytes.
    #[error(
        "{len} bytes cannot be allocated: ask for at least 1, and for less than a quarter of the \
        address space"
    )]
    Len {
        /// Bytes that were asked for.
        len: usize,
    },
    /// A rank cannot take part; no allocator was made.
    #[error(
        "{rank} cannot have memory together with others: {why}; correct that, or use a group \
        without this rank"
    )]
    Unable {
        /// The rank.
        rank: Rank,
        /// The reason.
        why: String,
    },
    /// The group of the scope cannot be made at this rank; the others get [`Unable`](Self::Unable).
    #[error(transparent)]
    Group(#[from] GroupError),
    /// The ranks have made different calls.
    #[error(
        "{rank} has made {theirs}, this rank {ours}: all ranks of the scope must make the same \
        calls of an allocator and its pools in the same order"
    )]
    Differ {
        /// The rank whose call differs.
        rank: Rank,
        /// The call of that rank.
        theirs: String,
        /// The call of this rank.
        ours: String,
    },
    /// The leader, which allocates for all ranks, failed.
    #[error(
        "{leader}, which allocates for {ranks} ranks, could not: {why}; free memory of its GPU, or \
        ask for less"
    )]
    Leader {
        /// The leader.
        leader: Rank,
        /// Ranks of the scope.
        ranks: u32,
        /// The driver's reason.
        why: String,
    },
    /// A rank could not map the leader's allocation.
    #[error(
        "{rank} cannot map memory of {leader}'s {gpu}: {why}; correct that, or use a group without \
        one of the two"
    )]
    NotMapped {
        /// The rank.
        rank: Rank,
        /// The leader, whose GPU the memory lies on.
        leader: Rank,
        /// The leader's GPU.
        gpu: String,
        /// The reason, as the driver and each transport report it.
        why: String,
    },
    /// The leader is gone, and this allocator has ended. Its memory stays mapped until it is
    /// dropped.
    #[error(
        "{leader}, whose memory it is, is gone ({cause}): nothing more is allocated; what is \
        mapped stays until it is dropped. Make an allocator over a group without it"
    )]
    LeaderGone {
        /// The leader.
        leader: Rank,
        /// The reason for which the leader is gone.
        cause: DownCause,
    },
    /// The ranks cannot reach each other any more. This allocator has ended.
    #[error(
        "the ranks of the scope cannot agree any more: {0}; nothing more is allocated, what is \
        mapped stays until it is dropped. Make another allocator, over ranks that are left"
    )]
    Ended(Box<CollectiveError>),
    /// The call was made inside a completion handler, which must not wait. Only this rank gets the
    /// error. It has told the other ranks nothing, and they wait for its call.
    #[error(
        "memory of several ranks cannot be allocated inside a completion handler, which must not \
        wait: let the handler notify the thread that calls progress, and allocate there"
    )]
    InHandler,
    /// A rank has sent a message that this version cannot read.
    #[error(
        "{rank} has sent a message that this version cannot read: run one version of Carrack on \
        all ranks"
    )]
    Garbled {
        /// The rank.
        rank: Rank,
    },
}

other_error!(SharedAllocError);
