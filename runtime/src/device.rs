//! Devices: resources that a thread can have for itself.

use crate::chores::{Chore, Chores, Waiting};
use crate::comp::Completion;
use crate::datapath::Transfers;
use crate::error::{OpError, PostError, ResourceError};
use crate::names::{Rank, Tag};
use crate::op::{Ended, OnLinks, OpContext};
use crate::peer::address;
use crate::peer::backlog::{Parked, Stage};
use crate::peer::hold::{Deaf, Holds};
use crate::peer::route::{Linked, Route};
use crate::post::Ordered;
use crate::progress::{InLine, Landing, Undelivered};
use crate::region::direct::Remotes;
use crate::runtime::Inner;
use carrack_transports::contract::{
    Batch, Caps, DownCause, Event, Header, Op, PeerId, Polled, Submit, Unavailable,
};
use carrack_transports::fork::Owner;
use carrack_transports::mem::{
    Buffer, HostAllocator, MemRef, Packet, PacketPool, PacketSource, PinnedAllocator, SmallBytes,
};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Time that the end of a device waits for peers that are copying from or to this process.
const PATIENCE: Duration = Duration::from_secs(1);

/// A set of resources: an address on each transport, links to peers, packets. Threads that have a
/// device each do not meet. Clones are handles to the same device.
///
/// The devices of a job are numbered in the order in which they are made, and those of one number
/// talk to each other: all ranks must make them alike.
#[derive(Clone)]
pub struct Device(pub(crate) Arc<DeviceInner>);

pub(crate) struct DeviceInner {
    pub(crate) index: u32,
    pub(crate) lanes: Box<[Lane]>,
    /// Transports that this rank has opened, and that have no device.
    pub(crate) refused: Box<[Unavailable]>,
    routes: Box<[OnceLock<Arc<Route>>]>,
    /// The pool that active messages land in.
    pub(crate) pool: PacketPool,
    /// Set if `pool` is host memory, which every message asks.
    pub(crate) lands_on_host: bool,
    /// Host packets, for staging and for messages that wait. The same pool when that is host
    /// memory; else pinned memory, so that a copy's call need not wait for the copy.
    pub(crate) host_pool: PacketPool,
    /// Ranks whose backlog is not empty.
    busy: Waiting<Vec<Rank>>,
    /// Operations that links have.
    pub(crate) outstanding: OnLinks,
    /// Messages and operations on memory that take several steps.
    pub(crate) transfers: Transfers,
    /// The places of peers' regions, for this device's NIC.
    pub(crate) remotes: Remotes,
    /// Ranks that were told to hold.
    pub(crate) holds: Holds,
    pub(crate) deaf: Deaf,
    pub(crate) landing: Waiting<VecDeque<Landing>>,
    /// The landing to poll next after the oldest one.
    pub(crate) landing_turn: AtomicUsize,
    /// Active messages on their way into `pool`, where that is memory of a GPU.
    pub(crate) line: Waiting<VecDeque<InLine>>,
    /// Deliveries that wait for their completion object.
    pub(crate) undelivered: Waiting<Undelivered>,
    /// Operations that wait for events and streams of the user.
    pub(crate) ordered: Waiting<Ordered>,
    /// The lists above that are not empty.
    pub(crate) chores: Chores,
    closed: AtomicBool,
    owner: Owner,
}

/// One transport's part of a device.
pub(crate) struct Lane {
    pub(crate) transport: &'static str,
    pub(crate) caps: Caps,
    pub(crate) device: Arc<dyn carrack_transports::contract::Device>,
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

/// Makes a device: see [`Runtime::device`](crate::Runtime::device).
#[must_use = "a builder does nothing until `build` is called"]
pub struct DeviceBuilder<'a> {
    pub(crate) runtime: &'a Inner,
    pub(crate) pool: Option<PacketPool>,
}

impl DeviceBuilder<'_> {
    /// Sets the pool that active messages land in. The default is a pool of host memory of the
    /// device's own.
    ///
    /// On a GPU its engine copies them, and they are delivered in order of arrival. Messages too
    /// long for a packet are delivered when all of their bytes are there, in memory of the pool's
    /// allocator as well.
    pub fn packet_pool(mut self, pool: &PacketPool) -> Self {
        self.pool = Some(pool.clone());
        self
    }

    /// Makes it, and publishes its address.
    ///
    /// # Errors
    /// [`ResourceError::Packets`]: the pool's allocator has no memory on its GPU, or breaks its
    /// promise.
    pub fn build(self) -> Result<Device, ResourceError> {
        // One after the other, since each is published under its number. Without the lock of the
        // list, which progress takes: allocators and bootstraps may run any code.
        let _making = self.runtime.making_devices.lock();
        let index = u32::try_from(self.runtime.devices().len()).unwrap_or(u32::MAX);
        let device = Device(Arc::new(DeviceInner::open(self.runtime, index, self.pool)?));
        self.runtime.add_device(device.clone());
        Ok(device)
    }
}

impl DeviceInner {
    /// Returns `true` if the transport of this name carries messages of this device.
    pub(crate) fn carries(&self, transport: &str) -> bool {
        self.lanes.iter().any(|lane| lane.transport == transport)
    }

    fn open(runtime: &Inner, index: u32, pool: Option<PacketPool>) -> Result<Self, ResourceError> {
        let settings = &runtime.settings;
        let host = || {
            PacketPool::new(Arc::new(HostAllocator), settings.packet_size(), settings.packets_max())
        };
        let pool = pool.unwrap_or_else(host);
        let host_pool = match pool.gpu() {
            None => pool.clone(),
            Some(gpu) => {
                // An allocator that is no good is found out now, and not by the first message.
                if let (None, Some(why)) = (pool.take(), pool.last_failure()) {
                    return Err(why.into());
                }
                let near = PinnedAllocator::near(gpu.clone());
                let pinned =
                    PacketPool::new(Arc::new(near), settings.packet_size(), settings.packets_max());
                match (pinned.take(), pinned.last_failure()) {
                    (None, why) => {
                        tracing::info!(
                            ?why,
                            "no pinned memory: engines copy to and from ordinary packets"
                        );
                        host()
                    }
                    (Some(_), _) => pinned,
                }
            }
        };
        let mut lanes = Vec::new();
        let mut refused = Vec::new();
        for (transport, domain) in
            runtime.domains.iter().filter(|(_, domain)| domain.carries_messages())
        {
            // Transports receive into host packets. Progress copies messages for packets on a GPU
            // there.
            match domain.device(Arc::new(host_pool.clone())) {
                Ok(device) => lanes.push(Lane { transport, caps: domain.caps().clone(), device }),
                Err(why) => {
                    tracing::warn!(%why, "the job goes on without it");
                    refused.push(why);
                }
            }
        }
        if lanes.is_empty() {
            return Err(ResourceError::Device(refused));
        }
        let addresses: Vec<_> =
            lanes.iter().map(|lane| (lane.transport, lane.device.address())).collect();
        runtime
            .bootstrap
            .put(&address::key(runtime.rank.0, index), &address::encode(&addresses))
            .map_err(|error| ResourceError::Publish(error.to_string()))?;
        let chores = Chores::waking(&runtime.sleepers);
        Ok(Self {
            index,
            lanes: lanes.into(),
            refused: refused.into(),
            routes: (0..runtime.size).map(|_| OnceLock::new()).collect(),
            lands_on_host: pool.kind().is_host(),
            pool,
            host_pool,
            busy: Waiting::for_progress(&chores, Chore::Backlogs),
            outstanding: OnLinks::new(),
            remotes: Remotes::default(),
            transfers: Transfers::new(settings.offers(), &chores),
            holds: Holds::new(&chores),
            deaf: Deaf::new(settings.unexpected(), runtime.size),
            landing: Waiting::for_progress(&chores, Chore::Landings),
            landing_turn: AtomicUsize::new(0),
            line: Waiting::for_progress(&chores, Chore::Line),
            undelivered: Waiting::for_progress(&chores, Chore::Undelivered),
            ordered: Waiting::for_progress(&chores, Chore::Ordered),
            chores,
            closed: AtomicBool::new(false),
            owner: Owner::this_process(),
        })
    }

    /// Returns the route to a rank of the job, made at its first use.
    #[inline]
    pub(crate) fn route(&self, rank: Rank) -> Option<&Arc<Route>> {
        self.routes.get(rank.0 as usize).map(|cell| cell.get_or_init(|| Arc::new(Route::new(rank))))
    }

    /// Returns the route to a rank, if it was used before.
    #[inline(always)]
    pub(crate) fn known_route(&self, rank: Rank) -> Option<&Arc<Route>> {
        self.routes.get(rank.0 as usize)?.get()
    }

    /// Returns `true` if nothing can be posted here any more, or not in this process.
    #[inline(always)]
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed) || !self.owner.is_here()
    }

    /// Returns the reason for `is_closed`.
    #[cold]
    pub(crate) fn why_closed(&self) -> PostError {
        if self.owner.is_here() { PostError::Closed } else { PostError::Forked }
    }

    /// Puts an operation at the end of its peer's backlog. Gives it back when the limit is reached.
    #[allow(
        clippy::result_large_err,
        reason = "the error is the operation that did not fit; not the hot path"
    )]
    pub(crate) fn park(&self, route: &Route, parked: Parked, limit: usize) -> Result<(), Parked> {
        let mut backlog = route.backlog();
        if backlog.len() >= limit {
            return Err(parked);
        }
        backlog.push_back(parked);
        route.set_waiting(backlog.len());
        if backlog.len() == 1 {
            let mut busy = self.busy.lock();
            if !busy.contains(&route.rank) {
                busy.push(route.rank);
            }
            self.busy.set_count(busy.len());
            // The bit may be set for a peer that is absent: threads then sleep until that one
            // comes.
            self.chores.wake();
        }
        Ok(())
    }

    /// Sends one of the runtime's own messages: now, or from the backlog as soon as there is room.
    /// In the latter case it then signals the object of `late`.
    pub(crate) fn send_control(
        &self,
        route: &Route,
        linked: Option<&Linked>,
        header: Header,
        payload: SmallBytes,
        late: impl FnOnce() -> Option<Arc<dyn Completion>>,
    ) {
        if !self.owner.is_here() {
            // It would be taken for the parent's.
            return;
        }
        if let Some(linked) = linked.filter(|_| route.is_open()) {
            let op = Op::AmCopied { header, bytes: MemRef::host(payload.as_slice()) };
            if let Ok(Submit::Done | Submit::Posted) = linked.link.submit(op) {
                return;
            }
        }
        let parked = Parked {
            header,
            op: OpContext::of_runtime(route.rank, Tag::default(), payload.as_slice().len(), late()),
            required: None,
            stage: Stage::Ready(Buffer::Small(payload)),
        };
        // Without a limit, so never refused.
        let _ = self.park(route, parked, usize::MAX);
    }

    /// Returns `true` if work waits that no descriptor reports, other than deliveries for room in
    /// their completion objects.
    pub(crate) fn has_chores(&self) -> bool {
        // A rank told to hold is released by the thread that receives, which makes progress then.
        let chores = self.chores.there().but(Chore::Holds).but(Chore::Undelivered);
        chores.but(Chore::Backlogs).any()
            || chores.has(Chore::Backlogs)
                && !self.busy_ranks().iter().all(|&rank| self.is_absent(rank))
    }

    /// Returns `true` if messages wait for a peer that has published no address.
    pub(crate) fn waits_for_absent(&self) -> bool {
        self.has_backlogs() && self.busy_ranks().iter().any(|&rank| self.is_absent(rank))
    }

    fn is_absent(&self, rank: Rank) -> bool {
        self.known_route(rank)
            .is_some_and(|route| route.linked().is_none() && route.down().is_none())
    }

    /// Returns `true` if a backlog is not empty.
    #[inline]
    pub(crate) fn has_backlogs(&self) -> bool {
        !self.busy.is_empty()
    }

    /// Returns the ranks whose backlog is not empty.
    pub(crate) fn busy_ranks(&self) -> Vec<Rank> {
        self.busy.lock().clone()
    }

    /// Notes that a backlog is empty. The caller holds its lock.
    pub(crate) fn not_busy(&self, rank: Rank) {
        let mut busy = self.busy.lock();
        busy.retain(|&other| other != rank);
        self.busy.set_count(busy.len());
    }

    /// Fails everything that waits for a gone peer.
    pub(crate) fn fail_backlog(&self, route: &Route, cause: &DownCause) -> Vec<Ended> {
        let mut backlog = route.backlog();
        let failed: Vec<_> = backlog.drain(..).collect();
        route.set_waiting(0);
        self.not_busy(route.rank);
        drop(backlog);
        let failed = failed.into_iter().map(|parked| {
            let rank = parked.op.rank;
            parked.into_status(Some(OpError::PeerDown { rank, cause: cause.clone() }))
        });
        failed.collect()
    }

    /// Ends everything. Waiting operations fail.
    pub(crate) fn close(&self) -> Vec<Ended> {
        if self.closed.swap(true, Ordering::AcqRel) {
            return Vec::new();
        }
        let mut ended = Vec::new();
        for route in self.routes.iter().filter_map(OnceLock::get) {
            let parked: Vec<_> = route.backlog().drain(..).collect();
            ended
                .extend(parked.into_iter().map(|parked| parked.into_status(Some(OpError::Closed))));
        }
        let mut batch = Batch::new(64);
        for lane in &self.lanes {
            lane.device.close();
            // The buffers of the links' operations come back.
            while lane.device.poll(&mut batch, &mut |_| {}) == Polled::Some {
                for event in batch.drain() {
                    if let Event::Completion { token, buffer, .. } = event
                        && let Some(on_link) = self.outstanding.take(token.0)
                    {
                        ended.push(on_link.op.end(buffer, Some(OpError::Closed)));
                    }
                }
            }
        }
        self.await_copies();
        ended
    }

    /// Ends the right of a peer's process to copy from and to this one. Returns `true` if no such
    /// copy is in progress.
    pub(crate) fn is_revoked(&self, peer: Rank) -> bool {
        self.lanes.iter().all(|lane| lane.device.revoke(PeerId(peer.0)))
    }

    /// Ends the right of all peers to copy, and waits for copies in progress for a limited time.
    /// Each is a system call of a fraction of a millisecond, unless the peer is stopped in it.
    fn await_copies(&self) {
        let until = Instant::now() + PATIENCE;
        for route in self.routes.iter().filter_map(OnceLock::get) {
            while !self.is_revoked(route.rank) && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Returns the rank of a peer in an event: transports return the numbers that they were given.
    pub(crate) fn rank_of(&self, peer: PeerId) -> Rank {
        Rank(peer.0)
    }
}
