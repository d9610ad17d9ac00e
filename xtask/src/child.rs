//! Runs a command with a watchdog. The output streams through. At the limit, the command and all
//! processes that it has started are ended.

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use fs_err as fs;
use rustix::process::{Pid, Signal, kill_process};

use crate::error::TaskError;

/// Time for which output is read after a command's end: a process left behind keeps the pipe open.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Interval of polls.
const GLANCE: Duration = Duration::from_millis(20);

/// An output of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    Out,
    Err,
}

/// Runs `command` and hands the lines of its standard output over. Standard error streams through.
///
/// # Errors
/// When the command cannot be started, fails, or is not done within `limit`; in each case all its
/// processes are ended.
pub(crate) fn run(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(&str),
) -> Result<(), TaskError> {
    let status = follow(command.stdout(Stdio::piped()), limit, |_, line| on_line(line))?;
    Heard { status, said: String::new(), complained: String::new() }.unless_failed(command)?;
    Ok(())
}

/// Output and status of a command.
#[derive(Debug)]
pub(crate) struct Heard {
    pub(crate) status: ExitStatus,
    /// Its standard output.
    pub(crate) said: String,
    /// Its standard error.
    pub(crate) complained: String,
}

/// Runs `command` silently, and returns output and status. A command that fails is no error here.
///
/// # Errors
/// When the command cannot be started, is not done within `limit`, or succeeds and leaves
/// processes running.
pub(crate) fn hear(command: &mut Command, limit: Duration) -> Result<Heard, TaskError> {
    let (mut said, mut complained) = (String::new(), String::new());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let status = follow(command, limit, |stream, line| {
        let to = if stream == Stream::Out { &mut said } else { &mut complained };
        to.extend([line, "\n"]);
    })?;
    Ok(Heard { status, said, complained })
}

impl Heard {
    /// Returns the standard output, if the command succeeded.
    pub(crate) fn unless_failed(self, command: &Command) -> Result<String, TaskError> {
        if self.status.success() {
            return Ok(self.said);
        }
        let said = self.said + &self.complained;
        Err(TaskError::Failed { command: spoken(command), status: self.status.to_string(), said })
    }
}

/// Runs `command` without printing its output, and returns its standard output.
///
/// # Errors
/// Those of [`hear`], and when the command fails; its output is in the error.
pub(crate) fn read(command: &mut Command, limit: Duration) -> Result<String, TaskError> {
    hear(command, limit)?.unless_failed(command)
}

/// Returns `true` if a program is installed and succeeds.
pub(crate) fn answers(command: &mut Command) -> bool {
    read(command, Duration::from_secs(60)).is_ok()
}

/// Runs `command` to its end, and hands over the lines of its piped outputs.
fn follow(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(Stream, &str),
) -> Result<ExitStatus, TaskError> {
    let started = Instant::now();
    let mut running = Running::start(command)?;
    let (send, lines) = mpsc::channel();
    if let Some(stdout) = running.child.stdout.take() {
        read_lines(stdout, send.clone(), Stream::Out);
    }
    if let Some(stderr) = running.child.stderr.take() {
        read_lines(stderr, send, Stream::Err);
    } else {
        drop(send);
    }
    let status = loop {
        match lines.recv_timeout(GLANCE) {
            Ok((stream, line)) => on_line(stream, &line),
            Err(RecvTimeoutError::Timeout) => {}
            // The command may still run: it can close its ends of the pipes before it ends.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(GLANCE),
        }
        if let Some(status) = running.ended()? {
            break status;
        }
        if started.elapsed() > limit {
            return Err(TaskError::TimedOut { command: spoken(command), limit });
        }
    };
    let until = Instant::now() + LAST_LINES;
    while let Ok((stream, line)) =
        lines.recv_timeout(until.saturating_duration_since(Instant::now()))
    {
        on_line(stream, &line);
    }
    // Processes that are about to end get half a second.
    let gone = || running.marked().next().is_none();
    if until_true(Duration::from_millis(500), || Ok(gone()))? || !status.success() {
        running.marked().map(end).for_each(drop);
        return Ok(status);
    }
    let left: Vec<_> = running.marked().map(end).collect();
    let status = format!("it left running, and they were ended: {}", left.join(", "));
    Err(TaskError::Failed { command: spoken(command), status, said: String::new() })
}

/// Polls `condition` until it is `true` or the time is up, and returns `true` if it was.
pub(crate) fn until_true(
    limit: Duration,
    mut condition: impl FnMut() -> Result<bool, TaskError>,
) -> Result<bool, TaskError> {
    let began = Instant::now();
    while !condition()? {
        if began.elapsed() > limit {
            return Ok(false);
        }
        thread::sleep(GLANCE / 4);
    }
    Ok(true)
}

/// Running command, with all processes that it starts. Dropping it ends all of them.
pub(crate) struct Running {
    child: Child,
    mark: String,
}

impl Running {
    /// Starts a command with an empty standard input.
    ///
    /// All its processes inherit a variable that marks them, by which even a process whose parent
    /// has ended is found. A process group would do the same, but Ctrl-C would no longer reach the
    /// command. A subreaper, as `carrack` is, does not learn which command an orphan comes from,
    /// and commands run next to each other here.
    pub(crate) fn start(command: &mut Command) -> Result<Self, TaskError> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        let mark = format!("{}-{number}", std::process::id());
        let child = command
            .env("XTASK_STEP", &mark)
            .stdin(Stdio::null())
            .spawn()
            .map_err(|source| TaskError::Start { program: spoken(command), source })?;
        Ok(Self { child, mark })
    }

    /// Returns the number of its process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the command, not to the processes that it has started.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            // The only possible error is that the process has ended.
            let _ = kill_process(pid, signal);
        }
    }

    /// Returns the status, once the command has ended.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>, TaskError> {
        Ok(self.child.try_wait()?)
    }

    /// Returns the processes that carry the mark.
    fn marked(&self) -> impl Iterator<Item = Pid> {
        let mark = format!("XTASK_STEP={}", self.mark).into_bytes();
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers.filter_map(Pid::from_raw).filter(move |pid| {
            // A zombie has no environment; another user's is unreadable, and cannot be ended here.
            let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero()));
            environment.unwrap_or_default().split(|byte| *byte == 0).any(|it| it == mark)
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // A process may start another between the look and the kill.
        let _ = until_true(Duration::from_secs(1), || Ok(self.marked().map(end).count() == 0));
        // It is dead or dying by now, and this only takes its status.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends a process, and says which it was.
fn end(pid: Pid) -> String {
    let number = pid.as_raw_nonzero();
    let name = fs::read_to_string(format!("/proc/{number}/comm")).unwrap_or_default();
    // The one error is that it has ended by itself.
    let _ = kill_process(pid, Signal::KILL);
    format!("{} (pid {number})", name.trim())
}

/// Reads lines on a thread of its own, since a pipe cannot be waited for with a limit.
fn read_lines(pipe: impl Read + Send + 'static, send: Sender<(Stream, String)>, stream: Stream) {
    thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            let text = String::from_utf8_lossy(&line).trim_end_matches('\r').to_owned();
            if send.send((stream, text)).is_err() {
                return;
            }
        }
    });
}

/// Prints a line of a child at once; a closed terminal is no reason to stop.
pub(crate) fn echo(line: &str) {
    let _ = writeln!(io::stdout().lock(), "{line}");
}

/// The command as a user would type it.
pub(crate) fn spoken(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str());
    let words: Vec<_> =
        std::iter::once(name).chain(command.get_args()).map(OsStr::to_string_lossy).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn the_lines_of_a_command_arrive_in_order_and_whole() {
        let mut lines = Vec::new();
        run(&mut shell("echo one; echo two; printf three"), SOON, |line| {
            lines.push(line.to_owned())
        })
        .unwrap();
        assert_eq!(lines, ["one", "two", "three"]);
    }

    #[test]
    fn a_command_that_fails_is_an_error_with_its_status() {
        let error = run(&mut shell("exit 3"), SOON, |_| {}).unwrap_err();
        assert!(error.to_string().contains("exit status: 3"), "{error}");
    }

    #[test]
    fn both_outputs_of_a_command_that_fails_are_heard_apart() {
        let heard = hear(&mut shell("echo one; echo two >&2; exit 2"), SOON).unwrap();
        assert_eq!(
            (heard.status.code(), &*heard.said, &*heard.complained),
            (Some(2), "one\n", "two\n")
        );
    }

    #[test]
    fn a_command_that_hangs_ends_at_its_limit_with_all_it_started() {
        let began = Instant::now();
        let script = "sh -c 'echo $$; exec sleep 600' & wait";
        let mut grandchild = String::new();
        let error = run(&mut shell(script), Duration::from_millis(500), |line| {
            grandchild = line.to_owned()
        });
        assert!(matches!(error, Err(TaskError::TimedOut { .. })), "{error:?}");
        assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
        let state = fs::read_to_string(format!("/proc/{grandchild}/stat")).unwrap_or_default();
        assert!(state.is_empty() || state.contains(") Z "), "the grandchild still runs: {state}");
    }

    #[test]
    fn a_command_that_leaves_a_process_running_fails_and_the_process_is_ended() {
        let began = Instant::now();
        let error = run(&mut shell("(sleep 600 &) ; echo done"), SOON, |_| {}).unwrap_err();
        assert!(error.to_string().contains("sleep"), "{error}");
        assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
    }

    #[test]
    fn a_program_that_is_not_there_is_an_error_that_names_it() {
        let error = run(&mut Command::new("no-such-program"), SOON, |_| {}).unwrap_err();
        assert!(error.to_string().contains("no-such-program"), "{error}");
    }
}
