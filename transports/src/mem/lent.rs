//! Memory of the program, which the program may have freed.

use super::{MemKind, Region};
use crate::gpu::Driver;
use std::sync::Weak;
use std::sync::atomic::{AtomicU8, Ordering};

/// A region's GPU memory is no longer the allocation that the region was made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the {kind} memory at {addr:#x} has been freed{}: make its region anew after allocating, and \
     tell invalidate_memory before freeing (host memory that lies there now: say MR_HOST)",
    if *.again { ", and its address allocated again" } else { "" }
)]
pub struct Freed {
    /// The address.
    pub addr: usize,
    /// The kind of the freed memory.
    pub kind: MemKind,
    /// `true` if another allocation lies there now.
    pub again: bool,
}

/// Check that a region's memory is still there, made before the region is used.
#[derive(Debug)]
pub(super) struct Watch(AtomicU8);

impl Watch {
    const NEVER: u8 = 0;
    const JUST_ASKED: u8 = 1;
    const EACH_TIME: u8 = 2;

    /// Makes no check: for memory that stays as long as its region, and where no check is wanted.
    pub(super) const fn never() -> Self {
        Self(AtomicU8::new(Self::NEVER))
    }

    /// Checks each use except the first: for a region whose memory was looked up just now.
    pub(super) const fn just_asked() -> Self {
        Self(AtomicU8::new(Self::JUST_ASKED))
    }

    /// Checks each use: for a region whose memory was not looked up just now.
    pub(super) const fn each_time() -> Self {
        Self(AtomicU8::new(Self::EACH_TIME))
    }

    /// Returns the check for a part of a region.
    pub(super) fn of_a_part(&self) -> Self {
        match self.0.load(Ordering::Relaxed) {
            Self::NEVER => Self::never(),
            _ => Self::each_time(),
        }
    }

    /// Returns `true` if no check is ever made.
    #[inline]
    pub(super) fn is_never(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::NEVER
    }

    /// Asks the driver whether the allocation at a region's address is still the one that the
    /// region was made of.
    #[cold]
    pub(super) fn recheck(&self, region: &Region, driver: &Weak<dyn Driver>) -> Result<(), Freed> {
        // A load and a store instead of an exchange: of two threads that use the region at once,
        // both may skip the check.
        if self.0.load(Ordering::Relaxed) == Self::JUST_ASKED {
            self.0.store(Self::EACH_TIME, Ordering::Relaxed);
            return Ok(());
        }
        let Some(driver) = driver.upgrade() else { return Ok(()) };
        match driver.buffer_id(region.addr()) {
            Ok(id) if id == Some(region.id()) => Ok(()),
            Ok(id) => Err(Freed { addr: region.addr(), kind: region.kind(), again: id.is_some() }),
            // The copy will report the driver's error.
            Err(_) => Ok(()),
        }
    }
}
