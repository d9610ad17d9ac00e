//! Allocation of memory of each flavour, and its release in the context that it came from.

use super::calls::Calls;
use super::capture::Relaxed;
use super::device::CudaGpu;
use super::error::{INVALID_VALUE, OUT_OF_MEMORY, because, released};
use super::home::Home;
use super::lane::CopyDirection;
use super::sys::{self, AccessDesc, CuDevice, DevicePtr, PoolHandle, PoolProps, handle_type};
use super::vmm;
use crate::fork::Owner;
use crate::gpu::{Flavour, Gpu, GpuError, HostRegistration};
use crate::mem::{MemKind, Region};
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

/// Plain allocations are whole multiples of this, so that a handle exposes no neighbour (gpu.md,
/// legacy IPC rule 2).
const BLOCK: usize = 2 << 20;

/// Call that gives memory back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum How {
    /// `cuMemFree`.
    Free,
    /// `cuMemFreeHost`.
    FreeHost,
    /// `cuMemFreeAsync`, on the stream of copies within the device.
    ToPool,
    /// `cuMemUnmap`, and release of the addresses.
    Unmap,
    /// `cuMemUnmap`: the addresses belong to a reservation.
    UnmapOnly,
    /// `cuIpcCloseMemHandle`.
    Close,
}

/// Memory that is given back when this is dropped. The holder waits for the work on it first.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) home: Arc<Home>,
    pub(super) ptr: DevicePtr,
    /// Bytes that it takes up.
    pub(super) span: usize,
    pub(super) how: How,
}

impl How {
    /// Returns `true` if the driver waits for all of the context, and so for streams that wait for
    /// a word (measured on driver 580).
    fn waits_for_streams(self) -> bool {
        matches!(self, Self::Free | Self::FreeHost | Self::Close)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.home.context.is_here() {
            return;
        }
        let (home, ptr, span, how) = (Arc::clone(&self.home), self.ptr, self.span, self.how);
        home.kept.forget(ptr);
        if how.waits_for_streams() {
            self.home.waits.when_none(move || give_back(&home, ptr, span, how));
        } else {
            give_back(&home, ptr, span, how);
        }
    }
}

/// Gives memory back. Called by its only holder.
fn give_back(home: &Home, ptr: DevicePtr, span: usize, how: How) {
    let calls = home.calls();
    let Ok(_current) = home.context.enter() else { return };
    if how.waits_for_streams() {
        home.end_copier_early();
    }
    // SAFETY: each is given back as it was taken, once, by its only holder.
    let outcome = unsafe {
        match how {
            How::Free => calls.mem_free(ptr),
            How::FreeHost => calls.mem_free_host(ptr as *mut c_void),
            How::ToPool => home
                .lane(CopyDirection::Within)
                .and_then(|stream| calls.mem_free_async(ptr, stream)),
            How::Unmap => {
                calls.mem_unmap(ptr, span).and_then(|()| calls.mem_address_free(ptr, span))
            }
            How::UnmapOnly => calls.mem_unmap(ptr, span),
            How::Close => calls.ipc_close_mem_handle(ptr),
        }
    };
    released("memory", outcome);
}

/// Allocates `len` bytes.
pub(super) fn allocate(gpu: &CudaGpu, len: usize, flavour: Flavour) -> Result<Region, GpuError> {
    if len == 0 {
        return Err(because("allocate", INVALID_VALUE, "an allocation of 0 bytes"));
    }
    let home = gpu.home()?;
    // Memory whose release was put off while streams waited may be missing.
    home.waits.catch_up();
    let uuid = gpu.info().uuid;
    let current = home.context.enter()?;
    let allocated = match flavour {
        Flavour::Plain => plain(home, len).map(|memory| (memory, MemKind::Device(uuid))),
        Flavour::Shareable => {
            vmm::shareable(gpu, home, len).map(|memory| (memory, MemKind::Device(uuid)))
        }
        Flavour::Pooled => pooled(gpu, home, len).map(|memory| (memory, MemKind::Device(uuid))),
        Flavour::Pinned => pinned(home, len).map(|memory| (memory, MemKind::Pinned)),
        Flavour::Managed => managed(home, len).map(|memory| (memory, MemKind::Managed(uuid))),
    };
    let allocated = allocated.map_err(|error| explain(home, len, error));
    drop(current);
    let (memory, kind) = allocated?;
    if matches!(kind, MemKind::Device(_)) {
        home.kept.note(memory.ptr, memory.span);
    }
    region(gpu, memory.ptr, len, kind, Box::new(memory))
}

/// Makes a region of memory that `owner` keeps.
pub(super) fn region(
    gpu: &CudaGpu,
    ptr: DevicePtr,
    len: usize,
    kind: MemKind,
    owner: Box<dyn std::any::Any + Send + Sync>,
) -> Result<Region, GpuError> {
    let nothing = || because("allocate", INVALID_VALUE, "the driver allocated nothing");
    let base = NonNull::new(ptr as *mut u8).ok_or_else(nothing)?;
    let nameless =
        || because("allocate", INVALID_VALUE, format!("the driver has no buffer id for {ptr:#x}"));
    let id = gpu.shared.buffer_id(ptr)?.ok_or_else(nameless)?;
    let engine = gpu.shared_self()?;
    // SAFETY: the driver's memory, to which no reference is made here, and which the owner keeps.
    Ok(unsafe { Region::from_parts(base, len, kind, id, Some(engine), owner) })
}

pub(super) fn blocks(len: usize, block: usize) -> Result<usize, GpuError> {
    let spans = len.checked_next_multiple_of(block.max(1));
    spans.ok_or_else(|| {
        because("allocate", OUT_OF_MEMORY, format!("{len} bytes are more than there are addresses"))
    })
}

fn plain(home: &Arc<Home>, len: usize) -> Result<Memory, GpuError> {
    let (span, mut ptr) = (blocks(len, BLOCK)?, 0);
    // SAFETY: the place for the answer is ours.
    unsafe { home.calls().mem_alloc(&raw mut ptr, span) }?;
    Ok(Memory { home: Arc::clone(home), ptr, span, how: How::Free })
}

fn managed(home: &Arc<Home>, len: usize) -> Result<Memory, GpuError> {
    let mut ptr = 0;
    // SAFETY: the place for the answer is ours.
    unsafe { home.calls().mem_alloc_managed(&raw mut ptr, len, sys::ATTACH_GLOBAL) }?;
    Ok(Memory { home: Arc::clone(home), ptr, span: len, how: How::Free })
}

fn pinned(home: &Arc<Home>, len: usize) -> Result<Memory, GpuError> {
    let mut ptr = null_mut();
    // SAFETY: the place for the answer is ours.
    unsafe { home.calls().mem_host_alloc(&raw mut ptr, len, sys::HOST_PORTABLE) }?;
    Ok(Memory { home: Arc::clone(home), ptr: ptr as usize, span: len, how: How::FreeHost })
}

// ---- pools --------------------------------------------------------------------------------------

/// A pool of the library's own. Other processes can open its memory.
#[derive(Debug)]
pub(super) struct CudaPool {
    calls: &'static Calls,
    pub(super) raw: PoolHandle,
    owner: Owner,
}

impl Drop for CudaPool {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return;
        }
        let _relaxed = Relaxed::enter(self.calls);
        // SAFETY: made or imported here. Memory that is still allocated keeps the driver's pool.
        released("pool", unsafe { self.calls.mem_pool_destroy(self.raw) });
    }
}

impl CudaPool {
    /// Wraps a pool that exists already.
    pub(super) fn of(calls: &'static Calls, raw: PoolHandle) -> Self {
        Self { calls, raw, owner: Owner::this_process() }
    }

    fn create(gpu: &CudaGpu, calls: &'static Calls) -> Result<Self, GpuError> {
        let (props, mut raw) = (PoolProps::of(gpu.device, handle_type::POSIX_FD), PoolHandle::NULL);
        // SAFETY: the place for the answer is ours.
        unsafe { calls.mem_pool_create(&raw mut raw, &raw const props) }?;
        let pool = Self::of(calls, raw);
        vmm::grant_to_peers(gpu, |peer| pool.grant(peer));
        Ok(pool)
    }

    /// Gives a device read and write access to all memory of the pool.
    pub(super) fn grant(&self, device: CuDevice) -> Result<(), GpuError> {
        let access = AccessDesc::read_write(device);
        // SAFETY: the pool is alive.
        unsafe { self.calls.mem_pool_set_access(self.raw, &raw const access, 1) }
    }
}

fn pooled(gpu: &CudaGpu, home: &Arc<Home>, len: usize) -> Result<Memory, GpuError> {
    let calls = home.calls();
    let span = blocks(len, 512)?;
    let pool = home.once(&home.pool, || CudaPool::create(gpu, calls))?.raw;
    let (stream, mut ptr) = (home.lane(CopyDirection::Within)?, 0);
    // SAFETY: the place for the answer is ours.
    unsafe { calls.mem_alloc_from_pool_async(&raw mut ptr, span, pool, stream) }?;
    let memory = Memory { home: Arc::clone(home), ptr, span, how: How::ToPool };
    // Other streams may use the memory as soon as the region is returned.
    // SAFETY: a stream of the library's own.
    unsafe { calls.stream_synchronize(stream) }?;
    Ok(memory)
}

// ---- host memory --------------------------------------------------------------------------------

/// Host memory of the user's that was locked here.
#[derive(Debug)]
struct Locked {
    home: Arc<Home>,
    addr: usize,
}

impl Drop for Locked {
    fn drop(&mut self) {
        let (home, addr) = (Arc::clone(&self.home), self.addr);
        self.home.waits.when_none(move || {
            let Ok(_current) = home.context.enter() else { return };
            home.end_copier_early();
            // SAFETY: locked here, and not yet unlocked.
            released("host registration", unsafe {
                home.calls().mem_host_unregister(addr as *mut c_void)
            });
        });
    }
}

/// Locks host memory of the user's until the registration is dropped.
///
/// # Safety
/// As `Gpu::register_host`.
pub(super) unsafe fn register_host(
    home: &Arc<Home>,
    addr: *mut u8,
    len: usize,
) -> Result<HostRegistration, GpuError> {
    let _current = home.context.enter()?;
    let flags = sys::HOST_PORTABLE | sys::HOST_DEVICE_MAP;
    // SAFETY: passed on from the caller.
    unsafe { home.calls().mem_host_register(addr.cast(), len, flags) }?;
    let locked = Locked { home: Arc::clone(home), addr: addr as usize };
    Ok(HostRegistration::new(Box::new(locked)))
}

/// Adds a hint to an error: the free memory if it did not suffice, else the length.
pub(super) fn explain(home: &Home, len: usize, error: GpuError) -> GpuError {
    let (mut free, mut total) = (0, 0);
    match error.code {
        OUT_OF_MEMORY => {
            // SAFETY: the places for the answers are ours.
            let asked = unsafe { home.calls().mem_get_info(&raw mut free, &raw mut total) };
            let hint = match asked {
                Ok(()) => format!("{len} bytes do not fit: {free} of {total} are free"),
                Err(_) => format!("{len} bytes do not fit"),
            };
            GpuError { hint, ..error }
        }
        INVALID_VALUE if error.hint.is_empty() => {
            GpuError { hint: format!("{len} bytes"), ..error }
        }
        _ => error,
    }
}
