//! Processes that tests start.

use super::patience;
use ::children::{Heard, Running, Stream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Returns the time limit of a process, and of what is waited for in it. It only turns a hang into
/// a failure.
pub fn limit() -> Duration {
    patience(Duration::from_secs(300))
}

/// Removes Carrack's variables, and these, with which the test itself may have been started.
pub fn unset<'a>(command: &'a mut Command, also: &[&str]) -> &'a mut Command {
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARRACK_") || also.contains(&&*text) {
            command.env_remove(&name);
        }
    }
    command
}

/// Starts a process whose outputs the test reads. It ends with the test, also by a panic.
#[track_caller]
pub fn started(mut command: Command) -> Running {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Running::start(&mut command).unwrap_or_else(|error| panic!("{error}"))
}

/// Questions of a test to a process.
pub trait Watched {
    /// Waits until it says this on its standard output.
    fn hears(&mut self, word: &str);

    /// Waits for its end, and returns what it has said.
    fn ends(self) -> Heard;

    /// Does as [`ends`](Self::ends), and checks that the process leaves none behind, however it
    /// ends.
    fn ends_with_all(self) -> Heard;
}

impl Watched for Running {
    #[track_caller]
    fn hears(&mut self, word: &str) {
        while let Some(line) = self.next_line(Stream::Out, limit()) {
            if line.contains(word) {
                return;
            }
        }
        panic!("it has not said {word:?}, and says nothing more");
    }

    #[track_caller]
    fn ends(self) -> Heard {
        self.heard(limit()).unwrap_or_else(|error| panic!("{error}"))
    }

    #[track_caller]
    fn ends_with_all(mut self) -> Heard {
        let (ended, began) = (self.wait(limit(), ::children::pause), Instant::now());
        if !matches!(ended, Ok(Some(_))) {
            // What it has said is in the error.
            panic!("{:?}: {:?}", ended, self.heard(Duration::ZERO));
        }
        while self.processes().next().is_some() && began.elapsed() < limit() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let heard = self.ends();
        assert!(heard.left.is_empty(), "left behind: {:?}", heard.left);
        assert!(!heard.is_held, "a process that was not found holds its output");
        heard
    }
}

/// Returns the standard output of a process that has succeeded, and has left none behind.
#[track_caller]
pub fn succeeded(heard: &Heard) -> String {
    let Heard { status, stdout, stderr, left, .. } = heard;
    assert!(status.success(), "{status}\n{stdout}\n{stderr}");
    assert!(left.is_empty(), "left behind: {left:?}");
    stdout.clone()
}
