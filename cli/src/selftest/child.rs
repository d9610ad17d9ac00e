//! Runs one process to its end or its limit, and ends all processes that it leaves behind.

use super::SelftestError;
use crate::launch::tie;
use carrack_transports::stderr::say;
use children::{ChildError, Running, interrupted};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

/// Time for a process to end by itself after SIGTERM.
const GRACE: Duration = Duration::from_secs(3);

/// Watches for terminating signals from now on, and makes this process the parent of its children's
/// orphans.
pub(super) fn watch() -> Result<(), SelftestError> {
    let system = |doing| move |source| SelftestError::System { doing, source };
    children::watch_for_signals().map_err(system("watching for signals"))?;
    children::adopt_orphans().map_err(system("becoming the subreaper"))
}

/// Bad end of a process.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("{0}")]
    Exited(ExitStatus),
    #[error(
        "it was still running after {:.1} s, and was ended; --limit can raise that",
        .0.as_secs_f64()
    )]
    Overran(Duration),
    /// The user ended it.
    #[error("interrupted")]
    Interrupted,
    #[error("{0}; its output cannot be written: {1}; make room in the folder for temporary files")]
    Unwritten(ExitStatus, io::Error),
    #[error(transparent)]
    Child(#[from] ChildError),
    #[error("its output cannot be taken: {0}; see that files can be made in TMPDIR")]
    Unheard(io::Error),
}

/// Output of a process, and its end.
pub(super) struct Ended {
    pub(super) said: String,
    pub(super) complaints: String,
    pub(super) end: Result<(), Trouble>,
}

/// Runs a command whose stdout and stderr go to these files, and reads them.
pub(super) fn capture(
    command: &mut Command,
    [said, complained]: [&Path; 2],
    limit: Duration,
    on_tick: impl FnMut(),
) -> Ended {
    let read = |path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
    let end = File::create(said)
        .and_then(|said| Ok((said, File::create(complained)?)))
        .map_err(Trouble::Unheard)
        .and_then(|(said, complained)| {
            let mut log = said.try_clone().map_err(Trouble::Unheard)?;
            let ended = run(command.stdout(said).stderr(complained), limit, on_tick);
            ended.map_err(|trouble| match (trouble, log.write_all(b"\n")) {
                (Trouble::Exited(status), Err(error)) => Trouble::Unwritten(status, error),
                (trouble, _) => trouble,
            })
        });
    Ended { said: read(said), complaints: read(complained), end }
}

/// Runs a command in a process group of its own, so that Ctrl-C reaches this process alone. At the
/// limit or on a signal it ends the command. In each case it ends all processes that the command
/// has started. The command ends with this process, too.
fn run(command: &mut Command, limit: Duration, on_tick: impl FnMut()) -> Result<(), Trouble> {
    tie(command);
    let mut running = match Running::start(command.stdin(Stdio::null()).process_group(0)) {
        Err(ChildError::Interrupted { .. }) => return Err(Trouble::Interrupted),
        started => started?,
    };
    let end = end_of(&mut running, limit, on_tick);
    drop(running);
    // This process is now the parent of orphans that have cleared their environment.
    if let Err(error) = children::sweep() {
        say(format_args!("selftest: looking for processes to end failed: {error}"));
    }
    end
}

/// Waits for the end of a command, and asks it to end at the limit or on a signal.
fn end_of(
    running: &mut Running,
    limit: Duration,
    mut on_tick: impl FnMut(),
) -> Result<(), Trouble> {
    let ended = running.wait(limit, || {
        on_tick();
        !interrupted() && children::pause()
    })?;
    match ended {
        Some(status) if status.success() => Ok(()),
        Some(status) => Err(Trouble::Exited(status)),
        None => {
            running.ask(GRACE);
            Err(if interrupted() { Trouble::Interrupted } else { Trouble::Overran(limit) })
        }
    }
}
