//! Memory that a device may reach.

use super::super::bindings::{
    IB_UVERBS_ACCESS_OPTIONAL_RANGE, IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_ON_DEMAND,
    IBV_ACCESS_RELAXED_ORDERING, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE, ibv_mr,
};
use super::super::error::VerbsError;
use super::domain::ProtectionDomain;
use super::handle::VerbsPointer;
use std::ffi::c_int;
use std::fmt;
use std::ops::BitOr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

/// Access rights of registered memory. A device may always read it for work that is posted here.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct AccessFlags(u32);

impl AccessFlags {
    /// Work that is posted here reads it.
    pub const LOCAL_READ: Self = Self(0);
    /// Receives, and answers of reads and atomics, are written to it. Remote writes and atomics
    /// require this, too.
    pub const LOCAL_WRITE: Self = Self(IBV_ACCESS_LOCAL_WRITE);
    /// Peers write to it.
    pub const REMOTE_WRITE: Self = Self(IBV_ACCESS_REMOTE_WRITE);
    /// Peers read it.
    pub const REMOTE_READ: Self = Self(IBV_ACCESS_REMOTE_READ);
    /// Peers do atomic operations on it.
    pub const REMOTE_ATOMIC: Self = Self(IBV_ACCESS_REMOTE_ATOMIC);
    /// Memory stays pageable: the device faults. Not every device supports that.
    pub const ON_DEMAND: Self = Self(IBV_ACCESS_ON_DEMAND);
    /// Writes to memory may become visible out of order, except the completion, which comes after
    /// them. A kernel or library that does not know this flag ignores it.
    pub const RELAXED_ORDERING: Self = Self(IBV_ACCESS_RELAXED_ORDERING);

    /// Returns all of the bits, as in C.
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns `true` if all rights of `other` are contained.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the mandatory rights, without the flags that may be ignored.
    const fn without_wishes(self) -> Self {
        Self(self.0 & !IB_UVERBS_ACCESS_OPTIONAL_RANGE)
    }

    /// Returns the bits in the type that most functions take.
    const fn as_int(self) -> c_int {
        self.0.cast_signed()
    }
}

impl BitOr for AccessFlags {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for AccessFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AccessFlags({:#x})", self.0)
    }
}

/// Registered memory.
pub struct MemoryRegion {
    raw: VerbsPointer<ibv_mr>,
    addr: usize,
    len: usize,
    lkey: u32,
    rkey: u32,
    domain: Arc<ProtectionDomain>,
}

impl ProtectionDomain {
    /// Registers memory at `addr`: of the host, or of a GPU whose driver lets the kernel find it
    /// by its address (nvidia-peermem).
    ///
    /// # Errors
    /// The memory cannot be locked, is not there, or the device has no room for it.
    ///
    /// # Safety
    /// It stays allocated as long as the registration lives. There is no Rust reference to it
    /// while work that writes to it is in flight, or peers may write.
    pub unsafe fn register(
        self: &Arc<Self>,
        addr: *mut u8,
        len: usize,
        access: AccessFlags,
    ) -> Result<MemoryRegion, VerbsError> {
        let (verbs, pd) = (self.context().verbs(), self.base().as_raw());
        let wishes = access != access.without_wishes();
        let answer = if wishes && verbs.functions().reg_mr_iova2.is_some() {
            // It drops the flags that the kernel does not know; the plain call would fail because
            // of them.
            // SAFETY: the domain is there; of the memory, the caller's promise.
            unsafe { verbs.reg_mr_iova2(pd, addr.cast(), len, addr.addr() as u64, access.bits()) }
        } else {
            // SAFETY: as above.
            unsafe { verbs.reg_mr(pd, addr.cast(), len, access.without_wishes().as_int()) }
        };
        self.registered(answer, addr.addr(), len)
    }

    /// Registers memory of a dma-buf: `len` bytes from `offset` on. Peers and work name them by
    /// addresses from `iova` on. `offset` and `iova` have the same position within their pages.
    ///
    /// # Errors
    /// The library, kernel or device cannot register such memory ([`VerbsError::is_unsupported`]),
    /// or not this piece.
    ///
    /// # Safety
    /// As [`register`](Self::register), for the descriptor's memory. The descriptor itself may be
    /// closed afterwards.
    pub unsafe fn register_dmabuf(
        self: &Arc<Self>,
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        iova: u64,
        access: AccessFlags,
    ) -> Result<MemoryRegion, VerbsError> {
        let (verbs, pd, fd) = (self.context().verbs(), self.base().as_raw(), fd.as_raw_fd());
        // SAFETY: the domain exists; the memory is the caller's promise.
        let mut answer = unsafe { verbs.reg_dmabuf_mr(pd, offset, len, iova, fd, access.as_int()) };
        let plain = access.without_wishes();
        if plain != access && answer.as_ref().is_err_and(|error| error.errno == libc::EINVAL) {
            // No call for dma-bufs drops the optional flags by itself.
            // SAFETY: as above.
            answer = unsafe { verbs.reg_dmabuf_mr(pd, offset, len, iova, fd, plain.as_int()) };
        }
        // On the machines that Carrack runs on, an address is as long as a word on the wire.
        self.registered(answer, usize::try_from(iova).unwrap_or(usize::MAX), len)
    }

    fn registered(
        self: &Arc<Self>,
        answer: Result<*mut ibv_mr, VerbsError>,
        addr: usize,
        len: usize,
    ) -> Result<MemoryRegion, VerbsError> {
        let raw = answer.map_err(|error| self.context().name_in(error))?;
        // SAFETY: what is not a failure is not null, and has its keys, which do not change.
        let (raw, lkey, rkey) = unsafe { (VerbsPointer::new(raw), (*raw).lkey, (*raw).rkey) };
        Ok(MemoryRegion { raw, addr, len, lkey, rkey, domain: Arc::clone(self.base()) })
    }
}

impl MemoryRegion {
    /// Returns the key by which work that is posted here names it.
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.lkey
    }

    /// Returns the remote key, by which peers name it.
    #[inline]
    pub fn rkey(&self) -> u32 {
        self.rkey
    }

    /// Returns its first address, as work and peers name it.
    #[inline]
    pub fn addr(&self) -> usize {
        self.addr
    }

    /// Returns its length in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if its length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the domain that it is registered in.
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// Returns the library's own structure, which exists as long as this.
    pub fn as_raw(&self) -> *mut ibv_mr {
        self.raw.raw()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: registered here. Work in flight in it ends in an error, and accesses it no more.
        self.domain
            .context()
            .release("memory region", |verbs| unsafe { verbs.dereg_mr(self.as_raw()) });
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemoryRegion({} bytes at {:#x}, {:?})", self.len, self.addr, self.domain)
    }
}
