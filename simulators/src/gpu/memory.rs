//! Memory that the CPU cannot touch: a memfd mapped twice.
//!
//! The *device address* is a mapping without any access, in a window of addresses that is reserved
//! for the device. A load or a store there ends the process with SIGSEGV. The *alias* is a second
//! mapping of the same pages, readable and writable, whose address only the engine knows.

use super::error::{INVALID_HANDLE, MAP_FAILED, OPERATING_SYSTEM, error};
use carrack_transports::gpu::GpuError;
use rustix::fs::{
    MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::{NonNull, null_mut};

/// Allocations start and end at multiples of this, as the driver's blocks do (gpu.md, legacy IPC
/// rule 2).
pub(super) const GRANULE: usize = 2 << 20;

/// Name of the memory's descriptor in `/proc/<pid>/fd/<n>`.
pub(super) const MEMFD_NAME: &str = "carrack-fake-gpu";

/// Creates `span` zeroed bytes that can neither shrink nor grow, so that no process can kill
/// another that maps them by a truncation.
pub(super) fn create(call: &'static str, span: usize) -> Result<OwnedFd, GpuError> {
    let make = || {
        let fd = memfd_create(MEMFD_NAME, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, span as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(fd)
    };
    make()
        .map_err(|why: rustix::io::Errno| error(call, OPERATING_SYSTEM, format!("no memfd: {why}")))
}

/// Returns the inode and size of memory from elsewhere, after checking that it cannot shrink.
pub(super) fn inspect(call: &'static str, fd: impl AsFd) -> Result<(u64, usize), GpuError> {
    let bad = |what: String| error(call, INVALID_HANDLE, what);
    let seals =
        fcntl_get_seals(&fd).map_err(|why| bad(format!("the descriptor is no memfd: {why}")))?;
    if !seals.contains(SealFlags::SHRINK) {
        return Err(bad("the memfd is not sealed against shrinking".into()));
    }
    let stat = fstat(&fd).map_err(|why| bad(format!("fstat: {why}")))?;
    let size = usize::try_from(stat.st_size).map_err(|_| bad("a negative size".into()))?;
    Ok((stat.st_ino, size))
}

/// Addresses reserved for one device, none of which can be touched.
#[derive(Debug)]
pub(super) struct Window {
    mapping: NonNull<u8>,
    mapped: usize,
    base: usize,
    len: usize,
}

// SAFETY: the window is a range of addresses that is not read or written through. Mappings into it
// are made under the table's lock.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// Reserves `len` addresses, a multiple of [`GRANULE`]; costs no memory.
    pub(super) fn reserve(len: usize) -> Result<Self, GpuError> {
        let failed =
            |why: String| error("fake driver", MAP_FAILED, format!("no {len} addresses: {why}"));
        let mapped = len.checked_add(GRANULE).ok_or_else(|| failed("too many".into()))?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
        let start = unsafe { mmap_anonymous(null_mut(), mapped, ProtFlags::empty(), flags) };
        let start = start.map_err(|why| failed(why.to_string()))?;
        let mapping =
            NonNull::new(start.cast::<u8>()).ok_or_else(|| failed("mapped at 0".into()))?;
        let base = (start as usize).next_multiple_of(GRANULE);
        Ok(Self { mapping, mapped, base, len })
    }

    /// Returns the range of addresses.
    pub(super) fn range(&self) -> Range<usize> {
        self.base..self.base + self.len
    }

    /// Returns the pointer to an address of the window.
    pub(super) fn pointer(&self, addr: usize) -> NonNull<u8> {
        debug_assert!(self.range().contains(&addr));
        let ahead = addr.saturating_sub(self.mapping.as_ptr() as usize).min(self.mapped);
        // SAFETY: `ahead` is at most the length of the mapping that the pointer is the start of.
        unsafe { self.mapping.add(ahead) }
    }

    /// Maps `span` bytes of `fd` at `addr`, out of the CPU's reach.
    pub(super) fn map(
        &self,
        call: &'static str,
        addr: usize,
        span: usize,
        fd: impl AsFd,
    ) -> Result<(), GpuError> {
        self.check(call, addr, span)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the range lies in the window, which belongs to this. It is never used through
        // Rust references or loads: it has no access rights before and after.
        unsafe { mmap(self.pointer(addr).as_ptr().cast(), span, ProtFlags::empty(), flags, fd, 0) }
            .map(|_| ())
            .map_err(|why| {
                error(call, MAP_FAILED, format!("no mapping at the device address: {why}"))
            })
    }

    /// Empties `span` addresses at `addr`, without ever leaving a hole for another `mmap` of the
    /// process.
    pub(super) fn clear(&self, addr: usize, span: usize) {
        if self.check("free", addr, span).is_err() {
            return;
        }
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // A failure leaves the old mapping, still without access, to be replaced by the next `map`.
        // SAFETY: as in `map`.
        let _ = unsafe {
            mmap_anonymous(self.pointer(addr).as_ptr().cast(), span, ProtFlags::empty(), flags)
        };
    }

    fn check(&self, call: &'static str, addr: usize, span: usize) -> Result<(), GpuError> {
        let Range { start, end } = self.range();
        let fits = addr >= start && addr.checked_add(span).is_some_and(|last| last <= end);
        let granular = addr.is_multiple_of(GRANULE) && span.is_multiple_of(GRANULE) && span > 0;
        if fits && granular {
            return Ok(());
        }
        Err(error(
            call,
            MAP_FAILED,
            format!("{addr:#x}+{span:#x} is no place in the device's window"),
        ))
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and all that was mapped into it belonged to regions that
        // kept the window alive. A failure leaks addresses.
        let _ = unsafe { munmap(self.mapping.as_ptr().cast(), self.mapped) };
    }
}

/// The engine's own mapping of an allocation's bytes. Work in flight holds it, so that memory
/// freed meanwhile stays until the work ends.
#[derive(Debug)]
pub(super) struct Alias {
    ptr: NonNull<u8>,
    span: usize,
}

// SAFETY: the pointer is used only by engines, through raw copies; no references into it exist.
unsafe impl Send for Alias {}
// SAFETY: as above.
unsafe impl Sync for Alias {}

impl Alias {
    /// Maps `span` bytes of `fd` for the engine. The caller has checked that `fd` has them and
    /// cannot shrink.
    pub(super) fn map(call: &'static str, span: usize, fd: impl AsFd) -> Result<Self, GpuError> {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
        let start = unsafe { mmap(null_mut(), span, rights, MapFlags::SHARED, fd, 0) };
        let start = start
            .map_err(|why| error(call, MAP_FAILED, format!("no mapping for the engine: {why}")))?;
        let ptr = NonNull::new(start.cast::<u8>())
            .ok_or_else(|| error(call, MAP_FAILED, "mapped at 0"))?;
        Ok(Self { ptr, span })
    }

    /// Returns the pointer to `offset` of the allocation, or its end if that is less.
    pub(super) fn at(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: the offset is cut off at the length of the mapping.
        unsafe { self.ptr.add(offset.min(self.span)) }
    }
}

impl Drop for Alias {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this, and the work that uses it holds the alias. A
        // failure leaks it.
        let _ = unsafe { munmap(self.ptr.as_ptr().cast(), self.span) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_a_place_in_the_window_is_refused() {
        let window = Window::reserve(4 * GRANULE).unwrap();
        let fd = create("test", GRANULE).unwrap();
        let Range { start, end } = window.range();
        assert!(window.map("test", start, GRANULE, &fd).is_ok());
        assert!(window.map("test", end, GRANULE, &fd).is_err());
        assert!(window.map("test", end - GRANULE, 2 * GRANULE, &fd).is_err());
        assert!(window.map("test", start - GRANULE, GRANULE, &fd).is_err());
        assert!(window.map("test", start + 4096, GRANULE, &fd).is_err());
        assert!(window.map("test", start, 0, &fd).is_err());
        window.clear(start, GRANULE);
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let fd = memfd_create("loose", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        assert_eq!(inspect("test", &fd).unwrap_err().code, INVALID_HANDLE);
        assert_eq!(inspect("test", create("test", GRANULE).unwrap()).unwrap().1, GRANULE);
        assert_eq!(
            inspect("test", std::fs::File::open("/dev/null").unwrap()).unwrap_err().code,
            INVALID_HANDLE
        );
    }
}
