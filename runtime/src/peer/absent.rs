//! Ranks that are waited for and have published no address.

use crate::chores::{Chore, Chores, Waiting};
use crate::names::Rank;
use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Time between two looks in progress. A look asks the bootstrap for each rank.
const AGAIN: Duration = Duration::from_millis(10);

/// Ranks that are waited for and have published no address, each with a device's number. The
/// runtime looks for each again before a thread sleeps, and now and then in progress: only a link
/// reports the end of a rank.
pub(crate) struct Absent {
    ranks: Waiting<Vec<(u32, Rank)>>,
    /// The time of the next look in progress.
    next: Mutex<Option<Instant>>,
}

impl Absent {
    pub(crate) fn new(chores: &Chores) -> Self {
        Self { ranks: Waiting::for_progress(chores, Chore::Absent), next: Mutex::new(None) }
    }

    /// Looks in progress, if it is time to, and if no other thread does. Looks that take long are
    /// rarer: those in progress take a tenth of the time at most.
    pub(crate) fn look(&self, look: impl FnOnce()) {
        let Some(mut next) = self.next.try_lock() else { return };
        let now = Instant::now();
        if next.is_none_or(|next| next <= now) {
            look();
            let took = now.elapsed();
            *next = Some(now + took + AGAIN.max(took * 9));
        }
    }

    /// Returns `true` if there is no such rank.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranks.is_empty()
    }

    /// Adds a rank. Returns `true` if it is news.
    pub(crate) fn add(&self, device: u32, rank: Rank) -> bool {
        let mut ranks = self.ranks.lock();
        let is_news = !ranks.contains(&(device, rank));
        if is_news {
            ranks.push((device, rank));
            self.ranks.set_count(ranks.len());
        }
        is_news
    }

    pub(crate) fn all(&self) -> Vec<(u32, Rank)> {
        self.ranks.lock().clone()
    }

    /// Removes the ranks that were found.
    pub(crate) fn remove(&self, found: &[(u32, Rank)]) {
        let mut ranks = self.ranks.lock();
        ranks.retain(|rank| !found.contains(rank));
        self.ranks.set_count(ranks.len());
    }
}
