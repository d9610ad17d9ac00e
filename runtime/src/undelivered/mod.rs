//! Deliveries that wait for their completion object.
//!
//! A completion object without room refuses a status. The status then waits here, in a queue of
//! that object's. Later deliveries for the same object wait behind it, in order; deliveries for
//! other objects pass. An active message for which no packet is left waits in the same way.
//!
//! Callers that hold locks, and modules below progress, leave their deliveries here, too, as well
//! as peers whose operations have to end. Progress tries all of them again.
//!
//! Waiting deliveries are charged to the budget of unexpected messages (`CARRACK_UNEXPECTED`).
//! Beyond it, senders are told to hold (`peer::hold`). Their messages then come as offers, which
//! wait here without their bytes and are fetched one at a time, in order.

mod budget;
mod entry;
mod queue;

pub(crate) use budget::{ENTRY, Kept, UnexpectedBudget};
pub(crate) use entry::{About, Delivery, Fetch, Obstacle, QueuedDelivery};
pub(crate) use queue::{Queue, object_of};

use crate::chores::{Chore, Chores, Waiting};
use crate::comp::Completion;
use crate::names::Rank;
use crate::op::{Ended, Ending, Holder, PendingOp};
use carrack_transports::contract::DownCause;
use std::sync::Arc;

/// The deliveries that a device could not make yet.
pub(crate) struct Undelivered(Waiting<Lists>);

#[derive(Default)]
struct Lists {
    queues: Vec<Queue>,
    /// Peers that have broken the protocol, or are gone where no link tells of it, each with the
    /// reason. Progress has to end their operations.
    broken: Vec<(Rank, DownCause)>,
}

impl Lists {
    /// Lists that are not empty, as progress has to know of them.
    fn count(&self) -> usize {
        self.queues.len() + self.broken.len()
    }

    fn queue(&mut self, comp: &Arc<dyn Completion>) -> Option<&mut Queue> {
        let object = object_of(comp);
        self.queues.iter_mut().find(|queue| Arc::ptr_eq(&queue.object, object))
    }

    fn queue_or_new(&mut self, comp: &Arc<dyn Completion>) -> &mut Queue {
        let object = object_of(comp);
        let at = self.queues.iter().position(|queue| Arc::ptr_eq(&queue.object, object));
        let at = at.unwrap_or_else(|| {
            self.queues.push(Queue::of(object.clone()));
            self.queues.len() - 1
        });
        &mut self.queues[at]
    }
}

impl Undelivered {
    pub(crate) fn new(chores: &Chores) -> Self {
        Self(Waiting::for_progress(chores, Chore::Undelivered))
    }

    /// Returns `true` if nothing waits: without the lock.
    #[inline(always)]
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the number of deliveries that wait.
    pub(crate) fn len(&self) -> usize {
        let waiting =
            |queue: &Queue| queue.entries.len() + queue.fetches.len() + usize::from(queue.is_out);
        self.0.lock().queues.iter().map(waiting).sum()
    }

    /// Returns `true` if a delivery waits for a message of a rank, or for an operation with it.
    pub(crate) fn has_from(&self, rank: Rank) -> bool {
        let concerns = |entry: &QueuedDelivery| entry.rank() == rank;
        !self.is_empty()
            && self.0.lock().queues.iter().any(|queue| queue.is_out || queue.all().any(concerns))
    }

    /// Leaves signals to progress, for callers that hold locks.
    pub(crate) fn tell_later(&self, about: About, ended: impl IntoIterator<Item = Ended>) {
        // A status without a completion object is dropped without the lock: its buffer may run
        // code of the user.
        let told: Vec<_> =
            ended.into_iter().filter_map(|(comp, status)| Some((comp?, status))).collect();
        if told.is_empty() {
            return;
        }
        let mut lists = self.0.lock();
        for (comp, status) in told {
            let what = Delivery::Status(status, None, about);
            lists.queue_or_new(&comp).push(QueuedDelivery { comp, what });
        }
        self.0.set_count(lists.count());
        self.0.wake();
    }

    /// Leaves it to progress to end everything with a peer that has broken the protocol, or is
    /// gone.
    #[cold]
    pub(crate) fn note_broken(&self, rank: Rank, cause: DownCause) {
        let mut lists = self.0.lock();
        if !lists.broken.iter().any(|(known, _)| *known == rank) {
            lists.broken.push((rank, cause));
        }
        self.0.set_count(lists.count());
        self.0.wake();
    }

    /// Takes the peers whose operations have to end.
    pub(crate) fn take_broken(&self) -> Vec<(Rank, DownCause)> {
        let mut lists = self.0.lock();
        let broken = std::mem::take(&mut lists.broken);
        self.0.set_count(lists.count());
        broken
    }

    /// Puts a delivery behind those that wait for the same object, if there are any; else gives it
    /// back.
    #[allow(
        clippy::result_large_err,
        reason = "the error is the entry that has not to wait; not the hot path"
    )]
    pub(crate) fn wait_behind(&self, entry: QueuedDelivery) -> Result<(), QueuedDelivery> {
        match self.0.lock().queue(&entry.comp) {
            Some(queue) => {
                queue.push(entry);
                Ok(())
            }
            None => Err(entry),
        }
    }

    /// Returns `true` if deliveries wait for this object.
    #[inline(always)]
    pub(crate) fn is_waited_for(&self, comp: &Arc<dyn Completion>) -> bool {
        !self.is_empty() && self.has_queue_of(comp)
    }

    #[cold]
    fn has_queue_of(&self, comp: &Arc<dyn Completion>) -> bool {
        self.0.lock().queue(comp).is_some()
    }

    /// Adds a delivery to its object's queue by `add`. Returns the reason to complain of, with the
    /// number of deliveries that wait.
    pub(crate) fn add(
        &self,
        entry: QueuedDelivery,
        why: Option<Obstacle>,
        add: impl FnOnce(&mut Queue, QueuedDelivery),
    ) -> Option<(Obstacle, usize)> {
        let comp = entry.comp.clone();
        let mut lists = self.0.lock();
        let queue = lists.queue_or_new(&comp);
        add(queue, entry);
        let complaint = why.and_then(|why| queue.complaint(why));
        self.0.set_count(lists.count());
        complaint
    }

    /// Takes out the next entry that can be tried, from the queue `at` on.
    pub(crate) fn take_next(&self, at: &mut usize) -> Option<QueuedDelivery> {
        let mut lists = self.0.lock();
        loop {
            let queue = lists.queues.get_mut(*at)?;
            if !queue.is_out
                && let Some(entry) = queue.take()
            {
                queue.is_out = true;
                return Some(entry);
            }
            *at += 1;
        }
    }

    /// Ends a try for one of an object's entries. Returns the reason to complain of, with the
    /// number of deliveries that wait.
    pub(crate) fn put_back(
        &self,
        comp: &Arc<dyn Completion>,
        back: Option<(QueuedDelivery, Obstacle)>,
    ) -> Option<(Obstacle, usize)> {
        let mut lists = self.0.lock();
        let object = object_of(comp);
        let at = lists.queues.iter().position(|queue| Arc::ptr_eq(&queue.object, object))?;
        let queue = &mut lists.queues[at];
        queue.is_out = false;
        let mut complaint = None;
        if let Some((entry, why)) = back {
            queue.put_back(entry);
            complaint = queue.complaint(why);
        } else if queue.is_empty() {
            lists.queues.remove(at);
        }
        self.0.set_count(lists.count());
        complaint
    }

    /// Takes out the queues of objects whose users have dropped them.
    pub(crate) fn take_orphans(&self) -> Vec<Queue> {
        let mut lists = self.0.lock();
        let orphans = lists.queues.extract_if(.., |queue| queue.is_orphaned()).collect();
        self.0.set_count(lists.count());
        orphans
    }

    /// Frees a packet in which a message waits, the last of its queue: its bytes wait in memory of
    /// their own. Returns `false` if there is none.
    pub(crate) fn spare_a_packet(&self, budget: &UnexpectedBudget) -> bool {
        let mut lists = self.0.lock();
        let mut entries = lists.queues.iter_mut().flat_map(|queue| queue.entries.iter_mut().rev());
        let Some((before, now)) = entries.find_map(|entry| entry.leave_packet(budget)) else {
            return false;
        };
        budget.release_delivery(before);
        // Its sender was told to hold when it came, if it had to be.
        budget.charge_delivery(now);
        true
    }
}

/// The statuses of operations that have ended, and messages of peers.
impl Holder for Undelivered {
    fn end(&self, why: &Ending<'_>, ended: &mut Vec<Ended>) {
        let (Ending::Closing | Ending::Closed) = why else { return };
        let entries = self.0.take().queues.into_iter().flat_map(|queue| queue.entries);
        ended.extend(entries.filter_map(|QueuedDelivery { comp, what }| match what {
            Delivery::Status(status, ..) => Some((Some(comp), status)),
            Delivery::Message { .. } | Delivery::Rts { .. } | Delivery::Fetch(..) => None,
        }));
    }

    /// Lists nothing: the runtime counts them.
    fn list(&self, _: &mut dyn FnMut(PendingOp)) {}

    fn count(&self) -> usize {
        self.0.count() as usize
    }
}
