//! Trials: attempts that may cost a process its GPU context, made in a process of their own.
//!
//! A fork does not help, since a child of a process that has used CUDA cannot use it. So a program
//! is started anew that [answers](answer): this one, if its `main` begins with that call, or
//! another that was [named](by).
//!
//! ```
//! // First thing in `main`:
//! carrack_transports::trial::answer();
//! // Then the work of the program.
//! ```

use crate::stderr;
use children::{ChildError, Running, Stream, pause};
use parking_lot::{Mutex, MutexGuard};
use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Environment variable that names the attempt. Only [`ask`] sets it.
const QUESTION: &str = "CARRACK_TRIAL";

/// Beginning of the answer in its line: the program may print other lines.
const MARK: &str = "carrack trial: ";

/// Limit of an attempt: it makes two contexts, which take seconds each on machines with many
/// devices.
const PATIENCE: Duration = Duration::from_secs(60);

/// Limit for the end of a process that has closed its output.
const GRACE: Duration = Duration::from_secs(1);

/// Program that answers, and its arguments.
static PROGRAM: Mutex<Option<(PathBuf, Vec<OsString>)>> = Mutex::new(None);

fn program() -> MutexGuard<'static, Option<(PathBuf, Vec<OsString>)>> {
    PROGRAM.lock()
}

/// Makes the attempt, prints its result and ends the process, if the process was started for a
/// trial. In any other process it only notes that this program answers, unless another was named.
/// The call stands first in `main`, before there are threads.
///
/// A program with more rights than its user (set-uid, or with capabilities of its file) makes no
/// trials, as its user would choose the attempt. It has to name another program.
pub fn answer() {
    let is_privileged = has_rights_of_its_own();
    let Some(question) = std::env::var_os(QUESTION) else {
        if !is_privileged {
            program().get_or_insert_with(|| (PathBuf::from("/proc/self/exe"), Vec::new()));
        }
        return;
    };
    if is_privileged {
        stderr::say(format_args!("{QUESTION} is not for programs with rights of their own"));
        std::process::exit(1);
    }
    let said = said_of(&question.to_string_lossy());
    // The process that asked may have ended.
    let _ = writeln!(std::io::stdout(), "{MARK}{}", said.replace('\n', " "));
    std::process::exit(0)
}

/// Names a program that answers, and its arguments: the `carrack` command answers without any. For
/// libraries whose program is not theirs, and for tests.
///
/// A program that does not reach [`answer`] does its usual work until it is killed after a minute.
/// It makes no trials of its own.
pub fn by<A: Into<OsString>>(path: impl Into<PathBuf>, arguments: impl IntoIterator<Item = A>) {
    *program() = Some((path.into(), arguments.into_iter().map(A::into).collect()));
}

/// Returns `true` if the process has rights that its user lacks: `AT_SECURE` in the kernel's
/// auxiliary vector.
fn has_rights_of_its_own() -> bool {
    const AT_SECURE: usize = 23;
    // The vector of such a process may not even be readable.
    let Ok(vector) = std::fs::read("/proc/self/auxv") else { return true };
    let words = vector.chunks_exact(size_of::<usize>());
    let words: Vec<usize> =
        words.filter_map(|word| Some(usize::from_ne_bytes(word.try_into().ok()?))).collect();
    words.chunks_exact(2).any(|entry| entry[0] == AT_SECURE && entry[1] != 0)
}

fn said_of(question: &str) -> String {
    if let Some(said) = crate::gpu::cuda::try_in_this_process(question) {
        return said;
    }
    format!("failed: this program knows no trial `{question}`")
}

/// Has an attempt made, in an environment with the given variables and no others of `CARRACK_`.
///
/// # Errors
/// The reason why there is no answer, in words.
pub(crate) fn ask(question: &str, environment: &[(&str, &str)]) -> Result<String, String> {
    let Some((path, arguments)) = program().clone() else {
        return Err("this needs a trial in a process of its own, and no program that answers is \
                    known: call carrack::trial::answer() first thing in main, or name one, \
                    carrack::trial::by(\"carrack\", [\"\"; 0])"
            .into());
    };
    if std::env::var_os(QUESTION).is_some() {
        return Err("this process was started for a trial and has not answered: its program does \
                    not begin with carrack::trial::answer()"
            .into());
    }
    let mut command = Command::new(&path);
    for (name, _) in
        std::env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"CARRACK_"))
    {
        command.env_remove(name);
    }
    command.args(arguments).env(QUESTION, question).envs(environment.iter().copied());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    // Ctrl-C is the program's, which may go on.
    command.process_group(0);
    match Running::start(&mut command) {
        Ok(running) => said_by(running).map_err(|what| {
            let path = path.display();
            format!("{path} {what} (to see what it says: {QUESTION}='{question}' {path})")
        }),
        Err(ChildError::Start { source, .. }) => {
            Err(format!("{} does not start: {source}", path.display()))
        }
        Err(other) => Err(other.to_string()),
    }
}

/// Returns the answer among the lines that a process prints. Ends the process with all that it has
/// started: a spoilt context may keep it from ending by itself.
fn said_by(mut running: Running) -> Result<String, String> {
    let until = Instant::now() + PATIENCE;
    let is_late = || Instant::now() >= until;
    while !is_late()
        && let Some(line) = running.next_line(Stream::Out, until - Instant::now())
    {
        if let Some((_, said)) = line.split_once(MARK) {
            return Ok(said.to_owned());
        }
    }
    if is_late() {
        return Err(format!("did not answer within {PATIENCE:?}"));
    }
    // Its exit status tells the reason, unless it has only closed its output.
    let _ = running.wait(GRACE, pause);
    running.end();
    let status = running.ended().ok().flatten();
    let status = status.map_or_else(|| "a status unknown".into(), |status| status.to_string());
    Err(format!("ended without an answer, with {status}: does it begin with trial::answer()?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One test, one step after the other: there is one program that is asked.
    #[test]
    #[cfg_attr(miri, ignore = "it starts processes")]
    fn who_does_not_answer_is_told_apart_from_who_is_not_there_and_from_who_does() {
        let asked = |script: &str| {
            by("/bin/sh", ["-c", script]);
            ask("something", &[("TRIED", "here")])
        };
        assert_eq!(
            asked("echo noise; echo \"test a ... carrack trial: $CARRACK_TRIAL\"; sleep 100")
                .unwrap(),
            "something"
        );
        let why = asked("echo noise; exit 3").unwrap_err();
        assert!(why.contains("exit status: 3") && why.contains("trial::answer()"), "{why}");
        assert_eq!(asked("printf '\\377\\n'; echo \"carrack trial: $TRIED\"").unwrap(), "here");
        // The trial waits neither for them nor for the processes that they have started.
        let why = asked("sleep 1000 >/dev/null & exec >&-; exec sleep 1000").unwrap_err();
        assert!(
            why.contains("signal: 9") && why.contains("CARRACK_TRIAL='something' /bin/sh"),
            "{why}"
        );
        let why = asked("kill -9 $$").unwrap_err();
        assert!(why.contains("signal: 9"), "{why}");
        by("/nowhere/at/all", [""; 0]);
        let why = ask("something", &[]).unwrap_err();
        assert!(why.contains("/nowhere/at/all does not start"), "{why}");
        *program() = None;
        let why = ask("something", &[]).unwrap_err();
        assert!(why.contains("first thing in main"), "{why}");
        answer();
        assert_eq!(program().take().unwrap().0, PathBuf::from("/proc/self/exe"));
    }

    #[test]
    fn an_unknown_question_is_answered_with_that() {
        assert_eq!(said_of("what\never"), "failed: this program knows no trial `what\never`");
    }
}
