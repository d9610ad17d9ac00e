//! Regions one behind the other, as one region; regions with a single handle.

use super::{Allocation, Region};
use crate::mem::MemKind;
use std::any::Any;
use std::sync::Arc;

/// The regions that a joined one is made of.
struct Joined {
    parts: Vec<Region>,
}

/// A region without another handle, part or slice, so that all use goes through this one. Dropping
/// it returns the memory, or gives it to its keeper.
pub struct SoleRegion(Allocation);

impl SoleRegion {
    /// Returns the region as a shared handle.
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
    /// Joins regions of GPU memory that lie one behind the other into a region that keeps all of
    /// them. `None` if they do not lie so, or are memory of the program.
    ///
    /// If they are of several GPUs, the joined region and its parts count as the first GPU's. That
    /// GPU has to reach all of them, since its engines copy, across the borders. No handle stands
    /// for the whole (gpu.md, VMM rule 2), so it is exported part by part.
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
        // SAFETY: the range is that of the parts, without a gap, and they keep it. It is memory of
        // a device, so that only engines follow the pointer.
        Some(unsafe { Self::from_parts(base, len, kind, id, gpu, Box::new(Joined { parts })) })
    }

    /// Returns `true` if it is, or is a part of, a region that was [joined](Self::joined).
    pub fn is_joined(&self) -> bool {
        self.joint().is_some()
    }

    /// Returns the regions that a [joined](Self::joined) one, or a part of one, reaches into, in
    /// their order. Empty for any other region.
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

    /// Returns `true` if there are other handles to it, parts of it, or slices: in an operation,
    /// in a registration, or with the program.
    pub fn is_held_elsewhere(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// Turns the region into its only handle.
    ///
    /// # Errors
    /// The region itself, if there are others.
    pub fn into_sole(self) -> Result<SoleRegion, Self> {
        Arc::try_unwrap(self.0).map(SoleRegion).map_err(Self)
    }
}
