//! An elastic, bounded, lock-free pool of packets.
//!
//! A pool starts empty and grows by slabs of [`SLAB`] packets up to its limit. A rank that never
//! sends a middle-sized message allocates no packets. A GPU's driver gives memory, pinned memory
//! included, in blocks of 2 MiB, and stops the GPU for each. There the pool asks for whole blocks
//! and cuts slabs from them.

use super::block::Block;
use super::copy::copy_now;
use super::packet::{Packet, PacketHome, PacketSource};
use super::region::host_id;
use super::{AllocError, MemKind, MemRef, PacketAllocator, Place, Region};
use crate::gpu::{Driver, Gpu};
use crate::sync::FreeList;
use parking_lot::{Mutex, MutexGuard};
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Packets by which a pool grows at a time.
pub const SLAB: usize = 16;

/// Alignment of a packet in bytes: a cache line, so that two packets never share one.
pub const ALIGN: usize = 64;

/// Size of the smallest allocation of a GPU's driver.
const DRIVERS_BLOCK: usize = 2 << 20;

/// A pool of packets of one size and one kind of memory. Clones are handles to the same pool.
#[derive(Clone)]
pub struct PacketPool(Arc<Pool>);

struct Pool {
    allocator: Arc<dyn PacketAllocator>,
    /// Drivers that check the kind of the allocator's memory.
    drivers: Vec<Arc<dyn Driver>>,
    packet_size: usize,
    limit: usize,
    free: FreeList,
    slabs: Box<[OnceLock<PacketSlab>]>,
    /// Lock that is held while the pool grows.
    growth: Mutex<Growth>,
    /// Bytes of regions that are in use, and their limit.
    large: Arc<AtomicUsize>,
    large_limit: AtomicUsize,
}

/// First address of a slab's packets, in a block that the pool keeps.
#[derive(Clone, Copy)]
struct PacketSlab(NonNull<u8>);

// SAFETY: an address that is not read through here.
unsafe impl Send for PacketSlab {}
// SAFETY: as above.
unsafe impl Sync for PacketSlab {}

#[derive(Default)]
struct Growth {
    /// Number of slabs.
    slabs: usize,
    blocks: Vec<Block>,
    /// Number of slabs that still fit into the last block, and the offset of the next one in it.
    left: usize,
    offset: usize,
    /// Error of the last attempt to grow.
    failed: Option<AllocError>,
}

impl PacketPool {
    /// Makes a pool of at most `limit` packets of `packet_size` bytes each, rounded up to whole
    /// slabs and whole cache lines. Nothing is allocated yet.
    pub fn new(allocator: Arc<dyn PacketAllocator>, packet_size: usize, limit: usize) -> Self {
        Self::checked_by(Vec::new(), allocator, packet_size, limit)
    }

    /// Does the same, with drivers that check the kind of the allocator's memory in addition to
    /// the driver of its own GPU.
    pub fn checked_by(
        drivers: Vec<Arc<dyn Driver>>,
        allocator: Arc<dyn PacketAllocator>,
        packet_size: usize,
        limit: usize,
    ) -> Self {
        let slabs = limit.div_ceil(SLAB).max(1);
        let limit = slabs * SLAB;
        Self(Arc::new(Pool {
            allocator,
            drivers,
            packet_size: packet_size.max(1).next_multiple_of(ALIGN),
            limit,
            free: FreeList::new(limit),
            slabs: (0..slabs).map(|_| OnceLock::new()).collect(),
            growth: Mutex::default(),
            large: Arc::default(),
            large_limit: AtomicUsize::new(usize::MAX),
        }))
    }

    /// Takes a packet, with `len` bytes in use. `None` when the limit is reached, when the
    /// allocator has no more memory, or when `len` is more than a packet holds.
    #[inline]
    pub fn take_with_len(&self, len: usize) -> Option<Packet> {
        if len > self.0.packet_size {
            return None;
        }
        let mut packet = self.take()?;
        packet.set_len(len);
        Some(packet)
    }

    /// Takes a packet that holds a copy of host memory. `None` as for
    /// [`take_with_len`](Self::take_with_len), and when either side is not host memory.
    #[inline]
    pub fn take_copy(&self, of: MemRef<'_>) -> Option<Packet> {
        let mut packet = self.take_with_len(of.len())?;
        copy_now(packet.view_mut(), of).ok()?;
        Some(packet)
    }

    /// Takes memory of the allocator for a message of `len` bytes that is too long for a packet.
    /// It is not a packet: dropping its last handle frees it, and it does not count towards the
    /// limit.
    ///
    /// # Errors
    /// The allocator has too little memory, or has broken its promise; or
    /// [`limit_large`](Self::limit_large) is reached.
    pub fn region(&self, len: usize) -> Result<Region, AllocError> {
        let pool = &*self.0;
        let permit = Permit::of(&pool.large, len, pool.large_limit.load(Ordering::Relaxed))?;
        let block = Block::take(&*pool.allocator, &pool.drivers, (len.max(1), ALIGN))?;
        let (base, id) = (block.base(), block.id().unwrap_or_else(host_id));
        let (kind, gpu) = (pool.allocator.kind(), pool.allocator.gpu().cloned());
        // SAFETY: the block is that long, of that kind as its allocator promises, and kept by the
        // region's owner.
        Ok(unsafe { Region::from_parts(base, len, kind, id, gpu, Box::new((block, permit))) })
    }

    /// Limits the bytes of the allocator's memory that messages too long for a packet may use at a
    /// time. Initially only the memory itself is the limit.
    pub fn limit_large(&self, bytes: usize) {
        self.0.large_limit.store(bytes, Ordering::Relaxed);
    }

    /// Returns the GPU whose memory this is, if it is a GPU's.
    pub fn gpu(&self) -> Option<&Arc<dyn Gpu>> {
        self.0.place().gpu()
    }

    /// Returns the number of packets that may be taken at once.
    pub fn limit(&self) -> usize {
        self.0.limit
    }

    /// Returns the number of packets that have memory now, taken or free.
    pub fn allocated(&self) -> usize {
        self.0.growth().slabs * SLAB
    }

    /// Returns the error of the last attempt to grow, if it failed.
    pub fn last_failure(&self) -> Option<AllocError> {
        self.0.growth().failed.clone()
    }

    #[cold]
    fn grow(&self) -> Option<u32> {
        let pool = &*self.0;
        let mut growth = pool.growth();
        // Another thread may have grown the pool, or returned packets, while this one waited.
        if let Some(slot) = pool.free.pop() {
            return Some(slot);
        }
        let cell = pool.slabs.get(growth.slabs)?;
        if growth.failed.as_ref().is_some_and(AllocError::is_broken_promise) {
            return None;
        }
        match pool.new_slab(&mut growth) {
            Ok(slab) => {
                growth.failed = None;
                let _ = cell.set(slab);
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
    fn growth(&self) -> MutexGuard<'_, Growth> {
        self.growth.lock()
    }

    /// Cuts a slab from the last block, or from a fresh one.
    fn new_slab(&self, growth: &mut Growth) -> Result<PacketSlab, AllocError> {
        let kind = self.allocator.kind();
        let size = self.packet_size.saturating_mul(SLAB);
        if growth.left == 0 {
            let missing = self.slabs.len() - growth.slabs;
            let together = match kind {
                MemKind::Host => 1,
                _ => (DRIVERS_BLOCK / size).clamp(1, missing),
            };
            let block = Block::take(
                &*self.allocator,
                &self.drivers,
                (size.saturating_mul(together), ALIGN),
            )?;
            growth.blocks.push(block);
            (growth.left, growth.offset) = (together, 0);
        }
        let none = AllocError::OutOfMemory { bytes: size, kind };
        let base = growth.blocks.last().ok_or(none)?.base();
        // SAFETY: the block has room for another slab, there.
        let slab = PacketSlab(unsafe { base.add(growth.offset) });
        growth.left -= 1;
        growth.offset += size;
        Ok(slab)
    }

    #[inline]
    fn chunk(&self, slot: u32) -> Option<NonNull<u8>> {
        let (slab, at) = (slot as usize / SLAB, slot as usize % SLAB);
        let PacketSlab(base) = self.slabs.get(slab)?.get()?;
        // SAFETY: a slab has `SLAB` packets, in a block that the pool keeps.
        Some(unsafe { base.add(at * self.packet_size) })
    }
}

/// Bytes of a large message, counted until this is dropped.
#[derive(Debug)]
struct Permit(Arc<AtomicUsize>, usize);

impl Permit {
    fn of(used: &Arc<AtomicUsize>, bytes: usize, limit: usize) -> Result<Self, AllocError> {
        let more = |used: usize| used.checked_add(bytes).filter(|&sum| sum <= limit);
        match used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Self(used.clone(), bytes)),
            Err(used) => Err(AllocError::LargeLimit { bytes, used, limit }),
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::Relaxed);
    }
}

// SAFETY: all packets are cut to the pool's size from blocks of its allocator, which promises
// their kind. The pool holds the blocks, and this handle the pool.
unsafe impl PacketSource for PacketPool {
    #[inline]
    fn take(&self) -> Option<Packet> {
        let slot = self.0.free.pop().or_else(|| self.grow())?;
        let base = self.0.chunk(slot)?;
        let home: Arc<dyn PacketHome> = self.0.clone();
        // SAFETY: the free list gave this slot to this caller alone. Its chunk is `packet_size`
        // bytes of a slab that lives as long as the pool, which `home` keeps alive.
        Some(unsafe { Packet::from_parts(base, slot, home) })
    }

    fn kind(&self) -> MemKind {
        self.0.allocator.kind()
    }

    fn packet_size(&self) -> usize {
        self.0.packet_size
    }

    fn limit(&self) -> usize {
        self.0.limit
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

    fn extent(&self, slot: u32) -> (usize, usize) {
        let slab = self.slabs.get(slot as usize / SLAB).and_then(OnceLock::get);
        (slab.map_or(0, |PacketSlab(base)| base.addr().get()), self.packet_size * SLAB)
    }
}

impl fmt::Debug for PacketPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (size, kind) = (self.0.packet_size, self.0.allocator.kind());
        write!(f, "PacketPool({kind}, {size} B, {} of {})", self.allocated(), self.0.limit)
    }
}

#[cfg(test)]
#[path = "pool/tests.rs"]
mod tests;
