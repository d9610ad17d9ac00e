//! The start of one rank.

#![expect(unsafe_code, reason = "code runs between fork and exec")]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use carrack::bootstrap::protocol::{FD_VARIABLE, RANK_VARIABLE, SIZE_VARIABLE};
use nix::sys::signal::SigSet;
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, getpid, getppid, kill_process, kill_process_group,
    set_parent_process_death_signal, setrlimit,
};
use rustix::thread::sched_setaffinity;

use super::binding::cpu_of;
use super::orders::KeeperOptions;

/// Has this process killed when its parent ends.
fn end_with(parent: Pid) -> io::Result<()> {
    // The signal comes only for a death after this call, so look whether it was too late.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() == Some(parent) { Ok(()) } else { Err(Errno::SRCH.into()) }
}

/// Has what a command starts killed when this process ends: the thread that starts it has to stay
/// to the end.
pub(crate) fn tie(command: &mut Command) {
    let parent = getpid();
    // SAFETY: between fork and exec the closure makes system calls only.
    unsafe { command.pre_exec(move || end_with(parent)) };
}

/// Parameters of all ranks of a job.
pub(super) struct Template<'a> {
    pub(super) options: &'a KeeperOptions,
    /// CPUs that ranks are pinned to, if any.
    pub(super) cpus: Vec<usize>,
    /// The limit on open files that the user had set, before the keeper raised it for itself.
    pub(super) open_files: Rlimit,
    /// Signals that the keeper has blocked.
    pub(super) blocked: SigSet,
}

/// A rank that runs.
pub(super) struct Rank {
    pub(super) pid: Pid,
    /// `true` if its process leads a group of its own.
    leads_group: bool,
}

impl Template<'_> {
    /// Starts this rank with its end of the bootstrap's socket. Returns the pipes of its stdout and
    /// stderr, too, where they are piped.
    pub(super) fn start(
        &self,
        rank: u32,
        socket: OwnedFd,
    ) -> io::Result<(Rank, [Option<OwnedFd>; 2])> {
        let job = &self.options.job;
        let output = || if self.options.direct { Stdio::inherit() } else { Stdio::piped() };
        // Rank 0 joins the terminal's foreground to read from it.
        let foreground = self.options.foreground.filter(|_| rank == 0);
        let cpu = cpu_of(rank, &self.cpus);
        let mut command = Command::new(job.program());
        command
            .args(&job.command[1..])
            .stdin(if rank == 0 { Stdio::inherit() } else { Stdio::null() })
            .stdout(output())
            .stderr(output())
            .process_group(foreground.unwrap_or(0));
        let others = job.nodes.variables(rank, job.ranks);
        // Ranks of several nodes do not use the socket: it ends with their exec.
        let is_inherited = others.is_empty();
        if is_inherited {
            command
                .env(RANK_VARIABLE, rank.to_string())
                .env(SIZE_VARIABLE, job.ranks.to_string())
                .env(FD_VARIABLE, socket.as_raw_fd().to_string());
        } else {
            for name in [RANK_VARIABLE, SIZE_VARIABLE, FD_VARIABLE] {
                command.env_remove(name);
            }
            command.envs(others);
        }
        let (keeper, open_files, blocked) = (getpid(), self.open_files, self.blocked);
        let prepare = move || -> io::Result<()> {
            end_with(keeper)?;
            if let Some(cpu) = &cpu {
                sched_setaffinity(None, cpu)?;
            }
            setrlimit(Resource::Nofile, open_files)?;
            let flags = if is_inherited { FdFlags::empty() } else { FdFlags::CLOEXEC };
            fcntl_setfd(&socket, flags)?;
            Ok(blocked.thread_unblock()?)
        };
        // SAFETY: between fork and exec the closure makes system calls only. It takes no lock and
        // allocates nothing: an error made from an errno holds just that number.
        unsafe { command.pre_exec(prepare) };
        let child = command.spawn()?;
        let rank = Rank { pid: Pid::from_child(&child), leads_group: foreground.is_none() };
        Ok((rank, [child.stdout.map(OwnedFd::from), child.stderr.map(OwnedFd::from)]))
    }
}

impl Rank {
    /// Sends a signal to the rank and what it has started in its process group.
    ///
    /// The rank must not have been waited for, or its number may be another's.
    pub(super) fn signal(&self, signal: Signal) {
        // It fails only for one that has just died, or has changed its user: sweeping reports
        // those.
        let _ = if self.leads_group {
            kill_process_group(self.pid, signal)
        } else {
            kill_process(self.pid, signal)
        };
    }
}
