//! The invalidation of memory that the program is about to free, or to unmap.
//!
//! The knowledge of addresses belongs to the process, and the exposure to peers to each runtime.
//! An allocator that tells one runtime tells all.

use super::Runtime;
use crate::progress::Core;
use crate::region::StillInUse;
use carrack_transports::mem::KnownMemory;
use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, Weak};

/// The runtimes of this process.
static RUNTIMES: Mutex<Vec<Weak<Core>>> = Mutex::new(Vec::new());

fn runtimes() -> MutexGuard<'static, Vec<Weak<Core>>> {
    RUNTIMES.lock()
}

/// Returns the runtimes of this process, without those of a fork's parent.
fn here() -> Vec<Arc<Core>> {
    let all: Vec<Arc<Core>> = runtimes().iter().filter_map(Weak::upgrade).collect();
    all.into_iter().filter(|inner| !inner.is_forked()).collect()
}

/// The remaining users of memory that peers were told of for messages; it is not offered any more.
pub(crate) struct Withdrawn {
    /// Allocations of GPUs of which there are raw regions.
    pub(crate) regions: usize,
    /// Other processes that have it mapped.
    pub(crate) processes: Vec<u32>,
}

/// Withdraws the exposure of memory to peers for messages, and forgets its addresses.
/// Registrations stay.
pub(crate) fn withdraw(addr: usize, len: usize) -> Withdrawn {
    let (range, all) = (addr..addr.saturating_add(len), here());
    for inner in &all {
        inner.exposures.withdraw(&range);
        inner.drivers.iter().for_each(|driver| driver.forget(addr, len));
    }
    let regions = KnownMemory::of_the_process().forget(addr, len);
    let domains = all.iter().flat_map(|inner| &inner.domains);
    let mut processes: Vec<u32> =
        domains.flat_map(|(_, domain)| domain.mapped_by(addr, len)).collect();
    processes.sort_unstable();
    processes.dedup();
    Withdrawn { regions, processes }
}

/// Notes a runtime that has started.
pub(crate) fn note_runtime(inner: &Arc<Core>) {
    let mut all = runtimes();
    all.retain(|one| one.strong_count() > 0);
    all.push(Arc::downgrade(inner));
}

impl Runtime {
    /// Forgets memory that is about to be freed or unmapped, or to become accessible to other
    /// GPUs. Allocators call this before, and begin no operation there in between. The process
    /// forgets the addresses, registrations that overlap the range end, and the exposure to peers
    /// for messages is withdrawn. Operations that peers begin afterwards are stale; none of them
    /// reaches new memory at these addresses. Over a NIC they are stale as those behind an
    /// [`Mr`](crate::Mr)'s end.
    ///
    /// `Ok` means that no known user has the memory any more. Raw regions of GPU memory, mappings
    /// of other processes and NICs of other ranks are counted, raw regions of host memory are not.
    /// An unknown range costs a few locks and lookups.
    ///
    /// # Errors
    /// It is still in use: see [`StillInUse`]. Everything is withdrawn all the same, and a later
    /// call returns `Ok` once the users have released it. If freed before, operations in flight
    /// may read or write the memory.
    pub fn invalidate_memory(&self, addr: usize, len: usize) -> Result<(), StillInUse> {
        if len == 0 {
            return Ok(());
        }
        let range = addr..addr.saturating_add(len);
        let (registrations, by_nics) = here().iter().fold((0, 0), |(ended, leaving), inner| {
            let found = inner.regions.withdraw(&range);
            (ended + found.0, leaving + found.1)
        });
        let Withdrawn { regions, processes } = withdraw(addr, len);
        let found = StillInUse { addr, len, registrations, by_nics, regions, processes };
        let is_free =
            registrations + by_nics == 0 && found.regions == 0 && found.processes.is_empty();
        if is_free { Ok(()) } else { Err(found) }
    }
}
