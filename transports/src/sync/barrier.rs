//! A memory barrier of which one side is free.
//!
//! A producer that publishes a message and then asks "is my consumer still looking?" needs a full
//! barrier between the two. Otherwise the answer may be older than the message. In the path of
//! every message that barrier would cost more than the message. It waits for the slot's cache line
//! to arrive from the other core. So the side that is rare pays for both. [`heavy`] makes the
//! kernel run a barrier on every running thread of this process, or of all registered processes
//! (`membarrier`, `PRIVATE_EXPEDITED` and `GLOBAL_EXPEDITED`). [`light`] only keeps the compiler in
//! order. Where the kernel refuses, both sides use a real fence; [`Barrier`] says which it is.
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
    /// Only threads of this process take part. Those of others are not interrupted.
    within: bool,
}

impl Barrier {
    /// A barrier of two fences, which takes no system call.
    pub const FENCES: Self = Self { reachable: false, heavy: false, within: false };

    /// Asks the kernel for a barrier between processes, and registers this one as reachable. Cheap
    /// when repeated.
    pub fn between_processes() -> Self {
        Self::granted(false)
    }

    /// Asks the kernel for a barrier between the threads of this process. Cheap when repeated.
    pub fn within_process() -> Self {
        Self::granted(true)
    }

    #[cfg(not(any(miri, loom)))]
    fn granted(within: bool) -> Self {
        use kernel::{EXPEDITED, REGISTER_EXPEDITED, ask};
        use std::sync::OnceLock;
        static ANSWERS: [OnceLock<Barrier>; 2] = [const { OnceLock::new() }; 2];
        let which = usize::from(within);
        *ANSWERS[which].get_or_init(|| {
            let offered = ask(0).unwrap_or(0);
            let has = |command: libc::c_int| offered & libc::c_long::from(command) != 0;
            let grants = |command: libc::c_int| has(command) && ask(command).is_ok();
            let reachable = grants(REGISTER_EXPEDITED[which]);
            Self { reachable, heavy: grants(EXPEDITED[which]), within }
        })
    }

    /// Returns no barrier: under Miri and loom there is no kernel to ask. Both sides use real
    /// fences, which also makes the models meaningful.
    #[cfg(any(miri, loom))]
    fn granted(_within: bool) -> Self {
        Self::FENCES
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
        && let Err(error) = kernel::run_everywhere(barrier.within)
    {
        kernel::end(&error);
    }
    #[cfg(any(miri, loom))]
    let _ = barrier;
}

/// The system call.
#[cfg(not(any(miri, loom)))]
mod kernel {
    use std::io;
    use std::time::Duration;

    /// Commands of membarrier(2): for all processes, and for this one.
    pub(super) const EXPEDITED: [libc::c_int; 2] = [1 << 1, 1 << 3];
    pub(super) const REGISTER_EXPEDITED: [libc::c_int; 2] = [1 << 2, 1 << 4];

    /// Attempts, a millisecond apart, while the kernel has no memory for its list of cores.
    const ATTEMPTS: u32 = 1000;

    pub(super) fn ask(command: libc::c_int) -> io::Result<libc::c_long> {
        // SAFETY: membarrier takes three integers and touches no memory of this process.
        let answer = unsafe { libc::syscall(libc::SYS_membarrier, command, 0, 0) };
        if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(answer) }
    }

    /// Runs a barrier on every running thread of this process, or of all registered processes.
    pub(super) fn run_everywhere(within: bool) -> io::Result<()> {
        let mut attempts = 1;
        loop {
            match ask(EXPEDITED[usize::from(within)]) {
                Err(error) if error.raw_os_error() == Some(libc::ENOMEM) && attempts < ATTEMPTS => {
                    attempts += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
                // A forked child that the kernel has not registered.
                Err(error)
                    if within
                        && error.raw_os_error() == Some(libc::EPERM)
                        && attempts < ATTEMPTS =>
                {
                    attempts = ATTEMPTS;
                    ask(REGISTER_EXPEDITED[1])?;
                }
                answer => return answer.map(drop),
            }
        }
    }

    /// Ends the process. Otherwise two threads could be inside one lock, or a message stay unseen.
    #[cold]
    pub(super) fn end(error: &io::Error) -> ! {
        crate::stderr::say(format_args!(
            "membarrier(2) failed ({error}), which the kernel granted when this process \
             started. The locks of this process rely on it, so the process ends. Have the seccomp \
             filter allow membarrier, or install the filter before the first runtime starts"
        ));
        std::process::abort()
    }
}
