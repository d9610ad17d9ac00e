//! What all devices of one simulated driver share: who they are, what is allocated, what was opened.

use super::config::FakeConfig;
use super::device::FakeGpu;
use super::engine::Queue;
use super::error::{
    INVALID_DEVICE, INVALID_VALUE, OPERATING_SYSTEM, OUT_OF_MEMORY, PEER_ACCESS_UNSUPPORTED, error,
};
use super::faults::{Faults, count};
use super::ipc::Opened;
use super::lock;
use super::memory::{Alias, GRANULE, Window, create};
use super::table::{Entry, Origin, Table};
use crate::gpu::{Flavour, Gpu, GpuError, GpuInfo, HandleForm};
use crate::mem::{AllocId, GpuUuid, MemKind, Region};
use rustix::fs::fstat;
use std::any::Any;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

/// The library's own streams of each device.
pub(super) const INTERNAL_STREAMS: usize = 2;

/// Addresses of a window for each byte of a device's memory: room for what is opened from other
/// processes, and for not reusing an address at once. They cost nothing.
const WINDOW_FACTOR: usize = 64;

/// One device.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) info: GpuInfo,
    pub(super) window: Window,
    /// Bytes that can be allocated.
    memory: usize,
    /// What `classify` says for plain memory.
    context: u64,
    /// The handle given out last, so that all of them are one while one is alive.
    handle: Mutex<Weak<FakeGpu>>,
    /// The streams of `Gpu::copy`, started on first use.
    pub(super) streams: [Mutex<Option<Queue>>; INTERNAL_STREAMS],
    pub(super) turn: AtomicU64,
}

/// What all devices of a driver share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) devices: Vec<Device>,
    pub(super) faults: Arc<Faults>,
    pub(super) opened: Opened,
    table: Mutex<Table>,
    next_id: AtomicU64,
}

/// What is known of an address.
pub(super) struct Found {
    pub(super) base: usize,
    pub(super) len: usize,
    pub(super) ordinal: usize,
    pub(super) id: AllocId,
    pub(super) context: Option<u64>,
    pub(super) alias: Arc<Alias>,
}

/// How an allocation can be exported.
pub(super) enum Exportable {
    /// By the number of its descriptor in this process, and the inode to check.
    Bytes { fd: u32, inode: u64 },
    /// By a descriptor of its own.
    Fd(OwnedFd),
    /// Not at all: it belongs to another process.
    Not,
}

impl Shared {
    pub(super) fn new(config: &FakeConfig) -> Result<Self, GpuError> {
        let faults = Arc::new(Faults::default());
        faults.copy_delay(config.copy_delay);
        faults.launch_delay(config.launch_delay);
        for &(one, other) in &config.no_peer {
            faults.refuse_peer(config.uuid(one), config.uuid(other), true);
        }
        let visible = config.visible()?;
        let mut devices = Vec::with_capacity(visible.len());
        for (ordinal, &physical) in visible.iter().enumerate() {
            devices.push(Device {
                info: config.info(ordinal, physical),
                window: Window::reserve(config.memory.saturating_mul(WINDOW_FACTOR) / GRANULE * GRANULE)?,
                memory: config.memory,
                context: 0xfa4e_0000 + physical as u64,
                handle: Mutex::new(Weak::new()),
                streams: [const { Mutex::new(None) }; INTERNAL_STREAMS],
                turn: AtomicU64::new(0),
            });
        }
        let table = Mutex::new(Table::new(devices.iter().map(|device| device.window.range())));
        Ok(Self {
            devices,
            faults,
            opened: Opened::default(),
            table,
            next_id: AtomicU64::new(1),
        })
    }

    /// The device of an ordinal.
    pub(super) fn device(&self, call: &'static str, ordinal: usize) -> Result<&Device, GpuError> {
        self.devices.get(ordinal).ok_or_else(|| {
            error(
                call,
                INVALID_DEVICE,
                format!("there is no device {ordinal} in this process"),
            )
        })
    }

    /// This process's number of a device.
    pub(super) fn ordinal(&self, call: &'static str, uuid: GpuUuid) -> Result<usize, GpuError> {
        let unseen = || {
            let hint = format!("{uuid} is not among the devices that this process can see: widen its mask");
            error(call, INVALID_DEVICE, hint)
        };
        self.devices
            .iter()
            .position(|device| device.info.uuid == uuid)
            .ok_or_else(unseen)
    }

    /// The device as an object; the same one for as long as anybody holds it.
    pub(super) fn gpu(
        self: &Arc<Self>,
        call: &'static str,
        ordinal: usize,
    ) -> Result<Arc<FakeGpu>, GpuError> {
        let device = self.device(call, ordinal)?;
        let mut handle = lock(&device.handle);
        if let Some(gpu) = handle.upgrade() {
            return Ok(gpu);
        }
        let gpu = Arc::new(FakeGpu::new(Arc::clone(self), ordinal, device.info.clone()));
        *handle = Arc::downgrade(&gpu);
        Ok(gpu)
    }

    /// Whether the engine of one device reaches another's memory.
    pub(super) fn reaches(&self, call: &'static str, from: usize, peer: GpuUuid) -> Result<(), GpuError> {
        self.ordinal(call, peer)?;
        let own = self.device(call, from)?.info.uuid;
        if own != peer && self.faults.are_apart(own, peer) {
            let hint = format!(
                "{own} has no peer access to {peer}: copy through host memory, or by a device that reaches both"
            );
            return Err(error(call, PEER_ACCESS_UNSUPPORTED, hint));
        }
        Ok(())
    }

    /// What lies at an address. Addresses outside all windows are answered without a lock.
    pub(super) fn find(&self, addr: usize) -> Option<Found> {
        self.window_of(addr)?;
        let table = lock(&self.table);
        let (base, entry) = table.find(addr)?;
        let Entry {
            len,
            ordinal,
            id,
            context,
            ref alias,
            ..
        } = *entry;
        Some(Found {
            base,
            len,
            ordinal,
            id,
            context,
            alias: Arc::clone(alias),
        })
    }

    /// The device in whose window an address lies, allocated or not.
    pub(super) fn window_of(&self, addr: usize) -> Option<usize> {
        self.devices
            .iter()
            .position(|device| device.window.range().contains(&addr))
    }

    /// Finds the allocation of a region, if it is one of this driver's.
    pub(super) fn find_region(&self, call: &'static str, region: &Region) -> Result<Found, GpuError> {
        self.find(region.addr())
            .filter(|found| found.id == region.id())
            .ok_or_else(|| {
                error(
                    call,
                    INVALID_VALUE,
                    format!("{region:?} is no memory of this simulated driver"),
                )
            })
    }

    /// How a region can be exported.
    pub(super) fn exportable(
        &self,
        call: &'static str,
        region: &Region,
    ) -> Result<(Found, Exportable), GpuError> {
        let found = self.find_region(call, region)?;
        let table = lock(&self.table);
        let gone = || error(call, INVALID_VALUE, "the memory has been freed");
        let (_, entry) = table
            .find(found.base)
            .filter(|(_, entry)| entry.id == found.id)
            .ok_or_else(gone)?;
        let failed = |why: &dyn std::fmt::Display| error(call, OPERATING_SYSTEM, why.to_string());
        match &entry.origin {
            Origin::Plain(fd) => {
                let inode = fstat(fd).map_err(|why| failed(&why))?.st_ino;
                let fd = u32::try_from(fd.as_raw_fd()).map_err(|why| failed(&why))?;
                Ok((found, Exportable::Bytes { fd, inode }))
            }
            Origin::Shareable(fd) => {
                let fd = fd.try_clone().map_err(|why| failed(&why))?;
                Ok((found, Exportable::Fd(fd)))
            }
            Origin::Opened => Ok((found, Exportable::Not)),
        }
    }

    /// Allocates memory of a device.
    pub(super) fn allocate(
        self: &Arc<Self>,
        ordinal: usize,
        len: usize,
        flavour: Flavour,
    ) -> Result<Region, GpuError> {
        let device = self.device("allocate", ordinal)?;
        if len == 0 {
            return Err(error("allocate", INVALID_VALUE, "an allocation of 0 bytes"));
        }
        let room = |table: &Table| {
            let used = table.used(ordinal);
            let span = len.checked_next_multiple_of(GRANULE).unwrap_or(usize::MAX);
            if span > device.memory.saturating_sub(used) {
                let hint = format!(
                    "{len} bytes (in blocks of {GRANULE}) do not fit: {used} of {} are in use",
                    device.memory
                );
                return Err(error("allocate", OUT_OF_MEMORY, hint));
            }
            Ok(span)
        };
        // Asked before the memory is made; the lock is held from here on, so it stays true.
        let mut table = lock(&self.table);
        let span = room(&table)?;
        let fd = create("allocate", span)?;
        let (context, memory) = match flavour {
            Flavour::Plain => (Some(device.context), Origin::Plain as fn(OwnedFd) -> Origin),
            Flavour::Shareable => (None, Origin::Shareable as fn(OwnedFd) -> Origin),
        };
        let alias = Arc::new(Alias::map("allocate", span, &fd)?);
        let id = self.fresh_id();
        let base = self.place("allocate", &table, ordinal, span, &fd)?;
        table.insert(
            base,
            Entry {
                len,
                span,
                ordinal,
                id,
                context,
                alias,
                origin: memory(fd),
            },
        );
        drop(table);
        count(&self.faults.counts.allocs);
        let parts = Parts {
            ordinal,
            base,
            len,
            id,
        };
        self.region(
            parts,
            Box::new(Placed {
                shared: Arc::clone(self),
                parts,
                opened: false,
            }),
        )
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
        let span = span.ok_or_else(|| error("open", INVALID_VALUE, format!("a length of {len} bytes")))?;
        let alias = Arc::new(Alias::map("open", span, &fd)?);
        let context = matches!(form, HandleForm::Bytes).then_some(device.context);
        let id = self.fresh_id();
        let mut table = lock(&self.table);
        let base = self.place("open", &table, ordinal, span, &fd)?;
        let origin = Origin::Opened;
        table.insert(
            base,
            Entry {
                len,
                span,
                ordinal,
                id,
                context,
                alias,
                origin,
            },
        );
        drop(table);
        count(&self.faults.counts.maps);
        let parts = Parts {
            ordinal,
            base,
            len,
            id,
        };
        Ok(Placed {
            shared: Arc::clone(self),
            parts,
            opened: true,
        })
    }

    /// A region over memory that is in the table for as long as `owner` lives.
    pub(super) fn region(
        self: &Arc<Self>,
        parts: Parts,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Region, GpuError> {
        let Parts {
            ordinal,
            base,
            len,
            id,
        } = parts;
        let device = self.device("region", ordinal)?;
        let gpu: Arc<dyn Gpu> = self.gpu("region", ordinal)?;
        let kind = MemKind::Device(device.info.uuid);
        // SAFETY: the range was placed in the device's window and entered in the table; both stay until
        // `owner`, which is or holds the `Placed`, is dropped. Nobody can refer to it: it has no access.
        Ok(unsafe { Region::from_parts(device.window.pointer(base), len, kind, id, Some(gpu), owner) })
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

    fn fresh_id(&self) -> AllocId {
        AllocId(self.next_id.fetch_add(1, Ordering::Relaxed))
    }

    fn free(&self, base: usize, opened: bool) {
        let mut table = lock(&self.table);
        let Some(entry) = table.remove(base) else { return };
        if let Some(device) = self.devices.get(entry.ordinal) {
            device.window.clear(base, entry.span);
        }
        drop(table);
        count(if opened {
            &self.faults.counts.unmaps
        } else {
            &self.faults.counts.frees
        });
    }
}

/// Plain data of memory in the table.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts {
    pub(super) ordinal: usize,
    pub(super) base: usize,
    pub(super) len: usize,
    pub(super) id: AllocId,
}

/// Memory in the table; leaves it when dropped. Work under way keeps the bytes by their alias.
#[derive(Debug)]
pub(super) struct Placed {
    shared: Arc<Shared>,
    pub(super) parts: Parts,
    opened: bool,
}

impl Drop for Placed {
    fn drop(&mut self) {
        self.shared.free(self.parts.base, self.opened);
    }
}
