//! What is known of a rank's life.

use crate::names::Rank;
use crate::runtime::{Inner, Runtime};
use carrack_transports::contract::{Batch, DownCause, Event};
use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What is known of a rank's life.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PeerState {
    /// Nothing speaks against it; it may not have been used yet.
    Up,
    /// It is silent: an operation with it was not over by its deadline, and nothing has come from it since. It may
    /// be stopped, or busy; memory that it could still reach is kept for it.
    Suspect,
    /// It is known to be gone, and does not come back.
    Down(DownCause),
}

/// Ranks that are silent.
#[derive(Default)]
pub(crate) struct Suspects {
    ranks: Mutex<HashSet<Rank>>,
    count: AtomicU32,
}

impl Suspects {
    fn lock(&self) -> MutexGuard<'_, HashSet<Rank>> {
        self.ranks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self, ranks: &HashSet<Rank>) {
        self.count.store(u32::try_from(ranks.len()).unwrap_or(u32::MAX), Ordering::Release);
    }

    /// Whether there are any.
    #[inline(always)]
    pub(crate) fn any(&self) -> bool {
        self.count.load(Ordering::Relaxed) != 0
    }

    /// Somebody has been heard of.
    #[cold]
    pub(crate) fn heard(&self, batch: &mut Batch) {
        let mut ranks = self.lock();
        for message in batch.small_mut() {
            ranks.remove(&Rank(message.from.0));
        }
        for event in batch.events_mut() {
            if let Event::Arrived { from, .. } = event {
                ranks.remove(&Rank(from.0));
            }
        }
        self.changed(&ranks);
    }
}

impl Inner {
    /// An operation with a rank was not over by its deadline.
    #[cold]
    pub(crate) fn suspect(&self, rank: Rank) {
        if rank.0 < self.size && rank != self.rank {
            let mut ranks = self.suspects.lock();
            if ranks.insert(rank) {
                tracing::warn!(%rank, "it is silent: an operation with it was not over by its deadline");
            }
            self.suspects.changed(&ranks);
        }
    }
}

impl Runtime {
    /// What is known of a rank's life. Whatever is found out is found out by progress.
    pub fn peer_state(&self, rank: Rank) -> PeerState {
        match self.peer_down(rank) {
            Some(cause) => PeerState::Down(cause),
            None if self.0.suspects.lock().contains(&rank) => PeerState::Suspect,
            None => PeerState::Up,
        }
    }
}
