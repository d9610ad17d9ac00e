//! What an allocator gave, looked at before any of it is used.
//!
//! An allocator is somebody else's code, and what it gets wrong shows far away: as a crash in a
//! copy, or as a message that turns into another. So whatever can be known of its memory is asked
//! for here, where a pool grows and time is no matter.

use super::{AllocError, AllocId, Chunk, MemKind, PacketAllocator};
use crate::gpu::{Driver, Extent, Gpu};
use std::alloc::Layout;
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// No memory of a program's lies below this.
const FIRST_PAGE: usize = 4096;

/// Memory that was found to be what it was said to be. Freed when it is dropped.
#[derive(Debug)]
pub(super) struct Block {
    /// Goes before the chunk: its addresses may be given out again as soon as that is gone.
    _claim: Claim,
    chunk: Chunk,
    id: Option<AllocId>,
}

impl Block {
    /// Asks an allocator for memory. Those drivers are asked what it is that the allocator's own
    /// GPU does not know.
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
        // Last: nobody else is kept from memory that is not used here.
        let claim = Claim::of(base, len)?;
        Ok(Self { _claim: claim, chunk, id })
    }

    /// Where it starts.
    pub(super) fn base(&self) -> NonNull<u8> {
        self.chunk.base()
    }

    /// The driver's name for the allocation, where a driver knows it.
    pub(super) fn id(&self) -> Option<AllocId> {
        self.id
    }
}

/// Whether packets can be made of what an allocator says that it has.
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

/// Who knows what an address is.
struct Asked<'a> {
    own: Option<&'a Arc<dyn Gpu>>,
    drivers: &'a [Arc<dyn Driver>],
}

impl Asked<'_> {
    /// Whether all of a range is of a kind, as far as anybody knows. The name of the allocation
    /// that it begins in.
    fn check(&self, said: MemKind, base: usize, len: usize) -> Result<Option<AllocId>, AllocError> {
        let (mut at, mut id, end) = (base, None, base + len);
        while at < end {
            let Some(found) = self.classify(said, at) else { return Ok(id) };
            let kind = found.as_ref().map_or(MemKind::Host, |extent| extent.kind);
            if kind != said && !(said == MemKind::Host && kind == MemKind::Pinned) {
                return Err(AllocError::WrongKind { at, said, found: kind });
            }
            // Of host memory that no driver knows the last byte is asked about as well as the
            // first, and no more.
            let next = found.as_ref().map_or(if at < end - 1 { end - 1 } else { end }, Extent::end);
            id = id.or(found.map(|extent| extent.id));
            at = next.max(at + 1);
        }
        Ok(id)
    }

    /// What is known of an address; the inner `None` is host memory that is no driver's. The outer
    /// one: nobody can tell.
    fn classify(&self, said: MemKind, addr: usize) -> Option<Option<Extent>> {
        if let Some(gpu) = self.own {
            return gpu.classify(addr).ok();
        }
        let known = self.drivers.iter().find_map(|driver| driver.classify(addr).ok().flatten());
        // Memory that was locked by a driver which is not known here is none of these drivers'.
        known.map(Some).or((said == MemKind::Host).then_some(None))
    }
}

/// Addresses that are a pool's, in this process, for as long as this lives.
#[derive(Debug)]
struct Claim(usize);

/// The lengths of all claims, by where they start.
static CLAIMS: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn claims() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    CLAIMS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Claim {
    fn of(base: usize, len: usize) -> Result<Self, AllocError> {
        let mut claims = claims();
        // Those that are there do not overlap: only the last one that starts before this one's end
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

impl Drop for Claim {
    fn drop(&mut self) {
        claims().remove(&self.0);
    }
}
