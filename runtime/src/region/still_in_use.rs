//! The obstacle to freeing memory.

use std::fmt;

/// The obstacle to freeing memory. Everything was withdrawn from peers nevertheless.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct StillInUse {
    /// The address.
    pub addr: usize,
    /// Bytes from there on.
    pub len: usize,
    /// Registrations that this call has ended: operations of peers are stale from now on.
    pub registrations: usize,
    /// Ended registrations that NICs of other ranks reach until these ranks make progress.
    pub by_nics: usize,
    /// Allocations of GPUs of which this process has raw regions, in operations or in its own
    /// hands.
    pub regions: usize,
    /// Other processes that have it mapped. They close it when they next make progress.
    pub processes: Vec<u32>,
}

impl std::error::Error for StillInUse {}

impl fmt::Display for StillInUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { addr, len, registrations, by_nics, regions, processes } = self;
        write!(f, "{len} bytes at {addr:#x} must not be freed yet:")?;
        if *registrations > 0 {
            write!(
                f,
                " {registrations} registrations stood over them, and are ended: deregister first;"
            )?;
        }
        if *by_nics > 0 {
            write!(
                f,
                " NICs of other ranks reach {by_nics} of its ended registrations: let those ranks \
                make progress;"
            )?;
        }
        if *regions > 0 {
            write!(
                f,
                " regions of {regions} allocations are in use: wait for the operations, and drop \
                them;"
            )?;
        }
        if !processes.is_empty() {
            write!(f, " processes {processes:?} have them mapped: let them make progress;")?;
        }
        f.write_str(" then call again")
    }
}
