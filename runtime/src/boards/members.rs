//! The members of a group.

use crate::names::Rank;
use carrack_transports::fnv;

/// The ranks of a group, in its order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Members {
    /// All ranks: group 0.
    All(u32),
    Some(Box<[Rank]>),
}

impl Members {
    pub(crate) fn count(&self) -> u32 {
        match self {
            Self::All(count) => *count,
            // A group has no more members than the job has ranks.
            Self::Some(ranks) => ranks.len() as u32,
        }
    }

    pub(crate) fn at(&self, place: u32) -> Rank {
        match self {
            Self::All(_) => Rank(place),
            Self::Some(ranks) => ranks[place as usize],
        }
    }

    pub(crate) fn place(&self, rank: Rank) -> Option<u32> {
        match self {
            Self::All(count) => (rank.0 < *count).then_some(rank.0),
            Self::Some(ranks) => {
                ranks.iter().position(|&other| other == rank).map(|place| place as u32)
            }
        }
    }

    /// Returns the rank whose note a rank waits for in a step of a barrier: 2^step places before
    /// it.
    pub(crate) fn before(&self, me: Rank, step: u32) -> Option<Rank> {
        let count = u64::from(self.count());
        let distance = 1_u64.checked_shl(step).filter(|&distance| distance < count)?;
        // Below the number of members, which is a u32.
        Some(self.at(((u64::from(self.place(me)?) + count - distance) % count) as u32))
    }

    /// Tells lists of members apart: FNV-1a over the ranks.
    pub(crate) fn hash(&self) -> u64 {
        (0..self.count())
            .fold(fnv::BASIS, |hash, place| fnv::with(hash, u64::from(self.at(place).0)))
    }
}
