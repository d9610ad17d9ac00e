//! Fixed-size chunks of any kind of memory.
//!
//! Headers never lie in a chunk: a packet's bookkeeping is on the host, so that its payload may be
//! memory that the CPU cannot touch (the fault in LCI's pool, reference/anchors.md §1e).

use super::{MemKind, MemMut, MemRef, Place};
use crate::gpu::{Flavour, Gpu, GpuError};
use std::alloc::Layout;
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where memory for packets comes from. Users bring their own to have active messages land in memory
/// of their choice.
///
/// # Safety
/// Each [`Chunk`] that is given out is memory of [`kind`](Self::kind), as long and as aligned as was
/// asked for, and used by nobody else until the chunk is dropped.
pub unsafe trait PacketAllocator: Send + Sync + fmt::Debug {
    /// What sort of memory it gives out.
    fn kind(&self) -> MemKind;

    /// The GPU that the memory belongs to, when [`kind`](Self::kind) names one.
    fn gpu(&self) -> Option<&Arc<dyn Gpu>>;

    /// One chunk. Called when a pool grows, not for each packet.
    fn allocate(&self, layout: Layout) -> Result<Chunk, AllocError>;
}

/// Memory from a [`PacketAllocator`], freed when it is dropped.
pub struct Chunk {
    base: NonNull<u8>,
    len: usize,
    _owner: Box<dyn Any + Send + Sync>,
}

// SAFETY: a chunk is an address that is not read through here, and an owner that is Send.
unsafe impl Send for Chunk {}
// SAFETY: as above.
unsafe impl Sync for Chunk {}

impl Chunk {
    /// # Safety
    /// `len` bytes at `base` are used by nobody else, and stay allocated until `owner` is dropped.
    pub unsafe fn from_parts(base: NonNull<u8>, len: usize, owner: Box<dyn Any + Send + Sync>) -> Self {
        Self { base, len, _owner: owner }
    }

    /// Where it starts.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chunk({:p}+{})", self.base, self.len)
    }
}

/// Why an allocator gave nothing.
#[derive(Debug, Clone, thiserror::Error)]
pub enum AllocError {
    /// There is no more memory of that kind.
    #[error(
        "no {bytes} bytes of {kind} memory for packets: lower CARRACK_PACKETS_MAX or CARRACK_PACKET_SIZE"
    )]
    OutOfMemory {
        /// Bytes that were asked for.
        bytes: usize,
        /// Of which memory.
        kind: MemKind,
    },
    /// The GPU's driver refused.
    #[error("no packets on the GPU: {0}")]
    Gpu(#[from] GpuError),
    /// The allocator broke its promise.
    #[error(
        "the packet allocator gave {got} bytes at {base:#x} where {want} bytes aligned to {align} were asked for"
    )]
    Unfit {
        /// Where the chunk starts.
        base: usize,
        /// Its length.
        got: usize,
        /// The length asked for.
        want: usize,
        /// The alignment asked for.
        align: usize,
    },
}

/// The default: ordinary host memory.
#[derive(Debug, Clone, Copy, Default)]
pub struct HostAllocator;

struct HostChunk(NonNull<u8>, Layout);

// SAFETY: the pointer is only used to free.
unsafe impl Send for HostChunk {}
// SAFETY: as above.
unsafe impl Sync for HostChunk {}

impl Drop for HostChunk {
    fn drop(&mut self) {
        // SAFETY: allocated below with this very layout, freed only here.
        unsafe { std::alloc::dealloc(self.0.as_ptr(), self.1) };
    }
}

// SAFETY: the global allocator's memory is host memory of the layout asked for, and nobody else's.
unsafe impl PacketAllocator for HostAllocator {
    fn kind(&self) -> MemKind {
        MemKind::Host
    }

    fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
        None
    }

    fn allocate(&self, layout: Layout) -> Result<Chunk, AllocError> {
        let none = AllocError::OutOfMemory { bytes: layout.size(), kind: MemKind::Host };
        if layout.size() == 0 {
            return Err(none);
        }
        // Zeroed, so that a packet's bytes are initialised from the start: a slice of them is sound.
        // SAFETY: the layout's size is not zero.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or(none)?;
        // SAFETY: just allocated, and freed by the owner only.
        Ok(unsafe { Chunk::from_parts(base, layout.size(), Box::new(HostChunk(base, layout))) })
    }
}

/// Packets on a GPU: active messages land there, and handlers get what safe code cannot dereference.
#[derive(Debug, Clone)]
pub struct GpuAllocator {
    gpu: Arc<dyn Gpu>,
}

impl GpuAllocator {
    /// Packets in memory of `gpu`.
    pub fn on(gpu: Arc<dyn Gpu>) -> Self {
        Self { gpu }
    }
}

// SAFETY: each chunk is a whole allocation of the driver, kept by the region that owns it.
unsafe impl PacketAllocator for GpuAllocator {
    fn kind(&self) -> MemKind {
        MemKind::Device(self.gpu.info().uuid)
    }

    fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
        Some(&self.gpu)
    }

    fn allocate(&self, layout: Layout) -> Result<Chunk, AllocError> {
        let region = self.gpu.allocate(layout.size(), Flavour::Plain)?;
        let base = NonNull::new(region.addr() as *mut u8)
            .ok_or(AllocError::OutOfMemory { bytes: layout.size(), kind: self.kind() })?;
        // SAFETY: the region is fresh, so nobody else uses it, and it frees the memory when dropped.
        Ok(unsafe { Chunk::from_parts(base, region.len(), Box::new(region)) })
    }
}

/// What gives packets to a transport that receives into them. It says in which memory they lie.
pub trait PacketSource: Send + Sync + fmt::Debug {
    /// A packet, or `None` when the source's limit is reached: try again once some have been returned.
    fn take(&self) -> Option<Packet>;

    /// What sort of memory the packets are.
    fn kind(&self) -> MemKind;

    /// Bytes that a packet holds.
    fn packet_size(&self) -> usize;
}

/// Where a packet goes when it is dropped.
pub(super) trait PacketHome: Send + Sync {
    fn give_back(&self, slot: u32);
    fn place(&self) -> Place<'_>;
    fn packet_size(&self) -> usize;
}

/// A chunk of a pool, and nobody else's until it is dropped; then it returns to its pool.
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
    /// # Safety
    /// `home.packet_size()` initialised bytes at `base` are this packet's alone until `slot` is given back.
    #[inline]
    pub(super) unsafe fn from_parts(base: NonNull<u8>, slot: u32, home: Arc<dyn PacketHome>) -> Self {
        Self { base, len: 0, slot, home }
    }

    /// Bytes in use.
    #[inline]
    pub fn len(&self) -> usize {
        self.len as usize
    }

    /// Whether no bytes are in use.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes that it can hold.
    #[inline]
    pub fn capacity(&self) -> usize {
        self.home.packet_size()
    }

    /// Says how many bytes are in use. What was in the chunk before is what is found there: zeros, or an
    /// earlier message of this process.
    ///
    /// Lengths beyond the capacity are cut to it.
    #[inline]
    pub fn set_len(&mut self, len: usize) {
        self.len = u32::try_from(len.min(self.capacity())).unwrap_or(u32::MAX);
    }

    /// What sort of memory it is.
    #[inline]
    pub fn kind(&self) -> MemKind {
        self.home.place().kind()
    }

    /// The bytes in use, if they are host memory.
    #[inline]
    pub fn as_slice(&self) -> Option<&[u8]> {
        // SAFETY: host memory, initialised when it was allocated, `len` at most the chunk's size, and
        // this packet's alone.
        self.home
            .place()
            .is_host()
            .then(|| unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len()) })
    }

    /// The bytes in use, to be written, if they are host memory.
    #[inline]
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        // SAFETY: as in `as_slice`, and `self` is borrowed for writing.
        self.home
            .place()
            .is_host()
            .then(|| unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len()) })
    }

    /// The address of a packet, for a kernel's argument or a driver. Not to be dereferenced unless
    /// [`kind`](Self::kind) is host memory.
    pub fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// The bytes in use, for the copy function.
    #[inline]
    pub fn view(&self) -> MemRef<'_> {
        // SAFETY: the chunk is allocated, of the home's kind, and at least `len` long.
        unsafe { MemRef::from_raw(self.base.as_ptr(), self.len(), self.home.place()) }
    }

    /// The bytes in use, to be written by the copy function.
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
