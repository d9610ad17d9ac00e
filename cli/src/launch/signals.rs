//! Signals as a descriptor, and their names.
//!
//! A signalfd and not a self-pipe: no code runs in a handler, and each read says which signal it
//! was. A child has only the mask to undo.

use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// The signals by which a user or a batch system ends a job.
const TERMINATING: [Signal; 4] = [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM];

/// The signals that a job is told of, and that do not end it by themselves.
pub(super) const PASSED_ON: [Signal; 2] = [Signal::SIGUSR1, Signal::SIGUSR2];

/// Descriptor that takes those signals and SIGCHLD while it lives.
///
/// They are blocked in the thread that made it, and so in children, which must unblock them. Those
/// that this process was told to ignore (by `nohup`, or by a shell for its background jobs) are
/// left ignored.
pub(super) struct Signals {
    fd: SignalFd,
    /// Signals that children have to unblock.
    pub(super) blocked: SigSet,
    before: SigSet,
}

impl Signals {
    /// Blocks the signals, and those in `also`, in this thread.
    pub(super) fn take(also: &[Signal]) -> io::Result<Self> {
        let ignored = children::ignored();
        let is_wanted = |signal: &Signal| ignored & 1 << (*signal as u32 - 1) == 0;
        let wanted =
            TERMINATING.into_iter().chain(PASSED_ON).filter(is_wanted).chain([Signal::SIGCHLD]);
        let set: SigSet = wanted.collect();
        let mut blocked = set;
        blocked.extend(also.iter().copied());
        let before = blocked.thread_swap_mask(SigmaskHow::SIG_BLOCK)?;
        let fd = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Self { fd, blocked, before })
    }

    /// Reads the next signal; `None` when there is none now.
    pub(super) fn next(&self) -> io::Result<Option<i32>> {
        Ok(self.fd.read_signal()?.and_then(|info| i32::try_from(info.ssi_signo).ok()))
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        let _ = self.before.thread_set_mask();
    }
}

/// Returns the name of a signal as a person knows it: `SIGKILL`, or its number when it has no
/// common name.
pub(super) fn name(signal: i32) -> String {
    Signal::try_from(signal)
        .map_or_else(|_| format!("signal {signal}"), |signal| signal.as_str().into())
}

/// Returns the exit status that stands for a death by signal.
pub(super) fn exit_status(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_signal_comes_out_of_the_descriptor_and_ends_no_process() {
        // In a thread of its own: the mask is the thread's.
        std::thread::spawn(|| {
            let signals = Signals::take(&[]).unwrap();
            assert_eq!(signals.next().unwrap(), None);
            // It goes to this thread, which has it blocked.
            nix::sys::signal::raise(Signal::SIGTERM).unwrap();
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
