//! Memory that processes share: memfds, sealed, and their mappings.

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// The seals that memory carries before anybody else maps it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// Pages of a memfd, mapped for as long as this lives.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) base: NonNull<u8>,
    pub(crate) len: usize,
}

// SAFETY: the mapping is shared memory, used through atomics and the copy function only.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn of(fd: BorrowedFd<'_>, len: usize) -> Result<Self, Errno> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        NonNull::new(base.cast()).map(|base| Self { base, len }).ok_or(Errno::NOMEM)
    }

    /// # Safety
    /// A `T` lies at `offset`, within the mapping, aligned, and every byte pattern is a `T` that can be
    /// shared (atomics).
    pub(crate) unsafe fn at<T>(&self, offset: usize) -> &T {
        debug_assert!(offset + size_of::<T>() <= self.len);
        // SAFETY: the caller's promise; the pages stay mapped while `self` lives.
        unsafe { self.base.add(offset).cast::<T>().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `of` with this length, and nothing that borrows from it is left.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A memfd of `len` bytes that really has them, sealed.
pub(crate) fn sealed_memfd(name: &str, len: usize) -> Result<OwnedFd, Errno> {
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len as u64)?;
    // All of it now: where memory is short this is an error here, not a SIGBUS in the middle of a message.
    rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SEALS)?;
    Ok(fd)
}

/// Checks a memfd that a peer sent, before it is mapped.
pub(crate) fn check_memfd(fd: BorrowedFd<'_>, len: usize) -> Result<(), String> {
    let seals =
        rustix::fs::fcntl_get_seals(fd).map_err(|error| format!("its memory is not a memfd: {error}"))?;
    if !seals.contains(SEALS) {
        return Err("its memory is not sealed against shrinking".into());
    }
    let size =
        rustix::fs::fstat(fd).map_err(|error| format!("its memory cannot be examined: {error}"))?.st_size;
    if u64::try_from(size) != Ok(len as u64) {
        return Err(format!("its memory is {size} bytes long, not {len}"));
    }
    Ok(())
}
