//! A clock that costs nothing to read and is good for nothing but "has some time passed?".

/// Ticks since some moment: the processor's own counter where there is one (never a system call,
/// which the standard clock is on some virtual machines), else nanoseconds.
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

/// About so many ticks a microsecond: 1000 for nanoseconds, 2000 to 4000 for processors of these
/// years.
pub const TICKS_PER_MICROSECOND: u64 = if cfg!(target_arch = "x86_64") { 2500 } else { 1000 };
