//! Host memory that counts as locked for the engines. They reach all host memory anyway; this
//! module keeps the answers of `classify`.

use super::error::{ALREADY_REGISTERED, INVALID_VALUE, OUT_OF_MEMORY, error};
use super::faults::count;
use super::shared::Shared;
use carrack_transports::gpu::{Extent, Forms, Gpu, GpuError, HostRegistration};
use carrack_transports::mem::{AllocId, MemKind, Region};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Alignment of pinned memory.
const PAGE: usize = 4096;

/// The locked ranges of a driver, by address.
#[derive(Debug, Default)]
pub(super) struct Pinned {
    ranges: Mutex<BTreeMap<usize, Range>>,
    /// Number of ranges: a driver without any is asked about host memory all the time.
    count: AtomicUsize,
}

#[derive(Debug, Clone, Copy)]
struct Range {
    len: usize,
    id: AllocId,
    ordinal: usize,
}

/// One locked range, unlocked when this is dropped.
struct Locked {
    shared: Arc<Shared>,
    base: usize,
    ordinal: usize,
    /// The memory, if it was allocated here.
    memory: Option<Region>,
}

impl Drop for Locked {
    fn drop(&mut self) {
        let (shared, base, memory) = (Arc::clone(&self.shared), self.base, self.memory.take());
        let Some(device) = self.shared.devices.get(self.ordinal) else { return };
        let ordinal = self.ordinal;
        device.waits.when_none(move || {
            if let Some(device) = shared.devices.get(ordinal) {
                device.wait_as_a_call_does();
            }
            shared.pinned.ranges.lock().remove(&base);
            shared.pinned.count.fetch_sub(1, Ordering::Release);
            if memory.is_some() {
                count(&shared.faults.counts.unpinned);
            }
            drop(memory);
        });
    }
}

impl Shared {
    /// Allocates host memory that is locked from the start.
    pub(super) fn allocate_pinned(
        self: &Arc<Self>,
        ordinal: usize,
        len: usize,
    ) -> Result<Region, GpuError> {
        if self.faults.refuses_pinned() {
            return Err(error("allocate", OUT_OF_MEMORY, "no pinned memory, ordered by a test"));
        }
        let gpu: Arc<dyn Gpu> = self.gpu("allocate", ordinal)?;
        let none = || error("allocate", INVALID_VALUE, "no memory");
        let memory = Region::host(len.checked_add(PAGE).ok_or_else(none)?);
        // Aligned to a page, as the driver's.
        let before = memory.addr().next_multiple_of(PAGE) - memory.addr();
        let start = memory.part_mut(before, len).and_then(|all| NonNull::new(all.as_mut_ptr()));
        let start = start.ok_or_else(none)?;
        let (locked, id) =
            self.enter("allocate", ordinal, memory.addr() + before, len, Some(memory.clone()))?;
        count(&self.faults.counts.pinned);
        // SAFETY: the owner holds the host region whose bytes these are; both give out no
        // references.
        Ok(unsafe {
            Region::from_parts(start, len, MemKind::Pinned, id, Some(gpu), Box::new(locked))
        })
    }

    /// Locks memory of the caller's.
    pub(super) fn register_host(
        self: &Arc<Self>,
        ordinal: usize,
        base: usize,
        len: usize,
    ) -> Result<HostRegistration, GpuError> {
        if len == 0 || base.checked_add(len).is_none() || self.window_of(base).is_some() {
            let hint = format!("{base:#x}+{len} is no host memory");
            return Err(error("register_host", INVALID_VALUE, hint));
        }
        let (locked, _) = self.enter("register_host", ordinal, base, len, None)?;
        Ok(HostRegistration::new(Box::new(locked)))
    }

    fn enter(
        self: &Arc<Self>,
        call: &'static str,
        ordinal: usize,
        base: usize,
        len: usize,
        memory: Option<Region>,
    ) -> Result<(Locked, AllocId), GpuError> {
        let id = self.fresh_id();
        let mut ranges = self.pinned.ranges.lock();
        let before = ranges.range(..base + len).next_back();
        if before.is_some_and(|(start, range)| start + range.len > base) {
            let hint = format!("a part of {base:#x}+{len} is locked already");
            return Err(error(call, ALREADY_REGISTERED, hint));
        }
        ranges.insert(base, Range { len, id, ordinal });
        self.pinned.count.fetch_add(1, Ordering::Release);
        drop(ranges);
        Ok((Locked { shared: Arc::clone(self), base, ordinal, memory }, id))
    }

    /// Returns the locked range at an address outside all windows.
    pub(super) fn find_pinned(self: &Arc<Self>, addr: usize) -> Result<Option<Extent>, GpuError> {
        if self.pinned.count.load(Ordering::Acquire) == 0 {
            return Ok(None);
        }
        let ranges = self.pinned.ranges.lock();
        let found = ranges.range(..=addr).next_back().map(|(base, range)| (*base, *range));
        drop(ranges);
        let Some((base, Range { len, id, ordinal })) =
            found.filter(|(base, range)| addr - base < range.len)
        else {
            return Ok(None);
        };
        let gpu: Arc<dyn Gpu> = self.gpu("classify", ordinal)?;
        let (kind, forms) = (MemKind::Pinned, Forms::NONE);
        Ok(Some(Extent { base, len, kind, id, gpu: Some(gpu), context: None, forms }))
    }
}
