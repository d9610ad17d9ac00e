//! The known state of a rank.

use crate::chores::{Chore, Chores, Waiting};
use crate::local::Local;
use crate::names::Rank;
use carrack_transports::contract::{Batch, DownCause, Event};
use std::collections::HashSet;

/// The known state of a rank.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PeerState {
    /// No error is known of it; it may not have been used yet.
    Up,
    /// The rank is silent: an operation with it missed its deadline, and no message has come from
    /// it since. It may be stopped or busy, so memory that it could still reach stays allocated.
    Suspect,
    /// The rank is gone, and does not come back.
    Down(DownCause),
}

/// Ranks that are silent.
pub(crate) struct Suspects(Waiting<HashSet<Rank>>);

impl Suspects {
    pub(crate) fn new(chores: &Chores) -> Self {
        Self(Waiting::for_progress(chores, Chore::Suspects))
    }

    /// Notes the ranks that a batch of events came from.
    #[cold]
    pub(crate) fn heard(&self, batch: &mut Batch) {
        let mut ranks = self.0.lock();
        for message in batch.small_mut() {
            ranks.remove(&Rank(message.from.0));
        }
        for event in batch.events_mut() {
            if let Event::Arrived { from, .. } = event {
                ranks.remove(&Rank(from.0));
            }
        }
        self.0.set_count(ranks.len());
    }
    /// Notes that an operation with a rank missed its deadline.
    #[cold]
    pub(crate) fn add(&self, local: &Local, rank: Rank) {
        if rank.0 < local.size && rank != local.rank {
            let mut ranks = self.0.lock();
            if ranks.insert(rank) {
                tracing::warn!(%rank, "it is silent: an operation with it did not complete by its \
                    deadline");
            }
            self.0.set_count(ranks.len());
        }
    }

    /// Returns `true` if a rank is silent.
    pub(crate) fn has(&self, rank: Rank) -> bool {
        self.0.lock().contains(&rank)
    }
}
