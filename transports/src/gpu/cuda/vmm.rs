//! VMM: memory and addresses are allocated separately, and then mapped.

use super::calls::Calls;
use super::capture::Relaxed;
use super::device::{CudaGpu, unseen};
use super::error::{INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, because, error, released};
use super::home::Home;
use super::memory::{How, Memory, blocks, explain, region};
use super::peer::can_access;
use super::sys::{
    self, AccessDesc, AllocationHandle, AllocationProp, CuDevice, DevicePtr, Location, device,
    handle_type,
};
use crate::gpu::{Access, Gpu, GpuError, Reservation, Rights};
use crate::mem::{GpuUuid, MemKind, Region};
use std::ffi::c_int;
use std::sync::Arc;

/// Allocates memory at addresses of its own.
pub(super) fn shareable(gpu: &CudaGpu, home: &Arc<Home>, len: usize) -> Result<Memory, GpuError> {
    let prop = prop(gpu, home);
    let span = blocks(len, granularity(home.calls(), &prop, sys::GRANULARITY_RECOMMENDED)?)?;
    make(home, &prop, span, |handle| map(gpu, home, handle, span))
}

/// Returns the properties for new memory of a device: exportable as a descriptor, to a fabric if
/// there is one, and for NICs if possible.
fn prop(gpu: &CudaGpu, home: &Home) -> AllocationProp {
    let fabric = gpu.fabric.get_or_init(|| try_fabric(gpu, home));
    let types = handle_type::POSIX_FD | if fabric.is_none() { handle_type::FABRIC } else { 0 };
    AllocationProp::of(gpu.device, types, rdma_capable(home.calls(), gpu.device))
}

/// Allocates memory, maps it, and releases its handle: mapped memory stays until it is unmapped.
fn make(
    home: &Home,
    prop: &AllocationProp,
    span: usize,
    mapped: impl FnOnce(AllocationHandle) -> Result<Memory, GpuError>,
) -> Result<Memory, GpuError> {
    let (calls, mut handle) = (home.calls(), 0);
    // SAFETY: the place for the answer is ours.
    unsafe { calls.mem_create(&raw mut handle, span, &raw const *prop, 0) }?;
    let memory = mapped(handle);
    // SAFETY: created above.
    released("VMM handle", unsafe { calls.mem_release(handle) });
    memory
}

/// Tries to allocate memory that other nodes of an NVLink fabric may open. Returns the driver's
/// error if that fails: the system may forbid what the device supports.
fn try_fabric(gpu: &CudaGpu, home: &Home) -> Option<GpuError> {
    let calls = home.calls();
    let mut supported: c_int = 0;
    // SAFETY: the place for the answer is ours.
    let asked = unsafe {
        calls.device_get_attribute(&raw mut supported, device::FABRIC_SUPPORTED, gpu.device)
    };
    match asked {
        Ok(()) if supported != 0 => {}
        Ok(()) => {
            return Some(because("cuMemCreate", NOT_SUPPORTED, "the device has no fabric handles"));
        }
        Err(error) => return Some(error),
    }
    let both = handle_type::POSIX_FD | handle_type::FABRIC;
    let prop = AllocationProp::of(gpu.device, both, rdma_capable(calls, gpu.device));
    let span = match granularity(calls, &prop, sys::GRANULARITY_RECOMMENDED) {
        Ok(span) => span,
        Err(error) => return Some(error),
    };
    let mut handle: AllocationHandle = 0;
    // SAFETY: the place for the answer is ours; the created handle is released at once.
    unsafe {
        match calls.mem_create(&raw mut handle, span, &raw const prop, 0) {
            Ok(()) => calls.mem_release(handle).err(),
            Err(error) => Some(error),
        }
    }
}

fn rdma_capable(calls: &Calls, device: CuDevice) -> bool {
    let mut capable: c_int = 0;
    // SAFETY: the place for the answer is ours.
    let asked = unsafe {
        calls.device_get_attribute(&raw mut capable, device::GPU_DIRECT_RDMA_WITH_VMM, device)
    };
    asked.is_ok() && capable != 0
}

/// Returns the unit of sizes: the recommended one for new memory, or the minimum.
pub(super) fn granularity(
    calls: &Calls,
    prop: &AllocationProp,
    option: c_int,
) -> Result<usize, GpuError> {
    let mut bytes = 0;
    // SAFETY: the place for the answer is ours.
    unsafe { calls.mem_get_allocation_granularity(&raw mut bytes, prop, option) }?;
    Ok(bytes.max(1))
}

/// Reserves addresses. The context is current.
fn addresses(home: &Home, span: usize, align: usize) -> Result<DevicePtr, GpuError> {
    let mut base = 0;
    // SAFETY: the place for the answer is ours.
    unsafe { home.calls().mem_address_reserve(&raw mut base, span, align, 0, 0) }?;
    Ok(base)
}

/// Maps `span` bytes of an allocation at new addresses, and gives devices access.
pub(super) fn map(
    gpu: &CudaGpu,
    home: &Arc<Home>,
    handle: AllocationHandle,
    span: usize,
) -> Result<Memory, GpuError> {
    let (calls, ptr) = (home.calls(), addresses(home, span, 0)?);
    // SAFETY: the addresses were just reserved for this.
    if let Err(error) = unsafe { calls.mem_map(ptr, span, 0, handle, 0) } {
        // SAFETY: reserved above, and not mapped.
        released("addresses", unsafe { calls.mem_address_free(ptr, span) });
        return Err(error);
    }
    let memory = Memory { home: Arc::clone(home), ptr, span, how: How::Unmap };
    grant_all(gpu, &memory)?;
    Ok(memory)
}

/// Gives access to mapped memory to a device, and to the peers that can reach it.
pub(super) fn grant_all(gpu: &CudaGpu, memory: &Memory) -> Result<(), GpuError> {
    let grant = |device: CuDevice| {
        let access = AccessDesc::read_write(device);
        // SAFETY: the range was mapped as one piece.
        unsafe { gpu.shared.calls.mem_set_access(memory.ptr, memory.span, &raw const access, 1) }
    };
    grant(gpu.device)?;
    grant_to_peers(gpu, grant);
    Ok(())
}

/// Grants access to the peers that can reach the device, one by one. Access is per allocation for
/// VMM and pools. A refused peer can still be served by a peer copy.
pub(super) fn grant_to_peers(gpu: &CudaGpu, grant: impl Fn(CuDevice) -> Result<(), GpuError>) {
    for peer in
        gpu.shared.gpus().unwrap_or_default().iter().filter(|peer| peer.device != gpu.device)
    {
        if can_access(gpu.shared.calls, peer.device, gpu.device).is_ok()
            && let Err(why) = grant(peer.device)
        {
            tracing::debug!(%why, peer = peer.device, "no access for a peer");
        }
    }
}

// ---- chosen addresses ---------------------------------------------------------------------------

/// Reserved addresses, which are released when this is dropped. Memory that lies there holds a
/// reference.
struct Addresses {
    home: Arc<Home>,
    base: DevicePtr,
    span: usize,
}

impl Drop for Addresses {
    fn drop(&mut self) {
        if !self.home.context.is_here() {
            return;
        }
        let Ok(_current) = self.home.context.enter() else { return };
        // SAFETY: reserved here, in one piece, and nothing is mapped there any more.
        released("addresses", unsafe { self.home.calls().mem_address_free(self.base, self.span) });
    }
}

/// Returns the unit for lengths and offsets of memory at chosen addresses.
pub(super) fn unit(gpu: &CudaGpu) -> Result<usize, GpuError> {
    let home = gpu.home()?;
    let _current = home.context.enter()?;
    granularity(home.calls(), &prop(gpu, home), sys::GRANULARITY_RECOMMENDED)
}

/// Reserves addresses, at a multiple of the device's unit.
pub(super) fn reserve(gpu: &CudaGpu, len: usize) -> Result<Reservation, GpuError> {
    const CALL: &str = "cuMemAddressReserve";
    let unit = unit(gpu)?;
    let home = gpu.home()?;
    let _current = home.context.enter()?;
    if len == 0 {
        return Err(because(CALL, INVALID_VALUE, "a reservation of no addresses"));
    }
    let span = blocks(len, unit)?;
    let base = addresses(home, span, unit).map_err(|error| match error.hint.is_empty() {
        true => GpuError { hint: format!("{span} addresses"), ..error },
        false => error,
    })?;
    let own = Addresses { home: Arc::clone(home), base, span };
    Ok(Reservation::new(base, span, Arc::new(own)))
}

/// Allocates memory of a device at reserved addresses, with access for the device and others.
pub(super) fn allocate_at(
    gpu: &CudaGpu,
    reservation: &Reservation,
    (offset, len): (usize, usize),
    access: &[Access],
) -> Result<Region, GpuError> {
    let unit = unit(gpu)?;
    if len == 0 || !len.is_multiple_of(unit) || !offset.is_multiple_of(unit) {
        let hint = format!(
            "{len} bytes at {offset} of {reservation:?} are no multiples of {unit}, or none"
        );
        return Err(because("cuMemMap", INVALID_VALUE, hint));
    }
    let ptr = place_at((reservation, offset), len)?;
    let each = Access::of_each(gpu.info().uuid, access)
        .map_err(|why| because("cuMemSetAccess", INVALID_VALUE, why))?;
    let mut allowed = Vec::with_capacity(each.len());
    for Access { gpu: uuid, rights } in each {
        let device = device_of(gpu, uuid)?;
        if device != gpu.device {
            can_access(gpu.shared.calls, device, gpu.device)?;
        }
        allowed.push(AccessDesc::of(device, rights));
    }
    let home = gpu.home()?;
    let current = home.context.enter()?;
    let grant = |memory: &Memory| {
        // SAFETY: mapped as one piece.
        unsafe {
            home.calls().mem_set_access(memory.ptr, memory.span, allowed.as_ptr(), allowed.len())
        }
    };
    let mapped = |handle| map_at(home, handle, (ptr, len), grant);
    let memory =
        make(home, &prop(gpu, home), len, mapped).map_err(|error| explain(home, len, error));
    drop(current);
    let memory = memory?;
    home.kept.note(ptr, len);
    let owner = Box::new((memory, reservation.clone()));
    region(gpu, ptr, len, MemKind::Device(gpu.info().uuid), owner)
}

/// Returns the address of a piece of a reservation of this driver's.
pub(super) fn place_at(
    (reservation, offset): (&Reservation, usize),
    len: usize,
) -> Result<DevicePtr, GpuError> {
    let wrong = |what: &str| {
        because(
            "cuMemMap",
            INVALID_VALUE,
            format!("{len} bytes at {offset} of {reservation:?} {what}"),
        )
    };
    if reservation.own::<Addresses>().is_none() {
        return Err(wrong("are at addresses of another driver"));
    }
    reservation.place(offset, len).ok_or_else(|| wrong("are not inside"))
}

/// Maps all of an allocation at reserved addresses, and calls `grant` for the access of devices.
pub(super) fn map_at(
    home: &Arc<Home>,
    handle: AllocationHandle,
    (ptr, span): (DevicePtr, usize),
    grant: impl FnOnce(&Memory) -> Result<(), GpuError>,
) -> Result<Memory, GpuError> {
    // SAFETY: the addresses are reserved; the driver refuses those where memory is mapped already.
    unsafe { home.calls().mem_map(ptr, span, 0, handle, 0) }.map_err(|error| match error.code {
        INVALID_VALUE => {
            let hint =
                format!("{span} bytes at {ptr:#x}: other memory lies there, or is still mapped");
            GpuError { hint, ..error }
        }
        _ => error,
    })?;
    let memory = Memory { home: Arc::clone(home), ptr, span, how: How::UnmapOnly };
    grant(&memory)?;
    Ok(memory)
}

/// Returns the rights of a device on memory at an address.
pub(super) fn rights_at(gpu: &CudaGpu, addr: usize) -> Result<Option<Rights>, GpuError> {
    let (mut flags, location) = (0, Location::device(gpu.device));
    let _relaxed = Relaxed::enter(gpu.shared.calls);
    // SAFETY: the place for the answer is ours; any address may be asked about.
    unsafe { gpu.shared.calls.mem_get_access(&raw mut flags, &raw const location, addr) }?;
    Ok(match c_int::try_from(flags) {
        Ok(sys::ACCESS_READ_WRITE) => Some(Rights::ReadWrite),
        Ok(sys::ACCESS_READ) => Some(Rights::Read),
        _ => None,
    })
}

/// Returns the driver's number of a device.
fn device_of(gpu: &CudaGpu, uuid: GpuUuid) -> Result<CuDevice, GpuError> {
    const CALL: &str = "cuMemSetAccess";
    let at = gpu.shared.position(uuid).ok_or_else(|| unseen(CALL, uuid))?;
    let found = gpu.shared.gpus()?.get(at);
    found.map(|found| found.device).ok_or_else(|| error(CALL, INVALID_DEVICE))
}
