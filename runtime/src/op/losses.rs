//! Operations on peers' memory that were lost with their peer.

use crate::error::OpError;
use crate::names::Rank;
use carrack_transports::contract::DownCause;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// The peers with which an operation on their memory was lost, each with the reason of its end.
///
/// A flush looks for operations in flight first, and here afterwards. So a loss is noted before
/// its operation leaves the place where it is in flight.
#[derive(Default)]
pub(crate) struct Losses {
    any: AtomicBool,
    causes: Mutex<HashMap<Rank, DownCause>>,
}

impl Losses {
    /// Notes an operation on a peer's memory that ended with this error, if it was lost.
    #[inline]
    pub(crate) fn note_error(&self, error: &OpError) {
        if let OpError::PeerDown { rank, cause } = error {
            self.note(*rank, cause);
        }
    }

    #[cold]
    pub(crate) fn note(&self, rank: Rank, cause: &DownCause) {
        self.causes.lock().entry(rank).or_insert_with(|| cause.clone());
        self.any.store(true, Ordering::Release);
    }

    /// Returns the reason of a peer's end, if an operation on its memory was lost with it.
    #[inline]
    pub(crate) fn cause(&self, rank: Rank) -> Option<DownCause> {
        let any = self.any.load(Ordering::Acquire);
        any.then(|| self.causes.lock().get(&rank).cloned()).flatten()
    }
}
