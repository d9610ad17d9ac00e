//! The ranks that a device holds, and how much it sends without listening.
//!
//! Small messages are sent whole, before their receiver is known to have room for them. A message
//! to be matched waits at the receiver for its receive; an active message waits for room in its
//! completion object. The receiver has one budget for both (`CARRACK_UNEXPECTED`). A sender whose
//! message exceeds half of it is told to *hold*. Its messages then travel as offers, and their
//! bytes stay with it, until the receiver keeps at most a quarter. Offers take the place of their
//! messages, so only the place where the bytes wait changes. A message is neither refused nor
//! delayed because others wait, so a correct program cannot deadlock on it.
//!
//! A notification of a put or a get is no longer than its offer would be. Where deliveries alone
//! exceed half of the budget, puts and gets that notify are refused, to be retried.
//!
//! The other half is for messages that are sent before their sender hears of the hold. Each sender
//! has a share of that half ([`Deaf`]), after which it has to make progress before it sends more.
//! So a rank keeps its budget, plus the messages that the links to it hold. A link holds them in a
//! ring of shared memory, or as requests of a queue pair.
//!
//! A reply that a handler posts to its message's sender is accepted beyond the bound of the
//! backlog. The sender is then told XOFF: it posts only replies until half of the bound is left.
//! This rank's other posts have no more than that half. So a backlog exceeds its bound by the
//! replies to messages that the sender posted before the XOFF came. Its backlog and the links hold
//! those messages.
//!
//! The decisions are those of [`flow`](crate::protocol::flow).

use crate::chores::{Chore, Chores, Waiting};
use crate::names::Rank;
use crate::protocol::flow::{Budget, FlowReceiver, Hold};
use crate::undelivered::ENTRY;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// Ranks that a device has told, or will tell, to hold.
pub(crate) struct Holds(Waiting<FlowReceiver>);

impl Holds {
    pub(crate) fn new(chores: &Chores) -> Self {
        Self(Waiting::for_progress(chores, Chore::Holds))
    }

    /// Notes a rank whose messages exceed half of the budget, which progress will tell.
    #[cold]
    pub(crate) fn add(&self, rank: Rank) {
        self.note(rank, false);
    }

    /// Notes a rank to which replies exceed the bound of the backlog.
    #[cold]
    pub(crate) fn add_replies(&self, rank: Rank) {
        self.note(rank, true);
    }

    fn note(&self, rank: Rank, has_replies: bool) {
        let mut rx = self.0.lock();
        rx.note(rank, has_replies);
        self.0.set_count(rx.len());
    }

    /// Returns `true` if a rank was told to post only replies.
    #[cold]
    pub(crate) fn holds_off(&self, rank: Rank) -> bool {
        !self.0.is_empty() && self.0.lock().holds_off(rank)
    }

    /// Forgets a rank that is gone.
    pub(crate) fn forget(&self, rank: Rank) {
        let mut rx = self.0.lock();
        rx.forget(rank);
        self.0.set_count(rx.len());
    }

    /// Returns the ranks to tell something new, and the turn of these messages. A thread waits for
    /// its look: what it has just sent or received may be what a rank waits for.
    #[cold]
    pub(crate) fn news(&self, now: impl Fn(Rank, Hold) -> Hold) -> (Vec<(Rank, Hold)>, u64) {
        let mut rx = self.0.lock();
        let news = rx.news(now);
        self.0.set_count(rx.len());
        news
    }
}

/// The bytes that a device has sent to be matched since it last listened.
pub(crate) struct Deaf {
    bytes: AtomicU32,
    /// Set if a peer has said that it takes no notifications; it may take some again.
    was_refused: AtomicBool,
    /// The device's share of half of the budget, which the ranks of a job have in common.
    limit: u32,
}

impl Deaf {
    pub(crate) fn new(budget: usize, ranks: u32) -> Self {
        let limit = Budget(budget).share(ranks);
        Self { bytes: AtomicU32::new(0), was_refused: AtomicBool::new(false), limit }
    }

    #[inline(always)]
    pub(crate) fn sent(&self, size: usize) {
        // Not exact when several threads send, which is harmless. Each thread checks the limit
        // before it sends, so it is exceeded by one message of each thread at most.
        let bytes = self.bytes.load(Ordering::Relaxed).wrapping_add((size + ENTRY) as u32);
        self.bytes.store(bytes, Ordering::Relaxed);
    }

    #[inline(always)]
    pub(crate) fn has_to_listen(&self) -> bool {
        self.bytes.load(Ordering::Relaxed) > self.limit
    }

    /// Notes that a peer takes no notifications.
    pub(crate) fn set_refused(&self) {
        self.was_refused.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if a peer takes no notifications, or has taken none for a while.
    #[inline(always)]
    pub(crate) fn was_refused(&self) -> bool {
        self.was_refused.load(Ordering::Relaxed)
    }

    #[inline(always)]
    pub(crate) fn listens(&self) {
        if self.bytes.load(Ordering::Relaxed) != 0 {
            self.bytes.store(0, Ordering::Relaxed);
        }
    }
}
