//! Memory that other ranks reach.
//!
//! A [`Region`] is registered, and its remote key ([`RemoteKey`]) sent to other ranks in any way (a
//! message, an allgather). With it they put, get and do atomics: directly where they can map the
//! memory ([`Runtime::allocate`] returns such memory), else through its owner, whose progress
//! carries the operation out. Either way they notice a registration that has ended: the number of
//! a region carries a generation, and mapped memory an epoch.

pub(crate) mod direct;
mod invalidate;
mod registration;
mod remote_key;
mod table;

pub use carrack_transports::mem::{AtomicError, Region, RegionSlice};
pub use invalidate::StillInUse;
pub(crate) use invalidate::{Withdrawn, note_runtime, withdraw};
pub use registration::{AtomicAgent, Registration};
pub use remote_key::RemoteKey;
pub(crate) use table::{Refusal, Regions};

use crate::error::RegisterError;
use crate::runtime::Runtime;
use std::sync::Arc;
use table::Keys;

/// A registered region. Dropping it, or [`Runtime::deregister_memory`], ends the registration.
/// Operations that other ranks begin afterwards fail, and the memory is given back once no process
/// has it mapped.
#[must_use = "a registration ends when this is dropped"]
pub struct Mr {
    region: Region,
    index: u32,
    generation: u32,
    keys: Arc<Keys>,
    /// Transports by which it cannot be mapped, and why.
    refused: Vec<(&'static str, String)>,
    regions: Arc<Regions>,
    job: u64,
    rank: crate::names::Rank,
    /// The transport whose NIC does the atomic operations on its words.
    nic: Option<&'static str>,
}

impl Mr {
    /// Returns the remote key, by which other ranks reach the memory. It can be sent as plain
    /// [bytes](RemoteKey::to_bytes); [`Group::exchange_keys`](crate::Group::exchange_keys) gives
    /// each rank those of all others.
    pub fn remote_key(&self) -> RemoteKey {
        let number = (self.index, self.generation);
        let (len, keys) = (self.region.len() as u64, self.keys.named());
        RemoteKey::new((self.job, self.rank), number, len, keys, self.nic)
    }

    /// Returns the memory.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns the transports by which other ranks cannot map it, and the reasons: over these its
    /// owner's progress helps.
    pub fn refused(&self) -> &[(&'static str, String)] {
        &self.refused
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        self.regions.remove(self.index, self.generation);
    }
}

impl std::fmt::Debug for Mr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Mr(#{}.{}, {:?})", self.index, self.generation, self.region)
    }
}

impl Runtime {
    /// Allocates zeroed host memory that the ranks of this machine can map once it is registered.
    ///
    /// # Errors
    /// The system has no shared memory, or no descriptor, left.
    pub fn allocate(&self, len: usize) -> Result<Region, RegisterError> {
        Region::shared(len).map_err(|error| RegisterError::System { len, why: error.to_string() })
    }

    /// Lets other ranks reach a region, of any kind of memory. One registration serves all devices.
    ///
    /// Raw memory is registered by
    /// `buffer::raw::register_memory`, which finds its
    /// kind. [`registration`](Self::registration) chooses the coherence owner of its words.
    ///
    /// # Errors
    /// As of [`Registration::register`].
    pub fn register_memory(&self, region: &Region) -> Result<Mr, RegisterError> {
        self.registration(region).register()
    }

    /// Ends a registration.
    pub fn deregister_memory(&self, mr: Mr) {
        drop(mr);
    }
}
