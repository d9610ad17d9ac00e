//! Queue pairs at their end.
//!
//! A queue pair that fails may be taking a message in. A receive of the shared queue then belongs
//! to it until that comes back flushed, behind everything that was sent. If the queue pair is
//! destroyed before, the receive is lost, since it never completes. When the NIC has given back
//! the last one it says so (`IBV_EVENT_QP_LAST_WQE_REACHED`). By then all that it gave back is in
//! the completion queue. So the connection ends when its requests have come back, and its queue
//! pair stays until the event and the empty queue have been seen. No caller waits for that: the
//! peer's end is reported, and the peer may be called again.

use super::sys::QueuePair;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time after which a NIC counts as one that never sends the event.
const PATIENCE: Duration = Duration::from_secs(10);

/// An end that is due when the completion queue is found empty.
#[derive(Debug)]
pub(super) enum Parting {
    /// A connection whose end no completion will report.
    Forsaken(u32),
    /// A queue pair in error whose requests have come back.
    Lingering(Lingering),
}

/// A queue pair that is not sent through any more.
#[derive(Debug)]
pub(super) struct Lingering {
    queue: Arc<QueuePair>,
    /// Set if its last receive is known to have come back.
    is_back: bool,
    until: Instant,
}

impl Lingering {
    pub(super) fn new(queue: Arc<QueuePair>, is_back: bool) -> Self {
        Self { queue, is_back, until: Instant::now() + PATIENCE }
    }

    /// Returns `true` if it may be destroyed, given that the completion queue is empty.
    fn may_go(&self) -> bool {
        let is_late = !self.is_back && Instant::now() >= self.until;
        if is_late {
            tracing::debug!(
                queue = self.queue.number(),
                "the NIC has not told of a queue pair's last receive"
            );
        }
        self.is_back || is_late
    }
}

/// All ends of a device that are due.
#[derive(Debug, Default)]
pub(super) struct Partings(Vec<Parting>);

impl Partings {
    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn add(&mut self, parting: Parting) {
        self.0.push(parting);
    }

    /// Adds a connection, unless it is listed.
    pub(super) fn forsake(&mut self, index: u32) {
        let is_it =
            |parting: &Parting| matches!(parting, Parting::Forsaken(other) if *other == index);
        if !self.0.iter().any(is_it) {
            self.add(Parting::Forsaken(index));
        }
    }

    /// Notes that the NIC has given back the last receive of a queue pair.
    pub(super) fn note_last_receive(&mut self, number: u32) {
        for parting in &mut self.0 {
            if let Parting::Lingering(lingering) = parting
                && lingering.queue.number() == number
            {
                lingering.is_back = true;
            }
        }
    }

    /// Destroys the queue pairs that may go, as the completion queue is empty. Returns a
    /// connection to end, if there is one.
    pub(super) fn next(&mut self) -> Option<u32> {
        self.0.retain(
            |parting| !matches!(parting, Parting::Lingering(lingering) if lingering.may_go()),
        );
        let at = self.0.iter().position(|parting| matches!(parting, Parting::Forsaken(_)))?;
        match self.0.swap_remove(at) {
            Parting::Forsaken(index) => Some(index),
            Parting::Lingering(_) => None,
        }
    }

    /// Destroys all queue pairs to make room, at the price of a receive each. Returns `true` if
    /// there were any.
    pub(super) fn make_room(&mut self) -> bool {
        let before = self.0.len();
        self.0.retain(|parting| matches!(parting, Parting::Forsaken(_)));
        self.0.len() < before
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
