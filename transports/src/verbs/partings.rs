//! Queue pairs at their end.
//!
//! A queue pair that fails may be taking a message in: a receive of the shared queue is then its
//! own until it comes back flushed, and it comes behind everything that was sent. Whoever destroys
//! the queue pair before that loses the receive, since it completes nowhere any more. When the NIC
//! has given back the last one it says so (`IBV_EVENT_QP_LAST_WQE_REACHED`); what it has given back
//! is in the completion queue by then. So the connection ends when its requests have come back, and
//! its queue pair stays until both have been seen. Nothing waits for that: its peer's end is told,
//! and may be called again.

use super::sys::QueuePair;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// After this long a NIC is taken for one that never says so.
const PATIENCE: Duration = Duration::from_secs(10);

/// Something to be ended when the completion queue is found empty.
#[derive(Debug)]
pub(super) enum Parting {
    /// A connection at its end of which no completion will tell that it has come.
    Forsaken(u32),
    /// A queue pair in error whose requests have come back.
    Lingering(Lingering),
}

/// A queue pair that nobody sends through any more.
#[derive(Debug)]
pub(super) struct Lingering {
    queue: Arc<QueuePair>,
    /// Whether its last receive is known to have come back.
    is_over: bool,
    until: Instant,
}

impl Lingering {
    pub(super) fn new(queue: Arc<QueuePair>, is_over: bool) -> Self {
        Self { queue, is_over, until: Instant::now() + PATIENCE }
    }

    /// Whether it may go, the completion queue being empty.
    fn may_go(&self) -> bool {
        let is_late = !self.is_over && Instant::now() >= self.until;
        if is_late {
            tracing::debug!(
                queue = self.queue.number(),
                "the NIC has not told of a queue pair's last receive"
            );
        }
        self.is_over || is_late
    }
}

/// All of them.
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

    /// A connection, unless it is there.
    pub(super) fn forsake(&mut self, index: u32) {
        let is_it =
            |parting: &Parting| matches!(parting, Parting::Forsaken(other) if *other == index);
        if !self.0.iter().any(is_it) {
            self.add(Parting::Forsaken(index));
        }
    }

    /// The NIC has given back the last receive of a queue pair.
    pub(super) fn note_last_receive(&mut self, number: u32) {
        for parting in &mut self.0 {
            if let Parting::Lingering(lingering) = parting
                && lingering.queue.number() == number
            {
                lingering.is_over = true;
            }
        }
    }

    /// The completion queue is empty: has those queue pairs go that may. A connection that is to
    /// end, if there is one.
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

    /// Has all queue pairs go, at the price of a receive each: their room is needed. Whether there
    /// were any.
    pub(super) fn make_room(&mut self) -> bool {
        let before = self.0.len();
        self.0.retain(|parting| matches!(parting, Parting::Forsaken(_)));
        self.0.len() < before
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}
