//! The deliveries that wait for one completion object.

use super::entry::{Delivery, Obstacle, QueuedDelivery};
use crate::comp::Completion;
use crate::names::Rank;
use std::collections::{HashMap, VecDeque, hash_map};
use std::sync::Arc;

/// The deliveries that wait for one completion object of the user.
pub(crate) struct Queue {
    pub(crate) object: Arc<dyn Completion>,
    /// Oldest first.
    pub(super) entries: VecDeque<QueuedDelivery>,
    /// Number of entries of each rank, if not 0.
    of_rank: HashMap<Rank, usize>,
    /// Messages that are fetched, one of each sender, whose later messages wait for it.
    pub(super) fetches: Vec<QueuedDelivery>,
    /// Entries at the front that wait for fetches.
    held_up: usize,
    /// A thread is delivering an entry, without the lock: others leave the queue alone.
    pub(crate) is_out: bool,
    /// Obstacles that the user was told of: each once while the queue is not empty.
    reported: ReportedObstacles,
}

#[derive(Default)]
struct ReportedObstacles {
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
        let (entries, of_rank, fetches) = (VecDeque::new(), HashMap::new(), Vec::new());
        Self {
            object,
            entries,
            of_rank,
            fetches,
            held_up: 0,
            is_out: false,
            reported: ReportedObstacles::default(),
        }
    }

    /// Returns `true` if no thread can make room any more.
    pub(crate) fn is_orphaned(&self) -> bool {
        !self.is_out && self.object.is_abandoned()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.fetches.is_empty()
    }

    /// Returns all deliveries.
    pub(crate) fn all(&self) -> impl Iterator<Item = &QueuedDelivery> {
        self.entries.iter().chain(&self.fetches)
    }

    /// Adds an entry behind the others.
    pub(crate) fn push(&mut self, entry: QueuedDelivery) {
        self.insert(self.entries.len(), entry);
    }

    fn insert(&mut self, at: usize, entry: QueuedDelivery) {
        *self.of_rank.entry(entry.rank()).or_default() += 1;
        self.entries.insert(at, entry);
    }

    fn remove(&mut self, at: usize) -> Option<QueuedDelivery> {
        let entry = self.entries.remove(at)?;
        if let hash_map::Entry::Occupied(mut count) = self.of_rank.entry(entry.rank()) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
        Some(entry)
    }

    /// Takes out the first entry that can be tried. A message that is fetched holds up those of its
    /// sender only.
    pub(crate) fn take(&mut self) -> Option<QueuedDelivery> {
        if let Some(at) = self.fetches.iter().position(QueuedDelivery::is_ready) {
            self.held_up = 0;
            return Some(self.fetches.swap_remove(at));
        }
        // Most often they are of one sender: no search then.
        let behind = self.fetches.iter().filter_map(|fetch| self.of_rank.get(&fetch.rank()));
        if behind.sum::<usize>() == self.entries.len() {
            return None;
        }
        let is_held_up =
            |entry: &QueuedDelivery| self.fetches.iter().any(|fetch| fetch.rank() == entry.rank());
        let next = self.entries.range(self.held_up..).position(|entry| !is_held_up(entry));
        self.held_up = next.map_or(self.entries.len(), |next| self.held_up + next);
        self.remove(self.held_up)
    }

    /// Puts back the entries that were taken out.
    pub(crate) fn put_back(&mut self, entry: QueuedDelivery) {
        match &entry.what {
            Delivery::Fetch(..) => self.fetches.push(entry),
            // An entry that has got a packet meanwhile goes first: it may have the one that this
            // message waits for.
            Delivery::Message { .. } => self.insert_placed(entry),
            Delivery::Status(..) | Delivery::Rts { .. } => {
                self.held_up = 0;
                self.insert(0, entry);
            }
        }
    }

    /// Inserts an entry behind those at the front that have a packet, or need none.
    pub(crate) fn insert_placed(&mut self, entry: QueuedDelivery) {
        let unplaced =
            self.entries.iter().position(|entry| !matches!(entry.what, Delivery::Status(..)));
        self.held_up = 0;
        self.insert(unplaced.unwrap_or(self.entries.len()), entry);
    }

    /// Returns the obstacle to report, with the number of waiting deliveries. Reports once while
    /// the queue is not empty, and never if the user cannot act on it.
    pub(crate) fn complaint(&mut self, why: Obstacle) -> Option<(Obstacle, usize)> {
        let told = match why {
            Obstacle::Full if self.object.is_abandoned() => return None,
            Obstacle::Full => &mut self.reported.full,
            Obstacle::Packet(_) => &mut self.reported.no_packet,
            Obstacle::InFlight => return None,
        };
        let waiting = self.entries.len() + self.fetches.len();
        (!std::mem::replace(told, true)).then_some((why, waiting))
    }
}

#[cfg(test)]
mod tests {
    use super::super::entry::Fetch;
    use super::*;
    use crate::comp::{AsCompletion, CompQueue};
    use crate::names::Tag;
    use crate::protocol::wire::Rts;
    use proptest::prelude::*;

    proptest! {
        /// The model looks at all entries, from the front.
        #[test]
        fn each_senders_messages_are_taken_in_order_and_wait_for_its_fetch_only(
            steps in proptest::collection::vec((0_u8..5, 0_u32..3), 0..200),
        ) {
            let comp: Arc<dyn Completion> = CompQueue::new(1).as_completion().clone();
            let mut queue = Queue::of(comp.clone());
            let (mut model, mut fetched) = (VecDeque::new(), Vec::<(Rank, Arc<Fetch>)>::new());
            for (number, (step, rank)) in (0..).zip(steps) {
                let from = Rank(rank);
                if step < 2 {
                    let rts = Rts { size: 1, tx: number, addr: 0, mapped: None };
                    let what = Delivery::Rts { from, tag: Tag(number), rts };
                    queue.push(QueuedDelivery { comp: comp.clone(), what });
                    model.push_back((from, number));
                    continue;
                }
                if step == 2 {
                    // The fetch of this rank has ended.
                    fetched.retain(|(other, _)| *other != from);
                    continue;
                }
                let taken = queue.take();
                if let Some(QueuedDelivery { what: Delivery::Fetch(_, from), .. }) = taken {
                    prop_assert!(!fetched.iter().any(|(other, _)| *other == from));
                    continue;
                }
                let is_fetched = |rank| queue.fetches.iter().any(|fetch| fetch.rank() == rank);
                let expected = model.iter().position(|(rank, _)| !is_fetched(*rank));
                let expected = expected.and_then(|at| model.remove(at));
                let Some(QueuedDelivery { what: Delivery::Rts { from, rts, .. }, comp }) = taken
                else {
                    prop_assert_eq!(expected, None);
                    continue;
                };
                prop_assert_eq!(Some((from, rts.tx)), expected);
                let entry = |what| QueuedDelivery { comp: comp.clone(), what };
                if step == 3 {
                    let fetch = Arc::new(Fetch::default());
                    fetched.push((from, fetch.clone()));
                    queue.put_back(entry(Delivery::Fetch(fetch, from)));
                } else if rank == 0 {
                    // It could not be delivered.
                    queue.put_back(entry(Delivery::Rts { from, tag: Tag(rts.tx), rts }));
                    model.push_front((from, rts.tx));
                }
            }
            let counted: usize = queue.of_rank.values().sum();
            prop_assert_eq!((counted, queue.entries.len()), (model.len(), model.len()));
        }
    }
}
