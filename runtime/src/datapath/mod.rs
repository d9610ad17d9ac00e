//! The work that the protocols decide on: moving the bytes of transfers.
//!
//! | module | one idea |
//! |---|---|
//! | `carrier`, `port` | what a rank, and a device of it, have for this |
//! | `backlog` | carries on the messages that wait for an event, a staging copy, or room |
//! | `in_flight` | the transfers of a device, their events, and the thread that carries one on |
//! | `accept` | begins transfers to this rank |
//! | `tx`, `rx`, `target` | carry out the actions of a sender, and of a receiver |
//! | `kernel_copy`, `share` | the kernel copies a message, with its sender's help |
//! | `mapped`, `import` | a GPU's engine fetches a message from mapped memory; remote keys |
//! | `landing`, `reorder` | copies that engines are at; active messages on their way onto a GPU |
//! | `ordered` | operations that wait for events and streams of the user |
//! | `ahead`, `inflow` | fragments from and to GPU memory, by way of pinned blocks |
//! | `through` | copies within this process that the driver would do while the caller waits |
//! | `packed` | small pieces of memory that only its owner reaches, many in one message |
//! | `words` | atomic operations on words of GPU memory |

mod accept;
mod ahead;
mod backlog;
mod carrier;
mod import;
mod in_flight;
mod inflow;
mod kernel_copy;
mod landing;
mod mapped;
mod ordered;
pub(crate) mod packed;
mod port;
mod reorder;
mod rx;
mod share;
mod target;
#[cfg(test)]
mod tests;
mod through;
mod tx;
mod words;

pub(crate) use backlog::BacklogStep;
pub(crate) use carrier::Carrier;
pub(crate) use in_flight::{Event, Flush, Run};
pub(crate) use kernel_copy::Gathering;
pub(crate) use landing::{AT_ONCE, Fetched, Landing, Owed};
pub(crate) use ordered::{Deferred, OrderedEntry, Sort, Start, Waits};
pub(crate) use packed::Carried;
pub use port::Device;
pub(crate) use port::{NO_COMP, Port};
pub(crate) use reorder::{Reordered, arrival, fresh};
pub(crate) use rx::WRITTEN;
pub(crate) use target::Target;
pub(crate) use through::Moving;
pub(crate) use words::{Change, WordRequest};

use crate::chores::{Chore, Chores, Waiting};
use crate::names::Rank;
use crate::op::{OpKind, OpTable};
use crate::protocol::header::Message;
use carrack_transports::contract::Header;
use in_flight::InFlight;
use mapped::Introduced;
use packed::Packed;
use parking_lot::Mutex;
use share::Help;
use std::collections::VecDeque;
use std::sync::atomic::AtomicUsize;

/// A peer, and the name of a transfer with it.
pub(crate) type At = (Rank, u64);

/// The transfers of a device, and what is kept for them.
pub(crate) struct Transfers {
    table: OpTable<InFlight>,
    /// Transfers that progress has to continue, each once, in the order of their turns.
    listed: Waiting<VecDeque<At>>,
    /// Turn of the thread that continues them.
    turn: Mutex<()>,
    /// Transfers whose bytes the kernel copies here.
    pulls: Waiting<VecDeque<At>>,
    /// Number of messages that are being copied without being in the table.
    alone: AtomicUsize,
    /// Pulls of peers that this rank helps with.
    helps: Waiting<VecDeque<Help>>,
    /// Regions of peers in which messages lie.
    pub(crate) introduced: Introduced,
    /// Pieces that go together.
    packed: Packed,
    /// Transfers that may be in flight at a time.
    limit: usize,
}

impl Transfers {
    pub(crate) fn new(limit: usize, chores: &Chores) -> Self {
        Self {
            table: OpTable::default(),
            listed: Waiting::for_progress(chores, Chore::Transfers),
            turn: Mutex::new(()),
            pulls: Waiting::for_progress(chores, Chore::Pulls),
            alone: AtomicUsize::new(0),
            helps: Waiting::for_progress(chores, Chore::Helps),
            introduced: Introduced::default(),
            packed: Packed::default(),
            limit,
        }
    }

    /// Returns a name that is smaller than that of every later operation.
    pub(crate) fn now(&self) -> u64 {
        self.table.name()
    }

    /// Returns `true` if the limit of transfers in flight is reached.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.table.count() >= self.limit
    }

    /// Returns `true` if a message may be offered. Messages that are offered only because their
    /// receiver keeps too many (`is_held`) leave an eighth of the places to large ones and to
    /// other peers. A collective's messages need no place: members wait for them before they take
    /// others.
    pub(crate) fn may_offer(&self, header: Header, is_held: bool) -> bool {
        let limit = if is_held { self.limit - self.limit / 8 } else { self.limit };
        self.table.count() < limit || Message::decode(header).is_ok_and(Message::is_collective)
    }

    /// Returns `true` if an operation on a peer's memory is in flight that began before `name`.
    pub(crate) fn has_memory_operations(&self, peer: Rank, before: u64) -> bool {
        let is_meant = |name, kind| kind == OpKind::Memory && name < before;
        self.table.count_of(peer, is_meant) > 0 || self.packed.has(peer, before)
    }

    /// Lets progress look at a transfer.
    fn list(&self, at: At) {
        let mut listed = self.listed.lock();
        listed.push_back(at);
        self.listed.set_count(listed.len());
    }
}
