//! A memory barrier of which one side is free.
//!
//! A producer that publishes a message and then asks "is my consumer still looking?" needs a full
//! barrier between the two, or the answer may be older than the message. In the path of every message
//! that barrier would cost more than the message: it waits for the slot's cache line to arrive from the
//! other core. So the side that is rare pays for both: [`heavy`] makes the kernel run a barrier on every
//! running thread of all registered processes (`membarrier`, `GLOBAL_EXPEDITED`), and [`light`] only
//! keeps the compiler in order. Where the kernel refuses, both sides use a real fence; [`Barrier`] says
//! which it is.

use super::primitives::{Ordering, fence};

/// Which barriers this process can rely on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Barrier {
    /// This process's threads can be reached by another's [`heavy`].
    pub reachable: bool,
    /// This process can call [`heavy`].
    pub heavy: bool,
}

impl Barrier {
    /// Asks the kernel, and registers this process as one that can be reached. Cheap when repeated.
    #[cfg(not(any(miri, loom)))]
    pub fn of_this_process() -> Self {
        use std::sync::OnceLock;
        static ANSWER: OnceLock<Barrier> = OnceLock::new();
        *ANSWER.get_or_init(|| {
            const GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
            const REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;
            let ask = |command: libc::c_int| {
                // SAFETY: membarrier takes three integers and touches no memory of ours.
                unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) }
            };
            let offered = ask(0);
            let has = |command: libc::c_int| offered > 0 && offered & libc::c_long::from(command) != 0;
            Self {
                reachable: has(REGISTER_GLOBAL_EXPEDITED) && ask(REGISTER_GLOBAL_EXPEDITED) == 0,
                heavy: has(GLOBAL_EXPEDITED) && ask(GLOBAL_EXPEDITED) == 0,
            }
        })
    }

    /// Under Miri and loom there is no kernel to ask: real fences on both sides, which is also what
    /// makes the models meaningful.
    #[cfg(any(miri, loom))]
    pub fn of_this_process() -> Self {
        Self { reachable: false, heavy: false }
    }
}

/// The frequent side's half. `fenced`: the other side cannot run [`heavy`], or this process cannot be
/// reached by it, so a real fence is needed here.
#[inline(always)]
pub fn light(fenced: bool) {
    if fenced {
        fence(Ordering::SeqCst);
    } else {
        #[cfg(not(loom))]
        super::primitives::compiler_fence(Ordering::SeqCst);
    }
}

/// The rare side's half.
pub fn heavy(barrier: Barrier) {
    // Needed in any case: the kernel's barrier reaches those who registered, and our own thread must
    // be in order with those that use real fences.
    fence(Ordering::SeqCst);
    #[cfg(not(any(miri, loom)))]
    if barrier.heavy {
        const GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
        // SAFETY: as above.
        unsafe { libc::syscall(libc::SYS_membarrier, GLOBAL_EXPEDITED, 0, 0) };
    }
    #[cfg(any(miri, loom))]
    let _ = barrier;
}
