//! Atomic operations on words whose coherence owner is their rank's NIC. All ranks go through that
//! NIC, also the owner and ranks that have the memory mapped. A NIC's operations on a word are
//! atomic among its own only.

use super::atomic::{Atomic, AtomicOp};
use super::nic::Given;
use super::options::{Outcome, Post, RetryReason};
use super::order::Order;
use crate::comp::Completion;
use crate::error::PostError;
use crate::region::AtomicError;
use crate::region::direct::RemoteRegion;
use carrack_transports::contract::{Op, WordChange};
use carrack_transports::gpu::{EventState, GpuError, GpuEvent};
use std::sync::Arc;

impl Post<'_, Atomic<'_>> {
    /// Gives it to the link to the owner's NIC. It waits until the owner has sent the place of the
    /// word.
    #[cold]
    pub(super) fn begin_by_nic(
        &self,
        transport: &str,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        let Atomic { place, operation, has_waited } = &self.kind;
        let (_, route) = self.check_place(place, 8)?;
        if !place.rmr.is_of(self.runtime.0.job) {
            return Err(PostError::OtherJob(self.desc.rank));
        }
        self.check_path(transport)?;
        let device = self.device_inner();
        let remote = self.known_of(place);
        let rank = self.desc.rank;
        let unreachable = |why: String| {
            let why = format!("{why}; let the owner register the words with AtomicAgent::Owner");
            PostError::Unreachable { rank, why }
        };
        let without_link = |error| match error {
            // The rank itself may be up: the link of messages reports its end.
            PostError::PeerDown { cause, .. } if route.down().is_none() => {
                if *has_waited {
                    // It was accepted, and is lost with the link.
                    device.losses.note(rank, &cause);
                }
                unreachable(format!(
                    "the connection to the NIC that is the agent of its words ({transport}) has \
                    ended: {cause}"
                ))
            }
            error => error,
        };
        let link = route.link_to_words(&self.runtime.0, device, transport);
        let link = link.map_err(without_link)?;
        let Some(link) = link.filter(|_| remote.is_told()) else {
            return match has_waited {
                // The operation is already among those that wait.
                true => Ok(Outcome::Retry(RetryReason::Connecting)),
                false => {
                    self.wait_for(&Order::after(GpuEvent::new(Arc::new(PlaceEvent(remote)))), comp)
                }
            };
        };
        // Held until the link has the operation: no place is released while it is used.
        let known = remote.look();
        let Some(word) = self.part_of(*known, place, 8)? else {
            return Err(PostError::Stale(self.desc.rank));
        };
        if !word.addr.is_multiple_of(8) {
            let offset = usize::try_from(place.rmr.offset() + place.offset).unwrap_or(usize::MAX);
            return Err(PostError::Atomic(AtomicError::Unaligned { offset }));
        }
        let change = match *operation {
            AtomicOp::FetchAdd(value) => WordChange::Add(value),
            AtomicOp::CompareSwap { expected, new } => WordChange::Swap { expected, new },
        };
        let given = self.give(&*link, (8, None), comp, |token| Op::Atomic { word, change, token });
        drop(known);
        match given {
            Ok(Given::InFlight) => Ok(Outcome::Posted),
            Ok(Given::Full(reason)) if !self.desc.mode.submits() => Ok(Outcome::Retry(reason)),
            Ok(Given::Full(_)) => {
                self.wait_for(&Order::after(GpuEvent::new(Arc::new(PlaceEvent(remote)))), comp)
            }
            Ok(Given::Refused(why)) => Err(unreachable(why)),
            Err(error) => Err(without_link(error)),
        }
    }

    fn check_path(&self, transport: &str) -> Result<(), PostError> {
        match self.desc.required {
            Some(required) if required != transport => {
                let chosen = self
                    .runtime
                    .0
                    .domains
                    .iter()
                    .map(|(name, _)| *name)
                    .find(|name| *name == transport);
                let why = "the agent of the words is their owner's NIC".into();
                let chosen = chosen.unwrap_or("a transport that this rank does not have");
                Err(PostError::Path { rank: self.desc.rank, chosen, required, why })
            }
            _ => Ok(()),
        }
    }
}

/// Event that fires when the owner of a region has sent its place, or refused it.
struct PlaceEvent(Arc<RemoteRegion>);

impl EventState for PlaceEvent {
    fn query(&self) -> Result<bool, GpuError> {
        Ok(self.0.is_told())
    }

    fn wait(&self) -> Result<(), GpuError> {
        // Only progress waits for it, and it polls `query`.
        while !self.0.is_told() {
            std::thread::yield_now();
        }
        Ok(())
    }
}
