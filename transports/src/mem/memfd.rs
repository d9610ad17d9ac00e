//! Memory that processes share: sealed memfds and their mappings.

use crate::net::is_shortage;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::{Resource, getrlimit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

/// The seals that memory carries before another process maps it.
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
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        NonNull::new(base.cast()).map(|base| Self { base, len }).ok_or(Errno::NOMEM)
    }

    /// Returns the `T` at `offset`.
    ///
    /// # Safety
    /// A `T` lies at `offset`, within the mapping, aligned, and every byte pattern is a `T` that
    /// can be shared (atomics).
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

/// Length from which memory is only allocated if the system has it available.
const LARGE: usize = 64 << 20;

/// Returns the bytes that the kernel could give without ending a process: `MemAvailable` and
/// `SwapFree` of proc_meminfo(5). `None` where it does not say.
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let number = |name: &str| {
        let words = text.lines().find_map(|line| line.strip_prefix(name))?;
        words.strip_prefix(':')?.strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    Some((number("MemAvailable")? + number("SwapFree").unwrap_or(0)) << 10)
}

/// Makes a sealed memfd of `len` bytes, all of them allocated.
pub(crate) fn sealed_memfd(name: &str, len: usize) -> Result<OwnedFd, Errno> {
    // Beyond the limit of files (`ulimit -f`) the kernel would end the process (SIGXFSZ).
    if getrlimit(Resource::Fsize).current.is_some_and(|most| len as u64 > most) {
        return Err(Errno::FBIG);
    }
    // The kernel does not refuse pages of a memfd: it ends processes to find them.
    if len >= LARGE && available().is_some_and(|most| len as u64 > most) {
        return Err(Errno::NOMEM);
    }
    let fd = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&fd, len as u64)?;
    // Allocated now: a shortage of memory is an error here, and no SIGBUS in the middle of a
    // message.
    rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len as u64)?;
    rustix::fs::fcntl_add_seals(&fd, SEALS)?;
    Ok(fd)
}

/// Reason why memory of one process is not mapped in another.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MapError {
    /// This process lacks a descriptor or memory for the mapping. It may try again.
    #[error(
        "this process lacks a descriptor or memory for it: {0}; raise the limit on open files \
        (`ulimit -n`)"
    )]
    Lacking(Errno),
    /// The memory cannot be mapped.
    #[error("{0}")]
    Refused(String),
}

impl MapError {
    /// Makes the error of a system call, which `what` names.
    pub(crate) fn of(what: &str, error: Errno) -> Self {
        if is_shortage(error) {
            Self::Lacking(error)
        } else {
            Self::Refused(format!("{what}: {error}"))
        }
    }
}

impl From<String> for MapError {
    fn from(why: String) -> Self {
        Self::Refused(why)
    }
}

impl From<&str> for MapError {
    fn from(why: &str) -> Self {
        Self::Refused(why.into())
    }
}

/// Maps a memfd of a peer. An access to the mapping never faults, whatever the peer does.
pub(crate) fn map_memfd(fd: &OwnedFd, len: usize) -> Result<Mapping, MapError> {
    check_memfd(fd.as_fd(), len)?;
    Mapping::of(fd.as_fd(), len).map_err(|error| MapError::of("its memory cannot be mapped", error))
}

fn check_memfd(fd: BorrowedFd<'_>, len: usize) -> Result<(), String> {
    /// Magic number of the file system of ordinary memfds: linux/magic.h.
    const TMPFS_MAGIC: i128 = 0x0102_1994;
    let seals = rustix::fs::fcntl_get_seals(fd)
        .map_err(|error| format!("its memory is not a memfd: {error}"))?;
    if !seals.contains(SEALS) {
        return Err("its memory is not sealed against shrinking".into());
    }
    let unknown = |error| format!("its memory cannot be examined: {error}");
    // In hugetlbfs a page that is absent now, or is given back later, is a SIGBUS when no other is
    // left.
    if i128::from(rustix::fs::fstatfs(fd).map_err(unknown)?.f_type) != TMPFS_MAGIC {
        return Err(
            "its memory is a memfd of huge pages, which may be missing when they are used".into()
        );
    }
    let size = rustix::fs::fstat(fd).map_err(unknown)?.st_size;
    if u64::try_from(size) != Ok(len as u64) {
        return Err(format!("its memory is {size} bytes long, not {len}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memfd_of_huge_pages_that_may_be_missing_is_not_mapped() {
        const LEN: usize = 2 << 20;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let of = |more: MemfdFlags| {
            let fd = rustix::fs::memfd_create("x", flags | more)?;
            rustix::fs::ftruncate(&fd, LEN as u64)?;
            rustix::fs::fcntl_add_seals(&fd, SEALS)?;
            Ok::<_, Errno>(fd)
        };
        assert!(map_memfd(&of(MemfdFlags::empty()).unwrap(), LEN).is_ok());
        match of(MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB) {
            Ok(huge) => {
                let error = map_memfd(&huge, LEN).unwrap_err();
                assert!(
                    matches!(&error, MapError::Refused(why) if why.contains("huge pages")),
                    "{error}"
                );
            }
            Err(error) => println!("not tested: this kernel has no memfd of huge pages: {error}"),
        }
    }

    #[test]
    fn more_than_the_available_memory_is_an_error_and_ends_no_process() {
        let most = usize::try_from(available().unwrap()).unwrap();
        for len in [2 * most, 1 << 50] {
            assert_eq!(sealed_memfd("x", len).unwrap_err(), Errno::NOMEM);
        }
        assert!(sealed_memfd("x", LARGE.min(most / 8)).is_ok());
    }

    #[test]
    fn a_lack_of_address_space_is_told_from_memory_that_is_wrong() {
        assert_eq!(MapError::of("x", Errno::NOMEM), MapError::Lacking(Errno::NOMEM));
        assert!(matches!(MapError::of("x", Errno::PERM), MapError::Refused(_)));
    }
}
