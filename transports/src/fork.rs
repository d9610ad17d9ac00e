//! Whether this is still the process that something belongs to.
//!
//! A fork shares its parent's rings, sockets and descriptors: whatever it did with them would be
//! taken for its parent's doing. The C library tells each child of `fork` what it is; to ask costs
//! one load.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

/// Forks between this process and the one that first asked.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// The process that made something.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Owner(u32);

impl Owner {
    /// This process.
    pub fn this_process() -> Self {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            // SAFETY: the function lives as long as the program, and does what a fork may do: it
            // changes an atomic. Should there be no memory to note it in, forks are not noticed.
            unsafe { libc::pthread_atfork(None, None, Some(count)) };
        });
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Whether this process is the one, and no fork of it.
    #[inline(always)]
    pub fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

extern "C" fn count() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}
