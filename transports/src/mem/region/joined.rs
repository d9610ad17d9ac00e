//! Regions one behind the other, as one; and whether a region is anybody else's.

use super::{Allocation, Region};
use crate::mem::MemKind;
use std::any::Any;
use std::sync::Arc;

/// The regions that one is made of.
struct Joined {
    parts: Vec<Region>,
}

/// A region of which there is no other handle, no part and no slice: nobody can use it but by way
/// of this, and dropping it gives the memory back, or to its keeper.
pub struct SoleRegion(Allocation);

impl SoleRegion {
    /// The region again.
    pub fn into_region(self) -> Region {
        Region(Arc::new(self.0))
    }
}

impl std::fmt::Debug for SoleRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SoleRegion({} {:p}+{})", self.0.kind, self.0.base, self.0.len)
    }
}

impl Region {
    /// Regions of GPUs' memory that lie one behind the other, as a region that keeps all of them.
    /// `None` if they do not lie so, or are memory that the program answers for.
    ///
    /// Where they are of several GPUs, it is said to be of the first's, with all of its parts: that
    /// one has to reach all of them, since its engines are asked. Engines go across the borders. No
    /// handle stands for all of it (gpu.md, VMM rule 2): it is exported part by part.
    pub fn joined(parts: Vec<Self>) -> Option<Self> {
        let first = parts.first()?;
        let (base, kind, id, gpu) = (first.0.base, first.kind(), first.id(), first.gpu().cloned());
        let follows = |pair: &[Self]| match pair {
            [one, next] => one.addr().checked_add(one.len()) == Some(next.addr()),
            _ => false,
        };
        let can_be =
            |part: &Self| matches!(part.kind(), MemKind::Device(_)) && part.0.watch.is_never();
        if !parts.windows(2).all(follows) || !parts.iter().all(can_be) {
            return None;
        }
        let len = parts.iter().map(Self::len).sum();
        // SAFETY: the range is that of the parts, without a gap, and they keep it; it is memory of
        // a device, so that nobody follows the pointer but engines.
        Some(unsafe { Self::from_parts(base, len, kind, id, gpu, Box::new(Joined { parts })) })
    }

    /// Whether it is, or is a part of, a region that was [joined](Self::joined).
    pub fn is_joined(&self) -> bool {
        self.joint().is_some()
    }

    /// The regions that a [joined](Self::joined) one, or a part of one, reaches into, in their
    /// order. None of any other.
    pub fn joined_parts(&self) -> Vec<Self> {
        let Some(Joined { parts }) = self.joint() else { return Vec::new() };
        let end = self.addr().saturating_add(self.len());
        let reaches = |part: &&Self| {
            part.addr() < end && self.addr() < part.addr().saturating_add(part.len())
        };
        parts.iter().filter(reaches).cloned().collect()
    }

    fn joint(&self) -> Option<&Joined> {
        let owner: &(dyn Any + Send + Sync) = &**self.root().0.owner.as_ref()?;
        owner.downcast_ref()
    }

    /// Whether there are other handles to it, parts of it, or slices: in an operation, a
    /// registration, or anybody's hands.
    pub fn is_held_elsewhere(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// The region as its only handle.
    ///
    /// # Errors
    /// There are others: it comes back.
    pub fn into_sole(self) -> Result<SoleRegion, Self> {
        Arc::try_unwrap(self.0).map(SoleRegion).map_err(Self)
    }
}
