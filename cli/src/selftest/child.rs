//! Runs one process to its end or its limit, and ends all processes that it leaves behind.

use super::SelftestError;
use crate::launch::{adopt_orphans, sweep};
use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Interval of the looks for a process's end, and of the calls of `on_tick`.
const GLANCE: Duration = Duration::from_millis(20);

/// Time for a process to end by itself after SIGTERM.
const GRACE: Duration = Duration::from_secs(3);

/// Flag that a terminating signal sets.
pub(super) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Watches for terminating signals from now on, and makes this process the parent of its
    /// children's orphans.
    pub(super) fn watch() -> Result<Self, SelftestError> {
        let came = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, came.clone()).map_err(|source| {
                SelftestError::System { doing: "watching for signals", source }
            })?;
        }
        adopt_orphans()?;
        Ok(Self(came))
    }

    /// Returns `true` if a signal has come.
    pub(super) fn came(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Bad end of a process.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("{0}")]
    Exited(ExitStatus),
    #[error("it was still running after {:.1} s, and was ended", .0.as_secs_f64())]
    Overran(Duration),
    /// The user ended it.
    #[error("interrupted")]
    Interrupted,
    #[error("{0}; its output cannot be written: {1}")]
    Unwritten(ExitStatus, io::Error),
    #[error("the system lost its end: {0}")]
    Lost(io::Error),
    #[error("it could not be started: {0}")]
    NotStarted(io::Error),
}

/// What a process has said, and its end.
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
    interrupt: &Interrupt,
    on_tick: impl FnMut(),
) -> Ended {
    let read = |path| String::from_utf8_lossy(&fs::read(path).unwrap_or_default()).into_owned();
    let end = File::create(said)
        .and_then(|said| Ok((said, File::create(complained)?)))
        .map_err(Trouble::NotStarted)
        .and_then(|(said, complained)| {
            let mut log = said.try_clone().map_err(Trouble::NotStarted)?;
            let ended = run(command.stdout(said).stderr(complained), limit, interrupt, on_tick);
            ended.map_err(|trouble| match (trouble, log.write_all(b"\n")) {
                (Trouble::Exited(status), Err(error)) => Trouble::Unwritten(status, error),
                (trouble, _) => trouble,
            })
        });
    Ended { said: read(said), complaints: read(complained), end }
}

/// Runs a command in a process group of its own. At the limit or on a signal it ends the group and
/// all processes that the command has started. `on_tick` is called every [`GLANCE`].
fn run(
    command: &mut Command,
    limit: Duration,
    interrupt: &Interrupt,
    mut on_tick: impl FnMut(),
) -> Result<(), Trouble> {
    let spawned = command.stdin(Stdio::null()).process_group(0).spawn();
    let mut child = spawned.map_err(Trouble::NotStarted)?;
    let deadline = Instant::now() + limit;
    let end = loop {
        let trouble = match child.try_wait() {
            Ok(Some(status)) if status.success() => break Ok(()),
            Ok(Some(status)) => break Err(Trouble::Exited(status)),
            Err(error) => Trouble::Lost(error),
            Ok(None) if interrupt.came() => Trouble::Interrupted,
            Ok(None) if Instant::now() > deadline => Trouble::Overran(limit),
            Ok(None) => {
                on_tick();
                thread::sleep(GLANCE);
                continue;
            }
        };
        ask(&mut child);
        break Err(trouble);
    };
    // This process is now the parent of the command's orphans, in any group and session.
    if let Err(error) = sweep() {
        crate::complain(format_args!("selftest: looking for processes to end failed: {error}"));
    }
    end
}

/// Asks a process and its group to end, so that a launcher among them can end its job. What still
/// runs after the [`GRACE`] is the sweep's.
fn ask(child: &mut Child) {
    // The process is not reaped yet, so the kernel cannot have given its number to another one.
    let _ = kill_process_group(Pid::from_child(child), Signal::TERM);
    let until = Instant::now() + GRACE;
    while Instant::now() < until && matches!(child.try_wait(), Ok(None)) {
        thread::sleep(GLANCE);
    }
}
