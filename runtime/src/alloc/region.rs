//! What a call gives.

use crate::names::Rank;
use crate::region::Region;
use std::ops::Deref;

/// Memory of the leader's GPU that all ranks of the scope have, as a [`Region`] of this rank's: to
/// be registered, posted, copied, and given to kernels by its [address](Region::addr).
///
/// This rank has let go of it when the last clone is dropped, of it, of its region, and of parts of
/// that.
#[derive(Clone, Debug)]
pub struct SharedRegion {
    pub(super) region: Region,
    pub(super) leader: Rank,
    pub(super) number: u64,
}

impl SharedRegion {
    /// The rank on whose GPU it lies.
    pub fn leader(&self) -> Rank {
        self.leader
    }

    /// A number that is the same at all ranks, and no other allocation's of this allocator or pool.
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The memory.
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
