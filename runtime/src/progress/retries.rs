//! Futures whose operation has to be posted again.

use crate::chores::{Chore, Chores, Waiting};
use std::task::Waker;

/// Futures whose operation has to be posted again.
pub(crate) struct Retries(Waiting<Vec<Waker>>);

impl Retries {
    pub(crate) fn new(chores: &Chores) -> Self {
        Self(Waiting::for_progress(chores, Chore::Retries))
    }

    /// Adds the waker of a future, which the next progress call wakes.
    pub(crate) fn add(&self, waker: &Waker) {
        let mut wakers = self.0.lock();
        if !wakers.iter().any(|other| other.will_wake(waker)) {
            wakers.push(waker.clone());
        }
        self.0.set_count(wakers.len());
    }

    #[inline(always)]
    pub(crate) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Wakes the futures after a change.
    #[cold]
    pub(crate) fn wake(&self) {
        self.0.take().into_iter().for_each(Waker::wake);
    }
}
