//! Memory of this side that the NIC reads and writes.

#![expect(unsafe_code, reason = "structures of libibverbs, and memory by address")]

use super::sys::{AccessFlags, MemoryRegion, ProtectionDomain, VerbsError};
use crate::mem::{Buffer, MemKind, MemMut, MemRef, Packet, Region};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Host memory of the device's own, registered.
#[derive(Debug)]
pub(super) struct Area {
    // Before the memory that it is about.
    registration: MemoryRegion,
    region: Region,
}

impl Area {
    /// Allocates and registers zeroed memory.
    pub(super) fn new(domain: &Arc<ProtectionDomain>, len: usize) -> Result<Self, VerbsError> {
        let region = Region::host(len.max(1));
        // SAFETY: the region stays allocated as long as this, which ends the registration first.
        let registration = unsafe {
            domain.register(region.addr() as *mut u8, region.len(), AccessFlags::LOCAL_WRITE)
        }?;
        Ok(Self { registration, region })
    }

    /// Returns the key by which this side's requests name it.
    pub(super) fn key(&self) -> u32 {
        self.registration.lkey()
    }

    /// Returns the address of a part of it.
    pub(super) fn addr(&self, offset: usize) -> u64 {
        (self.region.addr() + offset) as u64
    }

    /// Returns a part of it.
    #[inline(always)]
    pub(super) fn part(&self, offset: usize, len: usize) -> Option<MemRef<'_>> {
        self.region.part(offset, len)
    }

    /// Returns a part of it, for writing.
    pub(super) fn part_mut(&self, offset: usize, len: usize) -> Option<MemMut<'_>> {
        self.region.part_mut(offset, len)
    }
}

/// Returns the address and length of a buffer's bytes, if they are one piece of memory that stays
/// in place when the buffer moves. That is host memory, or a region of a GPU's.
pub(super) fn addresses(buffer: &Buffer) -> Option<(*mut u8, usize)> {
    match buffer {
        Buffer::Vec(_)
        | Buffer::Bytes(_)
        | Buffer::BytesMut(_)
        | Buffer::Packet(_)
        | Buffer::Region(_) => {
            let bytes = buffer.view();
            let is_known = match bytes.place().kind() {
                MemKind::Host | MemKind::Pinned => true,
                MemKind::Device(_) => matches!(buffer, Buffer::Region(_)),
                MemKind::Managed(_) | MemKind::Unknown => false,
            };
            (is_known && !buffer.is_empty()).then(|| (bytes.as_ptr().cast_mut(), bytes.len()))
        }
        _ => None,
    }
}

/// Two words of a connection: one that the peer writes, and one from which this side writes the
/// peer's. Registered by themselves, so that a peer reaches only its own.
#[derive(Debug)]
pub(super) struct CreditWords {
    registration: MemoryRegion,
    words: Box<[AtomicU64; 2]>,
}

impl CreditWords {
    pub(super) fn new(domain: &Arc<ProtectionDomain>) -> Result<Self, VerbsError> {
        let words = Box::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        let at = words.as_ptr().cast::<u8>().cast_mut();
        // SAFETY: the words stay in place as long as this, which ends the registration first. They
        // are atomic: the NIC may write them at any time.
        let registration = unsafe { domain.register(at, size_of::<[AtomicU64; 2]>(), access) }?;
        Ok(Self { registration, words })
    }

    /// Returns the value that the peer has written.
    #[inline(always)]
    pub(super) fn received(&self) -> u64 {
        self.words[0].load(Ordering::Acquire)
    }

    /// Sets the value to write to the peer, and returns its address.
    pub(super) fn to_be_sent(&self, value: u64) -> u64 {
        self.words[1].store(value, Ordering::Release);
        self.words[1].as_ptr() as u64
    }

    /// Returns the address that the peer writes to.
    pub(super) fn addr(&self) -> u64 {
        self.words[0].as_ptr() as u64
    }

    /// Returns the remote key of the words, for the peer.
    pub(super) fn remote_key(&self) -> u32 {
        self.registration.rkey()
    }

    /// Returns the key by which this side's requests name them.
    pub(super) fn key(&self) -> u32 {
        self.registration.lkey()
    }
}

/// Registrations of the slabs that packets lie in.
#[derive(Debug)]
pub(super) struct Slabs {
    domain: Arc<ProtectionDomain>,
    /// Regions, sorted by address.
    known: Vec<MemoryRegion>,
}

impl Slabs {
    pub(super) fn new(domain: Arc<ProtectionDomain>) -> Self {
        Self { domain, known: Vec::new() }
    }

    /// Returns the key of the slab in which a packet lies, registered when it is first seen.
    ///
    /// # Safety
    /// The packet's pool outlives this.
    pub(super) unsafe fn key(&mut self, packet: &Packet) -> Result<u32, VerbsError> {
        let addr = packet.addr();
        let at = self.known.partition_point(|slab| slab.addr() + slab.len() <= addr);
        if let Some(slab) = self.known.get(at)
            && slab.addr() <= addr
        {
            return Ok(slab.lkey());
        }
        let (base, len) = packet.extent();
        // SAFETY: a pool keeps its slabs as long as it lives, which is longer than this, as
        // promised.
        let slab = unsafe { self.domain.register(base as *mut u8, len, AccessFlags::LOCAL_WRITE) }?;
        let key = slab.lkey();
        self.known.insert(at, slab);
        Ok(key)
    }
}
