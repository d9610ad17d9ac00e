//! Allocators of packet memory: the host's, a GPU's, or a program's own.

use super::{MemKind, Region};
use crate::gpu::{Flavour, Gpu, GpuError};
use std::alloc::Layout;
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Source of memory for packets. Users bring their own so that active messages land in memory of
/// their choice.
///
/// A pool asks for whole blocks, and checks each before its first use. It drops a block that is too
/// short, lies at an impossible address, or is of another kind than claimed. An [`AllocError`]
/// gives the reason. The checks help authors of allocators; they do not replace the promise below,
/// as a pool cannot see whether memory is also used elsewhere.
///
/// An allocator over a driver's memory pools:
///
/// ```
/// use carrack_simulators::gpu::{FakeConfig, FakeDriver};
/// use carrack_transports::gpu::{Flavour, Gpu, GpuError};
/// use carrack_transports::mem::{AllocError, Chunk, MemKind, PacketAllocator, PacketPool};
/// use std::{alloc::Layout, sync::Arc};
///
/// #[derive(Debug)]
/// struct Pooled(Arc<dyn Gpu>);
///
/// // SAFETY: each chunk is an allocation of its own, freed with the region that only it holds.
/// unsafe impl PacketAllocator for Pooled {
///     fn kind(&self) -> MemKind {
///         MemKind::Device(self.0.info().uuid)
///     }
///     fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
///         Some(&self.0)
///     }
///     fn allocate(&self, layout: Layout) -> Result<Chunk, AllocError> {
///         let region = self.0.allocate(layout.size(), Flavour::Pooled)?;
///         let none = AllocError::OutOfMemory { bytes: layout.size(), kind: self.kind() };
///         Chunk::of_region(region).ok_or(none)
///     }
/// }
///
/// let gpu = FakeDriver::new(FakeConfig::default())?.gpu(0)?;
/// let pool = PacketPool::new(Arc::new(Pooled(gpu)), 8 << 10, 64);
/// let packet = pool.take_with_len(100).expect("the pool's first");
/// assert!(packet.as_slice().is_none(), "it is on the GPU, at packet.addr()");
/// # Ok::<(), GpuError>(())
/// ```
///
/// # Safety
/// Each [`Chunk`] that is given out is memory of [`kind`](Self::kind), with the length and
/// alignment asked for. It is not used elsewhere until the chunk is dropped. Host memory is
/// initialised, to any values.
pub unsafe trait PacketAllocator: Send + Sync + fmt::Debug {
    /// Returns the kind of its memory, always the same: host, pinned, or one GPU's.
    fn kind(&self) -> MemKind;

    /// Returns the GPU that the memory belongs to, when [`kind`](Self::kind) names one: its engine
    /// copies messages. For pinned memory, returns a GPU of the driver that has locked it.
    fn gpu(&self) -> Option<&Arc<dyn Gpu>>;

    /// Allocates one chunk. Called when a pool grows, not for each packet, and for each message
    /// into GPU memory that is too long for a packet. Any thread may call it, inside progress: it
    /// must not wait for anything that needs progress.
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
    /// Makes a chunk of memory that `owner` frees when it is dropped.
    ///
    /// # Safety
    /// `len` bytes at `base` are not used elsewhere, and stay allocated until `owner` is dropped.
    pub unsafe fn from_parts(
        base: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { base, len, _owner: owner }
    }

    /// Makes a chunk of a whole region, which is kept until the chunk is dropped. The allocator
    /// promises that the memory is not used elsewhere meanwhile. `None` for a region at address 0.
    pub fn of_region(region: Region) -> Option<Self> {
        let base = NonNull::new(region.addr() as *mut u8)?;
        Some(Self { base, len: region.len(), _owner: Box::new(region) })
    }

    /// Returns its first address.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for Chunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chunk({:p}+{})", self.base, self.len)
    }
}

/// Reason why an allocator gave no memory, or none that can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// Memory of that kind is used up.
    #[error(
        "no {bytes} bytes of {kind} memory are left: packets take up less with a lower \
        CARRACK_PACKETS_MAX or CARRACK_PACKET_SIZE"
    )]
    OutOfMemory {
        /// Bytes that were asked for.
        bytes: usize,
        /// The kind of memory.
        kind: MemKind,
    },
    /// The GPU's driver refused.
    #[error("no memory on the GPU: {0}; free some there, or ask for smaller packets or fewer")]
    Gpu(#[from] GpuError),
    /// Large messages use all the memory allowed for them: see
    /// [`PacketPool::limit_large`](super::PacketPool::limit_large).
    #[error(
        "no {bytes} bytes for a large message: others have {used} of the {limit} that this pool's \
         may take up; drop those that were kept, or give PacketPool::limit_large more"
    )]
    LargeLimit {
        /// Bytes that were asked for.
        bytes: usize,
        /// Bytes in use.
        used: usize,
        /// Bytes that may be in use.
        limit: usize,
    },
    /// The allocator's own description is invalid.
    #[error(
        "packets cannot be made of the allocator's memory, {kind}: {why}; correct its \
        `kind` and its `gpu`"
    )]
    Unsuitable {
        /// The kind that it claims.
        kind: MemKind,
        /// The objection.
        why: &'static str,
    },
    /// A chunk is too short.
    #[error(
        "the packet allocator gave {got} bytes at {base:#x} where {want} were asked for: correct \
        its `allocate`"
    )]
    TooShort {
        /// First address of the chunk.
        base: usize,
        /// Length of the chunk.
        got: usize,
        /// The length asked for.
        want: usize,
    },
    /// A chunk is not aligned as was asked for.
    #[error(
        "the packet allocator gave memory at {base:#x}, which is not aligned to {align} bytes: \
        correct its `allocate`"
    )]
    Misaligned {
        /// First address of the chunk.
        base: usize,
        /// The alignment asked for.
        align: usize,
    },
    /// A chunk lies where no memory can be: in the page at address 0, or beyond the last address.
    #[error(
        "the packet allocator gave {len} bytes at {base:#x}, where no memory can be: correct its \
        `allocate`"
    )]
    Nowhere {
        /// First address of the chunk.
        base: usize,
        /// The length asked for.
        len: usize,
    },
    /// A chunk overlaps one that is in use.
    #[error(
        "the packet allocator gave {len} bytes at {base:#x}, which overlap the {other_len} bytes \
         at {other:#x} that a packet pool already has from it or another allocator: correct the \
         `allocate` of one"
    )]
    Overlap {
        /// First address of the chunk.
        base: usize,
        /// The length asked for.
        len: usize,
        /// First address of the other chunk.
        other: usize,
        /// Length of the other chunk.
        other_len: usize,
    },
    /// A chunk is not of the kind that the allocator says.
    #[error(
        "the packet allocator said that its memory is {said}; the driver says that {at:#x} is \
        {found}: correct its `kind` or `allocate`"
    )]
    WrongKind {
        /// The first address of the chunk that is of another kind.
        at: usize,
        /// The kind that the allocator claims.
        said: MemKind,
        /// The kind that the driver reports.
        found: MemKind,
    },
}

impl AllocError {
    /// Returns `true` if the allocator has broken its promise: then it is not asked again.
    pub fn is_broken_promise(&self) -> bool {
        !matches!(self, Self::OutOfMemory { .. } | Self::Gpu(_) | Self::LargeLimit { .. })
    }
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

// SAFETY: the global allocator's memory is host memory of the layout asked for, used by no other.
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
        // Zeroed, so that a packet's bytes are initialised from the start: then a slice of them is
        // sound.
        // SAFETY: the layout's size is not zero.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or(none)?;
        // SAFETY: just allocated, and freed by the owner only.
        Ok(unsafe { Chunk::from_parts(base, layout.size(), Box::new(HostChunk(base, layout))) })
    }
}

/// Packets on a GPU: active messages land there, and handlers get buffers that safe code cannot
/// dereference.
#[derive(Debug, Clone)]
pub struct GpuAllocator {
    gpu: Arc<dyn Gpu>,
}

impl GpuAllocator {
    /// Makes packets in memory of `gpu`.
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
        whole(self.gpu.allocate(layout.size(), Flavour::Plain)?)
    }
}

/// Packets in host memory that GPUs' engines reach without the driver's help: for bytes that
/// travel to or from a GPU.
#[derive(Debug, Clone)]
pub struct PinnedAllocator {
    gpu: Arc<dyn Gpu>,
}

impl PinnedAllocator {
    /// Makes packets in host memory that the driver of `gpu` has locked.
    pub fn near(gpu: Arc<dyn Gpu>) -> Self {
        Self { gpu }
    }
}

// SAFETY: each chunk is a whole allocation of the driver, kept by the region that owns it. It is
// mapped from the system, and so initialised.
unsafe impl PacketAllocator for PinnedAllocator {
    fn kind(&self) -> MemKind {
        MemKind::Pinned
    }

    fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
        Some(&self.gpu)
    }

    fn allocate(&self, layout: Layout) -> Result<Chunk, AllocError> {
        whole(self.gpu.allocate(layout.size(), Flavour::Pinned)?)
    }
}

fn whole(region: Region) -> Result<Chunk, AllocError> {
    let none = AllocError::OutOfMemory { bytes: region.len(), kind: region.kind() };
    Chunk::of_region(region).ok_or(none)
}
