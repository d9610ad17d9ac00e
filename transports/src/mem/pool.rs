//! An elastic, bounded, lock-free pool of packets.
//!
//! A pool starts empty and grows by slabs of [`SLAB`] packets up to its limit, so that a rank which
//! never sends a middle-sized message never pays for packets (design.md §6.6; LCI pins 512 MiB).

use super::copy::copy_now;
use super::packet::{AllocError, Chunk, Packet, PacketAllocator, PacketHome, PacketSource};
use super::{MemKind, MemRef, Place};
use crate::sync::FreeList;
use std::alloc::Layout;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Packets that a pool grows by at a time.
pub const SLAB: usize = 16;

/// Alignment of a packet in bytes: a cache line, so that two packets never share one.
pub const ALIGN: usize = 64;

/// A pool of packets, all of one size and one kind of memory. Clones are handles to the same pool.
#[derive(Clone)]
pub struct PacketPool(Arc<Pool>);

struct Pool {
    allocator: Arc<dyn PacketAllocator>,
    packet_size: usize,
    limit: usize,
    free: FreeList,
    slabs: Box<[OnceLock<Chunk>]>,
    /// How many slabs there are; held while growing, and holds why growing last failed.
    growth: Mutex<Growth>,
}

#[derive(Default)]
struct Growth {
    slabs: usize,
    failed: Option<AllocError>,
}

impl PacketPool {
    /// A pool of at most `limit` packets of `packet_size` bytes each, rounded up to whole slabs and
    /// whole cache lines. Nothing is allocated yet.
    pub fn new(allocator: Arc<dyn PacketAllocator>, packet_size: usize, limit: usize) -> Self {
        let slabs = limit.div_ceil(SLAB).max(1);
        let limit = slabs * SLAB;
        Self(Arc::new(Pool {
            allocator,
            packet_size: packet_size.max(1).next_multiple_of(ALIGN),
            limit,
            free: FreeList::new(limit),
            slabs: (0..slabs).map(|_| OnceLock::new()).collect(),
            growth: Mutex::default(),
        }))
    }

    /// A packet with room for `len` bytes, and that many in use. `None` when the limit is reached, when
    /// the allocator has no more, or when `len` is more than a packet holds.
    #[inline]
    pub fn take_with_len(&self, len: usize) -> Option<Packet> {
        if len > self.0.packet_size {
            return None;
        }
        let mut packet = self.take()?;
        packet.set_len(len);
        Some(packet)
    }

    /// A packet that holds a copy of host memory. `None` as for [`take_with_len`](Self::take_with_len), and when
    /// either side is not host memory.
    #[inline]
    pub fn take_copy(&self, of: MemRef<'_>) -> Option<Packet> {
        let mut packet = self.take_with_len(of.len())?;
        copy_now(packet.view_mut(), of).ok()?;
        Some(packet)
    }

    /// Packets that may be out at once.
    pub fn limit(&self) -> usize {
        self.0.limit
    }

    /// Packets that have memory now, taken or free.
    pub fn allocated(&self) -> usize {
        self.0.growth.lock().unwrap_or_else(PoisonError::into_inner).slabs * SLAB
    }

    /// Why the pool could not grow the last time that it tried.
    pub fn last_failure(&self) -> Option<AllocError> {
        self.0.growth.lock().unwrap_or_else(PoisonError::into_inner).failed.clone()
    }

    #[cold]
    fn grow(&self) -> Option<u32> {
        let pool = &*self.0;
        let mut growth = pool.growth.lock().unwrap_or_else(PoisonError::into_inner);
        // Another thread may have grown it, or returned packets, while this one waited.
        if let Some(slot) = pool.free.pop() {
            return Some(slot);
        }
        let cell = pool.slabs.get(growth.slabs)?;
        match pool.new_slab() {
            Ok(chunk) => {
                growth.failed = None;
                let _ = cell.set(chunk);
            }
            Err(error) => {
                growth.failed = Some(error);
                return None;
            }
        }
        let first = u32::try_from(growth.slabs * SLAB).ok()?;
        growth.slabs += 1;
        for slot in (first + 1..).take(SLAB - 1).collect::<Vec<_>>().into_iter().rev() {
            pool.free.push(slot);
        }
        Some(first)
    }
}

impl Pool {
    fn new_slab(&self) -> Result<Chunk, AllocError> {
        let want = self.packet_size * SLAB;
        let layout = Layout::from_size_align(want, ALIGN)
            .map_err(|_| AllocError::OutOfMemory { bytes: want, kind: self.allocator.kind() })?;
        let chunk = self.allocator.allocate(layout)?;
        let base = chunk.base().as_ptr() as usize;
        if chunk.len() < want || !base.is_multiple_of(ALIGN) {
            return Err(AllocError::Unfit { base, got: chunk.len(), want, align: ALIGN });
        }
        Ok(chunk)
    }

    #[inline]
    fn chunk(&self, slot: u32) -> Option<NonNull<u8>> {
        let (slab, at) = (slot as usize / SLAB, slot as usize % SLAB);
        let chunk = self.slabs.get(slab)?.get()?;
        // SAFETY: `new_slab` checked that a slab has `SLAB` packets.
        Some(unsafe { chunk.base().add(at * self.packet_size) })
    }
}

impl PacketSource for PacketPool {
    #[inline]
    fn take(&self) -> Option<Packet> {
        let slot = self.0.free.pop().or_else(|| self.grow())?;
        let base = self.0.chunk(slot)?;
        let home: Arc<dyn PacketHome> = self.0.clone();
        // SAFETY: the free list gave this slot to this caller alone, and its chunk is `packet_size`
        // bytes of a slab that lives as long as the pool, which `home` keeps alive.
        Some(unsafe { Packet::from_parts(base, slot, home) })
    }

    fn kind(&self) -> MemKind {
        self.0.allocator.kind()
    }

    fn packet_size(&self) -> usize {
        self.0.packet_size
    }
}

impl PacketHome for Pool {
    #[inline]
    fn give_back(&self, slot: u32) {
        self.free.push(slot);
    }

    #[inline]
    fn place(&self) -> Place<'_> {
        Place::of(self.allocator.kind(), self.allocator.gpu())
    }

    #[inline]
    fn packet_size(&self) -> usize {
        self.packet_size
    }
}

impl fmt::Debug for PacketPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, kind) = (self.0.packet_size, self.0.allocator.kind());
        write!(f, "PacketPool({kind}, {size} B, {} of {})", self.allocated(), self.0.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::HostAllocator;

    fn pool(limit: usize) -> PacketPool {
        PacketPool::new(Arc::new(HostAllocator), 100, limit)
    }

    #[test]
    fn miri_packets_are_distinct_and_come_back() {
        let pool = pool(20);
        assert_eq!(pool.allocated(), 0, "nothing is allocated before the first packet");
        let mut packets: Vec<Packet> = std::iter::from_fn(|| pool.take_with_len(100)).collect();
        assert_eq!(packets.len(), 32, "a limit is rounded up to whole slabs");
        for (at, packet) in packets.iter_mut().enumerate() {
            packet.as_mut_slice().unwrap().fill(at as u8);
        }
        for (at, packet) in packets.iter().enumerate() {
            assert!(packet.as_slice().unwrap().iter().all(|&byte| byte == at as u8));
        }
        drop(packets);
        assert!(pool.take().is_some());
        assert_eq!(pool.allocated(), 32);
    }

    #[test]
    fn miri_a_packet_outlives_the_handle_of_its_pool() {
        let packet = pool(1).take_with_len(64).unwrap();
        assert_eq!(packet.as_slice().unwrap(), [0; 64]);
    }

    #[test]
    fn a_message_longer_than_a_packet_gets_none() {
        assert!(pool(1).take_with_len(129).is_none());
        assert!(pool(1).take_with_len(128).is_some(), "100 is rounded up to whole cache lines");
    }

    #[derive(Debug)]
    struct Stingy;

    // SAFETY: it breaks its promise on purpose, in the way that the pool is to catch.
    unsafe impl PacketAllocator for Stingy {
        fn kind(&self) -> MemKind {
            MemKind::Host
        }
        fn gpu(&self) -> Option<&Arc<dyn crate::gpu::Gpu>> {
            None
        }
        fn allocate(&self, layout: Layout) -> Result<Chunk, AllocError> {
            HostAllocator.allocate(Layout::from_size_align(layout.size() / 2, layout.align()).unwrap())
        }
    }

    #[test]
    fn an_allocator_that_gives_too_little_is_named_and_its_memory_not_used() {
        let pool = PacketPool::new(Arc::new(Stingy), 64, 16);
        assert!(pool.take().is_none());
        assert!(matches!(pool.last_failure(), Some(AllocError::Unfit { got: 512, want: 1024, .. })));
    }
}
