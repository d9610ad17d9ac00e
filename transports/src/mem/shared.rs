//! Host memory that other processes of the job can map.
//!
//! ```text
//!    0  epoch   of the registration that is in force, 0 when there is none
//! page  bytes
//! ```
//!
//! The epoch lies in front of the bytes. So a process that has mapped them sees at each access
//! whether its registration still stands. The memory stays while any process has it mapped: a late
//! access does no harm.

use super::memfd::{MapError, Mapping, map_memfd, sealed_memfd};
use super::region::host_id;
use super::{MemKind, Region};
use crate::fork::Owner;
use parking_lot::Mutex;
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Offset of the bytes in the memfd.
const BYTES: usize = 4096;

/// Shared mapping of a region, with its registrations.
#[derive(Debug)]
pub struct Share {
    mapping: Mapping,
    /// `Some` in the process that made the memory; a process that maps it needs no descriptor.
    fd: Option<OwnedFd>,
    /// The last epoch, and the number of registrations that stand.
    registrations: Mutex<(u64, u32)>,
    owner: Owner,
}

/// Address of the memory for other processes of this machine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Whereabouts {
    /// The descriptor in the process that made it.
    pub fd: u32,
    /// Device of the memfd.
    pub dev: u64,
    /// Inode of the memfd.
    pub ino: u64,
    /// Bytes.
    pub len: u64,
}

impl Share {
    fn epoch(&self) -> &AtomicU64 {
        // SAFETY: in the first page, aligned, and any bytes are an atomic.
        unsafe { self.mapping.at(0) }
    }

    /// Returns `true` if the registration of that epoch stands.
    #[inline]
    pub fn is_open(&self, epoch: u64) -> bool {
        self.epoch().load(Ordering::Acquire) == epoch
    }

    /// Adds a registration and returns its epoch.
    pub fn open(&self) -> u64 {
        let mut registrations = self.registrations.lock();
        if registrations.1 == 0 {
            registrations.0 += 1;
            self.epoch().store(registrations.0, Ordering::Release);
        }
        registrations.1 += 1;
        registrations.0
    }

    /// Removes a registration. Does nothing in a fork, as the registration is its parent's.
    pub fn close(&self) {
        if !self.owner.is_here() {
            return;
        }
        let mut registrations = self.registrations.lock();
        registrations.1 = registrations.1.saturating_sub(1);
        if registrations.1 == 0 {
            self.epoch().store(0, Ordering::Release);
        }
    }

    /// Returns the address for other processes. `None` in a process that has only mapped the
    /// memory.
    pub fn whereabouts(&self) -> Option<Whereabouts> {
        let fd = self.fd.as_ref()?;
        let stat = rustix::fs::fstat(fd).ok()?;
        let fd = u32::try_from(fd.as_raw_fd()).ok()?;
        Some(Whereabouts {
            fd,
            dev: stat.st_dev,
            ino: stat.st_ino,
            len: (self.mapping.len - BYTES) as u64,
        })
    }
}

impl Region {
    /// Allocates zeroed host memory that other processes of the job can map once it is registered.
    ///
    /// # Errors
    /// The system has no memory, or no descriptor, left: [`Errno::NOMEM`] for more than its
    /// available memory.
    pub fn shared(len: usize) -> Result<Self, Errno> {
        let whole = len.checked_add(BYTES).ok_or(Errno::NOMEM)?;
        let fd = sealed_memfd("carrack-region", whole)?;
        let mapping = Mapping::of(fd.as_fd(), whole)?;
        Ok(Self::over(mapping, Some(fd), len))
    }

    /// Maps memory that another process made.
    ///
    /// # Errors
    /// The memory is not as its exporter says, or this process lacks a resource for the mapping.
    pub fn map_shared(fd: &OwnedFd, len: u64) -> Result<Self, MapError> {
        let whole = usize::try_from(len).ok().and_then(|len| len.checked_add(BYTES));
        let whole = whole.ok_or("it is larger than the address space")?;
        Ok(Self::over(map_memfd(fd, whole)?, None, whole - BYTES))
    }

    fn over(mapping: Mapping, fd: Option<OwnedFd>, len: usize) -> Self {
        // SAFETY: the mapping is longer than this.
        let base: NonNull<u8> = unsafe { mapping.base.add(BYTES) };
        let owner = Owner::this_process();
        let share = Arc::new(Share { mapping, fd, registrations: Mutex::new((0, 0)), owner });
        // SAFETY: the share keeps the `len` bytes at `base` mapped until it is dropped, and gives
        // out no references.
        unsafe {
            Self::from_parts(base, len, MemKind::Host, host_id(), None, Box::new(share.clone()))
        }
        .with_share(share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_mapping_writes_another_reads_until_the_registration_ends() {
        let region = Region::shared(10_000).unwrap();
        region.slice(9000, 1000).unwrap().write(&[5; 1000]).unwrap();
        let share = region.share().unwrap();
        let found = share.whereabouts().unwrap();
        assert_eq!(found.len, 10_000);
        let fd = share.fd.as_ref().unwrap().try_clone().unwrap();
        let mapped = Region::map_shared(&fd, 10_000).unwrap();
        assert_eq!(mapped.slice(9000, 1000).unwrap().to_vec().unwrap(), [5; 1000]);
        let theirs = mapped.share().unwrap();
        assert!(!theirs.is_open(1));
        let epoch = share.open();
        assert!(share.open() == epoch && theirs.is_open(epoch));
        share.close();
        assert!(theirs.is_open(epoch));
        share.close();
        assert!(!theirs.is_open(epoch));
        assert_ne!(share.open(), epoch);
        assert!(Region::map_shared(&fd, 9999).unwrap_err().to_string().contains("bytes long"));
        assert!(Region::map_shared(&fd, u64::MAX).is_err());
    }

    #[test]
    fn atomics_work_on_aligned_words_within() {
        let region = Region::shared(64).unwrap();
        assert_eq!(region.fetch_add(8, 5), Ok(0));
        assert_eq!(region.fetch_add(8, u64::MAX), Ok(5));
        assert_eq!(region.compare_swap(8, 4, 9), Ok(4));
        assert_eq!(region.compare_swap(8, 0, 1), Ok(9));
        assert!(region.fetch_add(4, 1).is_err() && region.fetch_add(60, 1).is_err());
        assert!(
            region.fetch_add(64, 1).is_err() && region.compare_swap(usize::MAX - 7, 0, 0).is_err()
        );
    }
}
