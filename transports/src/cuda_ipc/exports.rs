//! Allocations of this process that other processes map.

use super::broker::Broker;
use super::key::{AllocationKey, Several};
use super::ledger::Ledger;
use crate::contract::Exported;
use crate::gpu::{Gpu, Handle, HandleForm};
use crate::mem::{AllocId, GpuUuid, Keeper, MapError, MemKind, Region, WeakRegion};
use crate::shm;
use parking_lot::Mutex;
use std::any::Any;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, OnceLock, Weak};

/// Forms of handles whose importers survive the exporter's death, in the order of the attempts.
pub(super) const FORMS: [HandleForm; 3] = [HandleForm::Bytes, HandleForm::Fd, HandleForm::Fabric];

/// An allocation that is exported: once, for all its regions.
pub(super) struct ExportedAllocation {
    handle: Handle,
    /// First address.
    base: usize,
    /// Inode of its ledger.
    inode: u64,
    ledger: Ledger,
}

impl ExportedAllocation {
    /// Returns the descriptor of its handle, if the handle has one.
    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.handle.fd()
    }

    /// Returns `true` if no process has the allocation mapped or can still map it. While another
    /// region of it is registered, its importers may belong to that one.
    fn is_free(&self) -> bool {
        self.ledger.stands(0) && self.ledger.importers().is_empty()
    }
}

#[derive(Default)]
pub(super) struct Exports {
    /// Allocations by device, driver's number and address: pieces that are mapped into one
    /// reservation are distinguished even if their driver numbers are equal.
    all: Mutex<HashMap<(GpuUuid, AllocId, usize), Weak<ExportedAllocation>>>,
    /// Broker, opened with the first handle that has a descriptor. `None`: the broker cannot be
    /// opened, and importers fetch descriptors themselves.
    broker: OnceLock<Option<Broker>>,
}

/// Owners of regions without handles here, whose memory other processes may still have mapped.
/// They are freed once no process maps them, by any runtime that looks. Memory of the program has
/// no owner here: the program keeps it for that long.
static LEFT: Mutex<Vec<(Arc<ExportedAllocation>, MemoryOwner)>> = Mutex::new(Vec::new());

type MemoryOwner = Box<dyn Any + Send + Sync>;

/// Ends a registration when dropped.
struct ExportRegistration(Arc<ExportedAllocation>);

/// Regions by the inode of their ledger, their offset in the allocation, and their length. For
/// ranks of the same process: no driver opens a process's own handles (gpu.md, legacy IPC rule 3).
static OWN: Mutex<Vec<(RegionName, WeakRegion)>> = Mutex::new(Vec::new());

type RegionName = (u64, usize, u64);

impl Exports {
    pub(super) fn export(&self, region: &Region) -> Result<Exported, MapError> {
        let gpu = match (region.kind(), region.gpu()) {
            (MemKind::Device(_), Some(gpu)) => gpu,
            (MemKind::Managed(_), _) => {
                return Err("managed memory has no handle: the driver moves it about".into());
            }
            _ => return Err("it is not memory of a GPU".into()),
        };
        if region.is_joined() {
            return self.export_joined(region);
        }
        let allocation = self.allocation(region, gpu)?;
        region.keep_with(|| Arc::new(UnmapGuard(allocation.clone())));
        let share = allocation.ledger.0.share().ok_or("its ledger is not in shared memory")?;
        let ledger = shm::export::export_shared(share)?;
        // The registration ends it, since it has to look at the ledger afterwards.
        let (pid, simulated, len) = (std::process::id(), gpu.info().simulated, region.len() as u64);
        let fd = allocation.fd().map(|fd| fd.as_raw_fd().cast_unsigned());
        let broker = fd.and_then(|_| self.broker()).map(|broker| {
            broker.offer(allocation.inode, &allocation);
            broker.address()
        });
        let offset = region.addr() - allocation.base;
        let key = AllocationKey {
            ledger,
            pid,
            fd,
            broker,
            simulated,
            len,
            handle: allocation.handle.encode_at(offset),
        };
        let mut own = OWN.lock();
        own.retain(|(_, region)| !region.is_gone());
        let name = (allocation.inode, offset, len);
        if !own.iter().any(|(other, known)| *other == name && known.is_of(region)) {
            own.push((name, region.downgrade()));
        }
        drop(own);
        Ok(Exported::new(key.encode(), ExportRegistration(allocation)))
    }

    /// Exports each part by itself, under one key: an importer maps them one behind the other.
    fn export_joined(&self, region: &Region) -> Result<Exported, MapError> {
        let parts = region.joined_parts();
        let first = parts.first().ok_or("it is no part of anything")?;
        let exported = parts.iter().map(|part| self.export(part)).collect::<Result<Vec<_>, _>>()?;
        let keys = exported.iter().map(|one| one.key.clone()).collect();
        let (offset, len) = ((region.addr() - first.addr()) as u64, region.len() as u64);
        let key = Several { offset, len, keys }.encode()?;
        Ok(Exported::new(key, exported))
    }

    /// Returns the processes that have memory of a range of addresses mapped, registered or not.
    pub(super) fn mapped_by(&self, addr: usize, len: usize) -> Vec<u32> {
        free_left();
        let end = addr.saturating_add(len);
        let reaches = |one: &ExportedAllocation| {
            one.base < end && addr < one.base.saturating_add(one.handle.len)
        };
        let known: Vec<_> = self.all.lock().values().filter_map(Weak::upgrade).collect();
        let left: Vec<_> = LEFT.lock().iter().map(|(allocation, _)| allocation.clone()).collect();
        let all = known.iter().chain(&left).filter(|one| reaches(one));
        let mut processes: Vec<u32> = all.flat_map(|one| one.ledger.importers()).collect();
        processes.sort_unstable();
        processes.dedup();
        processes
    }

    fn broker(&self) -> Option<&Broker> {
        if let Some(known) = self.broker.get() {
            return known.as_ref();
        }
        let opened = Broker::open();
        if let Err(why) = &opened {
            tracing::info!(%why, "no descriptor broker: importers fetch descriptors themselves");
        }
        // A shortage may have ended at the next export.
        let is_lacking = matches!(opened, Err(MapError::Lacking(_)));
        if is_lacking { None } else { self.broker.get_or_init(|| opened.ok()).as_ref() }
    }

    /// Returns the allocation that a region lies in, and exports it if it is not exported yet.
    fn allocation(
        &self,
        region: &Region,
        gpu: &Arc<dyn Gpu>,
    ) -> Result<Arc<ExportedAllocation>, MapError> {
        let name = (gpu.info().uuid, region.id(), region.root().addr());
        let mut all = self.all.lock();
        if let Some(known) = all.get(&name).and_then(Weak::upgrade)
            && (known.base..known.base.saturating_add(known.handle.len)).contains(&region.addr())
        {
            return Ok(known);
        }
        all.retain(|_, allocation| allocation.strong_count() > 0);
        let mut reasons = Vec::new();
        let handle = FORMS.into_iter().find_map(|form| match gpu.export(region, form) {
            Ok(handle) => Some(handle),
            Err(error) => {
                reasons.push(error.to_string());
                None
            }
        });
        let handle = handle.ok_or_else(|| reasons.join("; "))?;
        let base = region.addr().checked_sub(handle.offset).ok_or("its handle begins behind it")?;
        let ledger = Ledger::new()?;
        let inode =
            ledger.0.share().and_then(|share| share.whereabouts()).map_or(0, |found| found.ino);
        let allocation = Arc::new(ExportedAllocation { handle, base, inode, ledger });
        all.insert(name, Arc::downgrade(&allocation));
        Ok(allocation)
    }
}

/// Returns a region of this very process, by its key.
pub(super) fn own(name: RegionName) -> Result<Region, String> {
    let own = OWN.lock();
    let found =
        own.iter().filter(|(other, _)| *other == name).find_map(|(_, known)| known.upgrade());
    found.ok_or_else(|| "it is not there any more".into())
}

/// Guard that keeps memory until no process has its allocation mapped.
struct UnmapGuard(Arc<ExportedAllocation>);

impl Keeper for UnmapGuard {
    fn keep(&self, owner: MemoryOwner) {
        // At once where possible, even while another thread goes through the list.
        if self.0.is_free() {
            return drop(owner);
        }
        LEFT.lock().push((self.0.clone(), owner));
        free_left();
    }
}

/// Frees memory that no other process has mapped any more.
pub(super) fn free_left() {
    // Dropped outside the lock: freeing GPU memory takes time, and an owner may be the program's.
    let freed: Vec<_> = {
        let Some(mut left) = LEFT.try_lock() else { return };
        left.extract_if(.., |(allocation, _)| allocation.is_free()).collect()
    };
    drop(freed);
}

impl Drop for ExportRegistration {
    fn drop(&mut self) {
        if let Some(share) = self.0.ledger.0.share() {
            share.close();
        }
        // No wait here: an importer closes its mapping when it next looks.
        free_left();
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::gpu::HandleKey;

    /// Makes an allocation like one of VMM memory.
    pub(in super::super) fn shareable() -> ExportedAllocation {
        let key = HandleKey::Fd(std::fs::File::open("/dev/null").unwrap().into());
        let handle = Handle { gpu: GpuUuid([1; 16]), id: AllocId(1), len: 1, offset: 0, key };
        ExportedAllocation { handle, base: 0, inode: 7, ledger: Ledger::new().unwrap() }
    }
}
