//! A cheap clock, only for the question "has about this much time passed?".

#![cfg_attr(target_arch = "x86_64", expect(unsafe_code, reason = "the cycle counter is read"))]

/// Returns ticks since some moment. On x86-64 it reads the processor's own counter, which is never
/// a system call; the standard clock is one on some virtual machines. Elsewhere ticks are
/// nanoseconds.
#[inline(always)]
pub fn ticks() -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // SAFETY: the instruction exists on every x86-64 and touches no memory.
        unsafe { std::arch::x86_64::_rdtsc() }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    {
        use std::sync::OnceLock;
        use std::time::Instant;
        static START: OnceLock<Instant> = OnceLock::new();
        u64::try_from(START.get_or_init(Instant::now).elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// Approximate ticks of a microsecond: 1000 for nanoseconds, 2000 to 4000 for current processors.
pub const TICKS_PER_MICROSECOND: u64 = if cfg!(target_arch = "x86_64") { 2500 } else { 1000 };
