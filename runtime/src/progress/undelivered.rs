//! Deliveries that wait for their completion object.
//!
//! A completion object without room refuses a status. The status then waits here, in a queue of that
//! object's. Whatever comes later for the same object waits behind it, in order; deliveries for other
//! objects pass. An active message for which no packet is left waits in the same way.
//!
//! What waits is charged to the budget of unexpected messages (`CARRACK_UNEXPECTED`). Beyond
//! it, senders are told to hold (`peer::hold`): their messages then come as offers, which wait here
//! without their bytes and are fetched one at a time when their turn has come.

use super::line::Lined;
use super::signal::{SignalError, signal};
use super::{Pass, arrival};
use crate::bulk::wire::{Offer, Verdict};
use crate::comp::{Completion, Status, Statuses};
use crate::device::DeviceInner;
use crate::error::{OpError, ProgressError};
use crate::names::{Rank, Tag};
use crate::peer::hold::Kept;
use crate::runtime::Inner;
use carrack_transports::contract::{DownCause, Payload};
use carrack_transports::mem::{AllocError, Buffer, PacketSource};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

/// Entries of a queue that are looked at for one that can be tried.
const LOOKS: usize = 256;

/// What a device could not deliver so far.
#[derive(Default)]
pub(crate) struct Undelivered {
    queues: Vec<Queue>,
    /// Peers that have broken the protocol, and whose operations progress has to end.
    broken: Vec<(Rank, DownCause)>,
}

/// What waits for one completion object, oldest first.
struct Queue {
    comp: Arc<dyn Completion>,
    entries: VecDeque<Entry>,
    /// A thread is delivering what was the first entry, without the lock: others leave the queue alone.
    is_out: bool,
    /// Reasons that the user was told of. They are told once for as long as the queue is not empty.
    told: Told,
}

#[derive(Default)]
struct Told {
    full: bool,
    no_packet: bool,
}

/// A delivery that waits.
enum Entry {
    /// The end of an operation, or what a peer has sent; and what it is charged with.
    Status(Status, Option<Kept>),
    /// An active message that still needs a packet.
    Message { from: Rank, tag: Tag, payload: Payload, kept: Kept },
    /// The offer of an active message. Its bytes are with the sender.
    Offer { from: Rank, tag: Tag, offer: Offer },
    /// An offered message that is being fetched.
    Fetch(Arc<Fetch>, Rank),
}

/// Stands for a completion object while an offered message is fetched for it, and keeps its status.
#[derive(Default)]
struct Fetch(Mutex<Option<Status>>);

impl Fetch {
    fn take(&self) -> Option<Status> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Completion for Fetch {
    fn signal(&self, status: Status) -> Result<(), Status> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
        Ok(())
    }

    fn describe(&self) -> String {
        "a message that is fetched".into()
    }
}

/// The place that a delivery takes in its queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// The last.
    Back,
    /// In front of messages that still need a packet: it has one, which they may be waiting for. In the line
    /// it was in front of them, too.
    BeforeUnplaced,
}

/// Why a delivery has to wait.
enum Refusal {
    /// The completion object has no room.
    Full,
    /// No packet is left, or there is no memory for one.
    Packet(Option<AllocError>),
    /// It is under way, on an engine or on a link.
    UnderWay,
}

impl Entry {
    /// Returns `true` if it can be tried.
    fn is_ready(&self) -> bool {
        match self {
            // Nobody but this entry has it any more: it has its status, or the sender has gone.
            Self::Fetch(fetch, _) => Arc::strong_count(fetch) == 1,
            Self::Status(..) | Self::Message { .. } | Self::Offer { .. } => true,
        }
    }

    /// What it is charged with.
    fn kept(&self) -> Option<Kept> {
        match self {
            Self::Status(_, kept) => *kept,
            Self::Message { kept, .. } => Some(*kept),
            Self::Offer { .. } | Self::Fetch(..) => None,
        }
    }

    /// The rank that has sent it, or that the operation was with.
    fn rank(&self) -> Rank {
        match self {
            Self::Status(status, _) => status.rank,
            Self::Message { from, .. } | Self::Offer { from, .. } | Self::Fetch(_, from) => *from,
        }
    }
}

impl Queue {
    /// Returns `true` if nobody can make room any more.
    fn is_orphaned(&self) -> bool {
        !self.is_out && self.comp.as_queue().is_some_and(Statuses::is_abandoned)
    }
}

impl Undelivered {
    /// Deliveries that wait.
    pub(crate) fn len(&self) -> usize {
        self.queues.iter().map(|queue| queue.entries.len() + usize::from(queue.is_out)).sum()
    }

    /// Notes a peer that has broken the protocol, if it is news.
    pub(crate) fn note_broken(&mut self, rank: Rank, why: String) {
        if !self.broken.iter().any(|(known, _)| *known == rank) {
            self.broken.push((rank, DownCause::Protocol(why)));
        }
    }

    /// Lists that are not empty, as progress has to know of them.
    fn count(&self) -> usize {
        self.queues.len() + self.broken.len()
    }

    fn queue(&mut self, comp: &Arc<dyn Completion>) -> Option<&mut Queue> {
        self.queues.iter_mut().find(|queue| Arc::ptr_eq(&queue.comp, comp))
    }

    fn queue_or_new(&mut self, comp: &Arc<dyn Completion>) -> &mut Queue {
        let at = self.queues.iter().position(|queue| Arc::ptr_eq(&queue.comp, comp));
        let at = at.unwrap_or_else(|| {
            let (comp, entries) = (comp.clone(), VecDeque::new());
            self.queues.push(Queue { comp, entries, is_out: false, told: Told::default() });
            self.queues.len() - 1
        });
        &mut self.queues[at]
    }

    /// Ends of operations that are still to be told, for a runtime that ends. What peers have sent goes
    /// with it.
    pub(crate) fn into_statuses(self) -> impl Iterator<Item = (Option<Arc<dyn Completion>>, Status)> {
        self.queues.into_iter().flat_map(|Queue { comp, entries, .. }| {
            entries.into_iter().filter_map(move |entry| match entry {
                Entry::Status(status, _) => Some((Some(comp.clone()), status)),
                Entry::Message { .. } | Entry::Offer { .. } | Entry::Fetch(..) => None,
            })
        })
    }
}

impl DeviceInner {
    /// Has progress tell completion objects, for callers that cannot: they hold locks.
    pub(crate) fn tell_later(&self, ended: impl IntoIterator<Item = (Option<Arc<dyn Completion>>, Status)>) {
        // What has no completion object is dropped without the lock: its buffer may run code of the user's.
        let told: Vec<_> = ended.into_iter().filter_map(|(comp, status)| Some((comp?, status))).collect();
        if told.is_empty() {
            return;
        }
        let mut undelivered = self.undelivered.lock();
        for (comp, status) in told {
            undelivered.queue_or_new(&comp).entries.push_back(Entry::Status(status, None));
        }
        self.undelivered.set_count(undelivered.count());
    }

    /// Has progress end what there is with a peer that has broken the protocol.
    #[cold]
    pub(crate) fn break_with(&self, rank: Rank, why: String) {
        if self.known_route(rank).is_some_and(|route| route.down().is_some()) {
            return;
        }
        let mut undelivered = self.undelivered.lock();
        undelivered.note_broken(rank, why);
        self.undelivered.set_count(undelivered.count());
    }

    /// Puts a delivery behind those that wait for the same object, if there are any; else gives it back.
    fn wait_behind(&self, comp: &Arc<dyn Completion>, entry: Entry) -> Result<(), Entry> {
        match self.undelivered.lock().queue(comp) {
            Some(queue) => {
                queue.entries.push_back(entry);
                Ok(())
            }
            None => Err(entry),
        }
    }

    /// Returns `true` if deliveries wait for this object.
    fn is_waited_for(&self, comp: &Arc<dyn Completion>) -> bool {
        !self.undelivered.is_empty() && self.undelivered.lock().queue(comp).is_some()
    }

    /// Takes out the next entry that can be tried, from the queue `at` on.
    fn take_undelivered(&self, at: &mut usize) -> Option<(Arc<dyn Completion>, Entry)> {
        let mut undelivered = self.undelivered.lock();
        loop {
            let queue = undelivered.queues.get_mut(*at)?;
            if !queue.is_out
                && let Some(entry) = queue.next().and_then(|at| queue.entries.remove(at))
            {
                queue.is_out = true;
                return Some((queue.comp.clone(), entry));
            }
            *at += 1;
        }
    }

    /// Ends a try. Returns the reason to complain of, with the number of deliveries that wait: the first
    /// time for as long as the queue is not empty.
    fn put_back(
        &self,
        comp: &Arc<dyn Completion>,
        back: Option<(Entry, Refusal)>,
    ) -> Option<(Refusal, usize)> {
        let mut undelivered = self.undelivered.lock();
        let at = undelivered.queues.iter().position(|queue| Arc::ptr_eq(&queue.comp, comp))?;
        let queue = &mut undelivered.queues[at];
        queue.is_out = false;
        let mut complaint = None;
        if let Some((entry, why)) = back {
            // What has got a packet meanwhile goes first: it may have the one that this message waits for.
            let at = if matches!(entry, Entry::Message { .. }) { queue.placed() } else { 0 };
            queue.entries.insert(at, entry);
            complaint = queue.complaint(why);
        } else if queue.entries.is_empty() {
            undelivered.queues.remove(at);
        }
        self.undelivered.set_count(undelivered.count());
        complaint
    }
}

impl Queue {
    /// The first entry that can be tried. A message that is fetched holds up those of its sender only.
    fn next(&self) -> Option<usize> {
        let mut held_up = Vec::new();
        for (at, entry) in self.entries.iter().take(LOOKS).enumerate() {
            if held_up.contains(&entry.rank()) {
                continue;
            }
            if entry.is_ready() {
                return Some(at);
            }
            held_up.push(entry.rank());
        }
        None
    }

    /// How many at the front need no packet, or have one.
    fn placed(&self) -> usize {
        let unplaced = self.entries.iter().position(|entry| !matches!(entry, Entry::Status(..)));
        unplaced.unwrap_or(self.entries.len())
    }

    fn complaint(&mut self, why: Refusal) -> Option<(Refusal, usize)> {
        let told = match why {
            Refusal::Full => &mut self.told.full,
            Refusal::Packet(_) => &mut self.told.no_packet,
            Refusal::UnderWay => return None,
        };
        (!std::mem::replace(told, true)).then_some((why, self.entries.len()))
    }
}

impl Pass<'_> {
    /// Tells a completion object of the end of an operation of this rank's.
    pub(crate) fn signal(&mut self, comp: Option<&Arc<dyn Completion>>, status: Status) {
        self.tell_or_keep(comp, status, false);
    }

    /// Tells a completion object of what a peer has sent.
    pub(crate) fn signal_arrival(&mut self, comp: &Arc<dyn Completion>, status: Status) {
        self.tell_or_keep(Some(comp), status, true);
    }

    #[inline]
    fn tell_or_keep(&mut self, comp: Option<&Arc<dyn Completion>>, status: Status, is_arrival: bool) {
        if let Some(OpError::PeerDown { rank, cause }) = status.error.as_deref()
            && let Some(route) = self.device.route(*rank)
        {
            route.tell_down(cause);
        }
        if let Some(comp) = comp
            && self.device.is_waited_for(comp)
        {
            return self.keep_status(comp, status, is_arrival, None);
        }
        match signal(comp, status) {
            Ok(()) => {}
            Err(SignalError::Full(comp, status)) => {
                self.keep_status(&comp, *status, is_arrival, Some(Refusal::Full));
            }
            Err(SignalError::Panicked(error)) => self.complain(error),
        }
    }

    /// Tells a completion object of a message that has left the line.
    pub(super) fn signal_in_line(&mut self, comp: Option<&Arc<dyn Completion>>, status: Status) {
        let (comp, status, why) = match comp {
            Some(comp) if self.device.is_waited_for(comp) => (comp.clone(), status, None),
            _ => match signal(comp, status) {
                Ok(()) => return,
                Err(SignalError::Full(comp, status)) => (comp, *status, Some(Refusal::Full)),
                Err(SignalError::Panicked(error)) => return self.complain(error),
            },
        };
        let entry = self.charged(status);
        self.add_undelivered(&comp, entry, why, Place::BeforeUnplaced);
    }

    /// Keeps a status that its completion object has refused.
    #[cold]
    pub(super) fn keep_refused(&mut self, comp: &Arc<dyn Completion>, status: Status, is_arrival: bool) {
        self.keep_status(comp, status, is_arrival, Some(Refusal::Full));
    }

    /// Keeps a status that was refused for the first time, or has to wait behind others.
    #[cold]
    fn keep_status(
        &mut self,
        comp: &Arc<dyn Completion>,
        status: Status,
        is_arrival: bool,
        why: Option<Refusal>,
    ) {
        let entry = if is_arrival {
            self.charged(status)
        } else {
            // The buffer is the user's. A peer may have caused it all the same, by a put that notifies.
            let kept = self.charge(status.rank, Kept::STATUS);
            Entry::Status(status, Some(kept))
        };
        let has_packet =
            matches!(&entry, Entry::Status(status, _) if matches!(status.buffer, Buffer::Packet(_)));
        let place = if has_packet { Place::BeforeUnplaced } else { Place::Back };
        self.add_undelivered(comp, entry, why, place);
    }

    fn add_undelivered(
        &mut self,
        comp: &Arc<dyn Completion>,
        entry: Entry,
        why: Option<Refusal>,
        place: Place,
    ) {
        let mut undelivered = self.device.undelivered.lock();
        let queue = undelivered.queue_or_new(comp);
        let at = if place == Place::Back { queue.entries.len() } else { queue.placed() };
        queue.entries.insert(at, entry);
        let complaint = why.and_then(|why| queue.complaint(why));
        self.device.undelivered.set_count(undelivered.count());
        drop(undelivered);
        self.complain_of(comp, complaint);
    }

    /// Charges what a peer has sent to the budget. Packets are few: where many wait in them, the bytes
    /// wait in memory of their own.
    fn charged(&self, status: Status) -> Entry {
        let Status { rank: from, tag, buffer, .. } = status;
        let payload = match buffer {
            Buffer::Packet(packet) if packet.kind().is_host() => Payload::Packet(packet),
            Buffer::Loan(loan) => Payload::Loan(loan),
            buffer => {
                let kept = self.charge(from, Kept::buffer(&buffer));
                return Entry::Status(Status { buffer, ..status }, Some(kept));
            }
        };
        match self.settle(payload) {
            Payload::Packet(packet) => {
                let kept = self.charge(from, Kept::packet(self.device.host_pool.packet_size()));
                let buffer = Buffer::Packet(packet);
                Entry::Status(Status { buffer, ..status }, Some(kept))
            }
            payload => self.charged_message(from, tag, payload),
        }
    }

    fn charged_message(&self, from: Rank, tag: Tag, payload: Payload) -> Entry {
        let kept = self.charge(from, self.inner.unexpected.kept(&payload));
        Entry::Message { from, tag, payload, kept }
    }

    fn charge(&self, from: Rank, kept: Kept) -> Kept {
        if self.inner.unexpected.charge_delivery(kept) {
            self.device.holds.add(from);
        }
        kept
    }

    /// An active message waits behind others for the same object. Gives it back if there are none.
    #[inline]
    pub(super) fn queue_am(
        &self,
        comp: &Arc<dyn Completion>,
        from: Rank,
        tag: Tag,
        payload: Payload,
    ) -> Result<(), Payload> {
        if !self.device.is_waited_for(comp) {
            return Err(payload);
        }
        let entry = self.charged_message(from, tag, self.settle(payload));
        match self.device.wait_behind(comp, entry) {
            Err(Entry::Message { payload, kept, .. }) => {
                self.inner.unexpected.release_delivery(kept);
                Err(payload)
            }
            _ => Ok(()),
        }
    }

    /// The offer of an active message waits behind others for the same object. Returns `false` if there
    /// are none; unless the message `is_held`, as it would have come whole otherwise: then it is the first.
    pub(crate) fn queue_offer(
        &mut self,
        comp: &Arc<dyn Completion>,
        (from, tag): (Rank, Tag),
        offer: Offer,
        is_held: bool,
    ) -> bool {
        if !is_held && !self.device.is_waited_for(comp) {
            return false;
        }
        if self.takes_offer(from) {
            self.inner.waiting_offers.add(from);
            self.add_undelivered(comp, Entry::Offer { from, tag, offer }, None, Place::Back);
        }
        true
    }

    /// Keeps an active message for which there is no packet.
    #[cold]
    pub(super) fn keep_am(
        &mut self,
        comp: &Arc<dyn Completion>,
        (from, tag): (Rank, Tag),
        payload: Payload,
        why: Option<AllocError>,
    ) {
        let why = self.no_packet(why);
        let entry = self.charged_message(from, tag, self.settle(payload));
        self.add_undelivered(comp, entry, Some(why), Place::Back);
    }

    /// Tries again what could not be delivered, until each object refuses.
    #[cold]
    pub(super) fn retry_undelivered(&mut self) {
        self.end_broken();
        let mut at = 0;
        while let Some((comp, entry)) = self.device.take_undelivered(&mut at) {
            let kept = entry.kept();
            let back = self.deliver_again(&comp, entry);
            match &back {
                None => {
                    self.moved = true;
                    if let Some(kept) = kept {
                        self.inner.unexpected.release_delivery(kept);
                    }
                }
                // One that was fetched at once, or whose sender has gone.
                Some((fetched @ Entry::Fetch(..), _)) if fetched.is_ready() => {}
                Some(_) => at += 1,
            }
            let complaint = self.device.put_back(&comp, back);
            self.complain_of(&comp, complaint);
        }
        self.drop_orphans();
    }

    /// Ends what there is with peers that have broken the protocol.
    fn end_broken(&mut self) {
        let mut undelivered = self.device.undelivered.lock();
        let broken = std::mem::take(&mut undelivered.broken);
        self.device.undelivered.set_count(undelivered.count());
        drop(undelivered);
        for (rank, cause) in broken {
            self.peer_down(rank, cause);
        }
    }

    /// Drops what waits for queues that their users have dropped.
    fn drop_orphans(&self) {
        let mut undelivered = self.device.undelivered.lock();
        let orphans: Vec<Queue> = undelivered.queues.extract_if(.., |queue| queue.is_orphaned()).collect();
        self.device.undelivered.set_count(undelivered.count());
        drop(undelivered);
        for entry in orphans.iter().flat_map(|queue| &queue.entries) {
            if let Some(kept) = entry.kept() {
                self.inner.unexpected.release_delivery(kept);
            }
            if let Entry::Offer { from, offer, .. } = entry {
                self.inner.waiting_offers.sub(*from);
                // As with one that was sent whole: the sender has done its part.
                self.finish(*from, offer.token, Verdict::Done);
            }
        }
    }

    /// Tries a delivery once more. Gives it back with the reason if it still has to wait.
    fn deliver_again(&mut self, comp: &Arc<dyn Completion>, entry: Entry) -> Option<(Entry, Refusal)> {
        let (status, kept) = match entry {
            Entry::Status(status, kept) => (status, kept),
            Entry::Message { from, tag, payload, kept } => match self.place_am(comp, (from, tag), payload) {
                Ok(Some(status)) => (status, Some(kept)),
                Ok(None) => return None,
                Err((payload, why)) => {
                    let why = self.no_packet(why);
                    return Some((Entry::Message { from, tag, payload, kept }, why));
                }
            },
            Entry::Offer { from, tag, offer } => {
                self.inner.waiting_offers.sub(from);
                let fetch = Arc::new(Fetch::default());
                let target: Arc<dyn Completion> = fetch.clone();
                self.fetch_am(comp, target, (from, tag), offer);
                return Some((Entry::Fetch(fetch, from), Refusal::UnderWay));
            }
            Entry::Fetch(fetch, _) => (fetch.take()?, None),
        };
        match signal(Some(comp), status) {
            Ok(()) => None,
            Err(SignalError::Full(_, status)) => Some((Entry::Status(*status, kept), Refusal::Full)),
            Err(SignalError::Panicked(error)) => {
                self.complain(error);
                None
            }
        }
    }

    /// Finds the place of an active message that waited for one. `Ok(None)`: it is in the line.
    #[allow(clippy::type_complexity, reason = "the message, and why it has to wait")]
    fn place_am(
        &mut self,
        comp: &Arc<dyn Completion>,
        (from, tag): (Rank, Tag),
        payload: Payload,
    ) -> Result<Option<Status>, (Payload, Option<AllocError>)> {
        if !self.device.lands_on_host {
            return match self.line_up((from, tag), comp, payload) {
                Lined::Up => Ok(None),
                Lined::There(status) => Ok(Some(status)),
                Lined::NoRoom(payload, why) => Err((payload, why)),
            };
        }
        let size = payload.len();
        let buffer = self.buffer_for(comp, payload).map_err(|payload| (payload, None))?;
        Ok(Some(arrival(from, tag, size, buffer)))
    }

    fn complain_of(&mut self, comp: &Arc<dyn Completion>, complaint: Option<(Refusal, usize)>) {
        let Some((why, waiting)) = complaint else { return };
        self.complain(match why {
            Refusal::Full => ProgressError::CompletionFull(comp.describe(), waiting),
            Refusal::Packet(Some(why)) => ProgressError::NoPacketMemory(Box::new(why), waiting),
            Refusal::Packet(None) => ProgressError::NoPacket(waiting),
            Refusal::UnderWay => return,
        });
    }

    /// Why an active message waits for a packet: engines may be at those that there are.
    fn no_packet(&self, why: Option<AllocError>) -> Refusal {
        if why.is_none() && !self.device.line.is_empty() {
            return Refusal::UnderWay;
        }
        let pools = [&self.device.pool, &self.device.host_pool];
        Refusal::Packet(why.or_else(|| pools.into_iter().find_map(|pool| pool.last_failure())))
    }
}

impl Inner {
    /// Tells a completion object outside of progress, in a call that posts. What has no room waits with
    /// the device; a panic is reported by the next call of progress.
    pub(crate) fn tell(&self, device: &DeviceInner, comp: Option<&Arc<dyn Completion>>, status: Status) {
        if let Err(error) = self.try_tell(device, comp, status) {
            self.complaints.keep(error);
        }
    }

    /// The same, for a call that can return the panic.
    pub(crate) fn try_tell(
        &self,
        device: &DeviceInner,
        comp: Option<&Arc<dyn Completion>>,
        status: Status,
    ) -> Result<(), ProgressError> {
        if let Some(comp) = comp
            && device.is_waited_for(comp)
        {
            device.tell_later([(Some(comp.clone()), status)]);
            return Ok(());
        }
        match signal(comp, status) {
            Ok(()) => Ok(()),
            Err(SignalError::Full(comp, status)) => {
                device.tell_later([(Some(comp), *status)]);
                Ok(())
            }
            Err(SignalError::Panicked(error)) => Err(error),
        }
    }
}
