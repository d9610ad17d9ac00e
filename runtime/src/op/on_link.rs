//! Operations that were handed to links: each ends by an event with its token.

use super::OpContext;
use crate::names::{Rank, RemoteComp, Tag};
use carrack_transports::sync::Slab;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Operations that links can have at a time, of one device.
const MOST: usize = 256;

/// An operation that a link has.
pub(crate) struct OnLink {
    pub(crate) op: OpContext,
    pub(crate) next: Continuation,
}

/// The step that follows the end of an operation.
pub(crate) enum Continuation {
    /// The completion object is signalled.
    Complete,
    /// The completion object of an operation on the peer's memory is signalled. Flushes wait for
    /// the operation by its name. `notify` names an object of the owner that is notified after a
    /// get: until then the NIC may repeat the read.
    Memory { name: u64, notify: Option<(RemoteComp, Tag)> },
    /// The transfer of this name continues: a chunk of its window that begins at `window` has
    /// completed.
    Chunk { name: u64, window: usize },
}

impl OnLink {
    pub(crate) fn of(op: OpContext) -> Self {
        Self { op, next: Continuation::Complete }
    }
}

/// The operations that links have.
pub(crate) struct OnLinks {
    all: Slab<OnLink>,
    /// The number of operations on peers' memory.
    on_memory: AtomicUsize,
}

impl OnLinks {
    pub(crate) fn new() -> Self {
        Self { all: Slab::new(MOST), on_memory: AtomicUsize::new(0) }
    }

    /// Adds an operation before it is submitted, since another thread may see its end first.
    /// Returns its token.
    ///
    /// # Errors
    /// The limit is reached: the operation is given back.
    #[allow(clippy::result_large_err, reason = "the error is the operation that did not fit")]
    pub(crate) fn insert(&self, on_link: OnLink) -> Result<u64, OnLink> {
        let is_on_memory = matches!(on_link.next, Continuation::Memory { .. });
        let token = self.all.insert(on_link)?;
        if is_on_memory {
            self.on_memory.fetch_add(1, Ordering::AcqRel);
        }
        Ok(token)
    }

    /// Removes an operation that has ended, or was not begun.
    pub(crate) fn take(&self, token: u64) -> Option<OnLink> {
        let taken = self.all.take(token)?;
        if matches!(taken.next, Continuation::Memory { .. }) {
            self.on_memory.fetch_sub(1, Ordering::AcqRel);
        }
        Some(taken)
    }

    /// Returns the peer whose memory an operation is on, if it is on any.
    pub(crate) fn peer_of_memory(&self, token: u64) -> Option<Rank> {
        let peer =
            |one: &OnLink| matches!(one.next, Continuation::Memory { .. }).then_some(one.op.rank);
        self.all.read(token, peer).flatten()
    }

    /// Returns `true` if an operation on a peer's memory is in flight that began before `name`.
    pub(crate) fn has_on_memory(&self, peer: Rank, before: u64) -> bool {
        self.on_memory.load(Ordering::Acquire) > 0
            && self.all.any(|one| {
                one.op.rank == peer
                    && matches!(one.next, Continuation::Memory { name, .. } if name < before)
            })
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    /// Takes all out, for shutting down.
    pub(crate) fn drain(&self) -> Vec<OnLink> {
        self.on_memory.store(0, Ordering::Release);
        self.all.drain()
    }
}
