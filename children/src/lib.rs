//! Child processes: each is run to its end or a limit, with all processes that it has started.
//!
//! [`run`], [`hear`] and [`read`] run a command and hand its output over; [`Running`] is a command
//! next to which the caller does something else. A process that outlives its command is found by
//! a variable that all processes of the command inherit. A caller that runs one command at a time
//! also finds those that have cleared their variables: [`adopt_orphans`], [`sweep`].

mod interrupt;
mod nodes;
mod orphans;
mod running;

pub use interrupt::{ignored, interrupted, watch_for_signals};
pub use nodes::{ADDRESSES, Nodes};
pub use orphans::{adopt_orphans, sweep};
pub use running::Running;

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write};
use std::process::{Command, ExitStatus, Stdio};
use std::thread;
use std::time::Duration;

use running::{Followed, GLANCE};
use rustix::process::Pid;

/// Variable that marks the processes of a command. It holds the marks of the commands around it,
/// too: a command that runs others is the end of theirs.
pub const MARK: &str = "CHILD_OF";

/// Bad end of a command.
#[derive(Debug, thiserror::Error)]
pub enum ChildError {
    /// The program could not be started.
    #[error("cannot start `{program}`: {source}; install it, or put its folder into PATH")]
    Start {
        /// The command.
        program: String,
        /// Reason of the system.
        source: io::Error,
    },
    /// The command ended with an error.
    #[error(
        "`{command}` failed ({status}); look for the reason in its output{}",
        after_colon(said)
    )]
    Failed {
        /// The command.
        command: String,
        /// Exit status, in words.
        status: String,
        /// Output of the command, where it was not streamed through.
        said: String,
    },
    /// The command was still running at its limit, and was ended.
    #[error(
        "`{command}` was still running after {limit:?} and was ended; look in its output for what \
        it waited for{}",
        after_colon(said)
    )]
    TimedOut {
        /// The command.
        command: String,
        /// The limit.
        limit: Duration,
        /// Output of the command, where it was not streamed through.
        said: String,
    },
    /// A signal that asks this process to end came while the command was to run.
    #[error("a signal came, and ended `{command}`{}", after_colon(said))]
    Interrupted {
        /// The command.
        command: String,
        /// Output of the command, where it was not streamed through.
        said: String,
    },
    /// The system does not tell the command's end.
    #[error("the end of `{command}` is not known: {source}; run it again")]
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
    let running = Running::start(command.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    let Followed { status, left, is_held } = running.follow(limit, |_, line| on_line(line))?;
    let heard = Heard { status, stdout: String::new(), stderr: String::new(), left, is_held };
    heard.unless_left(command)?.unless_failed(command)?;
    Ok(())
}

/// End of a command.
#[derive(Debug)]
pub struct Heard {
    /// Exit status.
    pub status: ExitStatus,
    /// Standard output, where it was piped. Each line has its end, also the last.
    pub stdout: String,
    /// Standard error, where it was piped.
    pub stderr: String,
    /// Processes that it had left running, and that were ended.
    pub left: Vec<String>,
    /// Set if an output was still open, held by a process that was not found.
    pub is_held: bool,
}

/// Runs `command` silently, and returns output and status. A command that fails is no error here.
///
/// # Errors
/// When the command cannot be started, is not done within `limit`, or succeeds and leaves
/// processes running. The output is in the error.
pub fn hear(command: &mut Command, limit: Duration) -> Result<Heard, ChildError> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Running::start(command)?.heard(limit)?.unless_left(command)
}

impl Heard {
    /// Returns the standard output, if the command succeeded.
    ///
    /// # Errors
    /// When it failed; its output is in the error.
    pub fn unless_failed(self, command: &Command) -> Result<String, ChildError> {
        if self.status.success() {
            return Ok(self.stdout);
        }
        let status = self.status.to_string();
        Err(self.failed(command, status))
    }

    /// Returns an error if a command that succeeded has left processes running.
    fn unless_left(self, command: &Command) -> Result<Self, ChildError> {
        if !self.status.success() || self.left.is_empty() {
            return Ok(self);
        }
        let left = self.left.join(", ");
        Err(self.failed(command, format!("it left running, and they were ended: {left}")))
    }

    fn failed(self, command: &Command, status: String) -> ChildError {
        let said = self.stdout + &self.stderr;
        ChildError::Failed { command: spoken(command), status, said }
    }
}

/// Runs `command` without printing its output, and returns its standard output.
///
/// # Errors
/// The errors of [`hear`], and one if the command fails; its output is in the error.
pub fn read(command: &mut Command, limit: Duration) -> Result<String, ChildError> {
    hear(command, limit)?.unless_failed(command)
}

/// Returns `true` if a program is installed and succeeds.
pub fn answers(command: &mut Command) -> bool {
    read(command, Duration::from_secs(60)).is_ok()
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

/// Prints a line of a child at once; a closed terminal is no reason to stop.
pub fn echo(line: &str) {
    let _ = writeln!(io::stdout().lock(), "{line}");
}

/// Returns the command as a user would type it.
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
    use std::time::Instant;

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
    fn a_line_that_is_waited_for_leaves_those_of_the_other_output() {
        let mut command = shell("echo one >&2; sleep 0.05; echo two; sleep 0.05; echo three >&2");
        let mut running =
            Running::start(command.stdout(Stdio::piped()).stderr(Stdio::piped())).unwrap();
        assert_eq!(running.next_line(Stream::Out, SOON).as_deref(), Some("two"));
        assert_eq!(running.next_line(Stream::Err, SOON).as_deref(), Some("one"));
        assert_eq!(running.next_line(Stream::Out, SOON), None);
        let heard = running.heard(SOON).unwrap();
        assert_eq!((&*heard.stdout, &*heard.stderr), ("", "three\n"));
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
            (heard.status.code(), &*heard.stdout, &*heard.stderr),
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
    fn a_command_on_this_terminal_ends_with_its_status_and_with_all_it_started() {
        const NAME: &str = "TEST_STATUS";
        let mut command = shell("sleep 600 & exit 3");
        let running = Running::start(command.env(NAME, "")).unwrap();
        assert_eq!(running.status().unwrap().code(), Some(3));
        assert_eq!(with_variable(NAME, |_| true).count(), 0);
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
            running.processes().filter_map(|pid| name(pid).ok()).any(|name| name == "sleep\n")
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
            let mut running = Running::start(shell(script).stdout(Stdio::piped())).unwrap();
            // Its first line says that the trap is set.
            assert!(running.next_line(Stream::Out, SOON).is_some());
            running.ask(SOON);
            assert_eq!(running.ended().unwrap().and_then(|status| status.code()), Some(7));
        }
    }

    #[test]
    fn a_process_that_is_not_found_and_goes_on_writing_does_not_hold_up_the_reader() {
        let began = Instant::now();
        let writes = "env -i timeout 60 sh -c 'while echo line; do sleep 0.01; done'";
        let said = read(&mut shell(&format!("echo first; {writes} &")), SOON).unwrap();
        assert!(said.starts_with("first\n"), "{said}");
        assert!(began.elapsed() < SOON, "it took {:?}", began.elapsed());
    }
}
