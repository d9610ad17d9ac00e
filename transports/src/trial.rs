//! Trials: what only an attempt can show, where the attempt may cost a process its GPU context, is tried in a process of its own.
//!
//! Nobody can fork for it: a child of a process that has used CUDA cannot use it. So a program is started anew, one that
//! [answers](answer): this one, if its `main` begins with that, or another that was [named](by).
//!
//! ```
//! // First thing in `main`:
//! carrack_transports::trial::answer();
//! // Then what the program is for.
//! ```

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The environment variable by which a process is told what to try. Nobody else sets it.
const QUESTION: &str = "CARRACK_TRIAL";

/// What the line begins with that is the answer: the program may print others.
const MARK: &str = "carrack trial: ";

/// How long an attempt may take: two contexts are made for it, seconds each on machines with many devices.
const PATIENCE: Duration = Duration::from_secs(60);

/// Who answers, and its arguments.
static PROGRAM: Mutex<Option<(PathBuf, Vec<OsString>)>> = Mutex::new(None);

fn program() -> MutexGuard<'static, Option<(PathBuf, Vec<OsString>)>> {
    PROGRAM.lock().unwrap_or_else(PoisonError::into_inner)
}

/// To be called first thing in `main`, before there are threads. In a process that was started for a trial it makes the attempt,
/// prints what came of it, and ends the process. In any other it only notes that this program answers, unless another was named.
pub fn answer() {
    let Ok(question) = std::env::var(QUESTION) else {
        program().get_or_insert_with(|| (PathBuf::from("/proc/self/exe"), Vec::new()));
        return;
    };
    let said = said_of(&question);
    // Who asked may have gone.
    let _ = writeln!(std::io::stdout(), "{MARK}{}", said.replace('\n', " "));
    std::process::exit(0)
}

/// Names a program that answers, and what it is to be started with: the `carrack` command does, with no arguments. For libraries
/// whose program is not theirs, and for tests.
///
/// A program that does not begin with [`answer`] does what it does otherwise, for as long as a trial may take; a runtime does not
/// start in it.
pub fn by<A: Into<OsString>>(path: impl Into<PathBuf>, arguments: impl IntoIterator<Item = A>) {
    *program() = Some((path.into(), arguments.into_iter().map(A::into).collect()));
}

fn said_of(question: &str) -> String {
    #[cfg(not(loom))]
    if let Some(said) = crate::gpu::cuda::try_in_this_process(question) {
        return said;
    }
    format!("failed: nobody here knows what `{question}` asks")
}

/// Has something tried.
///
/// # Errors
/// It was not, and why, in words.
pub(crate) fn ask(question: &str) -> Result<String, String> {
    let Some((path, arguments)) = program().clone() else {
        return Err("only an attempt shows it, which is made in a process of its own, and no program is known that answers: call \
                    carrack::trial::answer() first thing in main, or name one, carrack::trial::by(\"carrack\", [\"\"; 0])"
            .into());
    };
    let mut command = Command::new(&path);
    command.args(arguments).env(QUESTION, question);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|why| format!("{} does not start: {why}", path.display()))?;
    let Some(stdout) = child.stdout.take() else { return Err("it has no output".into()) };
    let (tell, told) = channel();
    let reads = move || {
        let lines = BufReader::new(stdout).lines().map_while(Result::ok);
        if let Some(said) = lines.filter_map(|line| Some(line.split_once(MARK)?.1.to_owned())).next() {
            let _ = tell.send(said);
        }
    };
    let reader = std::thread::Builder::new().name("carrack-trial".into()).spawn(reads);
    let said = match reader {
        Ok(_) => told.recv_timeout(PATIENCE),
        // Its end of the channel has gone with it.
        Err(_) => Err(RecvTimeoutError::Disconnected),
    };
    // What it had to say is said; a context that is spoilt may keep it from ending by itself.
    if said == Err(RecvTimeoutError::Timeout) || said.is_ok() {
        let _ = child.kill();
    }
    let ended = child.wait();
    said.map_err(|why| match (why, ended) {
        (RecvTimeoutError::Timeout, _) => format!("{} did not answer within {PATIENCE:?}", path.display()),
        (_, Ok(status)) => {
            format!(
                "{} ended without an answer, with {status}: does it call trial::answer()?",
                path.display()
            )
        }
        (_, Err(why)) => format!("{} ended without an answer: {why}", path.display()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One after the other: there is one program that is asked.
    #[test]
    #[cfg_attr(miri, ignore = "it starts processes")]
    fn who_does_not_answer_is_told_apart_from_who_is_not_there_and_from_who_does() {
        let asked = |script: &str| {
            by("/bin/sh", ["-c", script]);
            ask("something")
        };
        assert_eq!(
            asked("echo noise; echo \"test a ... carrack trial: $CARRACK_TRIAL\"; sleep 100").unwrap(),
            "something"
        );
        let why = asked("echo noise; exit 3").unwrap_err();
        assert!(why.contains("exit status: 3") && why.contains("trial::answer()"), "{why}");
        let why = asked("kill -9 $$").unwrap_err();
        assert!(why.contains("signal: 9"), "{why}");
        by("/nowhere/at/all", [""; 0]);
        let why = ask("something").unwrap_err();
        assert!(why.contains("/nowhere/at/all does not start"), "{why}");
        *program() = None;
        let why = ask("something").unwrap_err();
        assert!(why.contains("first thing in main"), "{why}");
        answer();
        assert_eq!(program().take().unwrap().0, PathBuf::from("/proc/self/exe"));
    }

    #[test]
    fn a_question_that_nobody_knows_is_answered_with_that() {
        assert_eq!(said_of("what\never"), "failed: nobody here knows what `what\never` asks");
    }
}
