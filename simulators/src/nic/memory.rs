//! Registered memory: ranges that the simulated NIC can access, by their keys.
//!
//! Bytes are moved by the project's one copy function, so memory of a GPU goes through its engine
//! and is never touched by the CPU. A region is accessed under the table's lock: after
//! `deregister` has returned, its memory is not accessed any more.

#![expect(unsafe_code, reason = "memory is mapped")]

use super::config::Limits;
use super::wire::Remote;
use carrack_transports::gpu::{Driver, Gpu};
use carrack_transports::mem::copy::copy_and_wait;
use carrack_transports::mem::{MemKind, MemMut, MemRef, Place};
use carrack_transports::verbs::sys::bindings as ibv;
use parking_lot::RwLock;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGE: usize = 4096;

/// A protection domain, by its number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Domain(pub(super) u32);

/// Permitted uses of memory: bits of `ibv_access_flags`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Access(pub(super) u32);

impl Access {
    pub(super) const NONE: Self = Self(0);
    pub(super) const LOCAL_WRITE: Self = Self(ibv::IBV_ACCESS_LOCAL_WRITE);
    pub(super) const REMOTE_WRITE: Self = Self(ibv::IBV_ACCESS_REMOTE_WRITE);
    pub(super) const REMOTE_READ: Self = Self(ibv::IBV_ACCESS_REMOTE_READ);
    pub(super) const REMOTE_ATOMIC: Self = Self(ibv::IBV_ACCESS_REMOTE_ATOMIC);
    const RELAXED_ORDERING: Self = Self(ibv::IBV_ACCESS_RELAXED_ORDERING);
    const ON_DEMAND: Self = Self(ibv::IBV_ACCESS_ON_DEMAND);

    pub(super) fn allows(self, wanted: Self) -> bool {
        self.0 & wanted.0 == wanted.0
    }

    /// Checks these flags as the kernel does.
    fn check(self, pages_on_demand: bool) -> Result<(), Errno> {
        let paging = if pages_on_demand { Self::ON_DEMAND.0 } else { 0 };
        let moves = Self::REMOTE_WRITE.0 | Self::REMOTE_READ.0 | Self::REMOTE_ATOMIC.0;
        let known = Self::LOCAL_WRITE.0 | moves | paging;
        let optional = ibv::IBV_ACCESS_OPTIONAL_FIRST..1 << 30;
        let others = self.0 & !known & !(optional.end - optional.start);
        let written = self.0 & (Self::REMOTE_WRITE.0 | Self::REMOTE_ATOMIC.0) != 0;
        match others {
            0 if written && !self.allows(Self::LOCAL_WRITE) => Err(Errno::INVAL),
            0 => Ok(()),
            _ => Err(Errno::OPNOTSUPP),
        }
    }
}

/// Reason why memory was not accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Unreachable {
    /// The key is unknown, or not valid for this domain, range or purpose.
    Key,
    /// An atomic operation's word is not aligned.
    Alignment,
    /// The engine of a GPU failed.
    Engine,
}

#[derive(Debug)]
enum Memory {
    /// Memory of this process, or of a GPU, at the program's address.
    Address { addr: usize, kind: MemKind, gpu: Option<Arc<dyn Gpu>> },
    /// Memory behind a descriptor, mapped for the NIC.
    Mapped(Mapping),
}

/// A descriptor's memory, mapped only for the NIC.
#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    span: usize,
    ahead: usize,
}

// SAFETY: the mapping is used through raw copies only; there are no references into it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, offset: u64, len: usize) -> Result<Self, Errno> {
        let end = offset.checked_add(len as u64).ok_or(Errno::OVERFLOW)?;
        let stat = rustix::fs::fstat(fd)?;
        let is_file = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
        let size = match is_file {
            true => u64::try_from(stat.st_size).unwrap_or(0),
            false => rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))?,
        };
        if end > size {
            return Err(Errno::INVAL);
        }
        let ahead = usize::try_from(offset % PAGE as u64).map_err(|_| Errno::INVAL)?;
        let span = (ahead + len).next_multiple_of(PAGE);
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
        let start =
            unsafe { mmap(null_mut(), span, rights, MapFlags::SHARED, fd, offset - ahead as u64) };
        let start = NonNull::new(start?.cast::<u8>()).ok_or(Errno::FAULT)?;
        Ok(Self { start, span, ahead })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping belongs to this, and its users hold the region. A failure leaks
        // addresses.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.span) };
    }
}

/// One registration.
#[derive(Debug)]
struct Registration {
    domain: Domain,
    access: Access,
    /// Address of its first byte for the users of the key.
    iova: u64,
    len: u64,
    memory: Memory,
}

impl Registration {
    /// Returns the number of its locked bytes: 0 for memory of GPUs, and for on-demand memory.
    fn locked(&self) -> u64 {
        let is_host = matches!(&self.memory, Memory::Address { kind, .. } if kind.is_host());
        if is_host && !self.access.allows(Access::ON_DEMAND) { self.len } else { 0 }
    }

    /// Returns a pointer to `len` bytes at `addr`, and their place.
    fn find(&self, addr: u64, len: u64) -> Result<(*mut u8, Place<'_>), Unreachable> {
        let ahead = addr.checked_sub(self.iova).ok_or(Unreachable::Key)?;
        ahead.checked_add(len).filter(|end| *end <= self.len).ok_or(Unreachable::Key)?;
        let ahead = usize::try_from(ahead).map_err(|_| Unreachable::Key)?;
        Ok(match &self.memory {
            Memory::Address { addr, kind, gpu } => (
                std::ptr::with_exposed_provenance_mut(addr + ahead),
                Place::of(*kind, gpu.as_ref()),
            ),
            Memory::Mapped(mapping) => {
                (mapping.start.as_ptr().wrapping_add(mapping.ahead + ahead), Place::Host)
            }
        })
    }
}

/// All registrations of a device.
#[derive(Debug)]
pub(super) struct Regions {
    by_key: RwLock<HashMap<u32, Registration>>,
    next: parking_lot::Mutex<u32>,
    limit: usize,
    /// Set if memory can be registered on demand, without locking.
    pages_on_demand: bool,
    most_locked: u64,
    /// Number of locked bytes. Written under the table's lock.
    locked: AtomicU64,
    gpus: Vec<Arc<dyn Driver>>,
    counted: parking_lot::Mutex<MemoryCounters>,
}

/// Counters of a simulated device's memory: see
/// [`SimulatedNic::memory_counters`](super::SimulatedNic::memory_counters).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct MemoryCounters {
    /// Registrations so far.
    pub registrations: u64,
    /// Bytes that are registered only for reading by their own rank's requests.
    pub to_be_read: Registered,
    /// Bytes that are registered for writing by peers.
    pub to_be_written: Registered,
    /// Bytes that peers have written.
    pub written: u64,
}

/// Registered bytes. A byte counts once for each registration.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Registered {
    /// Present value.
    pub now: u64,
    /// Maximum so far.
    pub most: u64,
}

impl Registered {
    fn add(&mut self, bytes: u64) {
        self.now += bytes;
        self.most = self.most.max(self.now);
    }
}

impl MemoryCounters {
    /// Returns the counter for registrations of that purpose, if there is one.
    fn of(&mut self, access: Access) -> Option<&mut Registered> {
        match access {
            access if access.allows(Access::REMOTE_WRITE) => Some(&mut self.to_be_written),
            Access::NONE => Some(&mut self.to_be_read),
            _ => None,
        }
    }
}

impl Regions {
    pub(super) fn new(limits: &Limits, gpus: Vec<Arc<dyn Driver>>) -> Self {
        let Limits {
            memory_regions: limit, on_demand: pages_on_demand, locked: most_locked, ..
        } = *limits;
        let (by_key, next) = (RwLock::default(), parking_lot::Mutex::new(1));
        let (limit, locked) = (limit as usize, AtomicU64::new(0));
        let counted = parking_lot::Mutex::default();
        Self { by_key, next, limit, pages_on_demand, most_locked, locked, gpus, counted }
    }

    /// Counts bytes that a peer has written.
    pub(super) fn note_written(&self, bytes: usize) {
        self.counted.lock().written += bytes as u64;
    }

    pub(super) fn counters(&self) -> MemoryCounters {
        *self.counted.lock()
    }

    /// Registers `len` bytes at `addr`, which users of the key address by `iova`.
    ///
    /// # Errors
    /// EFAULT: there is no memory that a NIC could access. EINVAL, EOPNOTSUPP: wrong flags.
    /// ENOMEM: there are too many.
    pub(super) fn register(
        &self,
        domain: Domain,
        addr: usize,
        len: usize,
        iova: u64,
        access: Access,
    ) -> Result<u32, Errno> {
        access.check(self.pages_on_demand)?;
        addr.checked_add(len).filter(|_| len > 0).ok_or(Errno::INVAL)?;
        iova.checked_add(len as u64).ok_or(Errno::INVAL)?;
        let memory = match self.gpu_memory(addr, len)? {
            Some(memory) => memory,
            None => {
                check_mapped(addr, len)?;
                Memory::Address { addr, kind: MemKind::Host, gpu: None }
            }
        };
        self.add(Registration { domain, access, iova, len: len as u64, memory })
    }

    /// Registers memory behind a descriptor.
    ///
    /// # Errors
    /// The errors of [`register`](Self::register), and of mapping the descriptor. A descriptor that
    /// the CPU cannot map is out of a simulated NIC's reach.
    pub(super) fn register_descriptor(
        &self,
        domain: Domain,
        fd: BorrowedFd<'_>,
        (offset, len): (u64, usize),
        iova: u64,
        access: Access,
    ) -> Result<u32, Errno> {
        access.check(false)?;
        // The kernel's own rule for dma-bufs.
        let agree = offset % PAGE as u64 == iova % PAGE as u64;
        iova.checked_add(len as u64).filter(|_| len > 0 && agree).ok_or(Errno::INVAL)?;
        let memory = Memory::Mapped(Mapping::new(fd, offset, len)?);
        self.add(Registration { domain, access, iova, len: len as u64, memory })
    }

    /// Ends a registration. Its memory is not accessed afterwards. Returns `true` if it existed.
    pub(super) fn deregister(&self, key: u32) -> bool {
        let mut by_key = self.by_key.write();
        let Some(gone) = by_key.remove(&key) else { return false };
        self.locked.fetch_sub(gone.locked(), Ordering::Relaxed);
        if let Some(bytes) = self.counted.lock().of(gone.access) {
            bytes.now -= gone.len;
        }
        true
    }

    fn gpu_memory(&self, addr: usize, len: usize) -> Result<Option<Memory>, Errno> {
        for driver in &self.gpus {
            let extents = driver.extents(addr, len).map_err(|_| Errno::FAULT)?;
            let [extent] = extents.as_slice() else {
                if extents.is_empty() {
                    continue;
                }
                // An engine's copy would cross allocations. A peer-memory module refuses that,
                // too.
                return Err(Errno::FAULT);
            };
            if matches!(extent.kind, MemKind::Managed(_) | MemKind::Unknown) {
                return Err(Errno::FAULT);
            }
            return Ok(Some(Memory::Address { addr, kind: extent.kind, gpu: extent.gpu.clone() }));
        }
        Ok(None)
    }

    fn add(&self, registration: Registration) -> Result<u32, Errno> {
        let mut by_key = self.by_key.write();
        let locked = self.locked.load(Ordering::Relaxed).saturating_add(registration.locked());
        if by_key.len() >= self.limit || locked > self.most_locked {
            return Err(Errno::NOMEM);
        }
        self.locked.store(locked, Ordering::Relaxed);
        let mut next = self.next.lock();
        // Neither small nor in order, so that guessed keys and neighbours of keys are invalid.
        let key = loop {
            *next = next.wrapping_add(1);
            let key = next.wrapping_mul(0x9e37_79b1) & !0xff | 0x80 | *next & 0x7f;
            if !by_key.contains_key(&key) {
                break key;
            }
        };
        let mut counted = self.counted.lock();
        counted.registrations += 1;
        if let Some(bytes) = counted.of(registration.access) {
            bytes.add(registration.len);
        }
        by_key.insert(key, registration);
        Ok(key)
    }

    /// Runs `act` on `len` bytes at a place, if the key permits that.
    fn reach<T>(
        &self,
        domain: Domain,
        at: Remote,
        len: u64,
        wanted: Access,
        act: impl FnOnce(*mut u8, Place<'_>) -> Result<T, Unreachable>,
    ) -> Result<T, Unreachable> {
        let by_key = self.by_key.read();
        let found = by_key
            .get(&at.key)
            .filter(|found| found.domain == domain && found.access.allows(wanted));
        let (pointer, place) = found.ok_or(Unreachable::Key)?.find(at.addr, len)?;
        act(pointer, place)
    }

    /// Checks that `len` bytes at a place may be used like that.
    pub(super) fn check(
        &self,
        domain: Domain,
        at: Remote,
        len: u64,
        wanted: Access,
    ) -> Result<(), Unreachable> {
        self.reach(domain, at, len, wanted, |_, _| Ok(()))
    }

    /// Returns `true` if the place is memory of a GPU.
    pub(super) fn is_of_a_gpu(&self, domain: Domain, at: Remote) -> bool {
        let by_key = self.by_key.read();
        by_key.get(&at.key).filter(|found| found.domain == domain).is_some_and(|found| match &found
            .memory
        {
            Memory::Address { kind, .. } => !kind.is_host(),
            // Dma-bufs are used for memory of GPUs.
            Memory::Mapped(_) => true,
        })
    }

    /// Returns `true` if writes to a place may become visible out of order.
    pub(super) fn is_relaxed(&self, domain: Domain, at: Remote) -> bool {
        let by_key = self.by_key.read();
        let found = by_key.get(&at.key).filter(|found| found.domain == domain);
        found.is_some_and(|found| found.access.allows(Access::RELAXED_ORDERING))
    }

    /// Reads bytes to fill `into`.
    pub(super) fn read(
        &self,
        domain: Domain,
        at: Remote,
        wanted: Access,
        into: &mut [u8],
    ) -> Result<(), Unreachable> {
        self.reach(domain, at, into.len() as u64, wanted, |pointer, place| {
            // SAFETY: the range lies in a registration, whose memory stays until `deregister` has
            // taken the lock that is held here: registering promises that. Others may write it
            // meanwhile.
            let from = unsafe { MemRef::from_raw(pointer, into.len(), place) };
            copy_and_wait(MemMut::host(into), from).map_err(|_| Unreachable::Engine)
        })
    }

    /// Writes bytes.
    pub(super) fn write(
        &self,
        domain: Domain,
        at: Remote,
        wanted: Access,
        bytes: &[u8],
    ) -> Result<(), Unreachable> {
        self.reach(domain, at, bytes.len() as u64, wanted, |pointer, place| {
            // SAFETY: as in `read`; registering memory for writes permits writes at any time.
            let to = unsafe { MemMut::from_raw(pointer, bytes.len(), place) };
            copy_and_wait(to, MemRef::host(bytes)).map_err(|_| Unreachable::Engine)
        })
    }

    /// Changes a word, and returns its old value.
    pub(super) fn change(
        &self,
        domain: Domain,
        word: Remote,
        change: impl Fn(u64) -> u64,
    ) -> Result<u64, Unreachable> {
        self.reach(domain, word, 8, Access::REMOTE_ATOMIC, |pointer, place| {
            if !pointer.addr().is_multiple_of(8) {
                return Err(Unreachable::Alignment);
            }
            if place.is_host() {
                // SAFETY: eight aligned bytes of a registration, as in `write`. Users of words
                // under a NIC's atomic operations use atomic loads and stores, too.
                let word = unsafe { AtomicU64::from_ptr(pointer.cast()) };
                // A load and a store, as over PCIe. Operations of one NIC are atomic among each
                // other, since one thread does them. They are not atomic with a CPU's, which now
                // and then is given its chance to come between them.
                let old = word.load(Ordering::SeqCst);
                if old.is_multiple_of(16) {
                    std::thread::yield_now();
                }
                word.store(change(old), Ordering::SeqCst);
                return Ok(old);
            }
            let mut bytes = [0; 8];
            // SAFETY: as in `read`. One thread does all operations of this process's NICs, one at
            // a time.
            let from = unsafe { MemRef::from_raw(pointer, 8, place) };
            copy_and_wait(MemMut::host(&mut bytes), from).map_err(|_| Unreachable::Engine)?;
            let old = u64::from_ne_bytes(bytes);
            // SAFETY: as in `write`.
            let to = unsafe { MemMut::from_raw(pointer, 8, place) };
            copy_and_wait(to, MemRef::host(&change(old).to_ne_bytes()))
                .map_err(|_| Unreachable::Engine)?;
            Ok(old)
        })
    }
}

/// Checks that the kernel finds readable pages there, as it does when it locks memory for a NIC.
/// It copies a byte of each page; if it refuses to copy at all, the check passes.
fn check_mapped(addr: usize, len: usize) -> Result<(), Errno> {
    const AT_ONCE: usize = 512;
    let last = addr + len - 1;
    let mut pages = (addr / PAGE..=last / PAGE).map(|page| (page * PAGE).max(addr));
    loop {
        let remote: Vec<libc::iovec> = pages
            .by_ref()
            .take(AT_ONCE)
            .map(|at| libc::iovec {
                iov_base: std::ptr::with_exposed_provenance_mut(at),
                iov_len: 1,
            })
            .collect();
        if remote.is_empty() {
            return Ok(());
        }
        let mut bytes = [0_u8; AT_ONCE];
        let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: remote.len() };
        // SAFETY: the kernel checks the remote addresses, which are this process's; `bytes` has
        // room for one byte of each.
        let read = unsafe {
            libc::process_vm_readv(
                libc::getpid(),
                &local,
                1,
                remote.as_ptr(),
                remote.len() as libc::c_ulong,
                0,
            )
        };
        match usize::try_from(read) {
            Ok(read) if read == remote.len() => {}
            Ok(_) => return Err(Errno::FAULT),
            Err(_) => match Errno::from_io_error(&std::io::Error::last_os_error()) {
                Some(Errno::FAULT) => return Err(Errno::FAULT),
                _ => return Ok(()),
            },
        }
    }
}

#[cfg(test)]
mod tests;
