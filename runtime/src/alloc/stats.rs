//! Counts of an allocator's or a pool's memory at one rank.

use parking_lot::Mutex;
use std::sync::Arc;

/// Counts of an allocator's or a pool's memory at one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub struct SharedStats {
    /// Allocations that this rank has not released.
    pub allocations: usize,
    /// Allocations that were ever made.
    pub made: u64,
    /// Requested bytes of the present allocations.
    pub in_use: usize,
    /// Bytes that they take up: for an allocator multiples of 2 MiB, for a pool all of its blocks.
    pub held: usize,
    /// The highest value that `in_use` has had.
    pub highest: usize,
}

#[derive(Clone, Default, Debug)]
pub(super) struct AllocCounts(Arc<Mutex<SharedStats>>);

impl AllocCounts {
    pub(super) fn change(&self, change: impl FnOnce(&mut SharedStats)) {
        let mut stats = self.0.lock();
        change(&mut stats);
        stats.highest = stats.highest.max(stats.in_use);
    }

    pub(super) fn get(&self) -> SharedStats {
        *self.0.lock()
    }

    /// Counts an allocation until the result is dropped.
    pub(super) fn allocation(&self, len: usize, held: usize) -> CountGuard {
        self.change(|stats| {
            stats.allocations += 1;
            stats.made += 1;
            stats.in_use += len;
            stats.held += held;
        });
        CountGuard { counts: self.clone(), len, held }
    }
}

pub(super) struct CountGuard {
    counts: AllocCounts,
    len: usize,
    held: usize,
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.counts.change(|stats| {
            stats.allocations -= 1;
            stats.in_use -= self.len;
            stats.held -= self.held;
        });
    }
}
