//! Where the memory of packets comes from: the host, a GPU, or wherever a program says.

use super::{MemKind, Region};
use crate::gpu::{Flavour, Gpu, GpuError};
use std::alloc::Layout;
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

/// Where memory for packets comes from. Users bring their own to have active messages land in
/// memory of their choice.
///
/// A pool asks for whole blocks, and looks at each before it uses any of it: one that is too short,
/// lies where it must not, or is of another kind than was said is an [`AllocError`] that says so,
/// and is dropped. That is a help for those who write allocators, not a way round the promise
/// below: nobody can look whether memory is also used elsewhere.
///
/// One over a driver's memory pools:
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
/// // SAFETY: each chunk is an allocation of its own, and freed with the region that only the chunk has.
/// unsafe impl PacketAllocator for Pooled {
///     fn kind(&self) -> MemKind {
///         MemKind::Device(self.0.info().uuid)
///     }
///     fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
///         Some(&self.0)
///     }
///     fn allocate(&self, layout: Layout) -> Result<Chunk, AllocError> {
///         let region = self.0.allocate(layout.size(), Flavour::Pooled)?;
///         Chunk::of_region(region).ok_or(AllocError::OutOfMemory { bytes: layout.size(), kind: self.kind() })
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
/// Each [`Chunk`] that is given out is memory of [`kind`](Self::kind), as long and as aligned as
/// was asked for, and used by nobody else until the chunk is dropped. Host memory is initialised,
/// to whatever values.
pub unsafe trait PacketAllocator: Send + Sync + fmt::Debug {
    /// What sort of memory it gives out, always the same: host, pinned, or one GPU's.
    fn kind(&self) -> MemKind;

    /// The GPU that the memory belongs to, when [`kind`](Self::kind) names one: its engine copies
    /// what arrives. Of pinned memory one whose driver has locked it.
    fn gpu(&self) -> Option<&Arc<dyn Gpu>>;

    /// One chunk. Called when a pool grows, not for each packet, and for each message into memory
    /// of a GPU that is too long for a packet. Any thread may call it, inside progress: it must not
    /// wait for anything that needs progress.
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
    pub unsafe fn from_parts(
        base: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Self {
        Self { base, len, _owner: owner }
    }

    /// All of a region, which is kept until the chunk is dropped. That nobody else uses it
    /// meanwhile is what an allocator promises. `None` for a region at address 0.
    pub fn of_region(region: Region) -> Option<Self> {
        let base = NonNull::new(region.addr() as *mut u8)?;
        Some(Self { base, len: region.len(), _owner: Box::new(region) })
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

/// Why an allocator gave nothing, or nothing that can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AllocError {
    /// There is no more memory of that kind.
    #[error(
        "no {bytes} bytes of {kind} memory are left: packets take up less with a lower \
        CARRACK_PACKETS_MAX or CARRACK_PACKET_SIZE"
    )]
    OutOfMemory {
        /// Bytes that were asked for.
        bytes: usize,
        /// Of which memory.
        kind: MemKind,
    },
    /// The GPU's driver refused.
    #[error("no memory on the GPU: {0}")]
    Gpu(#[from] GpuError),
    /// What large messages may take up is in use: see
    /// [`PacketPool::limit_large`](super::PacketPool::limit_large).
    #[error(
        "no {bytes} bytes for a large message: others have {used} of the {limit} that this pool's may take up; drop those \
         that were kept, or raise the limit"
    )]
    LargeLimit {
        /// Bytes that were asked for.
        bytes: usize,
        /// Bytes in use.
        used: usize,
        /// Bytes that may be in use.
        limit: usize,
    },
    /// The allocator says of itself what cannot be.
    #[error("packets cannot be made of the allocator's memory, {kind}: {why}")]
    Unsuitable {
        /// What it says that its memory is.
        kind: MemKind,
        /// What is wrong with that.
        why: &'static str,
    },
    /// A chunk is too short.
    #[error("the packet allocator gave {got} bytes at {base:#x} where {want} were asked for")]
    TooShort {
        /// Where the chunk starts.
        base: usize,
        /// Its length.
        got: usize,
        /// The length asked for.
        want: usize,
    },
    /// A chunk is not aligned as was asked for.
    #[error("the packet allocator gave memory at {base:#x}, which is not aligned to {align} bytes")]
    Misaligned {
        /// Where the chunk starts.
        base: usize,
        /// The alignment asked for.
        align: usize,
    },
    /// A chunk lies where no memory can be: in the page at address 0, or beyond the last address.
    #[error("the packet allocator gave {len} bytes at {base:#x}, where no memory can be")]
    Nowhere {
        /// Where the chunk starts.
        base: usize,
        /// The length asked for.
        len: usize,
    },
    /// A chunk lies, in part, where one lies that is in use.
    #[error(
        "the packet allocator gave {len} bytes at {base:#x}, which overlap the {other_len} bytes at {other:#x} that a packet \
         pool already has from it or another allocator"
    )]
    Overlap {
        /// Where the chunk starts.
        base: usize,
        /// The length asked for.
        len: usize,
        /// Where the other one starts.
        other: usize,
        /// Its length.
        other_len: usize,
    },
    /// A chunk is not of the kind that the allocator says.
    #[error(
        "the packet allocator said that its memory is {said}; the driver says that {at:#x} is \
        {found}"
    )]
    WrongKind {
        /// The address asked about: the first of the chunk's that is of another kind.
        at: usize,
        /// What the allocator says.
        said: MemKind,
        /// What the driver says.
        found: MemKind,
    },
}

impl AllocError {
    /// Whether the allocator has broken its promise: then it is not asked again.
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
        // Zeroed, so that a packet's bytes are initialised from the start: a slice of them is
        // sound.
        // SAFETY: the layout's size is not zero.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) }).ok_or(none)?;
        // SAFETY: just allocated, and freed by the owner only.
        Ok(unsafe { Chunk::from_parts(base, layout.size(), Box::new(HostChunk(base, layout))) })
    }
}

/// Packets on a GPU: active messages land there, and handlers get what safe code cannot
/// dereference.
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
        whole(self.gpu.allocate(layout.size(), Flavour::Plain)?)
    }
}

/// Packets in host memory that the engines of GPUs reach without the driver's help: what is on its
/// way to a GPU, or from one.
#[derive(Debug, Clone)]
pub struct PinnedAllocator {
    gpu: Arc<dyn Gpu>,
}

impl PinnedAllocator {
    /// Packets in host memory that the driver of `gpu` has locked.
    pub fn near(gpu: Arc<dyn Gpu>) -> Self {
        Self { gpu }
    }
}

// SAFETY: each chunk is a whole allocation of the driver, kept by the region that owns it; it is
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
