//! Allocations of other processes, mapped here.

use super::exports::{FORMS, own};
use super::key::{AllocationKey, Several};
use super::ledger::{Ledger, LedgerEntry, name_of};
use crate::contract::{Imported, WireKey};
use crate::gpu::{CopierState, Driver, Gpu, Handle};
use crate::mem::{GpuUuid, MapError, Region};
use crate::shm;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// Size of the IPC handle cache: allocations that stay mapped though they are not in use, since
/// opening one takes milliseconds.
const KEPT: usize = 64;

pub(super) struct Imports {
    drivers: Vec<Arc<dyn Driver>>,
    /// The most recently used at the end.
    opened: Mutex<VecDeque<OpenedAllocation>>,
}

/// An allocation that is mapped for one device's engines.
#[derive(Clone)]
struct OpenedAllocation {
    /// The ledger's inode, which no other ledger has while this one is mapped, and the handle.
    /// Both are compared, since a peer chose which two belong together.
    inode: u64,
    handle: [u8; Handle::WIRE],
    /// The exporter's process.
    exporter: Option<u64>,
    opener: GpuUuid,
    ledger: Ledger,
    whole: Region,
    entry: Arc<StandingEntries>,
}

/// Entries in ledgers that stand until the driver has closed the allocations. The driver does not
/// close them while a stream waits.
struct StandingEntries {
    entries: Arc<[LedgerEntry]>,
    gpu: Arc<dyn Gpu>,
}

impl StandingEntries {
    /// Creates a guard before an attempt to open: a failed attempt may leave memory that the driver
    /// closes later.
    fn of(entries: &Arc<[LedgerEntry]>, gpu: &Arc<dyn Gpu>) -> Self {
        Self { entries: entries.clone(), gpu: gpu.clone() }
    }
}

impl Drop for StandingEntries {
    fn drop(&mut self) {
        let entries = self.entries.clone();
        // The memory was dropped before this, so this callback runs after the driver has closed
        // it.
        self.gpu.when_no_stream_waits(Box::new(move || drop(entries)));
    }
}

/// A key, and the ledger that it names.
struct FoundLedger {
    key: AllocationKey,
    inode: u64,
    epoch: u64,
    ledger: Ledger,
}

impl FoundLedger {
    fn of(key: &WireKey) -> Result<Self, MapError> {
        let key = AllocationKey::decode(key).ok_or("its key is not one of this transport's")?;
        let found = shm::export::find_shared(&key.ledger)?;
        let (inode, epoch, ledger) = (found.inode, found.epoch, Ledger(found.region));
        if ledger.0.len() != Ledger::BYTES {
            return Err("its ledger is none".into());
        }
        Ok(Self { key, inode, epoch, ledger })
    }
}

impl OpenedAllocation {
    /// Returns the number of its exporter's process.
    fn pid(&self) -> u32 {
        self.exporter.map_or(0, |name| (name >> 32) as u32)
    }
}

impl Imports {
    pub(super) fn of(drivers: Vec<Arc<dyn Driver>>) -> Self {
        Self { drivers, opened: Mutex::default() }
    }

    pub(super) fn import(
        &self,
        key: &WireKey,
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<Imported, MapError> {
        if let Some(several) = Several::decode(key) {
            return self.import_several(&several, near);
        }
        let FoundLedger { key, inode, epoch, ledger } = FoundLedger::of(key)?;
        let share = ledger.0.share().ok_or("its ledger is not in shared memory")?.clone();
        let offset = Handle::offset_of(&key.handle);
        if key.pid == std::process::id() {
            return Ok(
                Imported::watched(own((inode, offset, key.len))?, share, epoch).of_this_process()
            );
        }
        let opened = self.opened(&key, inode, ledger, epoch, near)?;
        let len = usize::try_from(key.len).map_err(|_| "it is larger than the address space")?;
        let region = opened.whole.subregion_with(offset, len, Box::new(opened.entry));
        let region = region.ok_or("it lies outside its allocation")?;
        Ok(Imported::watched(region, share, epoch))
    }

    /// Maps memory that consists of several allocations, one behind the other in a range reserved
    /// for it, until the caller drops it.
    fn import_several(
        &self,
        several: &Several,
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<Imported, MapError> {
        let all = several.keys.iter().map(FoundLedger::of).collect::<Result<Vec<_>, _>>()?;
        let first = all.first().ok_or("its key names no allocation")?;
        // The registrations of all of them end together.
        let share = first.ledger.0.share().ok_or("its ledger is not in shared memory")?.clone();
        let too_large = |_| "it is larger than the address space";
        let offset = usize::try_from(several.offset).map_err(too_large)?;
        let len = usize::try_from(several.len).map_err(too_large)?;
        let outside = || "it lies outside its allocations".to_owned();
        if all.iter().any(|one| one.key.pid == std::process::id()) {
            let mut parts = Vec::with_capacity(all.len());
            for FoundLedger { key, inode, .. } in &all {
                parts.push(own((*inode, Handle::offset_of(&key.handle), key.len))?);
            }
            let whole =
                Region::joined(parts).ok_or("its allocations do not lie one behind the other")?;
            let region = whole.subregion(offset, len).ok_or_else(outside)?;
            return Ok(Imported::watched(region, share, first.epoch).of_this_process());
        }
        let (mut handles, mut entries) = (Vec::new(), Vec::new());
        for FoundLedger { key, inode, epoch, ledger } in &all {
            entries.push(ledger.enter()?);
            if !ledger.stands(*epoch) {
                return Err("its registration has ended".into());
            }
            let handle = key.handle(*inode)?;
            if handle.offset != 0
                || handle.len as u64 != key.len
                || key.simulated != first.key.simulated
            {
                return Err(
                    "its allocations are not named as a whole, and one behind the other".into()
                );
            }
            handles.push(handle);
        }
        let whole = self.open_joined(&handles, first.key.simulated, near, &entries.into())?;
        let region = whole.subregion(offset, len).ok_or_else(outside)?;
        Ok(Imported::watched(region, share, first.epoch))
    }

    /// Returns the allocation, mapped for the engines of the device `near`, or of one that can.
    fn opened(
        &self,
        key: &AllocationKey,
        inode: u64,
        ledger: Ledger,
        epoch: u64,
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<OpenedAllocation, MapError> {
        let near = near.filter(|gpu| gpu.info().simulated == key.simulated);
        let whole = Handle::whole(key.handle);
        let mut all = self.opened.lock();
        let fits = |one: &OpenedAllocation| {
            one.inode == inode
                && one.handle == whole
                && near.is_none_or(|near| near.info().uuid == one.opener)
        };
        if let Some(at) = all.iter().position(fits)
            && let Some(one) = all.remove(at)
        {
            all.push_back(one.clone());
            return Ok(one);
        }
        let entry = ledger.enter()?;
        if !ledger.stands(epoch) {
            return Err("its registration has ended".into());
        }
        let handle = key.handle(inode)?;
        if !FORMS.contains(&handle.form()) {
            let form = handle.form();
            return Err(format!(
                "memory in the form {form:?} is not mapped: it goes with its owner"
            )
            .into());
        }
        let exporter = name_of(key.pid)?;
        let (opener, region, entry) = self.open(&handle, key.simulated, near, entry)?;
        let one = OpenedAllocation {
            inode,
            handle: whole,
            exporter,
            opener,
            ledger,
            whole: region,
            entry,
        };
        all.push_back(one.clone());
        let old = if all.len() > KEPT { all.pop_front() } else { None };
        drop(all);
        drop(old);
        Ok(one)
    }

    fn open(
        &self,
        handle: &Handle,
        simulated: bool,
        near: Option<&Arc<dyn Gpu>>,
        entry: LedgerEntry,
    ) -> Result<(GpuUuid, Region, Arc<StandingEntries>), String> {
        let entry: Arc<[LedgerEntry]> = Arc::new([entry]);
        let by = |gpu: &Arc<dyn Gpu>| {
            let standing = Arc::new(StandingEntries::of(&entry, gpu));
            let region = gpu.open(handle).map_err(|why| why.to_string())?;
            Ok((gpu.info().uuid, region, standing))
        };
        self.by_the_first(simulated, near, by)
    }

    /// Opens allocations one behind the other.
    fn open_joined(
        &self,
        handles: &[Handle],
        simulated: bool,
        near: Option<&Arc<dyn Gpu>>,
        entries: &Arc<[LedgerEntry]>,
    ) -> Result<Region, String> {
        let add = |sum: usize, handle: &Handle| sum.checked_add(handle.len);
        let total =
            handles.iter().try_fold(0, add).ok_or("they are larger than the address space")?;
        let near = near.filter(|gpu| gpu.info().simulated == simulated);
        self.by_the_first(simulated, near, |gpu| {
            let standing = StandingEntries::of(entries, gpu);
            let reservation = gpu.reserve(total).map_err(|why| why.to_string())?;
            let (mut at, mut parts) = (0, Vec::with_capacity(handles.len()));
            for handle in handles {
                parts.push(gpu.open_at(&reservation, at, handle).map_err(|why| why.to_string())?);
                at += handle.len;
            }
            let whole = Region::joined(parts).ok_or("they do not lie one behind the other")?;
            let whole = whole.subregion_with(0, total, Box::new(standing));
            whole.ok_or_else(|| "they are shorter than their handles say".to_owned())
        })
    }

    /// Returns the result of the first device that can, `near` before others. Only an attempt
    /// tells whether a device can, not a comparison of numbers (gpu.md, legacy IPC rule 9).
    fn by_the_first<T>(
        &self,
        simulated: bool,
        near: Option<&Arc<dyn Gpu>>,
        can: impl Fn(&Arc<dyn Gpu>) -> Result<T, String>,
    ) -> Result<T, String> {
        let mut reasons = Vec::new();
        let mut gpus: Vec<Arc<dyn Gpu>> = near.cloned().into_iter().collect();
        for driver in &self.drivers {
            match driver.devices() {
                Ok(devices) => gpus.extend(devices),
                Err(why) => reasons.push(format!("{}: {why}", driver.name())),
            }
        }
        gpus.retain(|gpu| gpu.info().simulated == simulated);
        // Where any of them will do, prefer one that this process works with. A GPU that another
        // process uses exclusively has its copier for that process.
        let works = |gpu: &Arc<dyn Gpu>| matches!(gpu.copier(), CopierState::On { .. });
        if near.is_none() {
            gpus.sort_by_key(|gpu| !works(gpu));
        }
        for gpu in &gpus {
            match can(gpu) {
                Ok(done) => return Ok(done),
                Err(why) => reasons.push(format!("device {}: {why}", gpu.info().ordinal)),
            }
        }
        if gpus.is_empty() {
            reasons.push("this process has no such GPU".into());
        }
        Err(reasons.join("; "))
    }

    /// Closes allocations that their exporters have withdrawn, if they are not in use here.
    pub(super) fn close_ended(&self) {
        self.close(|one| one.ledger.stands(0));
    }

    /// Closes what [`close_ended`](Self::close_ended) closes, and allocations whose exporter has
    /// ended without withdrawing them.
    pub(super) fn close_dead(&self) {
        self.close(|one| {
            let has_ended = || name_of(one.pid()).is_ok_and(|found| found != one.exporter);
            one.ledger.stands(0) || one.exporter.is_none() || has_ended()
        });
    }

    fn close(&self, which: impl Fn(&OpenedAllocation) -> bool) {
        let mut all = self.opened.lock();
        let (gone, kept) = std::mem::take(&mut *all).into_iter().partition(which);
        *all = kept;
        drop(all);
        drop::<VecDeque<OpenedAllocation>>(gone);
    }
}
