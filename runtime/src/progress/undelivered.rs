//! Signals completion objects, and retries deliveries that wait for them.

use super::signal::{SignalError, signal, signal_message};
use super::{Core, Pass};
use crate::comp::{Completion, Status};
use crate::datapath::{Port, Reordered, arrival};
use crate::error::{OpError, ProgressError};
use crate::names::{Rank, Tag};
use crate::protocol::wire::{Rts, TransferVerdict};
use crate::undelivered::{About, Delivery, Fetch, Kept, Obstacle, Queue, QueuedDelivery};
use carrack_transports::contract::Payload;
use carrack_transports::mem::{AllocError, Buffer, PacketSource};
use std::sync::Arc;

impl Pass<'_> {
    /// Tells a completion object of the end of an operation of this rank's.
    pub(crate) fn signal(&mut self, comp: Option<&Arc<dyn Completion>>, status: Status) {
        self.tell_or_keep(comp, status, About::Operation);
    }

    /// Tells a completion object of the end of a receive, or of another operation that a peer has
    /// ended.
    pub(crate) fn signal_received(&mut self, comp: Option<&Arc<dyn Completion>>, status: Status) {
        self.tell_or_keep(comp, status, About::Received);
    }

    /// Signals a completion object for a message of a peer, except for an active message that came
    /// whole.
    pub(crate) fn signal_arrival(&mut self, comp: &Arc<dyn Completion>, status: Status) {
        self.tell_or_keep(Some(comp), status, About::Arrival);
    }

    /// Tells a completion object of an active message that came whole.
    #[inline]
    pub(super) fn signal_am(&mut self, comp: &Arc<dyn Completion>, status: Status) {
        self.tell_or_keep(Some(comp), status, About::Whole);
    }

    #[inline(always)]
    fn tell_or_keep(&mut self, comp: Option<&Arc<dyn Completion>>, status: Status, about: About) {
        if let Some(error) = &status.error {
            self.note_end_of_peer(error);
        }
        if let Some(comp) = comp
            && self.device.undelivered.is_waited_for(comp)
        {
            return self.keep_behind(comp, status, about);
        }
        match signal_about(about, comp, status) {
            Ok(()) => {}
            Err(SignalError::Full(comp, status)) => self.keep_refused(&comp, *status, about),
            Err(SignalError::Panicked(error)) => self.complain(error),
        }
    }

    #[cold]
    fn note_end_of_peer(&self, error: &OpError) {
        if let OpError::PeerDown { rank, cause } = error
            && let Some(route) = self.device.route(*rank)
        {
            route.tell_down(cause);
        }
    }

    /// Keeps a status behind those that wait for the same object.
    #[cold]
    fn keep_behind(&mut self, comp: &Arc<dyn Completion>, status: Status, about: About) {
        let what = self.charged(status, about);
        self.add_undelivered(QueuedDelivery { comp: comp.clone(), what }, None);
    }

    /// Tells a completion object of a message that has left the reorder queue, where it was in
    /// front of those that still need a packet.
    pub(super) fn signal_reordered(&mut self, comp: Option<&Arc<dyn Completion>>, status: Status) {
        let (comp, status, why) = match comp {
            Some(comp) if self.device.undelivered.is_waited_for(comp) => {
                (comp.clone(), status, None)
            }
            _ => match signal_message(comp, status) {
                Ok(()) => return,
                Err(SignalError::Full(comp, status)) => (comp, *status, Some(Obstacle::Full)),
                Err(SignalError::Panicked(error)) => return self.complain(error),
            },
        };
        let what = self.charged(status, About::Arrival);
        self.add_with(QueuedDelivery { comp, what }, why, Queue::insert_placed);
    }

    /// Keeps a status that its completion object has refused.
    #[cold]
    pub(super) fn keep_refused(
        &mut self,
        comp: &Arc<dyn Completion>,
        status: Status,
        about: About,
    ) {
        let what = self.charged(status, about);
        self.add_undelivered(QueuedDelivery { comp: comp.clone(), what }, Some(Obstacle::Full));
    }

    #[cold]
    fn add_undelivered(&mut self, entry: QueuedDelivery, why: Option<Obstacle>) {
        self.add_with(entry, why, Queue::push);
    }

    fn add_with(
        &mut self,
        entry: QueuedDelivery,
        why: Option<Obstacle>,
        add: impl FnOnce(&mut Queue, QueuedDelivery),
    ) {
        let comp = entry.comp.clone();
        let complaint = self.device.undelivered.add(entry, why, add);
        self.complain_of(&comp, complaint);
    }

    /// Charges a status to the budget of unexpected messages. Packets are few: if many messages
    /// wait in them, the bytes of one that came whole move to memory of their own.
    fn charged(&self, status: Status, about: About) -> Delivery {
        let Status { rank: from, tag, buffer, .. } = status;
        let payload = match (about, buffer) {
            (About::Whole, Buffer::Packet(packet)) => Payload::Packet(packet),
            (About::Whole, Buffer::Loan(loan)) => Payload::Loan(loan),
            (About::Whole | About::Arrival, buffer) => {
                let kept = self.charge(from, Kept::buffer(&buffer));
                return Delivery::Status(Status { buffer, ..status }, Some(kept), about);
            }
            (About::Operation | About::Received, buffer) => {
                // The buffer is the user's, but a peer may have caused the status by a put that
                // notifies.
                let kept = self.charge(from, Kept::STATUS);
                return Delivery::Status(Status { buffer, ..status }, Some(kept), about);
            }
        };
        match self.settle(payload) {
            Payload::Packet(packet) => {
                let kept = self.charge(from, Kept::packet(self.device.host_pool.packet_size()));
                let buffer = Buffer::Packet(packet);
                Delivery::Status(Status { buffer, ..status }, Some(kept), about)
            }
            payload => self.charged_message(from, tag, payload),
        }
    }

    fn charged_message(&self, from: Rank, tag: Tag, payload: Payload) -> Delivery {
        let kept = self.charge(from, self.inner.unexpected.kept(&payload));
        Delivery::Message { from, tag, payload, kept }
    }

    fn charge(&self, from: Rank, kept: Kept) -> Kept {
        if self.inner.unexpected.charge_delivery(kept) {
            self.device.holds.add(from);
        }
        kept
    }

    /// Queues an active message behind others for the same object. Gives it back if there are
    /// none.
    #[inline]
    pub(super) fn queue_am(
        &self,
        comp: &Arc<dyn Completion>,
        from: Rank,
        tag: Tag,
        payload: Payload,
    ) -> Result<(), Payload> {
        if !self.device.undelivered.is_waited_for(comp) {
            return Err(payload);
        }
        let what = self.charged_message(from, tag, self.settle(payload));
        match self.device.undelivered.wait_behind(QueuedDelivery { comp: comp.clone(), what }) {
            Err(QueuedDelivery { what: Delivery::Message { payload, kept, .. }, .. }) => {
                self.inner.unexpected.release_delivery(kept);
                Err(payload)
            }
            _ => Ok(()),
        }
    }

    /// Queues the offer of an active message behind others for the same object. Returns `false` if
    /// there are none. A message that `is_held` would otherwise have come whole: it then becomes
    /// the first.
    pub(crate) fn queue_offer(
        &mut self,
        comp: &Arc<dyn Completion>,
        (from, tag): (Rank, Tag),
        rts: Rts,
        is_held: bool,
    ) -> bool {
        if !is_held && !self.device.undelivered.is_waited_for(comp) {
            return false;
        }
        let what = Delivery::Rts { from, tag, rts };
        self.add_undelivered(QueuedDelivery { comp: comp.clone(), what }, None);
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
        let what = self.charged_message(from, tag, self.settle(payload));
        self.add_undelivered(QueuedDelivery { comp: comp.clone(), what }, Some(why));
    }

    /// Retries the deliveries, until each object refuses.
    #[cold]
    pub(super) fn retry_undelivered(&mut self) {
        self.end_broken();
        let mut at = 0;
        while let Some(entry) = self.device.undelivered.take_next(&mut at) {
            let (comp, kept) = (entry.comp.clone(), entry.kept());
            let back = self.deliver_again(entry);
            match &back {
                None => {
                    self.moved = true;
                    if let Some(kept) = kept {
                        self.inner.unexpected.release_delivery(kept);
                    }
                }
                // Deliveries of other senders continue.
                Some((QueuedDelivery { what: Delivery::Fetch(..), .. }, _)) => {}
                Some(_) => at += 1,
            }
            let complaint = self.device.undelivered.put_back(&comp, back);
            self.complain_of(&comp, complaint);
        }
        self.drop_orphans();
    }

    /// Ends everything with peers that have broken the protocol, or are gone.
    fn end_broken(&mut self) {
        for (rank, cause) in self.device.undelivered.take_broken() {
            self.peer_down(rank, cause);
        }
    }

    /// Drops the deliveries for queues that their users have dropped.
    fn drop_orphans(&self) {
        let orphans = self.device.undelivered.take_orphans();
        for entry in orphans.iter().flat_map(Queue::all) {
            if let Some(kept) = entry.kept() {
                self.inner.unexpected.release_delivery(kept);
            }
            if let Delivery::Rts { from, rts, .. } = &entry.what {
                // The sender has done its part, as with a message that was sent whole.
                self.send_fin(*from, rts.tx, TransferVerdict::Done);
            }
        }
    }

    /// Tries a delivery once more. Gives it back with the reason if it still has to wait.
    fn deliver_again(&mut self, entry: QueuedDelivery) -> Option<(QueuedDelivery, Obstacle)> {
        let QueuedDelivery { comp, what } = entry;
        let (status, kept, about) = match what {
            Delivery::Status(status, kept, about) => (status, kept, about),
            Delivery::Message { from, tag, payload, kept } => {
                match self.place_am(&comp, (from, tag), payload) {
                    Ok(Some(status)) => (status, Some(kept), About::Arrival),
                    Ok(None) => return None,
                    Err((payload, why)) => {
                        let why = self.no_packet(why);
                        return Some((
                            QueuedDelivery {
                                comp,
                                what: Delivery::Message { from, tag, payload, kept },
                            },
                            why,
                        ));
                    }
                }
            }
            // The entries of the reorder queue came before it.
            Delivery::Rts { .. } if self.device.reorder_queue.has_for(&comp) => {
                return Some((QueuedDelivery { comp, what }, Obstacle::InFlight));
            }
            Delivery::Rts { from, tag, rts } => {
                let fetch = Arc::new(Fetch::default());
                let target: Arc<dyn Completion> = fetch.clone();
                self.fetch_am(&comp, target, (from, tag), rts);
                return Some((
                    QueuedDelivery { comp, what: Delivery::Fetch(fetch, from) },
                    Obstacle::InFlight,
                ));
            }
            Delivery::Fetch(fetch, _) => (fetch.take()?, None, About::Arrival),
        };
        match signal_about(about, Some(&comp), status) {
            Ok(()) => None,
            Err(SignalError::Full(_, status)) => Some((
                QueuedDelivery { comp, what: Delivery::Status(*status, kept, about) },
                Obstacle::Full,
            )),
            Err(SignalError::Panicked(error)) => {
                self.complain(error);
                None
            }
        }
    }

    /// Finds the place of an active message that waited for one. `Ok(None)`: it is in the reorder
    /// queue.
    #[allow(clippy::type_complexity, reason = "the message, and why it has to wait")]
    fn place_am(
        &mut self,
        comp: &Arc<dyn Completion>,
        (from, tag): (Rank, Tag),
        payload: Payload,
    ) -> Result<Option<Status>, (Payload, Option<AllocError>)> {
        if !self.device.lands_on_host {
            return match self.device.reorder((from, tag), comp, payload) {
                Reordered::Queued => Ok(None),
                Reordered::There(status) => Ok(Some(status)),
                Reordered::NoRoom(payload, why) => Err((payload, why)),
            };
        }
        let size = payload.len();
        let buffer = self.buffer_for(comp, payload).or_else(|payload| {
            match self.device.undelivered.spare_a_packet(&self.inner.unexpected) {
                true => self.buffer_for(comp, payload),
                false => Err(payload),
            }
        });
        Ok(Some(arrival(from, tag, size, buffer.map_err(|payload| (payload, None))?)))
    }

    fn complain_of(&mut self, comp: &Arc<dyn Completion>, complaint: Option<(Obstacle, usize)>) {
        let Some((why, waiting)) = complaint else { return };
        self.complain(match why {
            Obstacle::Full => ProgressError::CompletionFull(comp.describe(), waiting),
            Obstacle::Packet(Some(why)) => ProgressError::NoPacketMemory(Box::new(why), waiting),
            Obstacle::Packet(None) => ProgressError::NoPacket(waiting),
            Obstacle::InFlight => return,
        });
    }

    /// Returns the reason why an active message waits for a packet: engines may be using all
    /// packets.
    fn no_packet(&self, why: Option<AllocError>) -> Obstacle {
        if why.is_none() && !self.device.reorder_queue.is_empty() {
            return Obstacle::InFlight;
        }
        let pools = [&self.device.pool, &self.device.host_pool];
        Obstacle::Packet(why.or_else(|| pools.into_iter().find_map(|pool| pool.last_failure())))
    }
}

/// Gives a status to a completion object. A post of its code is a reply unless the status is that
/// of an operation.
#[inline(always)]
fn signal_about(
    about: About,
    comp: Option<&Arc<dyn Completion>>,
    status: Status,
) -> Result<(), SignalError> {
    match about {
        About::Operation => signal(comp, status),
        About::Received | About::Arrival | About::Whole => signal_message(comp, status),
    }
}

impl Core {
    /// Signals a completion object of a receive whose message was there, in the call that posts it.
    pub(crate) fn tell_received(
        &self,
        device: &Port,
        comp: Option<&Arc<dyn Completion>>,
        status: Status,
    ) {
        match comp.filter(|comp| comp.runs_user_code()).cloned() {
            Some(comp) => device.undelivered.tell_later(About::Received, [(Some(comp), status)]),
            None => self.tell(device, comp, status),
        }
    }

    /// Signals a completion object outside of progress, in a call that posts. A status waits with
    /// the device for progress if there is no room for it, or if its object may run code of the
    /// user's.
    pub(crate) fn tell(&self, device: &Port, comp: Option<&Arc<dyn Completion>>, status: Status) {
        if let Some(comp) = comp
            && comp.runs_user_code()
        {
            return device.tell_later([(Some(comp.clone()), status)]);
        }
        if let Err(error) = self.try_tell(device, comp, status) {
            self.complaints.keep(error);
        }
    }

    /// Signals as `tell`, for a call that can return the panic.
    pub(crate) fn try_tell(
        &self,
        device: &Port,
        comp: Option<&Arc<dyn Completion>>,
        status: Status,
    ) -> Result<(), ProgressError> {
        if let Some(comp) = comp
            && device.undelivered.is_waited_for(comp)
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
