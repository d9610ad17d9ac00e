//! A memory barrier of which one side is free.
//!
//! A producer that publishes a message and then asks "is my consumer still looking?" needs a full
//! barrier between the two. Otherwise the answer may be older than the message. In the path of
//! every message that barrier would cost more than the message. It waits for the slot's cache line
//! to arrive from the other core. So the side that is rare pays for both: [`heavy`] makes the
//! kernel run a barrier on every running thread of all registered processes (`membarrier`,
//! `GLOBAL_EXPEDITED`), and [`light`] only keeps the compiler in order. Where the kernel refuses,
//! both sides use a real fence; [`Barrier`] says which it is.
//!
//! The kernel is asked once, at the start. A later refusal (from a seccomp filter that the program
//! installs) comes too late. Other threads have left out their fences, and no other call makes the
//! cores of other processes run a barrier. So it ends the process, and says why.

#![allow(unsafe_code, reason = "rustix has no membarrier")]

use super::primitives::{Ordering, fence};

/// Barriers that this process can rely on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Barrier {
    /// This process's threads can be reached by another's [`heavy`].
    pub reachable: bool,
    /// This process can call [`heavy`].
    pub heavy: bool,
}

impl Barrier {
    /// Asks the kernel, and registers this process as reachable. Cheap when repeated.
    #[cfg(not(any(miri, loom)))]
    pub fn of_this_process() -> Self {
        use std::sync::OnceLock;
        static ANSWER: OnceLock<Barrier> = OnceLock::new();
        *ANSWER.get_or_init(|| {
            use kernel::{GLOBAL_EXPEDITED, REGISTER_GLOBAL_EXPEDITED, ask};
            let offered = ask(0).unwrap_or(0);
            let has = |command: libc::c_int| offered & libc::c_long::from(command) != 0;
            let grants = |command: libc::c_int| has(command) && ask(command).is_ok();
            Self { reachable: grants(REGISTER_GLOBAL_EXPEDITED), heavy: grants(GLOBAL_EXPEDITED) }
        })
    }

    /// Returns no barrier: under Miri and loom there is no kernel to ask. Both sides use real
    /// fences, which also makes the models meaningful.
    #[cfg(any(miri, loom))]
    pub fn of_this_process() -> Self {
        Self { reachable: false, heavy: false }
    }
}

/// Runs the frequent side's half. `fenced`: the other side cannot run [`heavy`], or cannot reach
/// this process by it, so a real fence is needed here.
#[inline(always)]
pub fn light(fenced: bool) {
    if fenced {
        fence(Ordering::SeqCst);
    } else {
        #[cfg(not(loom))]
        super::primitives::compiler_fence(Ordering::SeqCst);
    }
}

/// Runs the rare side's half.
pub fn heavy(barrier: Barrier) {
    // Needed in any case: the kernel's barrier reaches registered processes, and this thread must
    // be in order with those that use real fences.
    fence(Ordering::SeqCst);
    #[cfg(not(any(miri, loom)))]
    if barrier.heavy
        && let Err(error) = kernel::run_everywhere()
    {
        kernel::end(&error);
    }
    #[cfg(any(miri, loom))]
    let _ = barrier;
}

/// The system call.
#[cfg(not(any(miri, loom)))]
mod kernel {
    use std::io::{self, Write};
    use std::time::Duration;

    pub(super) const GLOBAL_EXPEDITED: libc::c_int = 1 << 1;
    pub(super) const REGISTER_GLOBAL_EXPEDITED: libc::c_int = 1 << 2;

    /// Attempts, a millisecond apart, while the kernel has no memory for its list of cores.
    const ATTEMPTS: u32 = 1000;

    pub(super) fn ask(command: libc::c_int) -> io::Result<libc::c_long> {
        // SAFETY: membarrier takes three integers and touches no memory of this process.
        let answer = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
        if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
    }

    /// Runs a barrier on every running thread of all registered processes.
    pub(super) fn run_everywhere() -> io::Result<()> {
        let mut attempts = 1;
        loop {
            match ask(GLOBAL_EXPEDITED) {
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && attempts < ATTEMPTS => {
                    attempts += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                answer => return answer.map(drop),
            }
        }
    }

    /// Ends the process. Otherwise two threads could be inside one lock, or a message stay unseen.
    #[cold]
    pub(super) fn end(error: &io::Error) -> ! {
        let _ = writeln!(
            io::stderr(),
            "carrack: membarrier(2) failed ({error}), which the kernel granted when this process \
             started. The locks of this process rely on it, so the process ends. Have the seccomp \
             filter allow membarrier, or install the filter before the first runtime starts"
        );
        std::process::abort()
    }
}
