//! Memory of the program's, which it may have freed.

use super::{MemKind, Region};
use crate::gpu::Driver;
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// Whom to ask whether memory of the program's is still there.
#[derive(Debug)]
pub(super) struct Lent {
    driver: Weak<dyn Driver>,
    /// It was asked just now.
    fresh: AtomicBool,
}

impl Lent {
    /// For a region of which its driver has just said what it is.
    pub(super) fn by(driver: Weak<dyn Driver>) -> Self {
        Self { driver, fresh: AtomicBool::new(true) }
    }

    /// The same for a part of the region.
    pub(super) fn again(&self) -> Self {
        Self { driver: self.driver.clone(), fresh: AtomicBool::new(false) }
    }

    #[cold]
    pub(super) fn recheck(&self, region: &Region) -> Result<(), Freed> {
        // Not by an exchange: two threads that post the region at once may both take it for fresh.
        if self.fresh.load(Ordering::Relaxed) {
            self.fresh.store(false, Ordering::Relaxed);
            return Ok(());
        }
        let Some(driver) = self.driver.upgrade() else { return Ok(()) };
        match driver.buffer_id(region.addr()) {
            Ok(id) if id == Some(region.id()) => Ok(()),
            Ok(id) => Err(Freed { addr: region.addr(), kind: region.kind(), again: id.is_some() }),
            // What is wrong with the driver, the copy will tell.
            Err(_) => Ok(()),
        }
    }
}
