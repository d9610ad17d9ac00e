//! The chores of progress apart from polling transports, as bits of one word: an idle look costs
//! one load, however many sorts there are. The word, and the lists whose bits it has, are
//! [`carrack_transports::sync::chores`].

use carrack_transports::sync::chores::Bit;
pub(crate) use carrack_transports::sync::chores::{Chores, PendingChores, Waiting};

/// A sort of work that may wait for progress.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Chore {
    /// Backlogs that are not empty.
    Backlogs = 1,
    /// Copies that engines are at.
    Landings = 1 << 1,
    /// Transfers that have their turn.
    Transfers = 1 << 2,
    /// Large messages that the kernel copies here.
    Pulls = 1 << 3,
    /// Ranks that are waited for and have no address, of the whole runtime.
    Absent = 1 << 4,
    /// Deliveries that wait for their completion object.
    Undelivered = 1 << 5,
    /// Active messages on their way into memory of a GPU.
    Reorder = 1 << 13,
    /// Large messages that others copy from here.
    Helps = 1 << 10,
    /// Operations that wait for events and streams of the user.
    Ordered = 1 << 14,
    /// Ranks to be told to hold, or to go on.
    Holds = 1 << 6,
    /// Deadlines of the whole runtime.
    Deadlines = 1 << 7,
    /// Futures of the whole runtime to be polled again.
    Retries = 1 << 8,
    /// Errors of progress of the whole runtime that no call has returned yet.
    Complaints = 1 << 18,
    /// Ranks that are silent, of the whole runtime.
    Suspects = 1 << 9,
    /// Atomic operations on words of GPUs, of the whole runtime.
    Words = 1 << 12,
    /// A signal's request for the list of pending operations, of the whole runtime.
    Dump = 1 << 17,
}

/// The chores of a runtime before it polls a device.
pub(crate) const SELDOM: Bit = Bit(Chore::Deadlines as usize | Chore::Words as usize);

impl From<Chore> for Bit {
    #[inline(always)]
    fn from(chore: Chore) -> Self {
        Self(chore as usize)
    }
}
