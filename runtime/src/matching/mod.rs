//! Matching of messages with receives.
//!
//! Both sides name a [`Matching`] policy. A message meets a receive of the same policy with equal
//! rank and tag, as far as the policy compares them. So both sides have one key, and finding the
//! partner is one look into a hash table, however many are outstanding. (MPI's wildcards, which a
//! receive may put against any message, make its matching a search.)
//!
//! Keys hold the policy with rank and tag at full width: two policies never collide (in LCI they
//! share one 64-bit key). Messages and receives of one key meet in the order in which they came.

mod engine;
mod table;

pub use crate::names::Matching;
pub(crate) use engine::{Content, Engines, Receive, Unexpected};
pub use engine::{Envelope, MatchingEngine, ReceiveName};
pub(crate) use table::HashedKey;

use crate::error::PostError;
use crate::names::{Rank, Tag};

impl Matching {
    /// Returns the policy of a receive, or of a probe. Wildcards choose it, unless the program
    /// named one.
    #[inline(always)]
    pub(crate) fn of_receive(
        self,
        is_named: bool,
        rank: Rank,
        tag: Tag,
    ) -> Result<Self, PostError> {
        if rank == Rank::ANY || tag == Tag::ANY {
            let narrowed = self.narrowed(rank, tag);
            if is_named && narrowed != self {
                return Err(PostError::Policy { policy: self, rank, tag });
            }
            return Ok(narrowed);
        }
        Ok(self)
    }

    /// Returns the policy that a receive's wildcards ask for.
    #[cold]
    #[inline(never)]
    fn narrowed(self, rank: Rank, tag: Tag) -> Self {
        match (self.looks_at_rank() && rank != Rank::ANY, self.looks_at_tag() && tag != Tag::ANY) {
            (true, true) => Self::RankTag,
            (true, false) => Self::RankOnly,
            (false, true) => Self::TagOnly,
            (false, false) => Self::None,
        }
    }
}

/// The key of a lookup: two words, which are compared and hashed as such.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MatchKey {
    /// The policy's code above the rank.
    who: u64,
    tag: u64,
}

impl MatchKey {
    #[inline(always)]
    pub(crate) fn new(policy: Matching, rank: Rank, tag: Tag) -> Self {
        let rank = if policy.looks_at_rank() { rank.0 } else { 0 };
        Self {
            who: u64::from(policy.code()) << 32 | u64::from(rank),
            tag: if policy.looks_at_tag() { tag.0 } else { 0 },
        }
    }

    /// Returns the policy, from its code.
    pub(crate) fn policy(&self) -> Matching {
        Matching::from_code((self.who >> 32) as u8).unwrap_or_default()
    }

    /// Returns `true` if only a message of `rank` can have this key.
    pub(crate) fn is_of(&self, rank: Rank) -> bool {
        [Matching::RankTag, Matching::RankOnly]
            .iter()
            .any(|policy| self.who == u64::from(policy.code()) << 32 | u64::from(rank.0))
    }
}
