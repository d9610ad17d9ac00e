//! Allocations of other processes, mapped here.

use super::exports::{FORMS, own};
use super::key::Key;
use super::ledger::{Entry, Ledger, name_of};
use crate::contract::{Imported, WireKey};
use crate::gpu::{Driver, Gpu, Handle};
use crate::mem::{GpuUuid, Region};
use crate::shm;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Allocations that stay mapped, though nothing uses them at the moment: opening one takes milliseconds.
const KEPT: usize = 64;

pub(super) struct Imports {
    drivers: Vec<Arc<dyn Driver>>,
    /// The latest at the end.
    opened: Mutex<VecDeque<Opened>>,
}

/// An allocation that is mapped for one device's engines.
#[derive(Clone)]
struct Opened {
    /// The ledger's inode, which is no other's while this has it mapped; and the handle, whoever named the two together.
    inode: u64,
    handle: [u8; Handle::WIRE],
    /// Its exporter's process.
    exporter: Option<u64>,
    opener: GpuUuid,
    ledger: Ledger,
    whole: Region,
    entry: Arc<Standing>,
}

/// Stands in the ledger until the driver has closed the allocation, which it does not while a stream waits.
struct Standing {
    entry: Option<Entry>,
    gpu: Option<Arc<dyn Gpu>>,
}

impl Drop for Standing {
    fn drop(&mut self) {
        let entry = self.entry.take();
        if let Some(gpu) = &self.gpu {
            // Whoever drops this has dropped the memory before: so it is done behind that.
            gpu.when_no_stream_waits(Box::new(move || drop(entry)));
        }
    }
}

impl Opened {
    /// The number of its exporter's process.
    fn pid(&self) -> u32 {
        self.exporter.map_or(0, |name| (name >> 32) as u32)
    }
}

impl Imports {
    pub(super) fn of(drivers: Vec<Arc<dyn Driver>>) -> Self {
        Self { drivers, opened: Mutex::default() }
    }

    pub(super) fn import(&self, key: &WireKey, near: Option<&Arc<dyn Gpu>>) -> Result<Imported, String> {
        let key = Key::decode(key).ok_or("its key is not one of this transport's")?;
        let found = shm::export::find_shared(&key.ledger)?;
        let (inode, epoch, ledger) = (found.inode, found.epoch, Ledger(found.region));
        if ledger.0.len() != Ledger::BYTES {
            return Err("its ledger is none".into());
        }
        let share = ledger.0.share().ok_or("its ledger is shared by nobody")?.clone();
        let offset = Handle::offset_of(&key.handle);
        if key.pid == std::process::id() {
            return Ok(Imported::watched(own((inode, offset, key.len))?, share, epoch).of_this_process());
        }
        let opened = self.opened(&key, inode, ledger, epoch, near)?;
        let len = usize::try_from(key.len).map_err(|_| "it is larger than the address space")?;
        let region = opened.whole.subregion_with(offset, len, Box::new(opened.entry));
        let region = region.ok_or("it lies outside its allocation")?;
        Ok(Imported::watched(region, share, epoch))
    }

    /// The allocation, mapped for the engines of the device that is `near`, or of one that can.
    fn opened(
        &self,
        key: &Key,
        inode: u64,
        ledger: Ledger,
        epoch: u64,
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<Opened, String> {
        let near = near.filter(|gpu| gpu.info().simulated == key.simulated);
        let whole = Handle::whole(key.handle);
        let mut all = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let fits = |one: &Opened| {
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
            return Err(format!(
                "memory in the form {:?} is not mapped: it goes with its owner",
                handle.form()
            ));
        }
        let exporter = name_of(key.pid);
        let (opener, region) = self.open(&handle, key.simulated, near)?;
        let entry = Arc::new(Standing { entry: Some(entry), gpu: region.gpu().cloned() });
        let one = Opened { inode, handle: whole, exporter, opener, ledger, whole: region, entry };
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
    ) -> Result<(GpuUuid, Region), String> {
        let mut reasons = Vec::new();
        let mut gpus: Vec<Arc<dyn Gpu>> = near.cloned().into_iter().collect();
        for driver in &self.drivers {
            match driver.devices() {
                Ok(devices) => gpus.extend(devices),
                Err(why) => reasons.push(format!("{}: {why}", driver.name())),
            }
        }
        gpus.retain(|gpu| gpu.info().simulated == simulated);
        // Whether it works is an experiment, not a comparison of numbers (gpu.md, legacy IPC rule 9).
        for gpu in &gpus {
            match gpu.open(handle) {
                Ok(region) => return Ok((gpu.info().uuid, region)),
                Err(why) => reasons.push(format!("device {}: {why}", gpu.info().ordinal)),
            }
        }
        if gpus.is_empty() {
            reasons.push("this process has no such GPU".into());
        }
        Err(reasons.join("; "))
    }

    /// Closes what its exporter has withdrawn, if nothing here uses it.
    pub(super) fn close_ended(&self) {
        self.close(|one| one.ledger.stands(0));
    }

    /// The same of those whose exporter has ended without a word.
    pub(super) fn close_dead(&self) {
        self.close(|one| {
            one.ledger.stands(0) || one.exporter.is_none() || name_of(one.pid()) != one.exporter
        });
    }

    fn close(&self, which: impl Fn(&Opened) -> bool) {
        let mut all = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let (gone, kept) = std::mem::take(&mut *all).into_iter().partition(which);
        *all = kept;
        drop(all);
        drop::<VecDeque<Opened>>(gone);
    }
}
