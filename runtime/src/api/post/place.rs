//! Places in other ranks' memory, and the checks of operations there.

use super::options::Post;
use crate::error::PostError;
use crate::names::{Rank, RemoteComp};
use crate::peer::route::Route;
use crate::progress::replies_to;
use crate::protocol::rkey::is_within;
use crate::protocol::rma::{Mover, mover};
use crate::region::{Region, RemoteKey};
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::MemKind;
use std::sync::Arc;

/// A place in another rank's memory, and the object to notify there.
#[derive(Clone, Copy)]
pub(super) struct RmaPlace<'a> {
    pub(super) rmr: &'a RemoteKey,
    pub(super) offset: u64,
    pub(super) notify: Option<RemoteComp>,
}

impl<K> Post<'_, K> {
    /// Returns the remote memory and the place in it, if it is mapped here for the engines of the
    /// GPU `near`. Else its owner has to help.
    pub(super) fn remote<'p>(
        &self,
        place: &RmaPlace<'p>,
        len: u64,
        near: Option<&Arc<dyn Gpu>>,
    ) -> Result<Option<(&'p Region, usize)>, PostError> {
        let (rank, rmr) = (self.desc.rank, place.rmr);
        let (at, route) = self.check_place(place, len)?;
        let (transport, imported, why) = match self.runtime.0.mapped(rmr, near) {
            Ok((transport, imported)) => (Some(*transport), Some(imported), ""),
            Err(why) => (route.linked().map(|linked| linked.transport), None, why),
        };
        if let Some(required) = self.desc.required
            && transport != Some(required)
            && (transport.is_some() || !self.device_inner().carries(required))
        {
            return Err(other_path(rank, transport, required, why));
        }
        let Some(imported) = imported else {
            return if rmr.is_of(self.runtime.0.job) {
                Ok(None)
            } else {
                Err(PostError::OtherJob(rank))
            };
        };
        let Some(region) = imported.region() else { return Err(PostError::Stale(rank)) };
        let room = region.len() as u64;
        if !is_within(at, len, room) {
            return Err(PostError::Outside { offset: at, len, room });
        }
        // It lies within a region of this address space.
        Ok(Some((region, usize::try_from(at).unwrap_or(usize::MAX))))
    }

    /// Checks that a part is inside its region, and that its owner can be reached. Returns the
    /// part's beginning and the route to the owner.
    pub(super) fn check_place(
        &self,
        place: &RmaPlace<'_>,
        len: u64,
    ) -> Result<(u64, &Arc<Route>), PostError> {
        self.check_rank()?;
        self.check_deadline()?;
        let (rank, rmr, offset) = (self.desc.rank, place.rmr, place.offset);
        if rmr.owner() != rank {
            return Err(PostError::Owner { rank, owner: rmr.owner() });
        }
        let Some(at) = rmr.at(offset, len) else {
            return Err(PostError::Outside { offset, len, room: rmr.len() });
        };
        Ok((at, self.check_reach()?))
    }

    /// Returns the route to the rank, to which there is a link or will be one.
    #[inline(always)]
    pub(super) fn check_reach(&self) -> Result<&Arc<Route>, PostError> {
        let (rank, device) = (self.desc.rank, self.device_inner());
        if device.is_closed() {
            return Err(device.why_closed());
        }
        // Only a link reports the end of the rank whose memory is used, so there has to be one.
        let Some(route) = device.route(rank) else {
            return Err(PostError::NoSuchRank { rank, last: self.runtime.0.size - 1 });
        };
        if route.linked().is_none() {
            self.make_link(route)?;
        }
        if let Some(cause) = route.down() {
            return Err(PostError::PeerDown { rank, cause: cause.clone() });
        }
        Ok(route)
    }

    /// Makes a link to the rank, or has progress look for the rank until there is one.
    #[cold]
    pub(super) fn make_link(&self, route: &Route) -> Result<(), PostError> {
        let device = self.device_inner();
        if route.link(&self.runtime.0, device)?.is_none() {
            self.runtime.0.look_out_for(device.index, self.desc.rank);
        }
        Ok(())
    }

    /// Checks the required path of an operation without a link of its own: the path to the rank.
    #[cold]
    pub(super) fn check_required(&self) -> Result<(), PostError> {
        self.check_rank()?;
        // A gone peer may have sent the awaited message before its end.
        match self.check_reach() {
            Ok(route) => self.check_transport(route),
            Err(PostError::PeerDown { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Checks that an operation through the memory's owner uses the required transport, if the
    /// transport is known.
    pub(super) fn check_transport(&self, route: &Route) -> Result<(), PostError> {
        match (self.desc.required, route.linked().map(|linked| linked.transport)) {
            (Some(required), Some(transport)) if required != transport => {
                Err(other_path(self.desc.rank, Some(transport), required, ""))
            }
            _ => Ok(()),
        }
    }

    /// Returns `true` if an operation between memory of `kind` and remote memory is a copy by the
    /// CPU at once.
    pub(super) fn ends_at_once(&self, place: &RmaPlace<'_>, kind: MemKind) -> bool {
        let imported = self.runtime.0.mapped(place.rmr, None).ok();
        let region = imported.and_then(|(_, imported)| imported.region());
        mover(region.map(Region::kind), kind) == Mover::Cpu
    }

    /// Returns `true` if an operation that notifies the owner has to be retried. The owner keeps
    /// too many notifications, or this rank has not listened for long.
    #[inline(always)]
    pub(super) fn waits_to_notify(&self, notify: Option<RemoteComp>) -> bool {
        let deaf = &self.device_inner().deaf;
        notify.is_some()
            && (deaf.has_to_listen() || deaf.was_refused())
            && self.has_to_wait_to_notify()
    }

    #[cold]
    fn has_to_wait_to_notify(&self) -> bool {
        // It goes, and waits at the owner.
        if self.desc.mode.submits() {
            return false;
        }
        let device = self.device_inner();
        let is_reply = || replies_to(self.runtime.0.id, self.desc.rank);
        let has_to_listen = device.deaf.has_to_listen();
        if has_to_listen {
            self.runtime.0.sleepers.wake();
        }
        has_to_listen
            || device.known_route(self.desc.rank).is_some_and(|route| {
                route.takes_no_notifications() || route.is_off() && !is_reply()
            })
    }
}

/// Returns the error for memory that is reached by another path than the required one.
#[cold]
fn other_path(
    rank: Rank,
    transport: Option<&'static str>,
    required: &'static str,
    unmapped: &str,
) -> PostError {
    let chosen = transport.unwrap_or("a link that is not up yet");
    let why = match unmapped {
        "" => format!("the memory is reached by {chosen}"),
        why => format!("the memory is not mapped here: {why}"),
    };
    PostError::Path { rank, chosen, required, why }
}
