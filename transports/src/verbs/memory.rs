//! Memory of this side that the NIC reads and writes.

use super::sys::{Access, MemoryRegion, ProtectionDomain, VerbsError};
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
    /// Zeroed memory.
    pub(super) fn new(domain: &Arc<ProtectionDomain>, len: usize) -> Result<Self, VerbsError> {
        let region = Region::host(len.max(1));
        // SAFETY: the region stays allocated as long as this, which ends the registration first.
        let registration = unsafe {
            domain.register(region.addr() as *mut u8, region.len(), Access::LOCAL_WRITE)
        }?;
        Ok(Self { registration, region })
    }

    /// The key by which this side's requests name it.
    pub(super) fn key(&self) -> u32 {
        self.registration.lkey()
    }

    /// Where a part of it begins.
    pub(super) fn addr(&self, offset: usize) -> u64 {
        (self.region.addr() + offset) as u64
    }

    /// A part of it.
    #[inline(always)]
    pub(super) fn part(&self, offset: usize, len: usize) -> Option<MemRef<'_>> {
        self.region.part(offset, len)
    }

    /// A part of it, to be written.
    pub(super) fn part_mut(&self, offset: usize, len: usize) -> Option<MemMut<'_>> {
        self.region.part_mut(offset, len)
    }
}

/// Where a buffer's bytes are, if they are memory in one piece, which stays there wherever the
/// buffer goes: of the host, or a region's of a GPU.
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
/// peer's. Registered by themselves, so that a peer reaches its own and nobody else's.
#[derive(Debug)]
pub(super) struct Words {
    registration: MemoryRegion,
    words: Box<[AtomicU64; 2]>,
}

impl Words {
    pub(super) fn new(domain: &Arc<ProtectionDomain>) -> Result<Self, VerbsError> {
        let words = Box::new([AtomicU64::new(0), AtomicU64::new(0)]);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let at = words.as_ptr().cast::<u8>().cast_mut();
        // SAFETY: the words stay where they are as long as this, which ends the registration first.
        // They are atomic: the NIC may write them at any time.
        let registration = unsafe { domain.register(at, size_of::<[AtomicU64; 2]>(), access) }?;
        Ok(Self { registration, words })
    }

    /// What the peer has written.
    #[inline(always)]
    pub(super) fn received(&self) -> u64 {
        self.words[0].load(Ordering::Acquire)
    }

    /// Sets what is to be written to the peer, and says where it stands.
    pub(super) fn to_be_sent(&self, value: u64) -> u64 {
        self.words[1].store(value, Ordering::Release);
        self.words[1].as_ptr() as u64
    }

    /// Where the peer writes.
    pub(super) fn addr(&self) -> u64 {
        self.words[0].as_ptr() as u64
    }

    /// The key by which the peer names them.
    pub(super) fn remote_key(&self) -> u32 {
        self.registration.rkey()
    }

    /// The key by which this side's requests name them.
    pub(super) fn key(&self) -> u32 {
        self.registration.lkey()
    }
}

/// Registrations of the slabs that packets lie in.
#[derive(Debug)]
pub(super) struct Slabs {
    domain: Arc<ProtectionDomain>,
    /// In the order of their addresses.
    known: Vec<MemoryRegion>,
}

impl Slabs {
    pub(super) fn new(domain: Arc<ProtectionDomain>) -> Self {
        Self { domain, known: Vec::new() }
    }

    /// The key of the slab in which a packet lies, registered when it is first seen.
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
        let slab = unsafe { self.domain.register(base as *mut u8, len, Access::LOCAL_WRITE) }?;
        let key = slab.lkey();
        self.known.insert(at, slab);
        Ok(key)
    }
}
