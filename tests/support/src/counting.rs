//! An allocator that counts, for programs that declare it as their global one.

#![expect(unsafe_code, reason = "an allocator of the process")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, with the requests of each thread and the bytes that the process holds.
pub struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Allocations of this thread.
    pub static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Bytes that this thread has allocated.
    pub static BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Returns the bytes that the process holds. Other threads allocate too.
pub fn live() -> usize {
    LIVE.load(Ordering::Relaxed)
}

fn count(size: usize) {
    ALLOCATIONS.with(|count| count.set(count.get() + 1));
    BYTES.with(|bytes| bytes.set(bytes.get() + size));
    LIVE.fetch_add(size, Ordering::Relaxed);
}

// SAFETY: every call is passed on to the system's allocator with its own arguments.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}
