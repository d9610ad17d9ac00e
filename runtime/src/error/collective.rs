//! The errors of groups.

use super::{OpError, PostError, WaitError};
use crate::names::Rank;

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
    /// Another member has failed in the operation.
    #[error("{what}: it failed at {rank}: read the error of that rank, which says why")]
    Failed {
        /// The operation.
        what: &'static str,
        /// The rank.
        rank: Rank,
    },
    /// Another member takes part in another operation.
    #[error(
        "{rank} is in {theirs}, this rank in {ours}: all members of a group must make it \
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
    #[error("broadcast: {rank} is not a member of group {group}: name a member as the root")]
    Root {
        /// The rank.
        rank: Rank,
        /// The group.
        group: u32,
    },
    /// The registration is another runtime's. Nothing was sent: call it again with one of this
    /// runtime.
    #[error(
        "exchange_keys: the registration (Mr) belongs to another runtime; register the \
        memory with this one"
    )]
    Foreign,
    /// A rank contributed bytes that are no remote key.
    #[error(
        "exchange_keys: {rank} contributed {len} bytes that are no remote key: let all members \
        call exchange_keys, with one version of Carrack"
    )]
    Key {
        /// The rank.
        rank: Rank,
        /// The number of bytes.
        len: usize,
    },
    /// A rank contributed more bytes than this process has memory for.
    #[error(
        "allgather: {rank} contributed {len} bytes, for which this rank has no memory: contribute \
        fewer bytes"
    )]
    TooLong {
        /// The rank.
        rank: Rank,
        /// The number of bytes.
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
        /// The number of that rank's bytes.
        theirs: usize,
        /// The number of this rank's bytes.
        ours: usize,
    },
}

impl CollectiveError {
    /// Names the call of the user that failed, where the error names an operation within it.
    pub(crate) fn of(mut self, call: &'static str) -> Self {
        if let Self::Post { what, .. }
        | Self::Op { what, .. }
        | Self::Wait { what, .. }
        | Self::Failed { what, .. } = &mut self
        {
            *what = call;
        }
        self
    }
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
    #[error("{0} is named twice: name each member once")]
    Twice(Rank),
    /// A rank does not exist.
    #[error("{rank} does not exist: name one of the job's ranks, 0 to {last}")]
    NoSuchRank {
        /// The rank.
        rank: Rank,
        /// The highest there is.
        last: u32,
    },
    /// This rank is not a member.
    #[error("{0}, this rank, is not among its members: only members make a group")]
    NotMember(Rank),
    /// The name is that of a group of other ranks, or in another order.
    #[error(
        "group {name} has been made already, of {count} ranks, and not of these in this order: use \
        another name"
    )]
    Taken {
        /// The name.
        name: u32,
        /// The number of its members.
        count: u32,
    },
    /// This rank has too many groups.
    #[error("all {0} groups of this rank are made: make a group once, and keep it")]
    TooMany(usize),
}
