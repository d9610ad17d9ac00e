//! A device's memory, for NICs: dma-bufs, and the visibility of a NIC's writes.

use super::device::CudaGpu;
use super::error::{INVALID_VALUE, NOT_SUPPORTED, OPERATING_SYSTEM, because};
use super::sys::{
    FLUSH_TARGET_CURRENT_CONTEXT, FLUSH_TO_OWNER, FLUSHED_BY_HOST, ORDERED_FOR_OWNER,
    RANGE_HANDLE_DMA_BUF, device,
};
use crate::gpu::direct::{DmaBuf, RemoteWrites, pages};
use crate::gpu::{Gpu, GpuError};
use crate::mem::MemKind;
use std::ffi::c_int;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Exports a dma-buf of the pages in which a range lies.
pub(super) fn export(gpu: &CudaGpu, addr: usize, len: usize) -> Result<DmaBuf, GpuError> {
    const CALL: &str = "cuMemGetHandleForAddressRange";
    let wrong = |what: &str| because(CALL, INVALID_VALUE, format!("{addr:#x}+{len} {what}"));
    let extent = gpu.classify(addr)?.ok_or_else(|| wrong("is host memory, or freed already"))?;
    match extent.kind {
        MemKind::Device(owner) if owner == gpu.info().uuid => {}
        MemKind::Device(_) => return Err(wrong("is another device's: ask the one that owns it")),
        kind => return Err(wrong(&format!("is {kind} memory, which a NIC reaches as the host's"))),
    }
    if attribute(gpu, device::DMA_BUF_SUPPORTED)? == 0 {
        return Err(because(
            CALL,
            NOT_SUPPORTED,
            "the device's driver has no dma-bufs (its open kernel module has)",
        ));
    }
    let (base, span) = pages(addr, len).filter(|_| len > 0).ok_or_else(|| wrong("is no range"))?;
    let home = gpu.home()?;
    let _current = home.context.enter()?;
    let mut fd: RawFd = -1;
    // SAFETY: the place for the answer is ours, and as long as a descriptor.
    unsafe {
        home.calls().mem_get_handle_for_address_range(
            (&raw mut fd).cast(),
            base,
            span,
            RANGE_HANDLE_DMA_BUF,
            0,
        )
    }?;
    if fd < 0 {
        return Err(because(CALL, OPERATING_SYSTEM, "it succeeded, and gave no descriptor"));
    }
    // SAFETY: the driver has just opened it, for its caller.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    close_on_exec(&fd);
    Ok(DmaBuf { fd, offset: (addr - base) as u64 })
}

/// Has a descriptor closed when the process executes another program. The driver says nothing of
/// what becomes of its descriptors then.
fn close_on_exec(fd: &OwnedFd) {
    let fd: BorrowedFd<'_> = std::os::fd::AsFd::as_fd(fd);
    if let Ok(flags) = rustix::io::fcntl_getfd(fd) {
        let _ = rustix::io::fcntl_setfd(fd, flags | rustix::io::FdFlags::CLOEXEC);
    }
}

/// Returns the visibility of a NIC's writes to the device's own work. The attributes hold only for
/// the device that owns the memory.
pub(super) fn remote_writes(gpu: &CudaGpu) -> RemoteWrites {
    let asked = || {
        let ordering = attribute(gpu, device::GPU_DIRECT_RDMA_WRITES_ORDERING)?;
        let flushes = attribute(gpu, device::GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
        Ok::<_, GpuError>((ordering, flushes))
    };
    match asked() {
        Ok((ordering, _)) if ordering >= ORDERED_FOR_OWNER => RemoteWrites::InOrder,
        Ok((_, flushes)) if flushes & FLUSHED_BY_HOST != 0 => RemoteWrites::AfterFlush,
        Ok((ordering, flushes)) => RemoteWrites::Unordered(format!(
            "the device neither orders a NIC's writes nor lets the host flush them (writes \
            ordering {ordering}, flush options \
             {flushes})"
        )),
        Err(error) => RemoteWrites::Unordered(error.to_string()),
    }
}

/// Makes what NICs have written visible to the device that owns the memory.
pub(super) fn flush(gpu: &CudaGpu) -> Result<(), GpuError> {
    let home = gpu.home()?;
    let _current = home.context.enter()?;
    // SAFETY: it takes no memory; the context is current.
    unsafe {
        home.calls().flush_gpu_direct_rdma_writes(FLUSH_TARGET_CURRENT_CONTEXT, FLUSH_TO_OWNER)
    }
}

fn attribute(gpu: &CudaGpu, attribute: c_int) -> Result<c_int, GpuError> {
    let mut value = 0;
    // SAFETY: the place for the answer is ours.
    unsafe { gpu.shared.calls.device_get_attribute(&raw mut value, attribute, gpu.device) }?;
    Ok(value)
}
