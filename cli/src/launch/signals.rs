//! Signals as a descriptor, and their names.
//!
//! A signalfd and not a self-pipe: no code runs in a handler, nothing is installed that a child
//! would have to undo but the mask, and each read says which signal it was.

#![expect(unsafe_code, reason = "rustix has no masks of signals and no signalfd")]

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::io::Errno;

/// The signals by which a user or a batch system ends a job.
const TERMINATING: [i32; 4] = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM];

/// Takes the terminating signals and SIGCHLD out of a descriptor while it lives.
///
/// They are blocked in the thread that made it, and so in children, which must
/// [`unblock`](SignalSet::unblock). Those that this process was told to ignore (by `nohup`, or by a
/// shell for its background jobs) are left ignored.
pub(super) struct Signals {
    fd: OwnedFd,
    set: SignalSet,
    before: libc::sigset_t,
}

/// A set of signals that a child can unblock between fork and exec.
#[derive(Clone, Copy)]
pub(super) struct SignalSet(libc::sigset_t);

impl Signals {
    /// Blocks the signals, and those in `also`, in this thread.
    pub(super) fn take(also: &[i32]) -> io::Result<Self> {
        let wanted = TERMINATING.into_iter().filter(|signal| !is_ignored(*signal));
        let set = SignalSet::of(wanted.chain([libc::SIGCHLD]));
        let blocked =
            SignalSet::of((0..64).filter(|signal| set.has(*signal)).chain(also.iter().copied()));
        let mut before = MaybeUninit::uninit();
        // SAFETY: the first set is initialised, and the second is written before it is read.
        let before = unsafe {
            match libc::pthread_sigmask(libc::SIG_BLOCK, &blocked.0, before.as_mut_ptr()) {
                0 => before.assume_init(),
                errno => return Err(io::Error::from_raw_os_error(errno)),
            }
        };
        // SAFETY: the set is initialised; the descriptor that comes back is new and ours.
        let fd = unsafe {
            match libc::signalfd(-1, &set.0, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) {
                -1 => return Err(io::Error::last_os_error()),
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        Ok(Self { fd, set: blocked, before })
    }

    /// Returns the signals that children have to unblock.
    pub(super) fn blocked(&self) -> SignalSet {
        self.set
    }

    /// The next signal, or `None` when there is none now.
    pub(super) fn next(&self) -> io::Result<Option<i32>> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = size_of::<libc::signalfd_siginfo>();
        loop {
            // SAFETY: the kernel writes at most `size` bytes to `info`, which has as many.
            let got = unsafe { libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), size) };
            if usize::try_from(got) == Ok(size) {
                // SAFETY: a whole record was written, and it is plain data.
                let info = unsafe { info.assume_init() };
                return Ok(i32::try_from(info.ssi_signo).ok());
            }
            match Errno::from_io_error(&io::Error::last_os_error()) {
                Some(Errno::INTR) => {}
                Some(Errno::AGAIN) => return Ok(None),
                _ => return Err(io::Error::last_os_error()),
            }
        }
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // SAFETY: `before` is the mask that this thread had; nothing is written back.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut());
        }
    }
}

impl SignalSet {
    fn of(signals: impl Iterator<Item = i32>) -> Self {
        let mut set = MaybeUninit::uninit();
        // SAFETY: `sigemptyset` initialises the set, and `sigaddset` refuses what is no signal.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in signals {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            Self(set.assume_init())
        }
    }

    fn has(&self, signal: i32) -> bool {
        // SAFETY: the set is initialised, and what is no signal is in no set.
        unsafe { libc::sigismember(&self.0, signal) == 1 }
    }

    /// Unblocks the signals in this thread. Async-signal-safe, for use between fork and exec.
    pub(super) fn unblock(&self) -> io::Result<()> {
        // SAFETY: the set is initialised, and nothing is written back.
        match unsafe { libc::pthread_sigmask(libc::SIG_UNBLOCK, &self.0, std::ptr::null_mut()) } {
            0 => Ok(()),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

fn is_ignored(signal: i32) -> bool {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: with no new action this only writes the old one, which is plain data.
    unsafe {
        libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) == 0
            && action.assume_init().sa_sigaction == libc::SIG_IGN
    }
}

/// A signal as a person knows it: `SIGKILL`, or its number when it has no common name.
pub(super) fn name(signal: i32) -> String {
    let name = match signal {
        libc::SIGABRT => "SIGABRT",
        libc::SIGALRM => "SIGALRM",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGHUP => "SIGHUP",
        libc::SIGILL => "SIGILL",
        libc::SIGINT => "SIGINT",
        libc::SIGKILL => "SIGKILL",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGSYS => "SIGSYS",
        libc::SIGTERM => "SIGTERM",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        _ => return format!("signal {signal}"),
    };
    name.to_owned()
}

/// The exit status that stands for a death by signal.
pub(super) fn exit_status(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_signal_comes_out_of_the_descriptor_and_ends_nobody() {
        // In a thread of its own: the mask is the thread's.
        std::thread::spawn(|| {
            let signals = Signals::take(&[]).unwrap();
            assert_eq!(signals.next().unwrap(), None);
            // SAFETY: the signal goes to this thread, which has it blocked.
            unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGTERM) };
            assert_eq!(signals.next().unwrap(), Some(libc::SIGTERM));
            assert_eq!(signals.next().unwrap(), None);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_status_stands_for_a_signal() {
        assert_eq!((exit_status(9), exit_status(64)), (137, 192));
        assert_eq!((name(11), name(64)), ("SIGSEGV".into(), "signal 64".into()));
    }
}
