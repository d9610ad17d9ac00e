//! The invalidation of memory that the program is about to free, or to unmap.
//!
//! The knowledge of addresses belongs to the process, and the exposure to peers to each runtime.
//! An allocator that tells one runtime tells all.

use crate::runtime::{Inner, Runtime};
use carrack_transports::mem::KnownMemory;
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::sync::{Arc, Weak};

/// The runtimes of this process.
static RUNTIMES: Mutex<Vec<Weak<Inner>>> = Mutex::new(Vec::new());

fn runtimes() -> MutexGuard<'static, Vec<Weak<Inner>>> {
    RUNTIMES.lock()
}

/// Returns the runtimes of this process, without those of a fork's parent.
fn here() -> Vec<Arc<Inner>> {
    let all: Vec<Arc<Inner>> = runtimes().iter().filter_map(Weak::upgrade).collect();
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
pub(crate) fn note_runtime(inner: &Arc<Inner>) {
    let mut all = runtimes();
    all.retain(|one| one.strong_count() > 0);
    all.push(Arc::downgrade(inner));
}

/// The obstacle to freeing memory. Everything was withdrawn from peers nevertheless.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StillInUse {
    /// The address.
    pub addr: usize,
    /// Bytes from there on.
    pub len: usize,
    /// Registrations that stood, and were ended by this call: operations of peers' are stale from
    /// now on.
    pub registrations: usize,
    /// Allocations of GPUs of which this process has raw regions, in operations or in its own
    /// hands.
    pub regions: usize,
    /// Other processes that have it mapped. They close it when they next make progress.
    pub processes: Vec<u32>,
}

impl std::error::Error for StillInUse {}

impl fmt::Display for StillInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { addr, len, registrations, regions, processes } = self;
        write!(f, "{len} bytes at {addr:#x} must not be freed yet:")?;
        if *registrations > 0 {
            write!(
                f,
                " {registrations} registrations stood over them, and are ended: deregister first;"
            )?;
        }
        if *regions > 0 {
            write!(
                f,
                " regions of {regions} allocations are in use: wait for the operations, and drop \
                them;"
            )?;
        }
        if !processes.is_empty() {
            write!(f, " processes {processes:?} have them mapped: let them make progress;")?;
        }
        f.write_str(" then call again")
    }
}

impl Runtime {
    /// Forgets memory that is about to be freed or unmapped, or to become accessible to other
    /// GPUs. Allocators call this before, and begin no operation there in between. The process
    /// forgets the addresses, registrations that overlap the range end, and the exposure to peers
    /// for messages is withdrawn. Operations that peers begin afterwards are stale; none of them
    /// reaches new memory at these addresses.
    ///
    /// `Ok` means that no known user has the memory any more. Raw regions of GPU memory and
    /// mappings of other processes are counted, raw regions of host memory are not. An unknown
    /// range costs a lock and a lookup.
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
        let registrations = here().iter().map(|inner| inner.regions.withdraw(&range)).sum();
        let Withdrawn { regions, processes } = withdraw(addr, len);
        let found = StillInUse { addr, len, registrations, regions, processes };
        let is_free = registrations == 0 && found.regions == 0 && found.processes.is_empty();
        if is_free { Ok(()) } else { Err(found) }
    }
}
