//! The result of an allocation.

use crate::names::Rank;
use crate::region::Region;
use std::ops::Deref;

/// Memory of the leader's GPU that all ranks of the scope share, as a [`Region`] of this rank. It
/// is registered, posted, copied, and passed to kernels by its [address](Region::addr).
///
/// This rank releases it when the last clone of it, of its region and of their parts is dropped.
#[derive(Clone, Debug)]
pub struct SharedRegion {
    pub(super) region: Region,
    pub(super) leader: Rank,
    pub(super) number: u64,
}

impl SharedRegion {
    /// Returns the rank on whose GPU the memory lies.
    pub fn leader(&self) -> Rank {
        self.leader
    }

    /// Returns a number that is equal at all ranks and unique within the allocator or pool.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// Returns the memory.
    pub fn region(&self) -> &Region {
        &self.region
    }
}

impl Deref for SharedRegion {
    type Target = Region;

    fn deref(&self) -> &Region {
        &self.region
    }
}

impl From<SharedRegion> for Region {
    fn from(shared: SharedRegion) -> Self {
        shared.region
    }
}
