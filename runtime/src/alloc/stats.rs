//! What there is of an allocator's memory, at one rank.

use std::sync::{Arc, Mutex, PoisonError};

/// What there is of an allocator's memory, or of a pool's, at one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct SharedStats {
    /// Allocations that this rank has not let go of.
    pub allocations: usize,
    /// Allocations that there have been.
    pub made: u64,
    /// Bytes of the former, as they were asked for.
    pub in_use: usize,
    /// Bytes that they take up: of an allocator in multiples of 2 MiB; of a pool its blocks, in use
    /// or not.
    pub held: usize,
    /// The most bytes in use that there have been at a time.
    pub highest: usize,
}

#[derive(Clone, Default, Debug)]
pub(super) struct Counts(Arc<Mutex<SharedStats>>);

impl Counts {
    pub(super) fn change(&self, change: impl FnOnce(&mut SharedStats)) {
        let mut stats = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut stats);
        stats.highest = stats.highest.max(stats.in_use);
    }

    pub(super) fn get(&self) -> SharedStats {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An allocation, which is counted until this is dropped.
    pub(super) fn allocation(&self, len: usize, held: usize) -> Counted {
        self.change(|stats| {
            stats.allocations += 1;
            stats.made += 1;
            stats.in_use += len;
            stats.held += held;
        });
        Counted { counts: self.clone(), len, held }
    }
}

pub(super) struct Counted {
    counts: Counts,
    len: usize,
    held: usize,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.counts.change(|stats| {
            stats.allocations -= 1;
            stats.in_use -= self.len;
            stats.held -= self.held;
        });
    }
}
