//! Hints to the processor.

#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "the prefetch instruction"))]

/// Fetches the cache lines of memory that is read soon. It changes nothing that a program can see:
/// any address will do.
#[inline(always)]
pub fn prefetch(first: *const u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for at in (0..len).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch of any address is allowed, and does nothing where there is no memory.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(first.wrapping_add(at).cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (first, len);
}

/// Fetches the cache lines of memory that is written soon, and takes them from other cores. On a
/// processor that does not know the instruction, it does nothing.
#[inline(always)]
pub fn prefetch_to_write(first: *const u8, len: usize) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    for at in (0..len).step_by(64) {
        // SAFETY: a prefetch reads and writes nothing that a program can see, at any address.
        unsafe {
            std::arch::asm!(
                "prefetchw [{0}]",
                in(reg) first.wrapping_add(at),
                options(nostack, preserves_flags, readonly)
            );
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (first, len);
}
