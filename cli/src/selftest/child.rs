//! Runs one process to its end or its limit, and ends all processes that it leaves behind.

use super::SelftestError;
use crate::launch::{adopt_orphans, sweep};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Interval of the calls of `on_tick`, and of polling for a process's end on a kernel without
/// pidfds.
const GLANCE: Duration = Duration::from_millis(100);

/// Time for a process to end by itself after SIGTERM.
const GRACE: Duration = Duration::from_secs(3);

/// Flag that a terminating signal sets.
pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Watches for terminating signals from now on, and makes this process the parent of its
    /// children's orphans.
    pub(super) fn watch() -> Result<Self, SelftestError> {
        let came = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, came.clone()).map_err(|source| {
                SelftestError::System { doing: "watching for signals", source }
            })?;
        }
        adopt_orphans()?;
        Ok(Self(came))
    }

    /// Returns `true` if a signal has come.
    pub(super) fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// End of a process.
#[derive(Debug)]
pub(super) enum End {
    /// By itself.
    Exited(ExitStatus),
    /// It was still running at its limit, and was ended.
    Overran(Duration),
    /// The user ended it.
    Interrupted,
    /// The system does not tell its end. It was ended.
    Lost(io::Error),
    /// It never ran.
    NotStarted(io::Error),
}

/// Runs a command in a process group of its own. At the limit or on a signal it ends the group and
/// all processes that the command has started. `on_tick` is called every [`GLANCE`].
pub(super) fn run(
    command: &mut Command,
    limit: Duration,
    interrupt: &Interrupt,
    mut on_tick: impl FnMut(),
) -> End {
    let mut child = match command.stdin(Stdio::null()).process_group(0).spawn() {
        Ok(child) => child,
        Err(error) => return End::NotStarted(error),
    };
    let deadline = Instant::now() + limit;
    let end = loop {
        match ended_within(&mut child, GLANCE) {
            Ok(Some(status)) => break End::Exited(status),
            Ok(None) => {}
            Err(error) => {
                stop(&mut child);
                break End::Lost(error);
            }
        }
        on_tick();
        if interrupt.came() {
            stop(&mut child);
            break End::Interrupted;
        }
        if Instant::now() > deadline {
            stop(&mut child);
            break End::Overran(limit);
        }
    };
    // This process is now the parent of the command's orphans, in any group and session.
    if let Err(error) = sweep() {
        crate::complain(format_args!("selftest: looking for processes to end failed: {error}"));
    }
    end
}

/// Waits for the end of a process, `moment` at most.
fn ended_within(child: &mut Child, moment: Duration) -> io::Result<Option<ExitStatus>> {
    if let Some(status) = child.try_wait()? {
        return Ok(Some(status));
    }
    match pidfd_open(Pid::from_child(child), PidfdFlags::empty()) {
        Ok(pidfd) => {
            let moment = Timespec {
                tv_sec: moment.as_secs().cast_signed(),
                tv_nsec: moment.subsec_nanos().into(),
            };
            // A signal that interrupts it is looked at by the caller.
            let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&moment));
        }
        Err(_) => thread::sleep(moment),
    }
    child.try_wait()
}

/// Ends a process and its group: asks first, so that a launcher among them can end its job.
fn stop(child: &mut Child) {
    let group = Pid::from_child(child);
    // The process is not reaped yet, so the kernel cannot have given its number to another one.
    let _ = kill_process_group(group, Signal::TERM);
    let until = Instant::now() + GRACE;
    while Instant::now() < until {
        if !matches!(ended_within(child, GLANCE), Ok(None)) {
            return;
        }
    }
    let _ = kill_process_group(group, Signal::KILL);
    let _ = child.wait();
}
