//! Runs a command with a watchdog. The output streams through. At the limit, the command and all
//! processes that it has started are ended.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::error::TaskError;

/// Time for which output is still read after a command has ended. A process that it left behind
/// may keep the pipe open for ever.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Interval at which the end of a command is polled.
const GLANCE: Duration = Duration::from_millis(20);

/// Runs `command` and hands each line of its standard output to `on_line`, which may print it.
/// Standard error streams through.
///
/// # Errors
/// When the command cannot be started, fails, or is not done within `limit`; in each case all its
/// processes are ended.
pub(crate) fn run(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(&str),
) -> Result<(), TaskError> {
    let status = follow(command.stdout(Stdio::piped()), limit, |line| on_line(line.text()))?;
    if status.success() {
        return Ok(());
    }
    Err(TaskError::Failed {
        command: spoken(command),
        status: status.to_string(),
        said: String::new(),
    })
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

/// Runs `command` without printing its output, and returns output and status. A command that fails
/// is no error here.
///
/// # Errors
/// When the command cannot be started, is not done within `limit`, or succeeds and leaves
/// processes running.
pub(crate) fn hear(command: &mut Command, limit: Duration) -> Result<Heard, TaskError> {
    let (mut said, mut complained) = (String::new(), String::new());
    let status = follow(command.stdout(Stdio::piped()).stderr(Stdio::piped()), limit, |line| {
        let to = if matches!(line, Line::Said(_)) { &mut said } else { &mut complained };
        to.push_str(line.text());
        to.push('\n');
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

/// Runs `command` to its end, and hands over the lines of its piped outputs.
fn follow(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(&Line),
) -> Result<ExitStatus, TaskError> {
    let started = Instant::now();
    let mut running = Running::start(command)?;
    let (send, lines) = mpsc::channel();
    if let Some(stdout) = running.child.stdout.take() {
        read_lines(stdout, send.clone(), Line::Said);
    }
    if let Some(stderr) = running.child.stderr.take() {
        read_lines(stderr, send.clone(), Line::Complained);
    }
    drop(send);
    let status = loop {
        match lines.recv_timeout(GLANCE) {
            Ok(line) => on_line(&line),
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
    while let Ok(line) = lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
        on_line(&line);
    }
    let left = running.left_behind();
    if status.success() && !left.is_empty() {
        let status = format!("it left running, and they were ended: {}", left.join(", "));
        return Err(TaskError::Failed { command: spoken(command), status, said: String::new() });
    }
    Ok(status)
}

/// Runs `command` like [`run`], but returns its standard output and discards its standard error.
pub(crate) fn read(command: &mut Command, limit: Duration) -> Result<String, TaskError> {
    let mut said = String::new();
    let result = run(command.stderr(Stdio::null()), limit, |line| {
        said.push_str(line);
        said.push('\n');
    });
    match result {
        Err(TaskError::Failed { command, status, .. }) => {
            Err(TaskError::Failed { command, status, said })
        }
        Err(other) => Err(other),
        Ok(()) => Ok(said),
    }
}

/// Returns `true` if a program is installed and succeeds.
pub(crate) fn answers(command: &mut Command) -> bool {
    read(command, Duration::from_secs(60)).is_ok()
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
    /// command.
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

    /// Sends a signal to the command, not to the processes that it has started.
    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            // The only possible error is that the process has ended.
            let _ = kill_process(pid, signal);
        }
    }

    /// Returns the status, once the command has ended.
    pub(crate) fn ended(&mut self) -> Result<Option<ExitStatus>, TaskError> {
        self.child.try_wait().map_err(TaskError::file(format!("/proc/{}", self.child.id())))
    }

    /// Ends the processes that an ended command has left running, and returns their descriptions.
    fn left_behind(&self) -> Vec<String> {
        // Processes that are about to end get half a second.
        for _ in 0..25 {
            if self.marked().next().is_none() {
                return Vec::new();
            }
            thread::sleep(GLANCE);
        }
        self.marked().map(end).collect()
    }

    /// Returns the processes that carry the mark.
    fn marked(&self) -> impl Iterator<Item = Pid> {
        let mark = format!("XTASK_STEP={}", self.mark).into_bytes();
        fs::read_dir("/proc")
            .into_iter()
            .flatten()
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
            .filter(move |pid| {
                // A zombie has no environment, and another user's is unreadable: neither can be
                // ended here.
                let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                environment.split(|byte| *byte == 0).any(|variable| variable == mark)
            })
            .filter_map(Pid::from_raw)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        // A process may start another between the look and the kill: look again until there is
        // none.
        for _ in 0..50 {
            if self.marked().map(end).count() == 0 {
                break;
            }
            thread::sleep(GLANCE);
        }
        // It is dead or dying by now, and this only takes its status; nothing is left to do about
        // an error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Ends a process, and says which it was.
fn end(pid: Pid) -> String {
    let name =
        fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_nonzero())).unwrap_or_default();
    // The one error is that it has ended by itself.
    let _ = kill_process(pid, Signal::KILL);
    format!("{} (pid {})", name.trim(), pid.as_raw_nonzero())
}

/// A line of a command, and where it came from.
enum Line {
    Said(String),
    Complained(String),
}

impl Line {
    fn text(&self) -> &str {
        match self {
            Self::Said(text) | Self::Complained(text) => text,
        }
    }
}

/// Reads lines on a thread of its own, since a pipe cannot be waited for with a limit.
fn read_lines(pipe: impl Read + Send + 'static, send: Sender<Line>, make: fn(String) -> Line) {
    thread::spawn(move || {
        let mut reader = BufReader::new(pipe);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).is_ok_and(|read| read > 0) {
            let text = String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']).to_owned();
            if send.send(make(text)).is_err() {
                return;
            }
            line.clear();
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
