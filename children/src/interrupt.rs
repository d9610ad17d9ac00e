//! Signals that ask this process to end: its commands are ended first.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

static CAME: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Watches for SIGHUP, SIGINT and SIGTERM from now on. Signals that this process was told to ignore
/// stay ignored (by `nohup`, or by a shell for its background jobs). When one comes, the commands
/// that run are ended, and no other is started.
///
/// # Errors
/// The system's.
pub fn watch_for_signals() -> io::Result<()> {
    let ignored = ignored();
    let is_wanted = |signal: &i32| ignored & 1 << (signal - 1) == 0;
    for signal in [SIGINT, SIGTERM, SIGHUP].into_iter().filter(is_wanted) {
        signal_hook::flag::register(signal, CAME.clone())?;
    }
    Ok(())
}

/// Returns `true` if such a signal has come.
pub fn interrupted() -> bool {
    CAME.load(Ordering::Relaxed)
}

/// Returns the signals that this process ignores, a bit each as in proc_pid_status(5).
pub fn ignored() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Running, Stream, pause, read};
    use rustix::process::Signal;
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    /// Variable of a process that a test starts.
    const ROLE: &str = "TEST_INTERRUPTED";

    const SOON: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    /// Returns the rest of the next line that begins with a word.
    fn after(running: &mut Running, word: &str) -> String {
        loop {
            let line = running.next_line(Stream::Out, SOON).unwrap();
            if let Some(rest) = line.strip_prefix(word) {
                return rest.to_owned();
            }
        }
    }

    /// The process of the test below.
    #[test]
    fn a_process_in_its_role() {
        if std::env::var_os(ROLE).is_none() {
            return;
        }
        watch_for_signals().unwrap();
        let slept = crate::run(&mut shell("echo sleeps $$; sleep 600"), SOON, crate::echo);
        println!("first: {}", slept.unwrap_err());
        println!("second: {}", read(&mut shell("true"), SOON).unwrap_err());
    }

    #[test]
    fn a_signal_ends_the_command_that_runs_and_no_other_is_started() {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", "interrupt::tests::a_process_in_its_role"]);
        command.env(ROLE, "").stdout(Stdio::piped());
        let mut this = Running::start(&mut command).unwrap();
        let sleeper = after(&mut this, "sleeps ");
        let began = Instant::now();
        // A shell starts its background jobs with SIGINT ignored, and may have started this test.
        this.signal(Signal::TERM);
        for which in ["first: ", "second: "] {
            assert!(after(&mut this, which).starts_with("a signal came, and ended `sh"));
        }
        assert!(this.heard(SOON).unwrap().status.success());
        while fs::read_to_string(format!("/proc/{sleeper}/comm")).is_ok() {
            assert!(began.elapsed() < SOON, "{sleeper} still runs");
            pause();
        }
    }
}
