//! The process that the user started: it starts the keeper, passes signals on, gives the status.

#![expect(unsafe_code, reason = "code runs between fork and exec")]

use std::io::{self, IsTerminal};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use carrack_transports::stderr::say;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, FdFlags, fcntl_setfd, write};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{
    Pid, PidfdFlags, Resource, WaitOptions, WaitStatus, getpgrp, getrlimit, pidfd_open, waitpid,
};

use super::binding::Bind;
use super::ending::sweep_and_tell;
use super::error::{Doing as _, LaunchError};
use super::look_up::Places;
use super::options::Job;
use super::orders::KeeperOptions;
use super::signals::{self, Signals};
use crate::own_ranks::allowed_cpus;

/// Runs a job to its end and gives its exit status. That is 0, the first failed rank's, 128 plus a
/// signal's number, or 124 after the time limit.
///
/// Call it from the main thread, best before others are started. It blocks the terminating signals
/// in the calling thread while the job runs. A signal that another thread takes ends this process;
/// the keeper then still ends the job.
///
/// # Errors
///
/// [`LaunchError`] when the job could not be started at all.
pub(crate) fn run_job(job: &Job) -> Result<u8, LaunchError> {
    check_files(job.ranks)?;
    if let Some(why) = job.nodes.fault(job.ranks).or_else(|| job.nodes.unresolved()) {
        return Err(LaunchError::Nodes(why));
    }
    let program = Places::of_this_process().look_up(job.program())?;
    warn_of_shared_cpus(job);
    let signals = Signals::take(&[]).doing("taking signals (signalfd)")?;
    children::adopt_orphans().doing("becoming the subreaper (prctl)")?;
    let (theirs, lifeline) = pipe_with(PipeFlags::CLOEXEC).doing("making a pipe to the keeper")?;
    // Only the foreground may read from a terminal; the group of this process is there.
    let foreground = io::stdin().is_terminal().then(|| getpgrp().as_raw_pid());
    let options = KeeperOptions::of(job, program, theirs.as_raw_fd(), foreground);
    let keeper = start_keeper(job, &options, theirs)?;
    wait_for(keeper, &signals, &lifeline)
}

fn start_keeper(job: &Job, options: &KeeperOptions, theirs: OwnedFd) -> Result<Pid, LaunchError> {
    // The running binary, even when its file has been replaced meanwhile.
    let mut command = Command::new("/proc/self/exe");
    command
        .arg0("carrack")
        .arg("__keeper")
        .args(options.to_args())
        .envs(job.env.iter().map(|(name, value)| (name, value)))
        // What kills the launcher's whole group (a shell, `timeout -k`) should leave the one that
        // cleans up.
        .process_group(0);
    let inherit = move || fcntl_setfd(&theirs, FdFlags::empty()).map_err(io::Error::from);
    // SAFETY: between fork and exec the closure makes one system call, and nothing else.
    unsafe { command.pre_exec(inherit) };
    let keeper = command.spawn().doing("starting the keeper (/proc/self/exe)")?;
    Ok(Pid::from_child(&keeper))
    // Our copy of their end goes with the command here.
}

fn wait_for(keeper: Pid, signals: &Signals, lifeline: &OwnedFd) -> Result<u8, LaunchError> {
    // SIGCHLD alone is not enough where a library (CUDA's, for one) has threads in this process.
    // The kernel may give it to one of those, which neither blocks nor handles it.
    let ended = pidfd_open(keeper, PidfdFlags::empty()).ok();
    let look_again = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
    let patience = if ended.is_none() { Some(&look_again) } else { None };
    loop {
        let mut fds = vec![PollFd::new(signals, PollFlags::IN)];
        fds.extend(ended.as_ref().map(|ended| PollFd::new(ended, PollFlags::IN)));
        match poll(&mut fds, patience) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).doing("waiting for the keeper"),
        }
        while let Some(signal) = signals.next().doing("reading signals")? {
            if signal != libc::SIGCHLD
                && let Ok(signal) = u8::try_from(signal)
            {
                // It fails only when the keeper is gone, which is seen below.
                let _ = write(lifeline, &[signal]);
            }
        }
        match waitpid(Some(keeper), WaitOptions::NOHANG) {
            Ok(Some((_, status))) => return Ok(keeper_ended(status)),
            Ok(None) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno).doing("waiting for the keeper"),
        }
    }
}

fn keeper_ended(status: WaitStatus) -> u8 {
    let Some(signal) = status.terminating_signal() else {
        return status.exit_status().and_then(|status| u8::try_from(status).ok()).unwrap_or(1);
    };
    // Its ranks die with it; what they had started has become ours.
    say(format_args!(
        "the keeper of this job was killed by {}; ending the job",
        signals::name(signal)
    ));
    sweep_and_tell();
    signals::exit_status(signal)
}

fn check_files(ranks: u32) -> Result<(), LaunchError> {
    // A socket and two pipes each, two more while one starts, and what the keeper itself has open.
    let needed = 3 * u64::from(ranks) + 64;
    match getrlimit(Resource::Nofile).maximum {
        Some(limit) if limit < needed => Err(LaunchError::TooManyFiles { ranks, needed, limit }),
        _ => Ok(()),
    }
}

fn warn_of_shared_cpus(job: &Job) {
    let (ranks, cpus) = (job.ranks, allowed_cpus().len());
    if job.bind == Bind::Core && cpus < ranks as usize {
        say(format_args!("warning: {ranks} ranks share {cpus} CPUs, round robin (--bind core)"));
    }
}
