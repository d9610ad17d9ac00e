//! Memory of an allocator, checked before its first use.
//!
//! An allocator may be the program's code. Its errors show far away, as a crash in a copy, or as a
//! message that turns into another. So all checks that are possible are made here, where a pool
//! grows and time does not matter.

use super::{AllocError, AllocId, Chunk, MemKind, PacketAllocator};
use crate::gpu::{Driver, Extent, Gpu};
use parking_lot::{Mutex, MutexGuard};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;

/// Lowest address that a program's memory can have.
const FIRST_PAGE: usize = 4096;

/// Memory that passed the checks. Dropping it frees the memory.
#[derive(Debug)]
pub(super) struct Block {
    /// Claim, dropped before the chunk: the chunk's addresses may be given out again as soon as it
    /// is freed.
    _claim: AddressClaim,
    chunk: Chunk,
    id: Option<AllocId>,
}

impl Block {
    /// Takes memory of an allocator and checks it: with the allocator's GPU, or with the drivers
    /// if it has none.
    pub(super) fn take(
        allocator: &dyn PacketAllocator,
        drivers: &[Arc<dyn Driver>],
        (len, align): (usize, usize),
    ) -> Result<Self, AllocError> {
        let kind = allocator.kind();
        check_word(kind, allocator.gpu())?;
        let layout = Layout::from_size_align(len, align)
            .map_err(|_| AllocError::OutOfMemory { bytes: len, kind })?;
        let chunk = allocator.allocate(layout)?;
        let base = chunk.base().as_ptr() as usize;
        if chunk.len() < len {
            return Err(AllocError::TooShort { base, got: chunk.len(), want: len });
        }
        if !base.is_multiple_of(align) {
            return Err(AllocError::Misaligned { base, align });
        }
        if base < FIRST_PAGE || base.checked_add(len).is_none() {
            return Err(AllocError::Nowhere { base, len });
        }
        let asked = Asked { own: allocator.gpu(), drivers };
        let id = asked.check(kind, base, len)?;
        // Last, so that memory that failed a check is not claimed: other pools may have it.
        let claim = AddressClaim::of(base, len)?;
        Ok(Self { _claim: claim, chunk, id })
    }

    /// Returns the address of its first byte.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.chunk.base()
    }

    /// Returns the driver's name of the allocation, if a driver knows it.
    pub(super) fn id(&self) -> Option<AllocId> {
        self.id
    }
}

/// Checks that packets can be made of the kind of memory that an allocator claims.
fn check_word(kind: MemKind, gpu: Option<&Arc<dyn Gpu>>) -> Result<(), AllocError> {
    let wrong = |why| Err(AllocError::Unsuitable { kind, why });
    match (kind, gpu) {
        (MemKind::Host | MemKind::Pinned, _) => Ok(()),
        (MemKind::Device(uuid), Some(gpu)) if gpu.info().uuid == uuid => Ok(()),
        (MemKind::Device(_), Some(_)) => wrong("its `gpu` is another one"),
        (MemKind::Device(_), None) => {
            wrong("its `gpu` is none, and an engine has to copy what arrives")
        }
        (MemKind::Managed(_), _) => wrong("managed memory moves while it is used"),
        (MemKind::Unknown, _) => wrong("an allocator has to say what its memory is"),
    }
}

/// Sources of knowledge about an address.
struct Asked<'a> {
    own: Option<&'a Arc<dyn Gpu>>,
    drivers: &'a [Arc<dyn Driver>],
}

impl Asked<'_> {
    /// Checks that a whole range is of one kind, as far as a driver can tell. Returns the name of
    /// the allocation in which the range begins.
    fn check(&self, said: MemKind, base: usize, len: usize) -> Result<Option<AllocId>, AllocError> {
        let (mut at, mut id, end) = (base, None, base + len);
        while at < end {
            let Some(found) = self.classify(said, at) else { return Ok(id) };
            let kind = found.as_ref().map_or(MemKind::Host, |extent| extent.kind);
            if kind != said && !(said == MemKind::Host && kind == MemKind::Pinned) {
                return Err(AllocError::WrongKind { at, said, found: kind });
            }
            // In host memory that no driver knows, only the first and the last byte are asked
            // about.
            let next = found.as_ref().map_or(if at < end - 1 { end - 1 } else { end }, Extent::end);
            id = id.or(found.map(|extent| extent.id));
            at = next.max(at + 1);
        }
        Ok(id)
    }

    /// Returns the driver's knowledge of an address. The inner `None`: host memory that no driver
    /// knows. The outer `None`: no driver can tell.
    fn classify(&self, said: MemKind, addr: usize) -> Option<Option<Extent>> {
        if let Some(gpu) = self.own {
            return gpu.classify(addr).ok();
        }
        let known = self.drivers.iter().find_map(|driver| driver.classify(addr).ok().flatten());
        // Pinned memory of a driver that is not among these looks like host memory to them.
        known.map(Some).or((said == MemKind::Host).then_some(None))
    }
}

/// Addresses that belong to a pool of this process while this lives.
#[derive(Debug)]
struct AddressClaim(usize);

/// Lengths of all claims, by their first addresses.
static CLAIMS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn claims() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    CLAIMS.lock()
}

impl AddressClaim {
    fn of(base: usize, len: usize) -> Result<Self, AllocError> {
        let mut claims = claims();
        // Claims do not overlap each other: only the last one that starts before this one's end
        // can reach into it.
        if let Some((&other, &other_len)) = claims.range(..base + len).next_back()
            && other + other_len > base
        {
            return Err(AllocError::Overlap { base, len, other, other_len });
        }
        claims.insert(base, len);
        Ok(Self(base))
    }
}

impl Drop for AddressClaim {
    fn drop(&mut self) {
        claims().remove(&self.0);
    }
}
