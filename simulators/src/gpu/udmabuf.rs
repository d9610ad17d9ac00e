//! Real dma-bufs of a simulated device's memory, for real NICs' drivers. The kernel makes them of
//! a memfd (`/dev/udmabuf`).

use super::error::{OPERATING_SYSTEM, error};
use super::memory::inspect;
use carrack_transports::gpu::GpuError;
use rustix::fs::{Mode, OFlags, open};
use std::ffi::{c_int, c_ulong};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

/// `struct udmabuf_create` of Linux's `udmabuf.h`.
#[repr(C)]
struct Create {
    memfd: u32,
    flags: u32,
    offset: u64,
    size: u64,
}

/// `UDMABUF_CREATE`: `_IOW('u', 0x42, struct udmabuf_create)`.
const CREATE: c_ulong =
    1 << 30 | (size_of::<Create>() as c_ulong) << 16 | (b'u' as c_ulong) << 8 | 0x42;

/// `UDMABUF_FLAGS_CLOEXEC`
const CLOSED_ON_EXEC: u32 = 1;

/// Makes a dma-buf of all of a memfd, which cannot shrink.
///
/// # Errors
/// The kernel has no such device, or makes no dma-buf of that size (64 MiB by default).
pub(super) fn of(memfd: impl AsFd) -> Result<OwnedFd, GpuError> {
    const CALL: &str = "UDMABUF_CREATE";
    let failed =
        |what: &str, why: std::io::Error| error(CALL, OPERATING_SYSTEM, format!("{what}: {why}"));
    let (_, size) = inspect(CALL, &memfd)?;
    let device = open("/dev/udmabuf", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
    let device = device.map_err(|errno| failed("/dev/udmabuf", errno.into()))?;
    let memfd = memfd.as_fd().as_raw_fd().cast_unsigned();
    let create = Create { memfd, flags: CLOSED_ON_EXEC, offset: 0, size: size as u64 };
    // SAFETY: the request reads one `Create`, which exists, and returns a descriptor that has no
    // owner yet.
    let fd: c_int = unsafe { libc::ioctl(device.as_raw_fd(), CREATE, &raw const create) };
    if fd < 0 {
        return Err(failed(&format!("{size} bytes"), std::io::Error::last_os_error()));
    }
    // SAFETY: the kernel has just created it for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
