//! Child processes: each is run to its end or a limit, with all processes that it has started.
//!
//! [`run`], [`hear`] and [`read`] run a command and hand its output over; [`Running`] is a command
//! next to which the caller does something else. A process that outlives its command is found by
//! a variable that all processes of the command inherit. A caller that runs one command at a time
//! also finds those that have cleared their variables: [`adopt_orphans`], [`sweep`].

mod orphans;

pub use orphans::{adopt_orphans, sweep};

use std::ffi::OsStr;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use fs_err as fs;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

/// Time for which output is read after a command's end: a process that is not found keeps the pipe
/// open.
const LAST_LINES: Duration = Duration::from_secs(2);

/// Time in which the processes that a command has started end by themselves after it.
const STRAGGLERS: Duration = Duration::from_millis(500);

/// Interval of polls.
const GLANCE: Duration = Duration::from_millis(20);

/// Variable that marks the processes of a command. It holds the marks of the commands around it,
/// too: a command that runs others is the end of theirs.
pub const MARK: &str = "CHILD_OF";

/// Bad end of a command.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The program could not be started.
    #[error("cannot start `{program}`: {source}; is it installed and in PATH?")]
    Start {
        /// The command.
        program: String,
        /// Reason of the system.
        source: io::Error,
    },
    /// The command ended with an error.
    #[error("`{command}` failed ({status}){}", after_colon(said))]
    Failed {
        /// The command.
        command: String,
        /// Its status, in words.
        status: String,
        /// Its output, where it was not streamed through.
        said: String,
    },
    /// The command was still running at its limit, and was ended.
    #[error("`{command}` was still running after {limit:?} and was ended{}", after_colon(said))]
    TimedOut {
        /// The command.
        command: String,
        /// The limit.
        limit: Duration,
        /// Its output, where it was not streamed through.
        said: String,
    },
    /// The system does not tell the command's end.
    #[error("the end of `{command}` is not known: {source}")]
    Lost {
        /// The command.
        command: String,
        /// Reason of the system.
        source: io::Error,
    },
}

/// An output of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// Runs `command` and hands the lines of its standard output over. Standard error streams through.
///
/// # Errors
/// When the command cannot be started, fails, leaves processes running, or is not done within
/// `limit`; in each case all its processes are ended.
pub fn run(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(&str),
) -> Result<(), ChildError> {
    let status = follow(command.stdout(Stdio::piped()), limit, |_, line| on_line(line))?;
    Heard { status, said: String::new(), complained: String::new() }.unless_failed(command)?;
    Ok(())
}

/// Output and status of a command.
#[derive(Debug)]
pub struct Heard {
    /// Its status.
    pub status: ExitStatus,
    /// Its standard output.
    pub said: String,
    /// Its standard error.
    pub complained: String,
}

/// Runs `command` silently, and returns output and status. A command that fails is no error here.
///
/// # Errors
/// When the command cannot be started, is not done within `limit`, or succeeds and leaves
/// processes running. The output is in the error.
pub fn hear(command: &mut Command, limit: Duration) -> Result<Heard, ChildError> {
    let (mut said, mut complained) = (String::new(), String::new());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let ended = follow(command, limit, |stream, line| {
        let to = if stream == Stream::Out { &mut said } else { &mut complained };
        to.extend([line, "\n"]);
    });
    match ended {
        Ok(status) => Ok(Heard { status, said, complained }),
        Err(mut error) => {
            if let ChildError::Failed { said: all, .. } | ChildError::TimedOut { said: all, .. } =
                &mut error
            {
                *all = said + &complained;
            }
            Err(error)
        }
    }
}

impl Heard {
    /// Returns the standard output, if the command succeeded.
    ///
    /// # Errors
    /// When it failed; its output is in the error.
    pub fn unless_failed(self, command: &Command) -> Result<String, ChildError> {
        if self.status.success() {
            return Ok(self.said);
        }
        let said = self.said + &self.complained;
        Err(ChildError::Failed { command: spoken(command), status: self.status.to_string(), said })
    }
}

/// Runs `command` without printing its output, and returns its standard output.
///
/// # Errors
/// Those of [`hear`], and when the command fails; its output is in the error.
pub fn read(command: &mut Command, limit: Duration) -> Result<String, ChildError> {
    hear(command, limit)?.unless_failed(command)
}

/// Returns `true` if a program is installed and succeeds.
pub fn answers(command: &mut Command) -> bool {
    read(command, Duration::from_secs(60)).is_ok()
}

/// Runs `command` to its end, and hands over the lines of its piped outputs.
fn follow(
    command: &mut Command,
    limit: Duration,
    mut on_line: impl FnMut(Stream, &str),
) -> Result<ExitStatus, ChildError> {
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
    let ended = running.wait(limit, || {
        match lines.recv_timeout(GLANCE) {
            Ok((stream, line)) => on_line(stream, &line),
            Err(RecvTimeoutError::Timeout) => {}
            // The command may still run: it can close its ends of the pipes before it ends.
            Err(RecvTimeoutError::Disconnected) => thread::sleep(GLANCE),
        }
        true
    })?;
    let began = Instant::now();
    while ended.is_some() && running.marked().next().is_some() && began.elapsed() < STRAGGLERS {
        pause();
    }
    let left = running.end();
    let until = Instant::now() + LAST_LINES;
    while Instant::now() < until
        && let Ok((stream, line)) = lines.recv_timeout(until - Instant::now())
    {
        on_line(stream, &line);
    }
    let (command, said) = (spoken(command), String::new());
    match ended {
        None => Err(ChildError::TimedOut { command, limit, said }),
        Some(status) if status.success() && !left.is_empty() => {
            let status = format!("it left running, and they were ended: {}", left.join(", "));
            Err(ChildError::Failed { command, status, said })
        }
        Some(status) => Ok(status),
    }
}

/// Running command, with all processes that it starts. Dropping it ends all of them.
#[derive(Debug)]
pub struct Running {
    child: Child,
    words: String,
    mark: String,
}

impl Running {
    /// Starts a command with an empty standard input.
    ///
    /// All its processes inherit a variable that marks them, by which even a process whose parent
    /// has ended is found. A process group would do the same, but Ctrl-C would no longer reach the
    /// command. A subreaper, as `carrack run` is, does not learn which command an orphan comes
    /// from, and commands run next to each other here.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> Result<Self, ChildError> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let number = STARTED.fetch_add(1, Ordering::Relaxed);
        // The number of a process alone is another's in another namespace, or later.
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let mark = format!("{}-{}-{number}", std::process::id(), now.as_nanos());
        let around = std::env::var(MARK).unwrap_or_default();
        let words = spoken(command);
        let child = command
            .env(MARK, format!("{around}/{mark}"))
            .stdin(Stdio::null())
            .spawn()
            .map_err(|source| ChildError::Start { program: words.clone(), source })?;
        Ok(Self { child, words, mark })
    }

    /// Returns the number of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the command, not to the processes that it has started, unless it has
    /// ended.
    pub fn signal(&mut self, signal: Signal) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = kill_process(Pid::from_child(&self.child), signal);
        }
    }

    /// Returns the status, once the command has ended.
    ///
    /// # Errors
    /// When the system does not tell its end.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>, ChildError> {
        let lost = |source| ChildError::Lost { command: self.words.clone(), source };
        self.child.try_wait().map_err(lost)
    }

    /// Waits for the command's end, and returns its status; `None` if it still runs at the limit,
    /// or when `pause` returned `false`. `pause` is called between two looks, and takes some
    /// milliseconds.
    ///
    /// # Errors
    /// Those of [`ended`](Self::ended).
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

    /// Asks all its processes by SIGTERM to end, so that a launcher among them can end its job.
    /// Waits for the command's end, this long at most.
    pub fn ask(&mut self, grace: Duration) {
        self.signal(Signal::TERM);
        self.marked().for_each(|pid| self.reach(pid, Signal::TERM));
        // One whose end is not known is ended like one that does not end.
        let _ = self.wait(grace, pause);
    }

    /// Ends its processes, and returns which of them were still running.
    pub fn end(&mut self) -> Vec<String> {
        let began = Instant::now();
        let mut ended = Vec::new();
        // A process may start another between the look and the kill.
        while began.elapsed() < Duration::from_secs(1) {
            let found: Vec<_> = self.marked().collect();
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
        if self.child.kill().is_ok() {
            let _ = self.child.wait();
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

    /// Returns the processes that carry the mark.
    fn marked(&self) -> impl Iterator<Item = Pid> {
        with_variable(MARK, |marks| is_among(marks, &self.mark))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.end();
    }
}

/// Sleeps a moment, and returns `true`: for [`Running::wait`].
pub fn pause() -> bool {
    thread::sleep(GLANCE);
    true
}

/// Returns the processes that have inherited a variable with such a value. A zombie has no
/// environment, and another user's cannot be read.
pub fn with_variable(name: &str, has: impl Fn(&[u8]) -> bool) -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    numbers.filter_map(Pid::from_raw).filter(move |pid| has_variable(*pid, name, &has))
}

fn has_variable(pid: Pid, name: &str, has: impl Fn(&[u8]) -> bool) -> bool {
    let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
    let value = |entry| <[u8]>::strip_prefix(entry, name.as_bytes())?.strip_prefix(b"=");
    environment.split(|byte| *byte == 0).filter_map(value).any(has)
}

fn is_among(marks: &[u8], mark: &str) -> bool {
    marks.split(|byte| *byte == b'/').any(|one| one == mark.as_bytes())
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
pub fn echo(line: &str) {
    let _ = writeln!(io::stdout().lock(), "{line}");
}

/// The command as a user would type it.
pub fn spoken(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let name = program.file_name().unwrap_or(program.as_os_str());
    let words: Vec<_> =
        std::iter::once(name).chain(command.get_args()).map(OsStr::to_string_lossy).collect();
    words.join(" ")
}

fn after_colon(said: &str) -> String {
    if said.trim().is_empty() { String::new() } else { format!(":\n{}", said.trim_end()) }
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
        assert!(matches!(error, Err(ChildError::TimedOut { .. })), "{error:?}");
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

    #[test]
    fn the_output_of_a_command_that_hangs_is_in_the_error() {
        let error = hear(&mut shell("echo begun; sleep 600"), Duration::from_millis(300));
        let error = error.unwrap_err().to_string();
        assert!(error.contains("begun") && error.contains("still running"), "{error}");
    }

    #[test]
    fn a_command_is_found_with_what_a_command_within_it_has_started() {
        let within = format!("{MARK}=\"${MARK}/1-1\" sh -c 'setsid sleep 600 & wait' & wait");
        let mut running = Running::start(&mut shell(&within)).unwrap();
        let sleeps = |running: &Running| {
            let name = |pid: Pid| fs::read_to_string(format!("/proc/{pid}/comm"));
            running.marked().filter_map(|pid| name(pid).ok()).any(|name| name == "sleep\n")
        };
        let began = Instant::now();
        while !sleeps(&running) && began.elapsed() < SOON {
            thread::sleep(GLANCE);
        }
        assert!(running.end().iter().any(|name| name.starts_with("sleep ")));
        assert!(!sleeps(&running));
    }

    #[test]
    fn a_command_that_is_asked_ends_by_itself_also_if_it_has_cleared_its_variables() {
        let script = "trap 'exit 7' TERM; echo; while :; do sleep 0.01; done";
        for script in [script, &format!("exec env -i sh -c \"{script}\"")] {
            let mut command = shell(script);
            let mut running = Running::start(command.stdout(Stdio::piped())).unwrap();
            // Its first line says that the trap is set.
            running.child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            running.ask(SOON);
            assert_eq!(running.ended().unwrap().and_then(|status| status.code()), Some(7));
        }
    }

    #[test]
    fn a_process_that_is_not_found_and_goes_on_writing_holds_nobody_up() {
        let began = Instant::now();
        let writes = "env -i timeout 60 sh -c 'while echo line; do sleep 0.01; done'";
        let said = read(&mut shell(&format!("echo first; {writes} &")), SOON).unwrap();
        assert!(said.starts_with("first\n"), "{said}");
        assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
    }
}
