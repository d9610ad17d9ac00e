//! The deliveries that wait for one completion object.

use super::entry::{Delivery, Entry, Obstacle};
use crate::comp::Completion;
use std::collections::VecDeque;
use std::sync::Arc;

/// The deliveries that wait for one completion object of the user.
pub(crate) struct Queue {
    pub(crate) object: Arc<dyn Completion>,
    /// Oldest first.
    pub(crate) entries: VecDeque<Entry>,
    /// Messages that are fetched, one of each sender, whose later messages wait for it.
    pub(crate) fetches: Vec<Entry>,
    /// Entries at the front that wait for fetches.
    held_up: usize,
    /// A thread is delivering an entry, without the lock: others leave the queue alone.
    pub(crate) is_out: bool,
    /// Obstacles that the user was told of: each once while the queue is not empty.
    told: Told,
}

#[derive(Default)]
struct Told {
    full: bool,
    no_packet: bool,
}

/// Returns the user's object that a completion object passes statuses on to: itself, most of the
/// time.
pub(crate) fn object_of(comp: &Arc<dyn Completion>) -> &Arc<dyn Completion> {
    let mut object = comp;
    while let Some(next) = object.passes_on_to() {
        object = next;
    }
    object
}

impl Queue {
    pub(crate) fn of(object: Arc<dyn Completion>) -> Self {
        let (entries, fetches, told) = (VecDeque::new(), Vec::new(), Told::default());
        Self { object, entries, fetches, held_up: 0, is_out: false, told }
    }

    /// Returns `true` if no thread can make room any more.
    pub(crate) fn is_orphaned(&self) -> bool {
        !self.is_out && self.object.is_abandoned()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.fetches.is_empty()
    }

    /// Takes out the first entry that can be tried. A message that is fetched holds up those of its
    /// sender only.
    pub(crate) fn take(&mut self) -> Option<Entry> {
        if let Some(at) = self.fetches.iter().position(Entry::is_ready) {
            self.held_up = 0;
            return Some(self.fetches.swap_remove(at));
        }
        let is_held_up =
            |entry: &Entry| self.fetches.iter().any(|fetch| fetch.rank() == entry.rank());
        let next = self.entries.range(self.held_up..).position(|entry| !is_held_up(entry));
        self.held_up = next.map_or(self.entries.len(), |next| self.held_up + next);
        self.entries.remove(self.held_up)
    }

    /// Puts back the entries that were taken out.
    pub(crate) fn put_back(&mut self, entry: Entry) {
        match &entry.what {
            Delivery::Fetch(..) => self.fetches.push(entry),
            // An entry that has got a packet meanwhile goes first: it may have the one that this
            // message waits for.
            Delivery::Message { .. } => self.insert_placed(entry),
            Delivery::Status(..) | Delivery::Rts { .. } => {
                self.held_up = 0;
                self.entries.push_front(entry);
            }
        }
    }

    /// Inserts an entry behind those at the front that have a packet, or need none.
    pub(crate) fn insert_placed(&mut self, entry: Entry) {
        let unplaced =
            self.entries.iter().position(|entry| !matches!(entry.what, Delivery::Status(..)));
        self.held_up = 0;
        self.entries.insert(unplaced.unwrap_or(self.entries.len()), entry);
    }

    /// Returns the obstacle to report, with the number of waiting deliveries. Reports once while
    /// the queue is not empty, and never if the user cannot act on it.
    pub(crate) fn complaint(&mut self, why: Obstacle) -> Option<(Obstacle, usize)> {
        let told = match why {
            Obstacle::Full if self.object.is_abandoned() => return None,
            Obstacle::Full => &mut self.told.full,
            Obstacle::Packet(_) => &mut self.told.no_packet,
            Obstacle::UnderWay => return None,
        };
        let waiting = self.entries.len() + self.fetches.len();
        (!std::mem::replace(told, true)).then_some((why, waiting))
    }
}
