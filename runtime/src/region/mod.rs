//! Memory that other ranks reach.
//!
//! A program registers a [`Region`], and sends its remote key ([`RemoteKey`]) to other ranks in any
//! way (a message, an allgather). With the key they put, get and do atomics. They do so directly
//! where they can map the memory, such as that of [`Runtime::allocate`](crate::Runtime::allocate);
//! else the owner's progress carries the operation out. Either way they notice a registration that
//! has ended: the number of a region carries a generation, and mapped memory an epoch.

pub(crate) mod direct;
mod registration;
mod remote_key;
mod still_in_use;
mod table;

pub use carrack_transports::mem::{AtomicError, Region, RegionSlice};
pub use registration::{AtomicAgent, Registration};
pub use remote_key::RemoteKey;
pub use still_in_use::StillInUse;
pub(crate) use table::{Refusal, Regions};

use crate::names::Rank;
use crate::protocol::rkey::{RegionKey, RegionPart, number};
use std::sync::Arc;
use table::Keys;

/// A registered region. The registration ends when this is dropped, or by
/// [`Runtime::deregister_memory`](crate::Runtime::deregister_memory). Operations that other ranks
/// begin afterwards fail, and the memory is given back once no process has it mapped. Where peers
/// map memory that is registered several times, its keys work until the last registration ends.
///
/// A NIC that meets an invalid key ends its connection. So the owner's NIC keeps the key until the
/// ranks that use it have answered the withdrawal, which is sent before the drop returns. An
/// operation by such a NIC fails if it begins behind a collective of both ranks that the owner
/// entered after the drop. It also fails behind a later message of the owner's on the same device.
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
    rank: Rank,
    /// The transport whose NIC does the atomic operations on its words.
    nic: Option<&'static str>,
}

impl Mr {
    /// Returns the remote key, by which other ranks reach the memory. It can be sent as plain
    /// [bytes](RemoteKey::to_bytes); [`Group::exchange_keys`](crate::Group::exchange_keys) gives
    /// each rank those of all others.
    pub fn remote_key(&self) -> RemoteKey {
        let key = RegionKey {
            job: Some(self.job),
            owner: self.rank,
            number: number((self.index, self.generation)),
            keys: self.keys.named(),
            nic: self.nic.map(str::to_owned),
        };
        RemoteKey::new(key, RegionPart { offset: 0, len: self.region.len() as u64 })
    }

    /// Returns the memory.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns `true` if these are the regions of the runtime that has made this.
    pub(crate) fn is_in(&self, regions: &Arc<Regions>) -> bool {
        Arc::ptr_eq(&self.regions, regions)
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
