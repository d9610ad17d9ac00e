//! Devices: resources that a thread can have for itself.

use super::Transfers;
use super::carrier::Carrier;
use super::in_flight::OfDevice;
use super::landing::Landings;
use super::ordered::Ordered;
use super::reorder::ReorderQueue;
use crate::comp::Completion;
use crate::error::{OpError, ResourceError};
use crate::local::Local;
use crate::names::{Rank, RemoteComp, Tag};
use crate::op::{Holder, Losses, OpContext};
use crate::peer::Endpoint;
use crate::protocol::wire::Control;
use crate::region::direct::Withdraws;
use carrack_transports::contract::Header;
use carrack_transports::mem::{Buffer, Packet, PacketPool, SmallBytes};
use std::ops::Deref;
use std::sync::Arc;

/// The name that stands for no completion object.
pub(crate) const NO_COMP: RemoteComp = RemoteComp(0);

/// A set of resources: an address on each transport, links to peers, packets. Threads with a device
/// each do not contend. Clones are handles to the same device, which lives as long as its runtime,
/// whether handles are left or not.
///
/// The devices of a job are numbered in the order in which they are made. Those of one number talk
/// to each other, so all ranks must make them alike.
#[derive(Clone)]
pub struct Device(pub(crate) Arc<Port>);

/// A device: the endpoint of its peers' routes, and the bytes that are on their way.
pub(crate) struct Port {
    /// Messages and operations on memory that take several steps.
    pub(crate) transfers: Transfers,
    /// Copies that engines are at.
    pub(crate) landings: Landings,
    /// Active messages on their way into the pool, where that is memory of a GPU.
    pub(crate) reorder_queue: ReorderQueue,
    /// Operations that wait for events and streams of the user.
    pub(crate) ordered: Ordered,
    /// Operations on peers' memory that were lost with their peer.
    pub(crate) losses: Arc<Losses>,
    endpoint: Endpoint,
}

impl Deref for Port {
    type Target = Endpoint;

    #[inline(always)]
    fn deref(&self) -> &Endpoint {
        &self.endpoint
    }
}

impl Device {
    /// Returns its number, the same on all ranks.
    pub fn index(&self) -> u32 {
        self.0.index
    }

    /// Returns the pool that active messages land in.
    pub fn packet_pool(&self) -> &PacketPool {
        &self.0.pool
    }

    /// Returns a packet of host memory of `len` bytes, to fill in place and post. The status
    /// returns it for another use. `None` if none is left, or if packets are shorter.
    pub fn take_packet(&self, len: usize) -> Option<Packet> {
        self.0.host_pool.take_with_len(len)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let lanes: Vec<_> = self.0.lanes.iter().map(|lane| lane.transport).collect();
        write!(f, "Device(#{}, {})", self.0.index, lanes.join("+"))
    }
}

impl Withdraws for Port {
    fn withdraw(&self, user: Rank, region: u64) {
        // The user was answered, so there is a route.
        let Some(route) = self.known_route(user) else { return };
        let (header, payload) = Control::Withdraw { region }.encode();
        self.send_control(route, route.linked(), header, payload, || None);
    }
}

impl Port {
    /// Opens a device on each transport, and publishes their addresses.
    ///
    /// # Errors
    /// See [`Endpoint::open`].
    pub(crate) fn open(
        local: &Local,
        index: u32,
        pool: Option<PacketPool>,
    ) -> Result<Self, ResourceError> {
        let endpoint = Endpoint::open(local, index, pool)?;
        let (chores, losses) = (&endpoint.chores, Arc::<Losses>::default());
        Ok(Self {
            transfers: Transfers::new(local.settings.offers(), chores),
            landings: Landings::new(chores),
            reorder_queue: ReorderQueue::new(chores),
            ordered: Ordered::new(chores, losses.clone()),
            losses,
            endpoint,
        })
    }

    /// Sends a control message: now, or from the backlog as soon as there is room. It is never
    /// refused. The operations that such messages answer bound their number.
    pub(crate) fn control(&self, carrier: &Carrier, to: Rank, control: Control) {
        let (header, payload) = control.encode();
        self.send_or_later(carrier, to, header, payload, || None);
    }

    /// Sends one of the runtime's own messages, as `control` does. If it has to wait, the
    /// completion object from `late` is signalled when it is sent, or when its peer is down.
    pub(crate) fn send_or_later(
        &self,
        carrier: &Carrier,
        to: Rank,
        header: Header,
        payload: SmallBytes,
        late: impl FnOnce() -> Option<Arc<dyn Completion>>,
    ) {
        let Some(route) = self.route(to) else { return };
        if let Some(cause) = route.down() {
            if let Some(comp) = late() {
                let error = OpError::PeerDown { rank: to, cause: cause.clone() };
                let op = OpContext::of_runtime(to, Tag::default(), 0, Some(comp));
                self.tell_later([op.end(Buffer::Empty, Some(error))]);
            }
            return;
        }
        let linked = match route.linked() {
            Some(linked) => Some(linked),
            None => route.link(carrier, self).ok().flatten(),
        };
        self.send_control(route, linked, header, payload, late);
    }

    /// Returns `true` if an operation on a peer's memory is in flight that began before `name`.
    pub(crate) fn has_memory_operations(&self, peer: Rank, before: u64) -> bool {
        self.transfers.has_memory_operations(peer, before)
            || self.outstanding.has_on_memory(peer, before)
            || self.landings.has_memory_operations(peer, before)
    }

    /// Shows `each` every place of this device where operations wait. An operation moves only to
    /// places further down, or its deadline is noted again: so a search for late ones misses none.
    pub(crate) fn each_holder(&self, carrier: &Carrier, each: &mut dyn FnMut(&dyn Holder)) {
        let transfers = OfDevice(carrier, self);
        // All fields: a further one is a holder, or says here that it is none.
        let Self { transfers: _, landings, reorder_queue, ordered, losses: _, endpoint } = self;
        let all: [&dyn Holder; 6] =
            [&endpoint.undelivered, ordered, endpoint, &transfers, landings, reorder_queue];
        all.into_iter().for_each(each);
    }

    /// Returns `true` if all messages and operations on memory have completed.
    pub(crate) fn is_drained(&self, carrier: &Carrier) -> bool {
        let mut is_drained = true;
        self.each_holder(carrier, &mut |holder| is_drained &= holder.count() == 0);
        is_drained
    }
}
