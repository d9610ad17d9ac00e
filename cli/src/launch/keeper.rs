//! The parent of all ranks: one thread, one event loop.

#![expect(unsafe_code, reason = "a file descriptor comes by its number")]

use std::io::{self, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use carrack::bootstrap::tcp::StandIn;
use carrack::bootstrap::{Departure, JobId};
use carrack_transports::stderr::say;
use nix::sys::signal::Signal as Named;
use rustix::event::{Timespec, epoll};
use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, FdFlags, fcntl_setfd, read};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, WaitStatus, getrlimit, setrlimit, wait,
};

use super::binding::Bind;
use super::ending::{Due, Ending, GRACE, LAST_WORDS, sweep_and_tell};
use super::error::{Doing as _, LaunchError};
use super::orders::KeeperOptions;
use super::output::Outputs;
use super::post::Post;
use super::rank::{Rank, Template};
use super::signals::{self, Signals};
use crate::own_ranks::allowed_cpus;

/// Sources of events, as epoll's 64 bits; a rank's socket has `SOCKETS` and its number.
const LIFELINE: u64 = 0;
const SIGNALS: u64 = 1;
const OUTPUTS: u64 = 2;
const STAND_IN: u64 = 3;
const SOCKETS: u64 = 4;

/// Time in which ranks of other nodes call a rank 0 that has ended: they try once a second.
const CALLS_COME: Duration = Duration::from_secs(5);

/// Keeps a job until nothing of it runs any more, and gives its exit status.
pub(crate) fn keep(options: KeeperOptions) -> ExitCode {
    // Whatever happens in here, a panic included, nothing is left behind.
    let _sweep = SweepOnDrop;
    match Keeper::new(&options).and_then(Keeper::run) {
        Ok(status) => ExitCode::from(status),
        Err(LaunchError::LauncherGone) => ExitCode::SUCCESS,
        Err(error) => {
            say(&error);
            ExitCode::from(error.exit_status())
        }
    }
}

struct SweepOnDrop;

impl Drop for SweepOnDrop {
    fn drop(&mut self) {
        sweep_and_tell();
    }
}

struct Keeper<'a> {
    options: &'a KeeperOptions,
    template: Template<'a>,
    signals: Signals,
    lifeline: OwnedFd,
    outputs: Outputs,
    post: Post,
    ending: Ending,
    /// The signal that asks the ranks to end.
    ask: Signal,
    /// Answers for a rank 0 that has ended, and the time until which this process stays for that.
    stand_in: Option<(StandIn, Option<Instant>)>,
    /// Ranks by number; `None` once waited for.
    ranks: Vec<Option<Rank>>,
    /// All output is written.
    has_written: bool,
}

impl<'a> Keeper<'a> {
    fn new(options: &'a KeeperOptions) -> Result<Self, LaunchError> {
        let lifeline = take_lifeline(options.lifeline)?;
        // Only a label in `ps`; it may fail.
        let _ = rustix::thread::set_name(c"carrack-keeper");
        // SIGTTOU would stop a keeper that writes to the terminal from the background.
        let signals = Signals::take(&[Named::SIGTTOU]).doing("taking signals (signalfd)")?;
        children::adopt_orphans().doing("becoming the subreaper (prctl)")?;
        let open_files = raise_open_files()?;
        let job = JobId::random().map_err(io::Error::other).doing("making the job's identity")?;
        let outputs = Outputs::start().doing("starting to write the ranks' output")?;
        let sources = [
            (lifeline.as_fd(), LIFELINE),
            (signals.as_fd(), SIGNALS),
            (outputs.news.as_fd(), OUTPUTS),
        ];
        let watch = |main: OwnedFd| {
            let add = |(fd, source)| {
                epoll::add(&main, fd, epoll::EventData::new_u64(source), epoll::EventFlags::IN)
            };
            sources.into_iter().try_for_each(add).map(|()| main)
        };
        let main = epoll::create(epoll::CreateFlags::CLOEXEC)
            .and_then(watch)
            .doing("making the event loop (epoll)")?;
        let cpus = if options.job.bind == Bind::Core { allowed_cpus() } else { Vec::new() };
        let blocked = signals.blocked;
        Ok(Self {
            options,
            template: Template { options, cpus, open_files, blocked },
            signals,
            lifeline,
            outputs,
            post: Post::new(job, options.job.ranks, main),
            ending: Ending::new(options.job.timeout.map(|limit| Instant::now() + limit)),
            ask: Signal::TERM,
            stand_in: None,
            ranks: Vec::new(),
            has_written: false,
        })
    }

    fn run(mut self) -> Result<u8, LaunchError> {
        for rank in 0..self.options.job.ranks {
            // Between two starts, so that ten thousand of them can be interrupted.
            self.turn(true)?;
            if self.ending.has_begun() {
                break;
            }
            self.start(rank)?;
        }
        while self.ranks.iter().any(Option::is_some) || self.stays().is_some() {
            self.turn(false)?;
        }
        // What ranks have left in the background must go first: it holds their pipes open.
        drop(SweepOnDrop);
        self.outputs.finish();
        let status = self.ending.status();
        // A reader that does not read is waited for, but not beyond the launcher's life, nor a
        // signal.
        let had_begun = self.ending.has_begun();
        self.ending = Ending::new(None);
        while !self.has_written && !self.ending.has_begun() {
            self.turn(false)?;
        }
        Ok(if had_begun { status } else { self.ending.status() })
    }

    fn start(&mut self, rank: u32) -> Result<(), LaunchError> {
        let socket = self.post.open(rank, SOCKETS + u64::from(rank));
        let socket = socket.doing("making a rank's socket")?;
        let number = self.number(rank);
        match self.template.start(rank, socket) {
            Ok((started, pipes)) => {
                self.ranks.push(Some(started));
                let tag = format!("[{number}] ");
                let tag = if self.options.job.no_tag { String::new() } else { tag };
                for (pipe, is_stdout) in pipes.into_iter().zip([true, false]) {
                    pipe.into_iter()
                        .for_each(|pipe| self.outputs.add(is_stdout, pipe, tag.clone()));
                }
            }
            Err(error) => {
                let (status, advice) = not_started(&error);
                let program = Path::new(self.options.job.program()).display();
                let why = format!("rank {number} could not be started: {program}: {error}{advice}");
                let is_first = self.end(status, Signal::TERM, &why);
                self.stand_in(rank, is_first, &format!("could not be started: {error}"))?;
            }
        }
        Ok(())
    }

    /// Returns the job's number of a rank of this node.
    fn number(&self, rank: u32) -> u32 {
        let job = &self.options.job;
        job.nodes.rank(rank, job.ranks)
    }

    /// Answers for a rank 0 that has ended. Stays for that where ranks of other nodes may not have
    /// reached it. `is_first`: the job ends because rank 0 has failed.
    fn stand_in(&mut self, rank: u32, is_first: bool, how: &str) -> Result<(), LaunchError> {
        let Some(stand_in) = self.options.job.nodes.stand_in(rank, how) else { return Ok(()) };
        let source = epoll::EventData::new_u64(STAND_IN);
        // By edges: a caller stays in the queue while this process has no descriptor left.
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&self.post.main, &stand_in, source, flags)
            .doing("watching the port of rank 0")?;
        let stays = is_first || !self.ending.has_begun() && !stand_in.was_reached();
        self.stand_in = Some((stand_in, stays.then(|| Instant::now() + CALLS_COME)));
        Ok(())
    }

    /// Returns the time until which ranks of other nodes are waited for.
    fn stays(&self) -> Option<Instant> {
        let until = self.stand_in.as_ref().and_then(|(_, until)| *until);
        until.filter(|until| *until > Instant::now())
    }

    /// Handles what has happened, after waiting for something to happen or for a deadline.
    fn turn(&mut self, at_once: bool) -> Result<(), LaunchError> {
        let deadlines = [self.ending.deadline(), self.post.deadline(), self.stays()];
        let deadline = deadlines.into_iter().flatten().min();
        let timeout = match (at_once, deadline) {
            (true, _) => Some(Duration::ZERO),
            (false, at) => at.map(|at| at.saturating_duration_since(Instant::now())),
        };
        // A duration too long to be told is as good as none.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut events = [MaybeUninit::uninit(); 256];
        let events = match epoll::wait(&self.post.main, &mut events, timeout.as_ref()) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(()),
            Err(errno) => return Err(errno).doing("waiting for events (epoll)"),
        };
        let bootstrap_failed = "serving a rank's bootstrap";
        for event in events {
            let data = event.data;
            match data.u64() {
                LIFELINE => self.hear_launcher()?,
                SIGNALS => self.take_signals()?,
                OUTPUTS => self.hear_outputs(),
                STAND_IN => self.stand_in.iter_mut().for_each(|(stand_in, _)| stand_in.answer()),
                socket => {
                    // Only ranks' numbers were added.
                    let rank = u32::try_from(socket - SOCKETS).unwrap_or(u32::MAX);
                    let served = self.post.serve(rank);
                    served.doing(bootstrap_failed)?;
                }
            }
        }
        let now = Instant::now();
        self.post.expire(now).doing(bootstrap_failed)?;
        for complaint in self.post.complaints() {
            self.outputs.say(&format!("carrack: {complaint}"));
        }
        match self.ending.due(now) {
            Some(Due::TimeLimit) if self.running().is_none() => self.stand_in = None,
            Some(Due::TimeLimit) => {
                let seconds = self.options.job.timeout.unwrap_or_default().as_secs_f64();
                let why = format!("the job took longer than {seconds} s (--timeout)");
                self.end(124, Signal::TERM, &why);
            }
            Some(Due::Ask) => self.ask(),
            Some(Due::Kill) => self.kill(&format!("{} s have passed", GRACE.as_secs())),
            None => {}
        }
        Ok(())
    }

    fn hear_outputs(&mut self) {
        let mut errno = [0];
        match self.outputs.news.read(&mut errno) {
            Ok(0) => self.has_written = true,
            Ok(_) => {
                let errno = Errno::from_raw_os_error(errno[0].into());
                // As the shell would end a program by SIGPIPE.
                let broken = signals::exit_status(libc::SIGPIPE);
                let status = if errno == Errno::PIPE { broken } else { 1 };
                let why = format!("stdout cannot be written to any more: {errno}");
                self.end(status, Signal::TERM, &why);
            }
            Err(_) => {}
        }
    }

    /// Takes the launcher's signals. Where it is gone no report can reach it.
    fn hear_launcher(&mut self) -> Result<(), LaunchError> {
        let mut bytes = [0; 64];
        match read(&self.lifeline, &mut bytes) {
            Ok(0) => return Err(LaunchError::LauncherGone),
            Ok(len) => bytes[..len].iter().for_each(|signal| self.told((*signal).into())),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(errno) => return Err(errno).doing("reading the launcher's pipe"),
        }
        Ok(())
    }

    fn take_signals(&mut self) -> Result<(), LaunchError> {
        while let Some(signal) = self.signals.next().doing("reading signals")? {
            match signal {
                libc::SIGCHLD => self.bury()?,
                signal => self.told(signal),
            }
        }
        Ok(())
    }

    /// Passes a signal from outside on, or ends the job for it; the second time without grace,
    /// unless both came together.
    fn told(&mut self, signal: i32) {
        let Some(to_send) = Signal::from_named_raw(signal) else {
            return;
        };
        if signals::PASSED_ON.iter().any(|passed| *passed as i32 == signal) {
            return self.ranks.iter().flatten().for_each(|rank| rank.signal(to_send));
        }
        self.stand_in = None;
        let name = signals::name(signal);
        let is_first = self.end(signals::exit_status(signal), to_send, &format!("got {name}"));
        let now = Instant::now();
        if is_first || self.ending.ask_now(now) {
            self.ask = to_send;
        } else if !self.ending.has_just_begun(now) {
            self.kill(&format!("got {name} again"));
        }
    }

    /// Waits for children that have died: ranks, and orphans of theirs that have become ours.
    fn bury(&mut self) -> Result<(), LaunchError> {
        loop {
            match wait(WaitOptions::NOHANG) {
                Ok(Some((pid, status))) => self.died(pid, status)?,
                Ok(None) | Err(Errno::CHILD) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno).doing("waiting for the ranks"),
            }
        }
    }

    fn died(&mut self, pid: Pid, status: WaitStatus) -> Result<(), LaunchError> {
        let is_it = |rank: &Option<Rank>| rank.as_ref().is_some_and(|rank| rank.pid == pid);
        let Some(number) = self.ranks.iter().position(is_it) else {
            return Ok(());
        };
        self.ranks[number] = None;
        // There are at most MAX_RANKS.
        let rank = u32::try_from(number).unwrap_or(u32::MAX);
        let (how, status, what) = if let Some(signal) = status.terminating_signal() {
            let what = format!("was killed by signal {signal} ({})", signals::name(signal));
            (Departure::Killed(signal), signals::exit_status(signal), what)
        } else {
            // One that has ended without a signal has a status.
            let code = status.exit_status().unwrap_or(1);
            let what = format!("exited with status {code}");
            (Departure::Exited(code), u8::try_from(code).unwrap_or(1), what)
        };
        let number = self.number(rank);
        let why = format!("rank {number} {what}");
        let is_first = status != 0 && self.end_after(LAST_WORDS, status, Signal::TERM, &why);
        self.stand_in(rank, is_first, &what)?;
        self.post.died(rank, how).doing("serving a rank's bootstrap")
    }

    /// Ends the job early: says why, and asks the ranks that still run to end. Returns `false` if
    /// it was ending already.
    fn end(&mut self, status: u8, ask: Signal, why: &str) -> bool {
        self.end_after(Duration::ZERO, status, ask, why)
    }

    /// Does as [`end`](Self::end), and asks the ranks after this time.
    fn end_after(&mut self, time: Duration, status: u8, ask: Signal, why: &str) -> bool {
        if !self.ending.begin(status, Instant::now(), time) {
            return false;
        }
        self.ask = ask;
        let consequence = self.running().map(|ranks| format!("; ending {ranks}"));
        self.outputs.say(&format!("carrack: {why}{}", consequence.unwrap_or_default()));
        true
    }

    /// Asks the ranks that still run to end.
    fn ask(&self) {
        for rank in self.ranks.iter().flatten() {
            rank.signal(self.ask);
            // A stopped process takes no signal but this one and SIGKILL.
            rank.signal(Signal::CONT);
        }
    }

    /// Kills the ranks that still run.
    fn kill(&mut self, why: &str) {
        if let Some(ranks) = self.running() {
            self.outputs.say(&format!("carrack: {why}; killing {ranks}"));
        }
        for rank in self.ranks.iter().flatten() {
            rank.signal(Signal::KILL);
        }
    }

    /// Describes in words the ranks that still run; `None` if no rank does.
    fn running(&self) -> Option<String> {
        match self.ranks.iter().flatten().count() {
            0 => None,
            1 => Some("the rank that still runs".into()),
            running => Some(format!("the {running} ranks that still run")),
        }
    }
}

/// Takes ownership of the end of the launcher's pipe that this process has inherited.
fn take_lifeline(number: i32) -> Result<OwnedFd, LaunchError> {
    let doing = "taking the launcher's pipe (start jobs with `carrack run`; it starts the keeper)";
    if number <= 2 {
        return Err(Errno::BADF).doing(doing);
    }
    // SAFETY: the launcher has passed the number of a descriptor for this process to own, and
    // nothing else here has opened one yet. A number that is not open only makes the next call
    // fail.
    let lifeline = unsafe { OwnedFd::from_raw_fd(number) };
    let is_pipe =
        fstat(&lifeline).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo);
    if !is_pipe {
        // Not ours to close, then.
        std::mem::forget(lifeline);
        return Err(Errno::BADF).doing(doing);
    }
    fcntl_setfd(&lifeline, FdFlags::CLOEXEC).doing(doing)?;
    rustix::io::ioctl_fionbio(&lifeline, true).doing(doing)?;
    Ok(lifeline)
}

/// Raises this process's limit on open files to what it may be, and returns what it was.
fn raise_open_files() -> Result<Rlimit, LaunchError> {
    let before = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: before.maximum, maximum: before.maximum };
    setrlimit(Resource::Nofile, raised).doing("raising the limit on open files")?;
    Ok(before)
}

/// Returns the exit status for a rank that could not be started, and what to do about the error.
fn not_started(error: &io::Error) -> (u8, &'static str) {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => (127, "; the file or the interpreter that it names is missing"),
        Some(Errno::ACCESS) => (126, "; make the file executable (`chmod +x`)"),
        Some(Errno::NOEXEC) => {
            (126, "; it is no program for this machine, or a script without `#!`")
        }
        Some(Errno::AGAIN) => {
            (1, "; raise the limit on processes (`ulimit -u`) or start fewer ranks")
        }
        Some(Errno::MFILE | Errno::NFILE) => {
            (1, "; raise the limit on open files (`ulimit -n`) or start fewer ranks")
        }
        _ => (1, ""),
    }
}
