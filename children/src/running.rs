//! A command that runs while its caller does something else.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

use crate::{
    ChildError, Heard, MARK, Stream, has_variable, interrupted, pause, spoken, with_variable,
};

/// Time for which output is read after a command's end: a process that is not found keeps the pipe
/// open.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Time in which the processes that a command has started end by themselves after it.
const STRAGGLERS: Duration = Duration::from_millis(500);

/// Time to end by itself for a command that a signal to this process ends.
const GRACE: Duration = Duration::from_secs(3);

/// Interval of polls.
pub(crate) const GLANCE: Duration = Duration::from_millis(5);

/// Running command, with all processes that it starts. Dropping it ends all of them.
#[derive(Debug)]
pub struct Running {
    child: Child,
    words: String,
    mark: String,
    lines: Receiver<(Stream, String)>,
    /// Lines of one output that came while a line of the other was waited for.
    kept: VecDeque<(Stream, String)>,
    /// Set once its end was taken up: its number may then be another process's.
    has_ended: bool,
}

impl Running {
    /// Starts a command. Outputs that are piped are read from now on, and kept until they are
    /// asked for. An input that is piped is never written or closed.
    ///
    /// All its processes inherit a variable that marks them, by which even a process whose parent
    /// has ended is found. A process group would do the same, but Ctrl-C would no longer reach the
    /// command. A subreaper, as `carrack run` is, does not learn which command an orphan comes
    /// from, and commands run next to each other here.
    ///
    /// # Errors
    /// When it cannot be started, or a signal has asked this process to end.
    pub fn start(command: &mut Command) -> Result<Self, ChildError> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        // The number of a process alone is another's in another namespace, or later.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mark = format!("{}-{}-{number}", std::process::id(), now.as_nanos());
        let around = std::env::var(MARK).unwrap_or_default();
        let words = spoken(command);
        if interrupted() {
            return Err(ChildError::Interrupted { command: words, said: String::new() });
        }
        let mut child = command
            .env(MARK, format!("{around}/{mark}"))
            .spawn()
            .map_err(|source| ChildError::Start { program: words.clone(), source })?;
        let (outputs, (send, lines)) =
            ((child.stdout.take(), child.stderr.take()), mpsc::channel());
        // Before the threads: where none can be started, the drop of this ends the command.
        let this = Self { child, words, mark, lines, kept: VecDeque::new(), has_ended: false };
        let stdout = outputs.0.map(|pipe| read_lines(pipe, send.clone(), Stream::Out));
        let stderr = outputs.1.map(|pipe| read_lines(pipe, send, Stream::Err));
        for is_read in [stdout, stderr].into_iter().flatten() {
            is_read.map_err(|source| ChildError::Start { program: this.words.clone(), source })?;
        }
        Ok(this)
    }

    /// Returns the number of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Returns the next line of a piped output, without the line's end; `None` where none comes in
    /// this time, or none will come.
    pub fn next_line(&mut self, of: Stream, within: Duration) -> Option<String> {
        if let Some(at) = self.kept.iter().position(|(stream, _)| *stream == of) {
            return self.kept.remove(at).map(|(_, line)| line);
        }
        let began = Instant::now();
        loop {
            let left = within.saturating_sub(began.elapsed());
            let (stream, line) = self.lines.recv_timeout(left).ok()?;
            if stream == of {
                return Some(line);
            }
            self.kept.push_back((stream, line));
        }
    }

    /// Sends a signal to the command, not to the processes that it has started, unless it has
    /// ended.
    pub fn signal(&self, signal: Signal) {
        if !self.has_ended {
            let _ = kill_process(Pid::from_child(&self.child), signal);
        }
    }

    /// Returns the status, once the command has ended.
    ///
    /// # Errors
    /// When the system does not tell its end.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>, ChildError> {
        let lost = |source| ChildError::Lost { command: self.words.clone(), source };
        let ended = self.child.try_wait().map_err(lost)?;
        self.has_ended |= ended.is_some();
        Ok(ended)
    }

    /// Waits for the command's end, and returns its status; `None` if it still runs at the limit,
    /// or when `pause` returned `false`. `pause` is called between two looks, and takes some
    /// milliseconds.
    ///
    /// # Errors
    /// The errors of [`ended`](Self::ended).
    pub fn wait(
        &mut self,
        limit: Duration,
        mut pause: impl FnMut() -> bool,
    ) -> Result<Option<ExitStatus>, ChildError> {
        let began = Instant::now();
        loop {
            let ended = self.ended()?;
            if ended.is_some() || began.elapsed() > limit || !pause() {
                return Ok(ended);
            }
        }
    }

    /// Waits for the command's end without a limit, and returns its status. A process that it has
    /// left running has half a second to end, and is then killed.
    ///
    /// # Errors
    /// When the system does not tell its end.
    pub fn status(mut self) -> Result<ExitStatus, ChildError> {
        let lost = |source| ChildError::Lost { command: self.words.clone(), source };
        let status = self.child.wait().map_err(lost)?;
        self.has_ended = true;
        self.let_end();
        Ok(status)
    }

    /// Gives the processes that it has started some time to end by themselves.
    fn let_end(&self) {
        let began = Instant::now();
        while self.processes().next().is_some() && began.elapsed() < STRAGGLERS {
            pause();
        }
    }

    /// Waits for the command's end, and returns its status and the piped outputs, line by line,
    /// without those that [`next_line`](Self::next_line) has returned.
    ///
    /// # Errors
    /// When it is not done within `limit`, or a signal asks this process to end; the output is in
    /// the error.
    pub fn heard(self, limit: Duration) -> Result<Heard, ChildError> {
        let (mut stdout, mut stderr) = (String::new(), String::new());
        let ended = self.follow(limit, |stream, line| {
            let to = if stream == Stream::Out { &mut stdout } else { &mut stderr };
            to.extend([line, "\n"]);
        });
        match ended {
            Ok(Followed { status, left, is_held }) => {
                Ok(Heard { status, stdout, stderr, left, is_held })
            }
            Err(mut error) => {
                if let ChildError::TimedOut { said, .. } | ChildError::Interrupted { said, .. } =
                    &mut error
                {
                    *said = stdout + &stderr;
                }
                Err(error)
            }
        }
    }

    /// Waits for the command's end and hands over the lines of its piped outputs.
    pub(crate) fn follow(
        mut self,
        limit: Duration,
        mut on_line: impl FnMut(Stream, &str),
    ) -> Result<Followed, ChildError> {
        let began = Instant::now();
        self.kept.drain(..).for_each(|(stream, line)| on_line(stream, &line));
        let mut ended = self.ended()?;
        while ended.is_none() && began.elapsed() <= limit && !interrupted() {
            match self.lines.recv_timeout(GLANCE) {
                Ok((stream, line)) => on_line(stream, &line),
                Err(RecvTimeoutError::Timeout) => {}
                // The command may still run: it can close its ends of the pipes before it ends.
                Err(RecvTimeoutError::Disconnected) => thread::sleep(GLANCE),
            }
            ended = self.ended()?;
        }
        let is_interrupted = ended.is_none() && interrupted();
        if is_interrupted {
            self.ask(GRACE);
        }
        if ended.is_some() {
            self.let_end();
        }
        let left = self.end();
        let (until, mut last, mut is_held) = (Instant::now() + LAST_LINES, Vec::new(), true);
        while is_held && Instant::now() < until {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                // Not handed over yet: the caller may be slow.
                Ok(line) => last.push(line),
                Err(end) => is_held = end == RecvTimeoutError::Timeout,
            }
        }
        last.iter().for_each(|(stream, line)| on_line(*stream, line));
        let (command, said) = (self.words.clone(), String::new());
        match ended {
            Some(status) => Ok(Followed { status, left, is_held }),
            None if is_interrupted => Err(ChildError::Interrupted { command, said }),
            None => Err(ChildError::TimedOut { command, limit, said }),
        }
    }

    /// Asks all its processes by SIGTERM to end, so that a launcher among them can end its job.
    /// Waits for the command's end, this long at most.
    pub fn ask(&mut self, grace: Duration) {
        self.signal(Signal::TERM);
        self.processes().for_each(|pid| self.reach(pid, Signal::TERM));
        // One whose end is not known is ended like one that does not end.
        let _ = self.wait(grace, pause);
    }

    /// Ends its processes, and returns which of them were still running.
    pub fn end(&mut self) -> Vec<String> {
        let began = Instant::now();
        let mut ended = Vec::new();
        // A process may start another between the look and the kill.
        while began.elapsed() < Duration::from_secs(1) {
            let found: Vec<_> = self.processes().collect();
            if found.is_empty() {
                break;
            }
            for pid in found {
                let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
                let name = format!("{} (pid {pid})", name.trim());
                if !ended.contains(&name) {
                    ended.push(name);
                }
                self.reach(pid, Signal::KILL);
            }
            pause();
        }
        // One that has changed its user goes on.
        match self.child.try_wait() {
            Ok(None) if self.child.kill().is_ok() => self.has_ended |= self.child.wait().is_ok(),
            Ok(ended) => self.has_ended |= ended.is_some(),
            // Its number may be another process's by now.
            Err(_) => {}
        }
        ended
    }

    /// Sends a signal to a process that carries the mark. It fails for one that has ended.
    fn reach(&self, pid: Pid, signal: Signal) {
        // The number may have become another process's since it was found.
        if let Ok(process) = pidfd_open(pid, PidfdFlags::empty())
            && has_variable(pid, MARK, |marks| is_among(marks, &self.mark))
        {
            let _ = pidfd_send_signal(process, signal);
        }
    }

    /// Returns the command's process and those that it has started, unless they have cleared their
    /// variables.
    pub fn processes(&self) -> impl Iterator<Item = Pid> {
        with_variable(MARK, |marks| is_among(marks, &self.mark))
    }
}

/// End of a command that was followed. The fields are those of [`Heard`].
pub(crate) struct Followed {
    pub(crate) status: ExitStatus,
    pub(crate) left: Vec<String>,
    pub(crate) is_held: bool,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

fn is_among(marks: &[u8], mark: &str) -> bool {
    marks.split(|byte| *byte == b'/').any(|one| one == mark.as_bytes())
}

/// Reads lines on a thread of its own, since a pipe cannot be waited for with a limit.
fn read_lines(
    pipe: impl Read + Send + 'static,
    send: Sender<(Stream, String)>,
    stream: Stream,
) -> io::Result<()> {
    let read = move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
            if send.send((stream, text)).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("carrack-child".into()).spawn(read).map(drop)
}
