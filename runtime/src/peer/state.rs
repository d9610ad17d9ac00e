//! The known state of a rank.

use crate::chores::{Chore, Chores, Waiting};
use crate::names::Rank;
use crate::runtime::{Inner, Runtime};
use carrack_transports::contract::{Batch, DownCause, Event};
use std::collections::HashSet;

/// The known state of a rank.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PeerState {
    /// Nothing speaks against it; it may not have been used yet.
    Up,
    /// It is silent: an operation with it missed its deadline, and no message has come from it
    /// since. It may be stopped, or busy; memory that it could still reach is kept for it.
    Suspect,
    /// It is known to be gone, and does not come back.
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
}

impl Inner {
    /// Returns the reason of a rank's end, as far as progress or an operation was told.
    pub(crate) fn told_down(&self, rank: Rank) -> Option<DownCause> {
        let known = self.down().get(&rank).cloned();
        known.or_else(|| {
            let devices = self.devices();
            devices.iter().find_map(|device| device.0.known_route(rank)?.told_down().cloned())
        })
    }

    /// Notes that an operation with a rank missed its deadline.
    #[cold]
    pub(crate) fn suspect(&self, rank: Rank) {
        if rank.0 < self.size && rank != self.rank {
            let mut ranks = self.suspects.0.lock();
            if ranks.insert(rank) {
                tracing::warn!(%rank, "it is silent: an operation with it did not complete by its \
                    deadline");
            }
            self.suspects.0.set_count(ranks.len());
        }
    }
}

impl Runtime {
    /// Returns the known state of a rank, from progress or from an operation that failed because
    /// the rank is gone. Messages that it sent before may still come;
    /// [`peer_down`](Self::peer_down) reports its end behind them.
    pub fn peer_state(&self, rank: Rank) -> PeerState {
        match self.0.told_down(rank) {
            Some(cause) => PeerState::Down(cause),
            None if self.0.suspects.0.lock().contains(&rank) => PeerState::Suspect,
            None => PeerState::Up,
        }
    }
}
