//! Detection of forks: "is this still the process that made this object?".
//!
//! A fork shares its parent's rings, sockets and descriptors: peers would take its use of them for
//! the parent's. The C library calls a handler in each child of `fork`; a check costs one load.

#![expect(unsafe_code, reason = "a handler of forks is registered")]

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of forks between the first process that asked and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process that made something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner(u32);

impl Owner {
    /// Returns this process as an owner.
    pub fn this_process() -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: the function lives as long as the program, and changes only an atomic, which
            // is allowed after a fork. If the C library has no memory to note it, forks go
            // unnoticed.
            unsafe { libc::pthread_atfork(None, None, Some(count)) };
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Returns `true` if this process made the object, `false` in a fork of that process.
    #[inline(always)]
    pub fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}
