//! Zeroed host memory that begins with a cache line.
//!
//! The allocator's own memory begins 16 bytes behind one, as a rule, and `memcpy` is slower with
//! it: `carrack perf bandwidth --op put --size 16K` shows 0.84 of the bandwidth of aligned
//! memory (two-core Intel Xeon, 2026-11-30).

use crate::mem::pool::ALIGN;
use std::ptr::NonNull;

/// A boxed slice, held as a pointer and freed as a box. A box may not be moved while a pointer
/// leads into it.
pub(super) struct Lines(*mut [u8]);

// SAFETY: the pointer is the only one that frees; nothing reads through it here.
unsafe impl Send for Lines {}
// SAFETY: as above.
unsafe impl Sync for Lines {}

impl Lines {
    /// Allocates `len` bytes, and returns the first one's address with their owner.
    pub(super) fn zeroed(len: usize) -> (NonNull<u8>, Self) {
        // A line more than is used: the allocator would zero aligned memory page by page, while it
        // gets other memory zeroed from the system, at its first use.
        let bytes = vec![0_u8; len.saturating_add(ALIGN - 1)].into_boxed_slice();
        let owner = Self(Box::into_raw(bytes));
        let start = owner.0.cast::<u8>();
        // SAFETY: the next line begins `ALIGN - 1` bytes further at most, which are allocated.
        let line = unsafe { start.add(start.addr().wrapping_neg() % ALIGN) };
        (NonNull::new(line).unwrap_or(NonNull::dangling()), owner)
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `Box::into_raw` and is freed only here.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::Region;

    #[test]
    fn miri_host_memory_begins_with_a_cache_line() {
        for len in [0, 1, 63, 64, 100, 5000] {
            let region = Region::host(len);
            assert_eq!((region.addr() % ALIGN, region.len()), (0, len));
            region.whole().write(&vec![7; len]).unwrap();
            assert_eq!(region.whole().to_vec().unwrap(), vec![7; len]);
        }
    }
}
