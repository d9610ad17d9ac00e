//! Allocators of packets that do not keep their promise.

#![expect(unsafe_code, reason = "an allocator of packets vouches for its memory")]

use carrack::packet::{AllocError, Chunk, PacketAllocator};
use carrack::transports::gpu::Gpu;
use carrack::transports::mem::MemKind;
use std::alloc::Layout;
use std::fmt;
use std::sync::Arc;

/// An allocator whose statements about its memory may be false.
pub struct Liar<F> {
    pub kind: MemKind,
    pub gpu: Option<Arc<dyn Gpu>>,
    pub gives: F,
}

impl<F> fmt::Debug for Liar<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Liar({})", self.kind)
    }
}

// SAFETY: the tests break the promise on purpose, in ways that a pool detects before the memory is
// used. What they use keeps it.
unsafe impl<F> PacketAllocator for Liar<F>
where
    F: Fn(Layout) -> Result<Chunk, AllocError> + Send + Sync,
{
    fn kind(&self) -> MemKind {
        self.kind
    }

    fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
        self.gpu.as_ref()
    }

    fn allocate(&self, layout: Layout) -> Result<Chunk, AllocError> {
        (self.gives)(layout)
    }
}

/// Returns a part of another chunk, as a chunk of its own.
pub fn part(of: &Arc<Chunk>, offset: usize, len: usize) -> Chunk {
    // SAFETY: the tests do not go beyond it. That it is not shared is the lie, which is detected.
    unsafe { Chunk::from_parts(of.base().add(offset), len, Box::new(of.clone())) }
}
