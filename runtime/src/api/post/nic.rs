//! Puts and gets that a NIC carries out: the owner of the memory does nothing.

use super::options::{Outcome, Post, RetryReason};
use super::place::RmaPlace;
use super::rma::{Get, Put, own_or_take};
use crate::api::buffer::{Buffer, SendBuffer};
use crate::comp::Completion;
use crate::error::PostError;
use crate::names::RemoteComp;
use crate::op::{Continuation, OnLink};
use crate::peer::route::Linked;
use crate::protocol::rkey::is_within;
use crate::protocol::wire::Control;
use crate::region::direct::{Knowledge, RemoteRegion};
use carrack_transports::contract::{Link, Op, OpToken, RemotePlace, Submit, SubmitError};
use std::sync::Arc;

/// The result of giving an operation to the link.
pub(super) enum Given {
    InFlight,
    /// The link takes nothing more at the moment.
    Full(RetryReason),
    /// A NIC does not do that, and why.
    Refused(String),
}

impl<K> Post<'_, K> {
    /// Returns the link and the knowledge of the region, if a NIC could do it.
    fn nic(&self, place: &RmaPlace<'_>) -> Option<(&Linked, Arc<RemoteRegion>)> {
        let device = self.device_inner();
        let linked = device.known_route(self.desc.rank)?.linked()?;
        if !linked.caps.remote_memory || !linked.link.is_up() {
            return None;
        }
        Some((linked, self.known_of(place)))
    }

    /// Returns `true` if a NIC reaches the region, or may reach it.
    pub(super) fn goes_by_nic(&self, place: &RmaPlace<'_>) -> bool {
        self.nic(place).is_some_and(|(_, remote)| *remote.look() != Knowledge::Refused)
    }

    /// Returns the knowledge of the region. The first call asks its owner for the place.
    pub(super) fn known_of(&self, place: &RmaPlace<'_>) -> Arc<RemoteRegion> {
        let device = self.device_inner();
        let remote = place.rmr.direct(self.runtime.0.id, (device.index, &device.remotes));
        if *remote.look() == Knowledge::Nothing && remote.begin_to_ask() {
            let ask = Control::Where { region: place.rmr.number() };
            device.control(&self.runtime.0, self.desc.rank, ask);
        }
        remote
    }

    /// Returns the place of a part of the region. `None`: not known, or refused.
    pub(super) fn part_of(
        &self,
        known: Knowledge,
        place: &RmaPlace<'_>,
        len: u64,
    ) -> Result<Option<RemotePlace>, PostError> {
        let (at, room) = match known {
            Knowledge::Nothing | Knowledge::Asked | Knowledge::Refused => return Ok(None),
            Knowledge::Ended => return Err(PostError::Stale(self.desc.rank)),
            Knowledge::Place(at, room) => (at, room),
        };
        let offset = place.rmr.offset() + place.offset;
        if !is_within(offset, len, room) {
            return Err(PostError::Outside { offset, len, room });
        }
        Ok(Some(RemotePlace { addr: at.addr.wrapping_add(offset), key: at.key }))
    }

    /// Gives an operation to the link, and notes the owner's object to notify at its end.
    pub(super) fn give<'b>(
        &self,
        link: &dyn Link,
        (size, notify): (usize, Option<RemoteComp>),
        comp: Option<&Arc<dyn Completion>>,
        op: impl FnOnce(OpToken) -> Op<'b>,
    ) -> Result<Given, PostError> {
        let device = self.device_inner();
        let notify = notify.map(|comp| (comp, self.desc.tag));
        let next = Continuation::Memory { name: device.transfers.now(), notify };
        let on_link = OnLink { op: self.desc.context(size, comp.cloned()), next };
        let Ok(token) = device.outstanding.insert(on_link) else {
            return Ok(Given::Full(RetryReason::Unanswered));
        };
        let submitted = link.submit(op(OpToken(token)));
        if let Ok(Submit::Posted) = submitted {
            return Ok(Given::InFlight);
        }
        device.outstanding.take(token);
        match submitted {
            Ok(Submit::Busy(busy)) => Ok(Given::Full(RetryReason::of(busy))),
            Err(SubmitError::Unregistered(why)) => Ok(Given::Refused(why)),
            Ok(_) => Ok(Given::Refused("the link has no completion for it".into())),
            Err(SubmitError::Down { cause, .. }) => {
                if let Some(route) = device.known_route(self.desc.rank) {
                    route.tell_down(&cause);
                }
                Err(PostError::PeerDown { rank: self.desc.rank, cause })
            }
            Err(SubmitError::Lacking(why)) => Err(PostError::Lacking { rank: self.desc.rank, why }),
            Err(other) => {
                Err(PostError::Unreachable { rank: self.desc.rank, why: other.to_string() })
            }
        }
    }

    /// Returns the begun operation. `None`: it has to go through the memory's owner.
    fn begun(&self, given: Given) -> Option<Outcome> {
        match given {
            Given::InFlight => Some(Outcome::Posted),
            Given::Full(reason) if !self.desc.mode.submits() => Some(Outcome::Retry(reason)),
            Given::Full(_) | Given::Refused(_) => None,
        }
    }
}

impl Post<'_, Put<'_>> {
    /// Begins a put by the NIC. `None`: it has to go through the memory's owner.
    #[cold]
    pub(super) fn put_by_nic(
        &self,
        place: &RmaPlace<'_>,
        given: &mut Option<SendBuffer<'_>>,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Option<Outcome>, PostError> {
        let size = given.as_ref().map_or(0, SendBuffer::len);
        let Some((linked, remote)) = self.nic(place).filter(|_| size > 0) else { return Ok(None) };
        // Held until the link has the operation: no place is released while it is used.
        let known = remote.look();
        let Some(to) = self.part_of(*known, place, size as u64)? else { return Ok(None) };
        let (mut buffer, borrowed) = own_or_take(self.device_inner(), given);
        let slot = &mut buffer;
        let outcome = self.give(&*linked.link, (size, None), comp, move |token| Op::Put {
            to,
            buffer: slot,
            token,
        });
        drop(known);
        if !matches!(outcome, Ok(Given::InFlight)) {
            *given = Some(borrowed.map_or(SendBuffer::Owned(buffer), SendBuffer::Borrowed));
        }
        let given = outcome?;
        if matches!(given, Given::InFlight) {
            // On the same link, so behind the bytes.
            self.tell(self.device_inner(), place, size);
        }
        Ok(self.begun(given))
    }
}

impl Post<'_, Get<'_>> {
    /// Begins a get by the NIC. `None`: it has to go through the memory's owner.
    #[cold]
    pub(super) fn get_by_nic(
        &self,
        place: &RmaPlace<'_>,
        given: &mut Option<Buffer>,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Option<Outcome>, PostError> {
        let size = given.as_ref().map_or(0, Buffer::len);
        let Some((linked, remote)) = self.nic(place) else { return Ok(None) };
        let known = remote.look();
        let Some(from) = self.part_of(*known, place, size as u64)? else { return Ok(None) };
        let mut buffer = given.take().unwrap_or_default();
        let slot = &mut buffer;
        // The owner is notified after the bytes are here, and not by a message behind the request.
        // A NIC that missed the answer repeats the read, and gets the bytes of that later time.
        let outcome = self.give(&*linked.link, (size, place.notify), comp, move |token| Op::Get {
            from,
            buffer: slot,
            token,
        });
        drop(known);
        if !matches!(outcome, Ok(Given::InFlight)) {
            *given = Some(buffer);
        }
        Ok(self.begun(outcome?))
    }
}
