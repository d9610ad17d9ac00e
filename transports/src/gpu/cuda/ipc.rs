//! Handles between processes, in the four forms of the driver.

use super::device::CudaGpu;
use super::driver::OpenedLibrary;
use super::error::{
    ALREADY_MAPPED, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, because,
    released,
};
use super::home::Home;
use super::memory::{self, CudaPool, How, Memory};
use super::pointer::Facts;
use super::sys::{
    AllocationHandle, AllocationProp, Bytes64, ContextHandle, DevicePtr, GRANULARITY_MINIMUM,
    IPC_LAZY_ENABLE_PEER_ACCESS, PoolHandle, handle_type, pointer,
};
use super::vmm;
use crate::gpu::{Gpu, GpuError, Handle, HandleForm, HandleKey, Reservation};
use crate::mem::{AllocId, GpuUuid, MemKind, Region};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Weak};

/// Openings of other processes' memory. Memory that is opened by bytes is opened once for each
/// context and handle, for any number of requests (gpu.md, legacy IPC rule 4). The exporter's
/// allocation id is part of the name, since the bytes may be reused for another allocation.
///
/// Pool memory is known by the address. A second import of a pointer gives the same address, and
/// one `cuMemFree` closes both (seen on driver 580). So openings of an address are counted here,
/// and the pools they came from are kept once each.
#[derive(Debug, Default)]
pub(super) struct Openings {
    bytes: Mutex<HashMap<OpeningName, Weak<Memory>>>,
    /// Owner of memory that is open by bytes: for that the driver names the opener's device.
    owners: Mutex<Vec<(Weak<Memory>, GpuUuid)>>,
    pooled: Mutex<Pooled>,
}

impl Openings {
    /// Returns the device that owns the memory at an address, if it was opened by bytes.
    pub(super) fn owner(&self, addr: usize) -> Option<GpuUuid> {
        let covers = |memory: &Memory| memory.ptr <= addr && addr - memory.ptr < memory.span;
        let owners = self.owners.lock();
        owners
            .iter()
            .find(|(memory, _)| memory.upgrade().is_some_and(|memory| covers(&memory)))
            .map(|(_, gpu)| *gpu)
    }
}

type OpeningName = (ContextHandle, [u8; 64], AllocId);

/// Counts of openings of each address, and of each pool.
#[derive(Debug, Default)]
struct Pooled {
    pointers: HashMap<DevicePtr, usize>,
    pools: HashMap<PoolHandle, (CudaPool, usize)>,
}

// ---- export -------------------------------------------------------------------------------------

/// Makes a handle of a region of this device's memory.
pub(super) fn export(gpu: &CudaGpu, region: &Region, form: HandleForm) -> Result<Handle, GpuError> {
    let wrong = |what: &str| because("export", INVALID_VALUE, format!("{region:?} {what}"));
    let addr = region.addr();
    let facts = gpu.shared.facts(addr)?.ok_or_else(|| wrong("is host memory, or freed already"))?;
    if facts.id != region.id() {
        return Err(wrong("is not what lies at its address: that was freed, and allocated again"));
    }
    let extent = gpu.shared.extent(addr, facts)?;
    match extent.kind {
        MemKind::Device(owner) if owner == gpu.info().uuid => {}
        MemKind::Device(_) => {
            return Err(wrong("is not this device's: ask the device that owns it"));
        }
        MemKind::Managed(_) => {
            return Err(wrong("is managed memory, which moves: no process exports it"));
        }
        _ => return Err(wrong("is host memory: share it as such")),
    }
    if addr + region.len() > extent.end() {
        return Err(wrong("is made of several handles: export each extent"));
    }
    if !extent.forms.contains(form) {
        return Err(because("export", NOT_SUPPORTED, why_not(gpu, form, &facts)));
    }
    let owner = gpu.shared.gpus()?.get(usize::try_from(facts.ordinal).unwrap_or(usize::MAX));
    let owner = owner.ok_or_else(|| wrong("is of no device that this process can see"))?;
    let engine = gpu.shared.engine(owner, facts.context)?;
    let home = engine.home()?;
    let _current = home.context.enter()?;
    let base = extent.base;
    if !home.context.sync_memops {
        let on = 1_u32;
        // SAFETY: the value is as long as the attribute. VMM and pool memory refuse it, without
        // harm.
        let _ = unsafe {
            home.calls().pointer_set_attribute((&raw const on).cast(), pointer::SYNC_MEMOPS, base)
        };
    }
    let key = match form {
        HandleForm::Bytes => {
            let mut handle = Bytes64([0; 64]);
            // SAFETY: the place for the answer is ours; the address is the base of the allocation
            // (legacy IPC rule 1).
            unsafe { home.calls().ipc_get_mem_handle(&raw mut handle, base) }?;
            HandleKey::Bytes(handle.0)
        }
        HandleForm::Fd => HandleKey::Fd(export_vmm_fd(home, base)?),
        HandleForm::Pool => {
            let fd = export_pool_fd(home, PoolHandle(facts.pool))?;
            let mut data = Bytes64([0; 64]);
            // SAFETY: the place for the answer is ours; the pointer is one of the pool's.
            unsafe { home.calls().mem_pool_export_pointer(&raw mut data, base) }?;
            HandleKey::Pool(fd, data.0)
        }
        HandleForm::Fabric => {
            let mut handle = Bytes64([0; 64]);
            export_vmm(home, base, (&raw mut handle).cast(), handle_type::FABRIC)?;
            HandleKey::Fabric(handle.0)
        }
    };
    let (gpu, id, len) = (gpu.info().uuid, facts.id, extent.len);
    Ok(Handle { gpu, id, len, offset: addr - extent.base, key })
}

/// Explains why memory has no handle of a form. Callers check first instead of trying (legacy IPC
/// rule 8).
fn why_not(gpu: &CudaGpu, form: HandleForm, facts: &Facts) -> String {
    match form {
        HandleForm::Bytes if facts.pool != 0 => {
            "pool memory has no legacy IPC handle: export it as HandleForm::Pool, or allocate it \
            by cuMemAlloc"
                .into()
        }
        HandleForm::Bytes => {
            "the driver gives this memory no legacy IPC handle (VMM memory, or opened from \
            another process): export it \
             as HandleForm::Fd, or allocate it by cuMemAlloc"
                .into()
        }
        HandleForm::Fd if facts.legacy_ipc => {
            "memory of cuMemAlloc has no descriptor: export it as HandleForm::Bytes".into()
        }
        HandleForm::Fd => {
            "the memory was not allocated with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, or \
            belongs to a pool"
                .into()
        }
        HandleForm::Pool if facts.pool == 0 => "the memory belongs to no pool".into(),
        HandleForm::Pool => {
            "the pool was not made with CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR; the default pool \
            is not"
                .into()
        }
        HandleForm::Fabric => match gpu.fabric.get() {
            Some(Some(refusal)) => format!("fabric handles were refused: {refusal}"),
            _ => "the memory was not allocated with CU_MEM_HANDLE_TYPE_FABRIC".into(),
        },
    }
}

fn export_vmm(home: &Home, base: DevicePtr, to: *mut c_void, kind: c_int) -> Result<(), GpuError> {
    let mut handle: AllocationHandle = 0;
    // SAFETY: the places for the answers are ours, of the size that the kind of handle has; the
    // retained count is released.
    unsafe {
        home.calls().mem_retain_allocation_handle(&raw mut handle, base as *mut c_void)?;
        let exported = home.calls().mem_export_to_shareable_handle(to, handle, kind, 0);
        released("VMM handle", home.calls().mem_release(handle));
        exported
    }
}

fn export_vmm_fd(home: &Home, base: DevicePtr) -> Result<OwnedFd, GpuError> {
    let mut fd: c_int = -1;
    export_vmm(home, base, (&raw mut fd).cast(), handle_type::POSIX_FD)?;
    own(fd)
}

fn export_pool_fd(home: &Home, pool: PoolHandle) -> Result<OwnedFd, GpuError> {
    let mut fd: c_int = -1;
    let to = (&raw mut fd).cast();
    // SAFETY: the place for the answer is ours, and the pool has memory, so it is alive.
    unsafe {
        home.calls().mem_pool_export_to_shareable_handle(to, pool, handle_type::POSIX_FD, 0)
    }?;
    own(fd)
}

fn own(fd: c_int) -> Result<OwnedFd, GpuError> {
    if fd < 0 {
        return Err(because("export", INVALID_HANDLE, format!("the driver gave descriptor {fd}")));
    }
    // SAFETY: the driver has just opened it, for us.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // A child process that this one starts must not keep the memory.
    let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
    Ok(fd)
}

// ---- open ---------------------------------------------------------------------------------------

/// Opens another process's handle for the engines of `gpu`.
pub(super) fn open(gpu: &CudaGpu, handle: &Handle) -> Result<Region, GpuError> {
    let home = gpu.home()?;
    let current = home.context.enter()?;
    let kind = MemKind::Device(handle.gpu);
    let (ptr, owner): (DevicePtr, Box<dyn std::any::Any + Send + Sync>) = match &handle.key {
        HandleKey::Bytes(bytes) => {
            let opened = open_bytes(gpu, home, handle, *bytes)?;
            (opened.ptr, Box::new(opened))
        }
        HandleKey::Fd(fd) => {
            let from = descriptor(fd);
            let memory = open_vmm(gpu, home, handle, from, handle_type::POSIX_FD)?;
            (memory.ptr, Box::new(memory))
        }
        HandleKey::Fabric(bytes) => {
            let mut bytes = Bytes64(*bytes);
            let from = (&raw mut bytes).cast();
            let memory = open_vmm(gpu, home, handle, from, handle_type::FABRIC)?;
            (memory.ptr, Box::new(memory))
        }
        HandleKey::Pool(fd, data) => {
            let opening = open_pool(gpu, home, fd, *data)?;
            (opening.ptr, Box::new(opening))
        }
    };
    drop(current);
    check_length(gpu, ptr, handle.len)?;
    memory::region(gpu, ptr, handle.len, kind, owner)
}

/// Checks the length that a handle claims, which comes from another process, against the driver's.
fn check_length(gpu: &CudaGpu, ptr: DevicePtr, len: usize) -> Result<(), GpuError> {
    let size = gpu.shared.length_from(ptr)?;
    if len == 0 || len > size {
        let hint = format!("the handle says {len} bytes, the memory has {size}");
        return Err(because("open", INVALID_HANDLE, hint));
    }
    Ok(())
}

fn open_bytes(
    gpu: &CudaGpu,
    home: &Arc<Home>,
    handle: &Handle,
    bytes: [u8; 64],
) -> Result<Arc<Memory>, GpuError> {
    let name = (home.context.raw, bytes, handle.id);
    // Held while the handle is opened, so that two threads get one mapping.
    let mut opened = gpu.shared.opened.bytes.lock();
    if let Some(memory) = opened.get(&name).and_then(Weak::upgrade) {
        return Ok(memory);
    }
    opened.retain(|_, memory| memory.strong_count() > 0);
    let same_bytes = |(context, other, _): &OpeningName| (*context, *other) == (name.0, name.1);
    if opened.keys().any(same_bytes) {
        // The driver counts openings by the bytes, and would return the mapping of the freed
        // memory.
        let hint = "the bytes name memory that was freed and allocated again, and the old one is \
            still open: close it first";
        return Err(because("open", ALREADY_MAPPED, hint));
    }
    let mut ptr = 0;
    // SAFETY: the place for the answer is ours; the driver checks the bytes.
    unsafe {
        home.calls().ipc_open_mem_handle(&raw mut ptr, Bytes64(bytes), IPC_LAZY_ENABLE_PEER_ACCESS)
    }
    .map_err(not_opened)?;
    let memory = Memory { home: Arc::clone(home), ptr, span: handle.len, how: How::Close };
    home.kept.note(ptr, handle.len);
    let memory = Arc::new(memory);
    opened.insert(name, Arc::downgrade(&memory));
    let mut owners = gpu.shared.opened.owners.lock();
    owners.retain(|(memory, _)| memory.strong_count() > 0);
    owners.push((Arc::downgrade(&memory), handle.gpu));
    Ok(memory)
}

fn not_opened(error: GpuError) -> GpuError {
    let hint = match error.code {
        INVALID_CONTEXT => {
            "the exporting process cannot open its own handle: use the pointer itself"
        }
        INVALID_VALUE | INVALID_HANDLE => {
            "the exporter has freed the memory or has ended, the bytes are no handle, or the two \
            processes are in \
             different pid namespaces (containers) or on different MIG instances"
        }
        _ => return error,
    };
    GpuError { hint: hint.into(), ..error }
}

/// Returns a descriptor in the form of a pointer, as the driver takes it.
fn descriptor(fd: &OwnedFd) -> *mut c_void {
    std::ptr::without_provenance_mut(
        usize::try_from(BorrowedFd::as_raw_fd(&std::os::fd::AsFd::as_fd(fd))).unwrap_or(0),
    )
}

/// Opens another process's descriptor for the engines of `gpu`, at reserved addresses.
pub(super) fn open_at(
    gpu: &CudaGpu,
    (reservation, offset): (&Reservation, usize),
    handle: &Handle,
) -> Result<Region, GpuError> {
    let HandleKey::Fd(fd) = &handle.key else {
        let hint = format!("{:?} handles are opened where the driver likes", handle.form());
        return Err(because("open_at", NOT_SUPPORTED, hint));
    };
    let ptr = vmm::place_at((reservation, offset), handle.len)?;
    let home = gpu.home()?;
    let current = home.context.enter()?;
    let (from, kind) = (descriptor(fd), handle_type::POSIX_FD);
    let memory = imported(gpu, home, handle, (from, kind), |imported| {
        let grants = |memory: &Memory| vmm::grant_all(gpu, memory);
        vmm::map_at(home, imported, (ptr, handle.len), grants)
    })?;
    drop(current);
    check_length(gpu, ptr, handle.len)?;
    memory::region(
        gpu,
        ptr,
        handle.len,
        MemKind::Device(handle.gpu),
        Box::new((memory, reservation.clone())),
    )
}

fn open_vmm(
    gpu: &CudaGpu,
    home: &Arc<Home>,
    handle: &Handle,
    from: *mut c_void,
    kind: c_int,
) -> Result<Memory, GpuError> {
    imported(gpu, home, handle, (from, kind), |imported| vmm::map(gpu, home, imported, handle.len))
}

/// Imports VMM memory, maps it, and releases its handle: mapped memory stays until it is unmapped.
fn imported(
    gpu: &CudaGpu,
    home: &Home,
    handle: &Handle,
    (from, kind): (*mut c_void, c_int),
    mapped: impl FnOnce(AllocationHandle) -> Result<Memory, GpuError>,
) -> Result<Memory, GpuError> {
    let granule = vmm::granularity(
        home.calls(),
        &AllocationProp::of(gpu.device, kind, false),
        GRANULARITY_MINIMUM,
    )?;
    if handle.len == 0 || !handle.len.is_multiple_of(granule) {
        let hint = format!(
            "the handle says {} bytes: VMM memory comes in multiples of {granule}",
            handle.len
        );
        return Err(because("open", INVALID_HANDLE, hint));
    }
    let mut imported: AllocationHandle = 0;
    // SAFETY: the place for the answer is ours; the driver checks `from`, and takes no ownership
    // of it.
    unsafe { home.calls().mem_import_from_shareable_handle(&raw mut imported, from, kind) }?;
    let memory = mapped(imported);
    // SAFETY: imported above.
    released("VMM handle", unsafe { home.calls().mem_release(imported) });
    memory
}

fn open_pool(
    gpu: &CudaGpu,
    home: &Arc<Home>,
    fd: &OwnedFd,
    data: [u8; 64],
) -> Result<PoolOpening, GpuError> {
    let (calls, mut pool) = (home.calls(), PoolHandle::NULL);
    // Held until the opening is counted, so that no other thread frees memory that the driver
    // returns a second time.
    let mut pooled = gpu.shared.opened.pooled.lock();
    // SAFETY: the place for the answer is ours; the driver checks the descriptor, and takes no
    // ownership of it.
    unsafe {
        calls.mem_pool_import_from_shareable_handle(
            &raw mut pool,
            descriptor(fd),
            handle_type::POSIX_FD,
            0,
        )
    }?;
    let (known, _) =
        pooled.pools.entry(pool).and_modify(|(_, openings)| *openings += 1).or_insert_with(|| {
            let imported = CudaPool::of(calls, pool);
            (imported, 1)
        });
    let (mut ptr, mut data) = (0, Bytes64(data));
    let imported = known.grant(gpu.device).and_then(|()| {
        // SAFETY: the place for the answer is ours; the driver checks the bytes.
        unsafe { calls.mem_pool_import_pointer(&raw mut ptr, pool, &raw mut data) }
    });
    if let Err(error) = imported {
        pooled.leave(pool);
        return Err(error);
    }
    *pooled.pointers.entry(ptr).or_insert(0) += 1;
    Ok(PoolOpening { shared: gpu.shared, home: Arc::clone(home), ptr, pool })
}

impl Pooled {
    /// Removes one opening of a pool. The pool is dropped with the last.
    fn leave(&mut self, pool: PoolHandle) {
        if let Some((_, openings)) = self.pools.get_mut(&pool) {
            *openings -= 1;
            if *openings == 0 {
                self.pools.remove(&pool);
            }
        }
    }
}

/// One opening of a pool's pointer. The last one closes it.
struct PoolOpening {
    shared: &'static OpenedLibrary,
    home: Arc<Home>,
    ptr: DevicePtr,
    pool: PoolHandle,
}

impl Drop for PoolOpening {
    fn drop(&mut self) {
        let (shared, home, ptr, pool) = (self.shared, Arc::clone(&self.home), self.ptr, self.pool);
        self.home.waits.when_none(move || close_pooled(shared, &home, ptr, pool));
    }
}

fn close_pooled(shared: &OpenedLibrary, home: &Home, ptr: DevicePtr, pool: PoolHandle) {
    let mut pooled = shared.opened.pooled.lock();
    let left = pooled.pointers.get_mut(&ptr).map_or(0, |openings| {
        *openings -= 1;
        *openings
    });
    if left == 0 {
        pooled.pointers.remove(&ptr);
        if let Ok(_current) = home.context.enter() {
            // SAFETY: imported here, and this was the last holder.
            released("pool memory", unsafe { home.calls().mem_free(ptr) });
        }
    }
    pooled.leave(pool);
}
