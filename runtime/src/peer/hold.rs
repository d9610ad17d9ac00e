//! A bound on messages that wait for their receives.
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
//! So a rank keeps its budget, plus the messages that the links to it hold: a ring of shared
//! memory, or the requests of a queue pair. A share is [`LEAST`] at least, so a budget that is too
//! small for all ranks of the job is exceeded by that, too.

use crate::chores::{Chore, Chores, Waiting};
use crate::names::Rank;
use crate::protocol::header::Room;
use crate::undelivered::{ENTRY, Unexpected};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// Bytes that a device may send without having listened, at least and at most.
const LEAST: usize = 16 << 10;
const MOST: usize = 1 << 20;

/// Ranks that a device has told, or will tell, to hold.
pub(crate) struct Holds {
    ranks: Waiting<Vec<(Rank, Room)>>,
    /// Counts the messages about room, under the lock of the list: two threads may send them in
    /// any order.
    turns: AtomicU64,
}

impl Holds {
    pub(crate) fn new(chores: &Chores) -> Self {
        Self { ranks: Waiting::for_progress(chores, Chore::Holds), turns: AtomicU64::new(1) }
    }

    /// Notes a rank, which progress will tell.
    #[cold]
    pub(crate) fn add(&self, rank: Rank) {
        let mut ranks = self.ranks.lock();
        if !ranks.iter().any(|&(other, _)| other == rank) {
            ranks.push((rank, Room::Any));
            self.ranks.set_count(ranks.len());
        }
    }

    /// Returns the ranks whose room here has changed, each with its room, and the turn of these
    /// messages. `None`: another thread does this now.
    #[cold]
    pub(crate) fn news(&self, kept: &Unexpected) -> Option<(Vec<(Rank, Room)>, u64)> {
        let mut ranks = self.ranks.try_lock()?;
        let turn = self.turns.fetch_add(1, Ordering::Relaxed);
        let mut news = Vec::new();
        ranks.retain_mut(|(rank, told)| {
            let room = kept.room(*told);
            if room != *told {
                news.push((*rank, room));
                *told = room;
            }
            room != Room::Any
        });
        self.ranks.set_count(ranks.len());
        Some((news, turn))
    }
}

/// The bytes that a device has sent to be matched since it last listened.
pub(crate) struct Deaf {
    bytes: AtomicU32,
    /// Set if a peer has said that it takes no notifications; it may take some again.
    was_refused: AtomicBool,
    /// Its share of half of the budget, which the ranks of a job have in common.
    limit: u32,
}

impl Deaf {
    pub(crate) fn new(budget: usize, ranks: u32) -> Self {
        let share = budget / 2 / ranks.saturating_sub(1).max(1) as usize;
        let limit = share.clamp(LEAST, MOST) as u32;
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
