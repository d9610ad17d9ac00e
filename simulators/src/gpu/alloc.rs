//! Allocation of a device's memory, mapping of another process's, and freeing of both.

use super::error::{INVALID_VALUE, OUT_OF_MEMORY, error};
use super::faults::count;
use super::memory::{Alias, GRANULE, create};
use super::shared::{GpuDevice, Shared};
use super::table::{Allocation, Origin, Table};
use carrack_transports::gpu::{Flavour, Gpu, GpuError, HandleForm};
use carrack_transports::mem::{AllocId, MemKind, Region};
use std::any::Any;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Shared {
    /// Allocates memory of a device.
    pub(super) fn allocate(
        self: &Arc<Self>,
        ordinal: usize,
        len: usize,
        flavour: Flavour,
    ) -> Result<Region, GpuError> {
        let device = self.device("allocate", ordinal)?;
        device.waits.catch_up();
        if len == 0 {
            return Err(error("allocate", INVALID_VALUE, "an allocation of 0 bytes"));
        }
        if flavour == Flavour::Pinned {
            return self.allocate_pinned(ordinal, len);
        }
        // Checked before the memory is created. The lock is held from here on, so the answer stays
        // true.
        let mut table = self.table.lock();
        let span = room("allocate", device, &table, ordinal, len)?;
        let fd = create("allocate", span)?;
        let own = (MemKind::Device(device.info.uuid), Some(device.context));
        let ((kind, context), memory): (_, fn(OwnedFd) -> Origin) = match flavour {
            Flavour::Plain => (own, Origin::Plain),
            Flavour::Shareable => ((own.0, None), Origin::Shareable),
            Flavour::Pooled => ((own.0, None), Origin::Pooled),
            // Pinned memory is the host's, and was handled above.
            Flavour::Managed | Flavour::Pinned => {
                ((MemKind::Managed(device.info.uuid), own.1), |_| Origin::Managed)
            }
        };
        let alias = Arc::new(Alias::map("allocate", span, &fd)?);
        let id = self.fresh_id();
        let base = self.place("allocate", &table, ordinal, span, &fd)?;
        let (window, origin) = (ordinal, memory(fd));
        let access = None;
        table.insert(
            base,
            Allocation { len, span, ordinal, window, kind, id, context, alias, origin, access },
        );
        drop(table);
        count(&self.faults.counts.allocs);
        let placement = Placement { ordinal, window, base, len, kind, id };
        self.region(placement, Box::new(Placed::new(self, placement, false)))
    }

    /// Maps another process's memory into the window of the device that owns it.
    pub(super) fn adopt(
        self: &Arc<Self>,
        ordinal: usize,
        len: usize,
        form: HandleForm,
        fd: impl AsFd,
    ) -> Result<Placed, GpuError> {
        let device = self.device("open", ordinal)?;
        let span = len.checked_next_multiple_of(GRANULE).filter(|&span| span > 0);
        let span =
            span.ok_or_else(|| error("open", INVALID_VALUE, format!("a length of {len} bytes")))?;
        let alias = Arc::new(Alias::map("open", span, &fd)?);
        let context = matches!(form, HandleForm::Bytes).then_some(device.context);
        let kind = MemKind::Device(device.info.uuid);
        let id = self.fresh_id();
        let mut table = self.table.lock();
        let base = self.place("open", &table, ordinal, span, &fd)?;
        let (window, origin) = (ordinal, Origin::Opened);
        let access = None;
        table.insert(
            base,
            Allocation { len, span, ordinal, window, kind, id, context, alias, origin, access },
        );
        drop(table);
        count(&self.faults.counts.maps);
        let placement = Placement { ordinal, window, base, len, kind, id };
        Ok(Placed::new(self, placement, true))
    }

    /// Makes a region of memory that is in the table as long as `owner` lives, for the engines of
    /// the device that owns it.
    pub(super) fn region(
        self: &Arc<Self>,
        placement: Placement,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Region, GpuError> {
        let own = placement.ordinal;
        self.region_for(own, placement, owner)
    }

    /// Makes a region as [`region`](Self::region) does, for the engines of the device that has
    /// opened the memory.
    pub(super) fn region_for(
        self: &Arc<Self>,
        engine: usize,
        placement: Placement,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Region, GpuError> {
        let Placement { window, base, len, kind, id, .. } = placement;
        let device = self.device("region", window)?;
        let gpu: Arc<dyn Gpu> = self.gpu("region", engine)?;
        // SAFETY: the range was placed in that device's window and entered in the table. Both stay
        // until `owner`, which is or holds the `Placed`, is dropped. There are no references to
        // it: it has no access.
        Ok(unsafe {
            Region::from_parts(device.window.pointer(base), len, kind, id, Some(gpu), owner)
        })
    }

    fn place(
        &self,
        call: &'static str,
        table: &Table,
        ordinal: usize,
        span: usize,
        fd: impl AsFd,
    ) -> Result<usize, GpuError> {
        let base = table.room(call, ordinal, span, self.faults.reuses_addresses())?;
        self.device(call, ordinal)?.window.map(call, base, span, fd)?;
        Ok(base)
    }

    pub(super) fn fresh_id(&self) -> AllocId {
        AllocId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    /// Frees memory as the driver does. Memory of `cuMemAlloc`, and memory opened by a handle of
    /// such, is freed only when no stream of the device waits for a word.
    pub(super) fn free(&self, base: usize, opened: bool) {
        let waits = {
            let table = self.table.lock();
            let Some((_, entry)) = table.find(base) else { return };
            // Memory at reserved addresses is unmapped, which waits for no stream.
            let closes = opened && !table.is_reserved(base);
            let blocks = closes || matches!(entry.origin, Origin::Plain(_) | Origin::Managed);
            self.devices.get(entry.ordinal).filter(|_| blocks)
        };
        if let Some(device) = waits {
            device.wait_as_a_call_does();
        }
        let mut table = self.table.lock();
        let Some(entry) = table.remove(base) else { return };
        if let Some(device) = self.devices.get(entry.window) {
            device.window.clear(base, entry.span);
        }
        drop(table);
        count(if opened { &self.faults.counts.unmaps } else { &self.faults.counts.frees });
    }
}

/// Returns the bytes that an allocation of `len` occupies on a device, if it has room.
pub(super) fn room(
    call: &'static str,
    device: &GpuDevice,
    table: &Table,
    ordinal: usize,
    len: usize,
) -> Result<usize, GpuError> {
    let used = table.used(ordinal);
    let span = len.checked_next_multiple_of(GRANULE).unwrap_or(usize::MAX);
    if span <= device.memory.saturating_sub(used) {
        return Ok(span);
    }
    let hint = format!(
        "{len} bytes (in blocks of {GRANULE}) do not fit: {used} of {} are in use",
        device.memory
    );
    Err(error(call, OUT_OF_MEMORY, hint))
}

/// Plain data of memory in the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placement {
    pub(super) ordinal: usize,
    /// Device in whose window it lies.
    pub(super) window: usize,
    pub(super) base: usize,
    pub(super) len: usize,
    pub(super) kind: MemKind,
    pub(super) id: AllocId,
}

/// Memory in the table, removed when this is dropped. Work in flight keeps the bytes by their
/// alias.
#[derive(Debug)]
pub(super) struct Placed {
    shared: Arc<Shared>,
    pub(super) placement: Placement,
    opened: bool,
}

impl Placed {
    fn new(shared: &Arc<Shared>, placement: Placement, opened: bool) -> Self {
        Self { shared: Arc::clone(shared), placement, opened }
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        let (shared, base, opened) = (Arc::clone(&self.shared), self.placement.base, self.opened);
        match self.shared.devices.get(self.placement.ordinal) {
            Some(device) => device.waits.when_none(move || shared.free(base, opened)),
            None => shared.free(base, opened),
        }
    }
}
