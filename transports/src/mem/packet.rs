//! Fixed-size chunks of any kind of memory.
//!
//! A chunk holds no header: a packet's bookkeeping is on the host, so that its payload may be
//! memory that the CPU cannot touch.

use super::{MemKind, MemMut, MemRef, Place};
use crate::gpu::Gpu;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// A source of packets for a transport that receives into them.
///
/// Transports rely on its answers: a NIC is told to write [`packet_size`](Self::packet_size) bytes
/// to each packet. So only `unsafe` code can implement it:
///
/// ```compile_fail,E0200
/// # use carrack_transports::mem::{MemKind, Packet, PacketPool, PacketSource};
/// #[derive(Debug)]
/// struct Boaster(PacketPool);
/// impl PacketSource for Boaster {
///     fn take(&self) -> Option<Packet> {
///         self.0.take()
///     }
///     fn kind(&self) -> MemKind {
///         self.0.kind()
///     }
///     fn packet_size(&self) -> usize {
///         2 * self.0.packet_size()
///     }
///     fn limit(&self) -> usize {
///         self.0.limit()
///     }
/// }
/// ```
///
/// # Safety
/// [`kind`](Self::kind) and [`packet_size`](Self::packet_size) give the same answer each time.
/// Each packet is memory of that kind, with a [capacity](Packet::capacity) of that size or more.
/// The pools of the packets live as long as the source, even if all packets are dropped.
pub unsafe trait PacketSource: Send + Sync + fmt::Debug {
    /// Takes a packet, or returns `None` when the source's limit is reached: try again after some
    /// have been returned.
    fn take(&self) -> Option<Packet>;

    /// Returns the kind of memory of the packets.
    fn kind(&self) -> MemKind;

    /// Returns the number of bytes that a packet holds.
    fn packet_size(&self) -> usize;

    /// Returns the number of packets that may be taken at once.
    fn limit(&self) -> usize;
}

/// Pool to which a packet returns when it is dropped.
pub(super) trait PacketHome: Send + Sync {
    fn give_back(&self, slot: u32);
    fn place(&self) -> Place<'_>;
    fn packet_size(&self) -> usize;
    /// Returns address and length of the slab that holds the slot's packet.
    fn extent(&self, slot: u32) -> (usize, usize);
}

/// A chunk of a pool, with a single owner; dropping it returns it to its pool.
pub struct Packet {
    base: NonNull<u8>,
    len: u32,
    slot: u32,
    home: Arc<dyn PacketHome>,
}

// SAFETY: a packet is the only handle to its chunk, and its home is Send and Sync.
unsafe impl Send for Packet {}
// SAFETY: shared access only reads.
unsafe impl Sync for Packet {}

impl Packet {
    /// Makes an empty packet of a slot, which the packet gives back to `home` when it is dropped.
    ///
    /// # Safety
    /// `home.packet_size()` initialised bytes at `base` are this packet's alone until `slot` is
    /// given back.
    #[inline]
    pub(super) unsafe fn from_parts(
        base: NonNull<u8>,
        slot: u32,
        home: Arc<dyn PacketHome>,
    ) -> Self {
        Self { base, len: 0, slot, home }
    }

    /// Returns the number of bytes in use.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Returns `true` if no bytes are in use.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of bytes that it can hold.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.home.packet_size()
    }

    /// Sets the number of bytes in use. Their values are the chunk's earlier content: zeros, or an
    /// earlier message of this process.
    ///
    /// Lengths beyond the capacity are cut to it.
    #[inline]
    pub fn set_len(&mut self, len: usize) {
        self.len = u32::try_from(len.min(self.capacity())).unwrap_or(u32::MAX);
    }

    /// Returns its kind of memory.
    #[inline]
    pub fn kind(&self) -> MemKind {
        self.home.place().kind()
    }

    /// Returns the bytes in use, if they are host memory.
    #[inline]
    pub fn as_slice(&self) -> Option<&[u8]> {
        // SAFETY: host memory, initialised when it was allocated, `len` at most the chunk's size,
        // and this packet's alone.
        self.home
            .place()
            .is_host()
            .then(|| unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len()) })
    }

    /// Returns the bytes in use for writing, if they are host memory.
    #[inline]
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        // SAFETY: as in `as_slice`, and `self` is borrowed for writing.
        self.home
            .place()
            .is_host()
            .then(|| unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len()) })
    }

    /// Returns the GPU that it lies on, if it lies on one.
    pub fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
        self.home.place().gpu()
    }

    /// Returns the address of a packet, for a kernel's argument or a driver. The CPU may
    /// dereference it only if [`kind`](Self::kind) is host memory.
    pub fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Returns address and length of the slab that this packet and its neighbours were cut from. A
    /// NIC registers this range. It stays as long as the pool.
    pub fn extent(&self) -> (usize, usize) {
        self.home.extent(self.slot)
    }

    /// Returns the bytes in use, for the copy function.
    #[inline]
    pub fn view(&self) -> MemRef<'_> {
        // SAFETY: the chunk is allocated, of the home's kind, and at least `len` long.
        unsafe { MemRef::from_raw(self.base.as_ptr(), self.len(), self.home.place()) }
    }

    /// Returns the bytes in use, as a target of the copy function.
    #[inline]
    pub fn view_mut(&mut self) -> MemMut<'_> {
        // SAFETY: as in `view`; the packet is the only handle to its chunk.
        unsafe { MemMut::from_raw(self.base.as_ptr(), self.len(), self.home.place()) }
    }
}

impl Drop for Packet {
    #[inline]
    fn drop(&mut self) {
        self.home.give_back(self.slot);
    }
}

impl fmt::Debug for Packet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Packet({} {}/{} B)", self.kind(), self.len, self.capacity())
    }
}
