//! State that all devices of one simulated driver share: the devices, allocations, and openings.

use super::config::FakeConfig;
use super::copier::Copier;
use super::device::FakeGpu;
use super::direct::Flushes;
use super::engine::Queue;
use super::error::{
    INVALID_DEVICE, INVALID_VALUE, OPERATING_SYSTEM, PEER_ACCESS_UNSUPPORTED, error,
};
use super::faults::GpuFaults;
use super::ipc::Opened;
use super::memory::{Alias, GRANULE, Window};
use super::pinned::Pinned;
use super::standstill::Standstill;
use super::table::{Allocation, Origin, Table};
use carrack_transports::gpu::waits::{PutOff, Waits};
use carrack_transports::gpu::{Forms, GpuError, GpuInfo, HandleForm, Rights};
use carrack_transports::mem::{AllocId, GpuUuid, MemKind, Region};
use parking_lot::Mutex;
use rustix::fs::fstat;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use std::sync::{Arc, Weak};

/// Number of the library's own streams of each device.
pub(super) const INTERNAL_STREAMS: usize = 2;

/// Addresses of a window for each byte of a device's memory: room for memory opened from other
/// processes, and for late reuse of addresses. They cost nothing.
const WINDOW_FACTOR: usize = 64;

/// One device.
#[derive(Debug)]
pub(super) struct GpuDevice {
    pub(super) info: GpuInfo,
    pub(super) window: Window,
    /// Bytes that can be allocated.
    pub(super) memory: usize,
    /// The configured NUMA node.
    pub(super) numa: Option<u32>,
    /// Context that `classify` reports for plain memory.
    pub(super) context: u64,
    /// The last handle, so that there is only one while it is alive.
    handle: Mutex<Weak<FakeGpu>>,
    /// The streams of `Gpu::copy`, started on first use.
    pub(super) streams: [Mutex<Option<Queue>>; INTERNAL_STREAMS],
    pub(super) turn: AtomicUsize,
    /// Streams that wait for words, as the library counts them; and as the device simulates them.
    pub(super) waits: Arc<Waits>,
    pub(super) standstill: Arc<Standstill>,
    pub(super) copier: Copier,
}

impl GpuDevice {
    /// Waits as a call of the driver that waits for the whole device, when the library makes it.
    pub(super) fn wait_as_a_call_does(&self) {
        self.copier.end_early();
        self.standstill.until_none_waits();
    }
}

/// State that all devices of a driver share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) devices: Vec<GpuDevice>,
    pub(super) faults: Arc<GpuFaults>,
    pub(super) opened: Opened,
    pub(super) table: Mutex<Table>,
    pub(super) pinned: Pinned,
    pub(super) next_id: AtomicU64,
    /// Calls that would block while a stream waits.
    pub(super) put_off: Arc<PutOff>,
    pub(super) flushes: Flushes,
    /// Set if small copies go to resident kernels.
    pub(super) wants_copiers: AtomicBool,
}

/// Facts about an address.
pub(super) struct Found {
    pub(super) base: usize,
    pub(super) len: usize,
    pub(super) ordinal: usize,
    pub(super) kind: MemKind,
    pub(super) id: AllocId,
    pub(super) context: Option<u64>,
    pub(super) forms: Forms,
    /// Set if copies may cross into a neighbour of the same sort: memory mapped by VMM calls.
    pub(super) is_vmm: bool,
    /// Set if engines of other devices than its owner have it, too: it was opened, or lies at
    /// reserved addresses.
    pub(super) is_for_others: bool,
    /// The rights in its table entry.
    pub(super) access: Option<Vec<(usize, Rights)>>,
    pub(super) alias: Arc<Alias>,
}

/// Ways to export an allocation.
pub(super) enum Exportable {
    /// The number of the allocation's descriptor in this process, and the inode to check.
    Bytes { fd: u32, inode: u64 },
    /// A file descriptor.
    Fd(OwnedFd),
    /// The pool's descriptor.
    Pool(OwnedFd),
    /// No way, for this reason.
    Not(&'static str),
}

impl Shared {
    pub(super) fn new(config: &FakeConfig) -> Result<Self, GpuError> {
        let faults = Arc::new(GpuFaults::default());
        faults.copy_delay(config.copy_delay);
        faults.launch_delay(config.launch_delay);
        for &(one, other) in &config.no_peer {
            faults.refuse_peer(config.uuid(one), config.uuid(other), true);
        }
        let put_off = Arc::<PutOff>::default();
        let visible = config.visible()?;
        let mut devices = Vec::with_capacity(visible.len());
        for (ordinal, &physical) in visible.iter().enumerate() {
            devices.push(GpuDevice {
                info: config.info(ordinal, physical),
                window: Window::reserve(
                    config.memory.saturating_mul(WINDOW_FACTOR) / GRANULE * GRANULE,
                )?,
                memory: config.memory,
                numa: config.numa.get(physical).copied(),
                context: 0xfa4e_0000 + physical as u64,
                handle: Mutex::new(Weak::new()),
                streams: [const { Mutex::new(None) }; INTERNAL_STREAMS],
                turn: AtomicUsize::new(0),
                waits: Waits::over(config.connections, &put_off),
                standstill: Arc::new(Standstill::over(config.connections)),
                copier: Copier::new(),
            });
        }
        let table = Mutex::new(Table::new(devices.iter().map(|device| device.window.range())));
        let (opened, pinned, flushes) = (Opened::default(), Pinned::default(), Flushes::default());
        let (next_id, wants_copiers) = (AtomicU64::new(1), AtomicBool::new(false));
        Ok(Self {
            devices,
            faults,
            opened,
            table,
            pinned,
            next_id,
            put_off,
            flushes,
            wants_copiers,
        })
    }

    /// Returns the device of an ordinal.
    pub(super) fn device(
        &self,
        call: &'static str,
        ordinal: usize,
    ) -> Result<&GpuDevice, GpuError> {
        self.devices.get(ordinal).ok_or_else(|| {
            error(call, INVALID_DEVICE, format!("there is no device {ordinal} in this process"))
        })
    }

    /// Returns this process's number of a device.
    pub(super) fn ordinal(&self, call: &'static str, uuid: GpuUuid) -> Result<usize, GpuError> {
        let unseen = || {
            let hint = format!(
                "{uuid} is not among the devices that this process can see: widen its mask"
            );
            error(call, INVALID_DEVICE, hint)
        };
        self.devices.iter().position(|device| device.info.uuid == uuid).ok_or_else(unseen)
    }

    /// Returns the device as an object, the same one while it has a holder.
    pub(super) fn gpu(
        self: &Arc<Self>,
        call: &'static str,
        ordinal: usize,
    ) -> Result<Arc<FakeGpu>, GpuError> {
        let device = self.device(call, ordinal)?;
        let mut handle = device.handle.lock();
        if let Some(gpu) = handle.upgrade() {
            return Ok(gpu);
        }
        let gpu = Arc::new(FakeGpu::new(Arc::clone(self), ordinal, device.info.clone()));
        *handle = Arc::downgrade(&gpu);
        Ok(gpu)
    }

    /// Checks that the engine of one device reaches another's memory.
    pub(super) fn reaches(
        &self,
        call: &'static str,
        from: usize,
        peer: GpuUuid,
    ) -> Result<(), GpuError> {
        self.ordinal(call, peer)?;
        let own = self.device(call, from)?.info.uuid;
        if own != peer && self.faults.are_apart(own, peer) {
            let hint = format!(
                "{own} has no peer access to {peer}: copy through host memory, or by a device that \
                reaches both"
            );
            return Err(error(call, PEER_ACCESS_UNSUPPORTED, hint));
        }
        Ok(())
    }

    /// Returns the facts about an address. Addresses outside all windows need no lock.
    pub(super) fn find(&self, addr: usize) -> Option<Found> {
        self.window_of(addr)?;
        let table = self.table.lock();
        let (base, entry) = table.find(addr)?;
        let Allocation {
            len, ordinal, kind, id, context, ref alias, ref origin, ref access, ..
        } = *entry;
        let forms = Forms::NONE
            .with(HandleForm::Bytes, matches!(origin, Origin::Plain(_)))
            .with(HandleForm::Fd, matches!(origin, Origin::Shareable(_)))
            .with(HandleForm::Pool, matches!(origin, Origin::Pooled(_)));
        let is_placed = table.is_reserved(base);
        let is_vmm = matches!(origin, Origin::Shareable(_)) || is_placed;
        let is_for_others = matches!(origin, Origin::Opened) || is_placed;
        let (alias, access) = (Arc::clone(alias), access.clone());
        Some(Found {
            base,
            len,
            ordinal,
            kind,
            id,
            context,
            forms,
            is_vmm,
            is_for_others,
            access,
            alias,
        })
    }

    /// Returns the device in whose window an address lies, allocated or not.
    pub(super) fn window_of(&self, addr: usize) -> Option<usize> {
        self.devices.iter().position(|device| device.window.range().contains(&addr))
    }

    /// Finds the allocation of a region, if it is one of this driver's.
    pub(super) fn find_region(
        &self,
        call: &'static str,
        region: &Region,
    ) -> Result<Found, GpuError> {
        self.find(region.addr()).filter(|found| found.id == region.id()).ok_or_else(|| {
            error(call, INVALID_VALUE, format!("{region:?} is no memory of this simulated driver"))
        })
    }

    /// Returns the way to export a region.
    pub(super) fn exportable(
        &self,
        call: &'static str,
        region: &Region,
    ) -> Result<(Found, Exportable), GpuError> {
        let found = self.find_region(call, region)?;
        let table = self.table.lock();
        let gone = || error(call, INVALID_VALUE, "the memory has been freed");
        let (_, entry) =
            table.find(found.base).filter(|(_, entry)| entry.id == found.id).ok_or_else(gone)?;
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
            Origin::Pooled(fd) => {
                let fd = fd.try_clone().map_err(|why| failed(&why))?;
                Ok((found, Exportable::Pool(fd)))
            }
            Origin::Managed => {
                Ok((found, Exportable::Not("managed memory moves: no process exports it")))
            }
            Origin::Opened => {
                let why =
                    "the memory was opened from another process's handle: its owner exports it";
                Ok((found, Exportable::Not(why)))
            }
        }
    }
}
