//! Ranks that are waited for and have published no address.

use crate::chores::Waiting;
use crate::names::Rank;

/// Ranks that are waited for and have published no address, each with a device's number. The
/// runtime looks for each again before a thread sleeps, and now and then in progress: only a link
/// reports the end of a rank.
pub(crate) struct Absent(Waiting<Vec<(u32, Rank)>>);

impl Absent {
    pub(crate) fn new() -> Self {
        Self(Waiting::new())
    }

    /// Returns `true` if there is no such rank.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a rank. Returns `true` if it is news.
    pub(crate) fn add(&self, device: u32, rank: Rank) -> bool {
        let mut ranks = self.0.lock();
        let is_news = !ranks.contains(&(device, rank));
        if is_news {
            ranks.push((device, rank));
            self.0.set_count(ranks.len());
        }
        is_news
    }

    pub(crate) fn all(&self) -> Vec<(u32, Rank)> {
        self.0.lock().clone()
    }

    /// Removes the ranks that were found.
    pub(crate) fn remove(&self, found: &[(u32, Rank)]) {
        let mut ranks = self.0.lock();
        ranks.retain(|rank| !found.contains(rank));
        self.0.set_count(ranks.len());
    }
}
