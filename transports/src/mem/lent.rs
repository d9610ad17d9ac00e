//! Memory of the program's, which it may have freed.

use super::{MemKind, Region};
use crate::gpu::Driver;
use std::sync::Weak;
use std::sync::atomic::{AtomicU8, Ordering};

/// Memory of a GPU that is not the allocation any more that it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the {kind} memory at {addr:#x} has been freed{}: make its region anew after allocating, and tell invalidate_memory \
     before freeing (host memory that lies there now: say MR_HOST)",
    if *.again { ", and its address allocated again" } else { "" }
)]
pub struct Freed {
    /// The address.
    pub addr: usize,
    /// What lay there.
    pub kind: MemKind,
    /// Whether another allocation lies there now.
    pub again: bool,
}

/// Whether it is to be asked, before a region of the program's memory is used, if the memory is
/// still there.
#[derive(Debug)]
pub(super) struct Watch(AtomicU8);

impl Watch {
    const NEVER: u8 = 0;
    const JUST_ASKED: u8 = 1;
    const EACH_TIME: u8 = 2;

    /// For memory that stays as long as its region, and for what is not to be asked about.
    pub(super) const fn never() -> Self {
        Self(AtomicU8::new(Self::NEVER))
    }

    /// For a region that was made of what was just asked: its first use costs no further question.
    pub(super) const fn just_asked() -> Self {
        Self(AtomicU8::new(Self::JUST_ASKED))
    }

    /// For a region of which nobody was asked just now.
    pub(super) const fn each_time() -> Self {
        Self(AtomicU8::new(Self::EACH_TIME))
    }

    /// For a part of a region.
    pub(super) fn of_a_part(&self) -> Self {
        match self.0.load(Ordering::Relaxed) {
            Self::NEVER => Self::never(),
            _ => Self::each_time(),
        }
    }

    /// Whether nothing is ever asked.
    #[inline]
    pub(super) fn is_never(&self) -> bool {
        self.0.load(Ordering::Relaxed) == Self::NEVER
    }

    /// Asks the driver whether what lies at a region's address is still what the region was made
    /// of.
    #[cold]
    pub(super) fn recheck(&self, region: &Region, driver: &Weak<dyn Driver>) -> Result<(), Freed> {
        // Not by an exchange: of two threads that use the region at once both may find that it was
        // just asked.
        if self.0.load(Ordering::Relaxed) == Self::JUST_ASKED {
            self.0.store(Self::EACH_TIME, Ordering::Relaxed);
            return Ok(());
        }
        let Some(driver) = driver.upgrade() else { return Ok(()) };
        match driver.buffer_id(region.addr()) {
            Ok(id) if id == Some(region.id()) => Ok(()),
            Ok(id) => Err(Freed { addr: region.addr(), kind: region.kind(), again: id.is_some() }),
            // What is wrong with the driver, the copy will tell.
            Err(_) => Ok(()),
        }
    }
}
