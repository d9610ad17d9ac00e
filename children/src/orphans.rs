//! The end of every descendant of a process, however deep, and whatever sessions they made.
//!
//! The process is a subreaper: when a child dies, its children become the subreaper's. So only
//! children are ever killed, over and over until there are none. A child's number cannot be reused
//! before it is waited for, so no other process is hit; a descendant's could be.

use std::fs;
use std::io;

use rustix::io::retry_on_intr;
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, getpid, kill_process, set_child_subreaper, waitpid,
};

/// Makes this process the one that inherits its descendants' orphans.
///
/// # Errors
/// The system's.
pub fn adopt_orphans() -> io::Result<()> {
    // Any number but zero switches it on.
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// Kills and waits for all descendants. Returns those that would not die, because this user may not
/// signal them. No other thread may wait for a child meanwhile.
///
/// # Errors
/// When the processes cannot be listed.
pub fn sweep() -> io::Result<Vec<Pid>> {
    loop {
        let (ended, refused): (Vec<_>, Vec<_>) = children()?.into_iter().partition(|&child| {
            kill_process(child, Signal::KILL).is_ok() || matches!(dead(child, true), Ok(Some(_)))
        });
        // Each descendant has one of the children among its ancestors, and a child is listed until
        // it is waited for. So where none could be ended, no other descendant is left.
        if ended.is_empty() {
            return Ok(refused);
        }
        for child in ended {
            // One that is waited for already is gone. Its orphans are ours, and in the next list.
            let _ = dead(child, false);
        }
    }
}

/// Waits for a child's end, or looks for it.
fn dead(child: Pid, at_once: bool) -> rustix::io::Result<Option<(Pid, WaitStatus)>> {
    let options = if at_once { WaitOptions::NOHANG } else { WaitOptions::empty() };
    retry_on_intr(|| waitpid(Some(child), options))
}

/// Returns the children of this process, dead ones included.
fn children() -> io::Result<Vec<Pid>> {
    let this = getpid().as_raw_pid();
    let mut children = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        // It may have gone since the folder was read.
        let stat = || fs::read(entry.path().join("stat")).unwrap_or_default();
        let ours = number.filter(|_| parent_in(&stat()) == Some(this));
        children.extend(ours.and_then(Pid::from_raw));
    }
    Ok(children)
}

/// Reads the parent from a line of `/proc/PID/stat`. The command's name, in parentheses, may itself
/// contain spaces and parentheses, and is not always text.
fn parent_in(stat: &[u8]) -> Option<i32> {
    let after_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let rest = std::str::from_utf8(&stat[after_name..]).ok()?;
    rest.split_ascii_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parent_is_found_behind_any_name() {
        assert_eq!(parent_in(b"12 (sh) S 7 12 12 0"), Some(7));
        assert_eq!(parent_in(b"12 (a ) S 9 (b) R 7 12"), Some(7));
        assert_eq!(parent_in(b"12 (\xff\xfe) R 7 12"), Some(7));
        assert_eq!(parent_in(b"12 (sh"), None);
        assert_eq!(parent_in(b""), None);
    }

    #[test]
    fn a_child_of_this_process_is_found() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = Pid::from_child(&child);
        let found = children().unwrap().contains(&pid);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found);
    }
}
