//! Importers of an allocation.

use crate::fork::Owner;
use crate::mem::{MapError, Region};
use rustix::io::Errno;
use std::io::ErrorKind;
use std::sync::atomic::{Ordering, fence};

/// Processes that can have an allocation mapped at a time.
const PLACES: usize = 128;

/// A page with an entry for each process that has the allocation mapped. The exporter makes it.
/// Importers map it before the allocation, and enter it before they check that the registration
/// stands. The exporter ends the registration before it reads the page. So either the exporter
/// sees an importer's entry, or the importer sees that the registration has ended.
#[derive(Clone)]
pub(super) struct Ledger(pub(super) Region);

/// A place in a ledger, given up when this is dropped.
pub(super) struct LedgerEntry {
    ledger: Ledger,
    at: usize,
    me: u64,
    /// The process that `me` names. Its forks leave the place as it is.
    owner: Owner,
}

impl Ledger {
    pub(super) const BYTES: usize = PLACES * 8;

    pub(super) fn new() -> Result<Self, MapError> {
        let failed = |error| MapError::of("no shared memory for the list of its importers", error);
        Region::shared(Self::BYTES).map(Self).map_err(failed)
    }

    /// Returns `true` if the registration of that epoch stands.
    pub(super) fn stands(&self, epoch: u64) -> bool {
        self.0.share().is_some_and(|share| share.is_open(epoch))
    }

    /// Enters this process.
    pub(super) fn enter(&self) -> Result<LedgerEntry, MapError> {
        let me = name_of(std::process::id())?.ok_or("this process is not in /proc")?;
        let at = (0..PLACES).find(|at| self.0.compare_swap(at * 8, 0, me) == Ok(0));
        let at = at.ok_or_else(|| format!("{PLACES} processes have it mapped, and no more can"))?;
        // The entry precedes the look at the epoch.
        fence(Ordering::SeqCst);
        Ok(LedgerEntry { ledger: self.clone(), at, me, owner: Owner::this_process() })
    }

    /// Returns the living processes that have it mapped. Called after the end of the registration.
    /// Removes entries of dead processes.
    pub(super) fn importers(&self) -> Vec<u32> {
        // The end of the registration precedes the look at the entries.
        fence(Ordering::SeqCst);
        let mut alive = Vec::new();
        for at in (0..PLACES).map(|at| at * 8) {
            let name = self.0.fetch_add(at, 0).unwrap_or(0);
            let pid = (name >> 32) as u32;
            if name == 0 {
                continue;
            }
            match name_of(pid) {
                Ok(found) if found != Some(name) => _ = self.0.compare_swap(at, name, 0),
                // A process that cannot be checked may be alive, and use the memory.
                Ok(_) | Err(_) => alive.push(pid),
            }
        }
        alive
    }
}

impl Drop for LedgerEntry {
    fn drop(&mut self) {
        if self.owner.is_here() {
            let _ = self.ledger.0.compare_swap(self.at * 8, self.me, 0);
        }
    }
}

/// Returns a name of a process, of its number and its start time, since numbers are used again.
/// `Ok(None)`: there is no such process.
///
/// # Errors
/// The check failed, for lack of a descriptor, for example.
pub(super) fn name_of(pid: u32) -> Result<Option<u64>, MapError> {
    let path = format!("/proc/{pid}/stat");
    let stat = match std::fs::read_to_string(&path) {
        Ok(stat) => stat,
        Err(error) => {
            let error = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            // It has ended, before the file was opened or after.
            let is_none = error.kind() == ErrorKind::NotFound || error == Errno::SRCH;
            return if is_none { Ok(None) } else { Err(MapError::of(&path, error)) };
        }
    };
    // The process's name, in brackets, may contain any character. Behind it the state comes first,
    // and the start is field 20, in ticks since boot: proc_pid_stat(5).
    let behind = stat.rsplit_once(')').map_or("", |(_, behind)| behind);
    let mut fields = behind.split_ascii_whitespace();
    if fields.next() == Some("Z") {
        return Ok(None);
    }
    let started: Option<u64> = fields.nth(18).and_then(|field| field.parse().ok());
    let started = started.ok_or_else(|| format!("{path} is not as expected: {stat}"))?;
    Ok(Some(u64::from(pid) << 32 | started & 0xffff_ffff))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_alive_stands_in_the_ledger_until_it_leaves() {
        let ledger = Ledger::new().unwrap();
        assert!(ledger.importers().is_empty());
        let (first, second) = (ledger.enter().unwrap(), ledger.enter().unwrap());
        assert_eq!(ledger.importers(), [std::process::id(); 2]);
        drop(first);
        assert_eq!(ledger.importers(), [std::process::id()]);
        drop(second);
        assert!(ledger.importers().is_empty());
    }

    #[test]
    fn the_dead_are_struck_out_and_a_full_ledger_says_so() {
        let ledger = Ledger::new().unwrap();
        // No process has that number: Linux has at most 2^22.
        assert_eq!(ledger.0.compare_swap(0, 0, u64::from(u32::MAX) << 32 | 5), Ok(0));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let name = name_of(child.id()).unwrap();
        child.wait().unwrap();
        if let Some(name) = name {
            assert_eq!(ledger.0.compare_swap(8, 0, name), Ok(0));
        }
        let all: Vec<_> = std::iter::from_fn(|| ledger.enter().ok()).collect();
        assert!(
            all.len() >= PLACES - 2
                && ledger.enter().is_err_and(|why| why.to_string().contains("processes"))
        );
        assert_eq!(ledger.importers().len(), all.len());
        drop(all);
        assert!(ledger.importers().is_empty() && ledger.enter().is_ok());
    }

    /// Otherwise its exporter would free memory that the process still uses.
    #[test]
    fn who_cannot_be_looked_for_is_not_taken_for_dead() {
        const ALONE: &str = "LEDGER_ALONE";
        if std::env::var_os(ALONE).is_none() {
            // Descriptors belong to the process, and other tests need theirs.
            let name = "cuda_ipc::ledger::tests::who_cannot_be_looked_for_is_not_taken_for_dead";
            let mut again = std::process::Command::new(std::env::current_exe().unwrap());
            let again = again.args(["--exact", name]).env(ALONE, "1").output().unwrap();
            let said = String::from_utf8_lossy(&again.stdout);
            assert!(again.status.success() && said.contains("1 passed"), "{said}");
            return;
        }
        let ledger = Ledger::new().unwrap();
        let entry = ledger.enter().unwrap();
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let low = rustix::process::Rlimit { current: Some(64), ..limit };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, low).unwrap();
        let spent: Vec<_> = std::iter::from_fn(|| std::fs::File::open("/dev/null").ok()).collect();
        assert_eq!(ledger.importers(), [std::process::id()]);
        assert!(matches!(ledger.enter().err(), Some(MapError::Lacking(_))));
        drop(spent);
        assert_eq!(ledger.importers(), [std::process::id()], "it was not struck out");
        drop(entry);
        assert!(ledger.importers().is_empty());
    }
}
