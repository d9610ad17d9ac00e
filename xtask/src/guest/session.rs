//! One run: guests boot, the command begins in all at once, and output and status come back.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fs_err::{self as fs, File};
use rustix::process::Signal;

use super::initramfs;
use super::kernel::{Emptied, Kernel};
use super::plan::{Node, Plan, Wiring};
use super::qemu::{self, Parts};
use super::tail::Tail;
use crate::error::TaskError;
use children::{Running, Stream};

/// Status of a run that reached its limit.
pub(crate) const TIMED_OUT: u8 = 124;

/// Status of a run whose guest failed.
pub(crate) const GUEST_FAILED: u8 = 125;

/// Number of attempts to boot guests. Emulated kernels fail rarely before the command has begun.
const ATTEMPTS: u32 = 3;

/// Time limit of a boot, which takes 3 seconds on a quiet machine.
const BOOT: Duration = Duration::from_secs(120);

/// Interval at which the guests' output and state are polled.
const GLANCE: Duration = Duration::from_millis(20);

/// Line of a command's output, with its line ending.
pub(crate) struct Said {
    pub(crate) node: Node,
    pub(crate) stream: Stream,
    pub(crate) bytes: Vec<u8>,
}

impl Said {
    /// Returns the line. Of two guests it begins with the number of the one that said it.
    pub(crate) fn marked(&self, wiring: Wiring) -> Vec<u8> {
        match wiring {
            Wiring::TwoGuests => [format!("[{}] ", self.node).as_bytes(), &self.bytes].concat(),
            _ => self.bytes.clone(),
        }
    }
}

/// Runs a plan, and returns the highest status. If it is not the command's, the reason is printed.
pub(super) fn run(
    kernel: &Kernel,
    runs: &Path,
    plan: &Plan,
    console: bool,
    mut on_line: impl FnMut(&Said),
) -> Result<u8, TaskError> {
    static RUN: AtomicU32 = AtomicU32::new(0);
    sweep(runs);
    let number = RUN.fetch_add(1, Ordering::Relaxed);
    let folder = Emptied::new(runs.join(format!("{}-{number}", std::process::id())))?;
    let initramfs = folder.0.join("initramfs");
    let more_modules = initramfs::write(&initramfs, kernel, &plan.modules)?;
    let deadline = Instant::now() + plan.limit;
    let mut attempt = 1;
    loop {
        let parts = |node: Node| Parts {
            kernel: kernel.image(),
            initramfs: initramfs.clone(),
            modules: kernel.modules(),
            folder: folder.0.join(format!("{attempt}/{node}")),
        };
        let (guests, began) = (Vec::new(), Instant::now());
        let mut session = Session { guests, began, deadline, going: false, timed_out: false };
        session.boot(plan, parts, &more_modules, &mut on_line)?;
        session.report(console, plan.limit);
        if session.going || session.timed_out || attempt == ATTEMPTS {
            let ends: Vec<_> = session.guests.iter().map(|guest| guest.end).collect();
            return Ok(verdict(&ends, session.timed_out));
        }
        eprintln!("xtask: the guest failed before the command began; it is booted again");
        attempt += 1;
    }
}

/// Removes what runs have left that were killed.
fn sweep(runs: &Path) {
    for entry in fs::read_dir(runs).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.split('-').next()).unwrap_or_default();
        if process.parse::<u32>().is_ok() && !Path::new("/proc").join(process).exists() {
            // If this fails, the next run tries again.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Reads a message of /init that the command has ended, and returns its status.
fn read_exit(line: &str) -> Option<u8> {
    line.trim_end().strip_prefix("exit ")?.parse().ok()
}

/// Reads an order, a line written to `RDMA_GUEST_HOST`: the signal for QEMU, and the guest.
fn read_order(line: &str) -> Option<(Option<Signal>, Node)> {
    let (verb, node) = line.trim().split_once(' ')?;
    let signal = match verb {
        // As if its power were cut. Its missing status is no failure.
        "kill" => Some(Signal::KILL),
        // A machine that is there and silent.
        "stop" => Some(Signal::STOP),
        "continue" => Some(Signal::CONT),
        // The guest is about to end itself without a status.
        "lose" => None,
        _ => return None,
    };
    Some((signal, Node(node.trim().parse().ok().filter(|node| *node < 2)?)))
}

/// End of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct End {
    /// Status of the command; `None` if there is none.
    status: Option<u8>,
    /// `true` if the command asked for an end without a status.
    excused: bool,
}

/// Returns the highest status of the guests. A run without any status has failed.
fn verdict(ends: &[End], timed_out: bool) -> u8 {
    let missing = if timed_out { TIMED_OUT } else { GUEST_FAILED };
    let counted = ends.iter().filter(|end| end.status.is_some() || !end.excused);
    counted.map(|end| end.status.unwrap_or(missing)).max().unwrap_or(missing)
}

/// Guests that belong together.
struct Session {
    guests: Vec<Guest>,
    began: Instant,
    deadline: Instant,
    /// `true` if the command has begun.
    going: bool,
    timed_out: bool,
}

/// A guest that was started.
struct Guest {
    node: Node,
    qemu: Running,
    folder: PathBuf,
    words: Tail,
    orders: Tail,
    outputs: [(Stream, Tail); 2],
    ready: bool,
    ended: bool,
    /// `true` if it was ended since the other had died.
    ended_for_another: bool,
    end: End,
}

impl Session {
    /// Boots the guests and stays until all have ended.
    fn boot(
        &mut self,
        plan: &Plan,
        parts: impl Fn(Node) -> Parts,
        more_modules: &[PathBuf],
        mut on_line: impl FnMut(&Said),
    ) -> Result<(), TaskError> {
        for node in plan.wiring.nodes() {
            let left = self.deadline.saturating_duration_since(Instant::now());
            self.guests.push(Guest::start(node, plan, &parts(node), more_modules, left)?);
            // The second guest connects to a socket on which the first one listens.
            let network = parts(node).folder.join(qemu::NETWORK);
            let is_last = self.guests.len() == plan.wiring.nodes().count();
            while !is_last && !network.exists() && !self.have_ended()? {
                thread::sleep(GLANCE);
            }
        }
        loop {
            // Asked before the output is read: all output before the end is then read after it.
            let ended = self.have_ended()?;
            let said = self.said(ended)?;
            said.iter().for_each(&mut on_line);
            if said.is_empty() && ended {
                return Ok(());
            } else if said.is_empty() {
                thread::sleep(GLANCE);
            }
        }
    }

    /// Returns the command's new output.
    fn said(&mut self, ended: bool) -> Result<Vec<Said>, TaskError> {
        let mut said = Vec::new();
        for Guest { node, outputs, .. } in &mut self.guests {
            for (stream, tail) in outputs {
                let lines = tail.lines(ended)?.into_iter();
                said.extend(lines.map(|bytes| Said { node: *node, stream: *stream, bytes }));
            }
        }
        Ok(said)
    }

    /// Polls all guests, carries out their orders, and returns `true` if all have ended.
    fn have_ended(&mut self) -> Result<bool, TaskError> {
        for at in 0..self.guests.len() {
            for order in self.guests[at].look()? {
                self.carry_out(self.guests[at].node, &order);
            }
        }
        let now = Instant::now();
        self.timed_out |= now > self.deadline && self.guests.iter().any(|guest| !guest.ended);
        // The others would wait for one that has died.
        let has_died = |guest: &Guest| {
            guest.ended && guest.end.status.is_none() && !(self.going && guest.end.excused)
        };
        let failed = !self.going && now > self.began + BOOT || self.guests.iter().any(has_died);
        if self.timed_out || failed || children::interrupted() {
            for guest in self.guests.iter_mut().filter(|guest| !guest.ended) {
                guest.ended_for_another |= failed && self.going;
                guest.qemu.signal(Signal::KILL);
            }
        } else if !self.going && self.guests.iter().all(|guest| guest.ready) {
            self.going = true;
            self.guests.iter().try_for_each(|guest| guest.answer("go"))?;
        }
        Ok(self.guests.iter().all(|guest| guest.ended))
    }

    fn carry_out(&mut self, from: Node, order: &str) {
        let Some((signal, node)) = read_order(order) else {
            return eprintln!(
                "xtask: guest {from}: {order:?} is no order: kill, stop, continue or lose, and \
                 the number of a node"
            );
        };
        let Some(guest) = self.guests.iter_mut().find(|guest| guest.node == node) else {
            return eprintln!("xtask: guest {from}: there is no guest {node}");
        };
        guest.end.excused |= matches!(signal, None | Some(Signal::KILL));
        if let Some(signal) = signal {
            guest.qemu.signal(signal);
        }
    }

    /// Prints the reason why a guest has no status.
    fn report(&self, console: bool, limit: Duration) {
        for guest in &self.guests {
            let (node, seconds) = (guest.node, limit.as_secs());
            let failed = guest.end.status.is_none() && !guest.end.excused;
            if failed && self.timed_out {
                eprintln!(
                    "xtask: guest {node} was still running after {seconds} s and was ended; its \
                     kernel's last words:"
                );
            } else if failed && guest.ended_for_another {
                eprintln!(
                    "xtask: guest {node} was ended since the other had died; its kernel's \
                           last words:"
                );
            } else if failed {
                eprintln!("xtask: guest {node} ended without a status; its kernel's last words:");
            }
            if console || failed {
                let files = [qemu::LOG, qemu::CONSOLE].map(|name| guest.folder.join(name));
                let said = files.map(|file| fs::read(file).unwrap_or_default()).concat();
                let said = String::from_utf8_lossy(&said);
                let lines: Vec<_> = said.lines().collect();
                let skipped = if console { 0 } else { lines.len().saturating_sub(25) };
                lines[skipped..].iter().for_each(|line| eprintln!("  {}", line.trim_end()));
            }
        }
    }
}

impl Guest {
    fn start(
        node: Node,
        plan: &Plan,
        parts: &Parts,
        more_modules: &[PathBuf],
        left: Duration,
    ) -> Result<Self, TaskError> {
        let folder = &parts.folder;
        fs::create_dir_all(folder)?;
        let shares: String =
            qemu::shares(plan).map(|(tag, path)| format!("{tag} {}\n", path.display())).collect();
        for (name, contents) in [
            ("setup", plan.setup_script(node, more_modules)),
            ("command", plan.command_script(node)),
            ("shares", shares.into_bytes()),
        ] {
            fs::write(folder.join(name), contents)?;
        }
        let log = File::create(folder.join(qemu::LOG))?.into_file();
        let mut qemu = qemu::command(node, plan, parts, left);
        let qemu = Running::start(qemu.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log))?;
        let tail = |name: &str| Tail::new(folder.join(name));
        Ok(Self {
            node,
            qemu,
            words: tail(qemu::STATUS),
            orders: tail(qemu::ORDERS),
            outputs: [(Stream::Out, tail(qemu::OUTPUT)), (Stream::Err, tail(qemu::ERRORS))],
            folder: folder.clone(),
            ready: false,
            ended: false,
            ended_for_another: false,
            end: End { status: None, excused: false },
        })
    }

    /// Hears what it has said since the last look, and gives its orders.
    fn look(&mut self) -> Result<Vec<String>, TaskError> {
        // Asked before the messages are read: all messages before the end are then read after it.
        self.ended = self.ended || self.qemu.ended()?.is_some();
        for line in self.words.lines(false)? {
            let line = String::from_utf8_lossy(&line);
            self.ready |= line.trim_end() == "ready";
            if let Some(status) = read_exit(&line) {
                self.end.status = Some(status);
                self.answer("done")?;
            }
        }
        let orders = self.orders.lines(false)?;
        Ok(orders.iter().map(|line| String::from_utf8_lossy(line).trim_end().to_owned()).collect())
    }

    /// Tells /init what it waits for.
    fn answer(&self, word: &str) -> Result<(), TaskError> {
        Ok(fs::write(self.folder.join(word), "")?)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn end(status: impl Into<Option<u8>>, excused: bool) -> End {
        End { status: status.into(), excused }
    }

    #[test]
    fn a_guest_says_how_it_ended() {
        assert_eq!(read_exit("exit 101\n"), Some(101));
        for noise in ["", "exit", "exit 256", "exit x", "ready"] {
            assert_eq!(read_exit(noise), None, "{noise:?}");
        }
    }

    #[test]
    fn an_order_names_what_and_which_node() {
        assert_eq!(read_order("kill 1"), Some((Some(Signal::KILL), Node(1))));
        assert_eq!(read_order("stop 0\r"), Some((Some(Signal::STOP), Node(0))));
        assert_eq!(read_order("continue 0"), Some((Some(Signal::CONT), Node(0))));
        assert_eq!(read_order("lose 1"), Some((None, Node(1))));
        for wrong in ["", "kill", "kill 2", "kill -1", "kill all", "burn 1"] {
            assert_eq!(read_order(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn the_status_of_a_run_is_the_worst_of_its_guests() {
        assert_eq!(verdict(&[end(0, false)], false), 0);
        assert_eq!(verdict(&[end(0, false), end(3, false)], false), 3);
        assert_eq!(verdict(&[end(101, false), end(3, false)], false), 101);
    }

    #[test]
    fn a_guest_without_a_status_has_failed_unless_that_was_asked_for() {
        assert_eq!(verdict(&[end(0, false), end(None, false)], false), GUEST_FAILED);
        assert_eq!(verdict(&[end(0, false), end(None, true)], false), 0);
        assert_eq!(verdict(&[end(7, true), end(0, false)], false), 7);
        assert_eq!(verdict(&[end(None, true)], false), GUEST_FAILED);
    }

    #[test]
    fn a_run_that_was_ended_at_its_limit_says_so() {
        assert_eq!(verdict(&[end(0, false), end(None, false)], true), TIMED_OUT);
        assert_eq!(verdict(&[end(None, true), end(None, false)], true), TIMED_OUT);
    }

    #[test]
    fn what_killed_runs_have_left_goes_and_what_others_have_stays() {
        let runs =
            Emptied::new(std::env::temp_dir().join(format!("xtask-sweep-{}", std::process::id())))
                .unwrap();
        // No process has the largest number there is.
        let ours = format!("{}-0", std::process::id());
        for name in [&*ours, "4294967295-0", "something"] {
            fs::create_dir(runs.0.join(name)).unwrap();
        }
        sweep(&runs.0);
        let left = fs::read_dir(&runs.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap());
        assert_eq!(left.collect::<BTreeSet<_>>(), BTreeSet::from([ours, "something".to_owned()]));
    }
}
