//! Runs one process to its end, or to its limit, and leaves nothing of it behind.

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

/// How often a process is asked whether it has ended, where the kernel does not tell, and how often
/// the bar moves.
const GLANCE: Duration = Duration::from_millis(100);

/// What a process gets to end by itself once it was told to.
const GRACE: Duration = Duration::from_secs(3);

/// Whether the user wants all of it to end.
pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Takes note of the terminating signals from now on, and makes this process the parent of what
    /// its children leave behind.
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

    /// Whether a signal has come.
    pub(super) fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// How a process ended.
#[derive(Debug)]
pub(super) enum End {
    /// By itself.
    Exited(ExitStatus),
    /// It was still running at its limit, and was ended.
    Overran(Duration),
    /// The user ended it.
    Interrupted,
    /// It never ran.
    NotStarted(io::Error),
}

/// Runs a command in a process group of its own, and ends that, with whatever it has started, at
/// the limit or on a signal. `on_tick` is called now and then.
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
            Err(error) => break End::NotStarted(error),
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
    // What it had started, in whatever groups and sessions, has become ours with its end.
    if let Err(error) = sweep() {
        crate::complain(format_args!("selftest: looking for processes to end failed: {error}"));
    }
    end
}

/// Waits for a process for a moment.
fn ended_within(child: &mut Child, moment: Duration) -> io::Result<Option<ExitStatus>> {
    if let Some(status) = child.try_wait()? {
        return Ok(Some(status));
    }
    match pidfd_open(Pid::from_child(child), PidfdFlags::empty()) {
        Ok(pidfd) => {
            let moment = Timespec { tv_sec: 0, tv_nsec: moment.subsec_nanos().into() };
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
    // Not waited for yet, so the number is still its own.
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
