//! Errors of progress that wait for a call that can return them.
//!
//! A call of progress returns one error. Further ones are kept, as are those of calls with another
//! result (collectives, futures, posts that wait, the progress thread). The user's next calls of
//! progress or `wait` return them, one each.

use crate::chores::{Chore, Chores, Waiting};
use crate::error::ProgressError;
use std::collections::VecDeque;

/// Errors that are kept at most. Further ones are in the log only.
const MOST: usize = 64;

/// Errors that wait for a call that can return them, oldest first.
pub(crate) struct Complaints(Waiting<VecDeque<ProgressError>>);

impl Complaints {
    pub(crate) fn new(chores: &Chores) -> Self {
        Self(Waiting::for_progress(chores, Chore::Complaints))
    }

    #[cold]
    pub(crate) fn keep(&self, error: ProgressError) {
        let mut kept = self.0.lock();
        if kept.len() < MOST {
            kept.push_back(error);
            self.0.set_count(kept.len());
        } else {
            tracing::warn!(%error, "an error that no call of progress or wait returns: too many \
                wait for one");
        }
    }

    /// Logs the errors that no call has returned, except shortages that have ended.
    pub(crate) fn end(&self) {
        for error in self.0.lock().drain(..) {
            if !is_shortage(&error) {
                tracing::warn!(%error, "an error that no call of progress or wait has returned");
            }
        }
    }

    /// Takes the oldest one. Shortages that have ended (`nothing_waits`) are dropped.
    #[cold]
    pub(super) fn take(&self, nothing_waits: bool) -> Option<ProgressError> {
        let mut kept = self.0.lock();
        if nothing_waits {
            kept.retain(|error| !is_shortage(error));
        }
        let first = kept.pop_front();
        self.0.set_count(kept.len());
        first
    }
}

/// Returns `true` for an error of deliveries that waited for room or a packet.
fn is_shortage(error: &ProgressError) -> bool {
    use ProgressError::{CompletionFull, NoPacket, NoPacketMemory};
    matches!(error, CompletionFull(..) | NoPacket(_) | NoPacketMemory(..))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_kept_in_order_and_no_more_than_the_bound() {
        let chores = Chores::default();
        let complaints = Complaints::new(&chores);
        for number in 0..MOST + 10 {
            complaints.keep(ProgressError::NoPacket(number));
        }
        assert!(chores.there().has(Chore::Complaints));
        for number in 0..MOST {
            let taken = complaints.take(false);
            assert!(matches!(taken, Some(ProgressError::NoPacket(at)) if at == number));
        }
        assert!(complaints.take(false).is_none());
        assert!(!chores.there().any());
    }

    #[test]
    fn a_shortage_that_has_ended_is_dropped_and_other_errors_are_not() {
        let chores = Chores::default();
        let complaints = Complaints::new(&chores);
        complaints.keep(ProgressError::NoPacket(1));
        complaints.keep(ProgressError::InHandler);
        complaints.keep(ProgressError::NoPacket(2));
        assert!(matches!(complaints.take(true), Some(ProgressError::InHandler)));
        assert!(complaints.take(true).is_none());
        assert!(!chores.there().any());
    }
}
