//! The parent of all ranks: one thread, one event loop.

#![expect(unsafe_code, reason = "a file descriptor comes by its number")]

use std::io;
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use carrack::bootstrap::{Departure, JobId};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::fs::{FileType, fstat};
use rustix::io::{Errno, FdFlags, fcntl_setfd, read};
use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitOptions, WaitStatus, getrlimit, setrlimit, wait,
};

use super::binding::{Bind, allowed_cpus, cpu_of};
use super::ending::{Due, Ending, GRACE};
use super::error::LaunchError;
use super::options::Output;
use super::orders::KeeperOptions;
use super::output::{Outputs, Stream};
use super::post::Post;
use super::rank::{Rank, Template};
use super::signals::{self, Signals};
use super::sweep::{adopt_orphans, sweep};

/// Keeps a job until nothing of it runs any more, and gives its exit status.
pub(crate) fn keep(options: KeeperOptions) -> ExitCode {
    // Whatever happens in here, a panic included, nothing is left behind.
    let _sweep = SweepOnDrop;
    match Keeper::new(&options).and_then(Keeper::run) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            eprintln!("carrack: {error}");
            ExitCode::from(error.exit_status())
        }
    }
}

struct SweepOnDrop;

impl Drop for SweepOnDrop {
    fn drop(&mut self) {
        match sweep() {
            Ok(left) => {
                for pid in left {
                    eprintln!(
                        "carrack: process {pid} of another user could not be killed; end it \
                        yourself"
                    );
                }
            }
            Err(error) => eprintln!("carrack: looking for processes to end failed: {error}"),
        }
    }
}

/// Source of an event, as epoll's 64 bits.
#[derive(Clone, Copy)]
enum Source {
    Lifeline,
    Signals,
    Pipes(Stream),
    Sink,
    Socket(u32),
}

impl Source {
    const FIRST_SOCKET: u64 = 16;

    fn token(self) -> u64 {
        match self {
            Self::Lifeline => 0,
            Self::Signals => 1,
            Self::Pipes(Stream::Out) => 2,
            Self::Pipes(Stream::Err) => 3,
            Self::Sink => 4,
            Self::Socket(rank) => Self::FIRST_SOCKET + u64::from(rank),
        }
    }

    fn of(token: u64) -> Self {
        match token {
            0 => Self::Lifeline,
            1 => Self::Signals,
            2 => Self::Pipes(Stream::Out),
            3 => Self::Pipes(Stream::Err),
            4 => Self::Sink,
            // Only ranks' numbers were added.
            socket => Self::Socket(u32::try_from(socket - Self::FIRST_SOCKET).unwrap_or(u32::MAX)),
        }
    }
}

struct Keeper<'a> {
    options: &'a KeeperOptions,
    program: &'a Path,
    signals: Signals,
    lifeline: OwnedFd,
    main: OwnedFd,
    outputs: Outputs,
    post: Post,
    ending: Ending,
    cpus: Vec<usize>,
    open_files: Rlimit,
    /// By number; none once it has been waited for.
    ranks: Vec<Option<Rank>>,
}

/// Break when the launcher is gone: no report can reach it.
type Flow = Result<ControlFlow<()>, LaunchError>;

const GO_ON: Flow = Ok(ControlFlow::Continue(()));

impl<'a> Keeper<'a> {
    fn new(options: &'a KeeperOptions) -> Result<Self, LaunchError> {
        let lifeline = take_lifeline(options.lifeline)?;
        // Only a label in `ps`; it may fail.
        let _ = rustix::thread::set_name(c"carrack-keeper");
        // SIGTTOU would stop a keeper that writes to the terminal from the background.
        let signals = Signals::take(&[libc::SIGTTOU])
            .map_err(LaunchError::os("taking signals (signalfd)"))?;
        adopt_orphans()?;
        let open_files = raise_open_files()?;
        let job = JobId::random().map_err(|error| {
            LaunchError::os("making the job's identity")(io::Error::other(error))
        })?;
        let watch = |main: &OwnedFd| {
            let add = |fd, source: Source| {
                epoll::add(
                    main,
                    fd,
                    epoll::EventData::new_u64(source.token()),
                    epoll::EventFlags::IN,
                )
            };
            add(lifeline.as_fd(), Source::Lifeline)?;
            add(signals.as_fd(), Source::Signals)
        };
        let main = epoll::create(epoll::CreateFlags::CLOEXEC)
            .and_then(|main| watch(&main).map(|()| main))
            .map_err(LaunchError::os("making the event loop (epoll)"))?;
        let outputs = Outputs::new(options.ranks)
            .map_err(LaunchError::os("making the event loop (epoll)"))?;
        let time_limit = options.timeout_ms.map(|ms| Instant::now() + Duration::from_millis(ms));
        Ok(Self {
            options,
            program: options.command.first().map_or(Path::new(""), Path::new),
            signals,
            lifeline,
            main,
            outputs,
            post: Post::new(job, options.ranks),
            ending: Ending::new(time_limit),
            cpus: if options.bind == Bind::Core { allowed_cpus()? } else { Vec::new() },
            open_files,
            ranks: Vec::new(),
        })
    }

    fn run(mut self) -> Result<u8, LaunchError> {
        for rank in 0..self.options.ranks {
            // Between two starts, so that ten thousand of them can be interrupted.
            if self.turn(true)?.is_break() {
                return Ok(0);
            }
            if self.ending.has_begun() {
                break;
            }
            self.start(rank)?;
        }
        while self.ranks.iter().any(Option::is_some) {
            if self.turn(false)?.is_break() {
                return Ok(0);
            }
        }
        // What ranks have left in the background must go first: it holds their pipes open.
        drop(SweepOnDrop);
        self.finish_output()?;
        Ok(self.ending.status())
    }

    fn start(&mut self, rank: u32) -> Result<(), LaunchError> {
        let socket = self
            .post
            .open(rank, &self.main, Source::Socket(rank).token())
            .map_err(LaunchError::os("making a rank's socket"))?;
        let template = Template {
            program: self.program,
            args: &self.options.command[1..],
            size: self.options.ranks,
            piped: self.options.output != Output::Inherited,
            foreground: self.options.foreground,
            open_files: self.open_files,
            blocked: self.signals.blocked(),
        };
        let started = match template.start(rank, &socket, cpu_of(rank, &self.cpus)) {
            Ok(started) => started,
            Err(error) => {
                let (status, advice) = not_started(&error);
                let program = self.program.display();
                self.end(
                    status,
                    Signal::TERM,
                    &format!("rank {rank} could not be started: {program}: {error}{advice}"),
                );
                return Ok(());
            }
        };
        self.ranks.push(Some(started.rank));
        for (stream, pipe) in [(Stream::Out, started.stdout), (Stream::Err, started.stderr)] {
            let Some(pipe) = pipe else { continue };
            let tag = match self.options.output {
                Output::Tagged => format!("[{rank}] "),
                Output::Plain | Output::Inherited => String::new(),
            };
            self.outputs
                .add(rank, stream, pipe, tag)
                .map_err(LaunchError::os("watching a rank's output"))?;
        }
        Ok(())
    }

    /// Handles what has happened, after waiting for something to happen or for a deadline.
    fn turn(&mut self, at_once: bool) -> Flow {
        let main_failed = "waiting for events (epoll)";
        self.flush()?;
        let deadline = [self.ending.deadline(), self.post.deadline()].into_iter().flatten().min();
        let timeout = match (at_once, deadline) {
            (true, _) => Some(Duration::ZERO),
            (false, at) => at.map(|at| at.saturating_duration_since(Instant::now())),
        };
        // A duration too long to be told is as good as none.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let mut events = [MaybeUninit::uninit(); 256];
        let events = match epoll::wait(&self.main, &mut events, timeout.as_ref()) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return GO_ON,
            Err(errno) => return Err(LaunchError::os(main_failed)(errno)),
        };
        for event in events {
            let data = event.data;
            match Source::of(data.u64()) {
                Source::Lifeline => {
                    if self.hear_launcher()?.is_break() {
                        return Ok(ControlFlow::Break(()));
                    }
                }
                Source::Signals => self.take_signals()?,
                Source::Pipes(stream) => {
                    self.outputs
                        .read(stream)
                        .map_err(LaunchError::os("reading a rank's output"))?;
                }
                // It has room again; every turn begins with a flush.
                Source::Sink => {}
                Source::Socket(rank) => {
                    self.post
                        .serve(rank, &self.main)
                        .map_err(LaunchError::os("serving a rank's bootstrap"))?;
                }
            }
        }
        let now = Instant::now();
        self.post.expire(now, &self.main).map_err(LaunchError::os("serving a rank's bootstrap"))?;
        for complaint in self.post.complaints() {
            self.outputs.say(&format!("carrack: {complaint}"));
        }
        match self.ending.due(now) {
            Some(Due::TimeLimit) => {
                let seconds =
                    Duration::from_millis(self.options.timeout_ms.unwrap_or(0)).as_secs_f64();
                self.end(
                    124,
                    Signal::TERM,
                    &format!("the job took longer than {seconds} s (--timeout)"),
                );
            }
            Some(Due::Kill) => {
                self.kill(&format!("{} s have passed", GRACE.as_secs()));
            }
            None => {}
        }
        GO_ON
    }

    fn flush(&mut self) -> Result<(), LaunchError> {
        let stdout_is_read = self
            .outputs
            .flush(&self.main, |stream| Source::Pipes(stream).token(), Source::Sink.token())
            .map_err(LaunchError::os("watching the output"))?;
        if !stdout_is_read {
            // As the shell would end a program by SIGPIPE.
            self.end(
                signals::exit_status(libc::SIGPIPE),
                Signal::TERM,
                "stdout cannot be written to any more",
            );
        }
        Ok(())
    }

    fn hear_launcher(&mut self) -> Flow {
        let mut bytes = [0; 64];
        match read(&self.lifeline, &mut bytes) {
            Ok(0) => Ok(ControlFlow::Break(())),
            Ok(len) => {
                for signal in &bytes[..len] {
                    self.told_to_end((*signal).into());
                }
                GO_ON
            }
            Err(Errno::INTR | Errno::AGAIN) => GO_ON,
            Err(errno) => Err(LaunchError::os("reading the launcher's pipe")(errno)),
        }
    }

    fn take_signals(&mut self) -> Result<(), LaunchError> {
        while let Some(signal) = self.signals.next().map_err(LaunchError::os("reading signals"))? {
            match signal {
                libc::SIGCHLD => self.bury()?,
                signal => self.told_to_end(signal),
            }
        }
        Ok(())
    }

    /// Ends the job for a signal from outside; the second time without grace.
    fn told_to_end(&mut self, signal: i32) {
        let Some(to_send) = Signal::from_named_raw(signal) else {
            return;
        };
        let name = signals::name(signal);
        if !self.end(signals::exit_status(signal), to_send, &format!("got {name}")) {
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
                Err(errno) => return Err(LaunchError::os("waiting for the ranks")(errno)),
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
        let how = match (status.exit_status(), status.terminating_signal()) {
            (_, Some(signal)) => Departure::Killed(signal),
            (status, None) => Departure::Exited(status.unwrap_or(0)),
        };
        match how {
            Departure::Exited(0) => {}
            Departure::Killed(signal) => {
                let what = format!(
                    "rank {rank} was killed by signal {signal} ({})",
                    signals::name(signal)
                );
                self.end(signals::exit_status(signal), Signal::TERM, &what);
            }
            _ => {
                let status = status.exit_status().unwrap_or(1);
                let what = format!("rank {rank} exited with status {status}");
                self.end(u8::try_from(status).unwrap_or(1), Signal::TERM, &what);
            }
        }
        self.post.died(rank, how, &self.main).map_err(LaunchError::os("serving a rank's bootstrap"))
    }

    /// Ends the job early: says why, and asks the ranks that still run to end. False when it was
    /// ending already.
    fn end(&mut self, status: u8, ask: Signal, why: &str) -> bool {
        if !self.ending.begin(status, Instant::now()) {
            return false;
        }
        let running = self.running();
        let consequence = match running {
            0 => String::new(),
            1 => "; ending the rank that still runs".into(),
            _ => format!("; ending the {running} ranks that still run"),
        };
        self.outputs.say(&format!("carrack: {why}{consequence}"));
        for rank in self.ranks.iter().flatten() {
            rank.signal(ask);
            // A stopped process takes no signal but this one and SIGKILL.
            rank.signal(Signal::CONT);
        }
        true
    }

    /// Kills the ranks that still run.
    fn kill(&mut self, why: &str) {
        let running = self.running();
        if running > 0 {
            let ranks = if running == 1 {
                "the rank that still runs".into()
            } else {
                format!("the {running} ranks that still run")
            };
            self.outputs.say(&format!("carrack: {why}; killing {ranks}"));
        }
        for rank in self.ranks.iter().flatten() {
            rank.signal(Signal::KILL);
        }
    }

    fn running(&self) -> usize {
        self.ranks.iter().flatten().count()
    }

    /// Writes what the ranks left in their pipes. A reader that does not read is waited for, but
    /// not beyond the launcher's life, nor a signal.
    fn finish_output(&mut self) -> Result<(), LaunchError> {
        let failed = "reading a rank's output";
        loop {
            let more = self.outputs.read_to_end().map_err(LaunchError::os(failed))?;
            self.flush()?;
            while let Some(sink) = self.outputs.blocked() {
                let mut fds = [
                    PollFd::from_borrowed_fd(sink, PollFlags::OUT),
                    PollFd::new(&self.lifeline, PollFlags::IN),
                    PollFd::new(&self.signals, PollFlags::IN),
                ];
                match poll(&mut fds, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(errno) => return Err(LaunchError::os("waiting for stdout")(errno)),
                }
                if self.hear_launcher_or_signal()? {
                    return Ok(());
                }
                self.flush()?;
            }
            if !more {
                return Ok(());
            }
        }
    }

    /// Returns `true` if the launcher is gone, or a signal or the launcher ends the job.
    fn hear_launcher_or_signal(&mut self) -> Result<bool, LaunchError> {
        let mut told = false;
        while let Some(signal) = self.signals.next().map_err(LaunchError::os("reading signals"))? {
            told |= signal != libc::SIGCHLD;
        }
        let mut ready = [PollFd::new(&self.lifeline, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        Ok(told || poll(&mut ready, Some(&now)).is_ok_and(|ready| ready > 0))
    }
}

/// The end of the launcher's pipe that this process has inherited.
fn take_lifeline(number: i32) -> Result<OwnedFd, LaunchError> {
    let doing = "taking the launcher's pipe (start jobs with `carrack run`; it starts the keeper)";
    if number <= 2 {
        return Err(LaunchError::os(doing)(Errno::BADF));
    }
    // SAFETY: the launcher has passed the number of a descriptor for this process to own; nothing
    // else here has opened one yet, and a number that is not open only makes the next call fail.
    let lifeline = unsafe { OwnedFd::from_raw_fd(number) };
    let is_pipe =
        fstat(&lifeline).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Fifo);
    if !is_pipe {
        // Not ours to close, then.
        std::mem::forget(lifeline);
        return Err(LaunchError::os(doing)(Errno::BADF));
    }
    fcntl_setfd(&lifeline, FdFlags::CLOEXEC).map_err(LaunchError::os(doing))?;
    rustix::io::ioctl_fionbio(&lifeline, true).map_err(LaunchError::os(doing))?;
    Ok(lifeline)
}

/// Raises this process's limit on open files to what it may be, and returns what it was.
fn raise_open_files() -> Result<Rlimit, LaunchError> {
    let before = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: before.maximum, maximum: before.maximum };
    setrlimit(Resource::Nofile, raised)
        .map_err(LaunchError::os("raising the limit on open files"))?;
    Ok(before)
}

/// The status for a rank that could not be started, and what to do about it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_comes_back_from_its_token() {
        for source in [
            Source::Lifeline,
            Source::Signals,
            Source::Sink,
            Source::Socket(0),
            Source::Socket(4095),
        ] {
            assert_eq!(Source::of(source.token()).token(), source.token());
        }
    }
}
