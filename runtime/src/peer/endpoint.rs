//! A device as its peers see it: an address on each transport, the routes to the peers, and what
//! waits for them.

use super::address;
use super::backlog::{Parked, Stage};
use super::hold::{Deaf, Holds};
use super::pace::Pace;
use super::route::{Linked, Route};
use crate::chores::{Chore, Chores, Waiting};
use crate::comp::Completion;
use crate::error::{OpError, PostError, ResourceError};
use crate::local::Local;
use crate::names::{Rank, Tag};
use crate::op::{Ended, Ending, Holder, OnLinks, OpContext, PendingOp};
use crate::protocol::flow::{Hold, Room};
use crate::region::direct::Remotes;
use crate::undelivered::{About, Undelivered};
use carrack_transports::contract::{
    Batch, Caps, DownCause, Event, Header, Op, PeerId, Polled, Submit, Unavailable,
};
use carrack_transports::fork::Owner;
use carrack_transports::mem::{
    Buffer, HostAllocator, MemRef, PacketPool, PacketSource, PinnedAllocator, SmallBytes,
};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Time that the end of a device waits for peers that are copying from or to this process.
const PATIENCE: Duration = Duration::from_secs(1);

/// A device as its peers see it.
pub(crate) struct Endpoint {
    pub(crate) index: u32,
    /// Number of its runtime in this process.
    pub(crate) runtime: u64,
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
    /// The places of peers' regions, for this device's NIC.
    pub(crate) remotes: Remotes,
    /// Ranks that were told to hold.
    pub(crate) holds: Holds,
    pub(crate) deaf: Deaf,
    /// Deliveries that wait for their completion object.
    pub(crate) undelivered: Undelivered,
    /// The lists of the device that are not empty.
    pub(crate) chores: Chores,
    closed: AtomicBool,
    owner: Owner,
}

/// One transport's part of a device.
pub(crate) struct Lane {
    pub(crate) transport: &'static str,
    pub(crate) caps: Caps,
    pub(crate) device: Arc<dyn carrack_transports::contract::Device>,
    pub(crate) pace: Pace,
    news: Option<Arc<AtomicU32>>,
}

impl Lane {
    fn new(
        transport: &'static str,
        caps: Caps,
        device: Arc<dyn carrack_transports::contract::Device>,
    ) -> Self {
        let news = device.news();
        Self { transport, caps, device, pace: Pace::default(), news }
    }

    /// Returns `true` if this call of progress leaves the device alone.
    #[inline(always)]
    pub(crate) fn rests(&self) -> bool {
        match &self.news {
            Some(news) => news.load(Ordering::Acquire) == 0,
            None => self.caps.polls_kernel && self.pace.rests(),
        }
    }
}

impl Endpoint {
    /// Returns `true` if the transport of this name carries messages of this device.
    pub(crate) fn carries(&self, transport: &str) -> bool {
        self.lanes.iter().any(|lane| lane.transport == transport)
    }

    /// Opens a device on each transport, and publishes their addresses.
    ///
    /// # Errors
    /// No transport has one, the pool has no memory, or the addresses could not be published.
    pub(crate) fn open(
        local: &Local,
        index: u32,
        pool: Option<PacketPool>,
    ) -> Result<Self, ResourceError> {
        let settings = &local.settings;
        let host = || {
            PacketPool::new(Arc::new(HostAllocator), settings.packet_size(), settings.packets_max())
        };
        let pool = pool.unwrap_or_else(host);
        let host_pool = match pool.gpu() {
            None => pool.clone(),
            Some(gpu) => {
                // A bad allocator fails here, and not at the first message.
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
            local.domains.iter().filter(|(_, domain)| domain.carries_messages())
        {
            // Transports receive into host packets. Progress copies messages for packets on a GPU
            // there.
            match domain.device(Arc::new(host_pool.clone())) {
                Ok(device) => lanes.push(Lane::new(transport, domain.caps().clone(), device)),
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
        local
            .bootstrap
            .put(&address::key(local.rank.0, index), &address::encode(&addresses))
            .map_err(|error| ResourceError::Publish(error.to_string()))?;
        let chores = Chores::waking(&local.sleepers);
        Ok(Self {
            index,
            runtime: local.id,
            lanes: lanes.into(),
            refused: refused.into(),
            routes: (0..local.size).map(|_| OnceLock::new()).collect(),
            lands_on_host: pool.kind().is_host(),
            pool,
            host_pool,
            busy: Waiting::for_progress(&chores, Chore::Backlogs),
            outstanding: OnLinks::new(),
            remotes: Remotes::default(),
            holds: Holds::new(&chores),
            deaf: Deaf::new(settings.unexpected(), local.size),
            undelivered: Undelivered::new(&chores),
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
        match parked.goes_first() {
            true => backlog.push_front(parked),
            false => backlog.push_back(parked),
        }
        route.set_waiting(backlog.len());
        if backlog.len() == 1 {
            let mut busy = self.busy.lock();
            if !busy.contains(&route.rank) {
                busy.push(route.rank);
            }
            self.busy.set_count(busy.len());
            // The bit may be set for an absent peer: threads then sleep until that peer has
            // published its address.
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
            // The peer would take the message for the parent's.
            return;
        }
        if let Some(linked) = linked.filter(|_| route.is_open_to_replies()) {
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

    /// Returns `true` if work waits that no descriptor reports, other than backlogs, and deliveries
    /// for room in their completion objects.
    pub(crate) fn has_chores(&self) -> bool {
        // A rank told to hold is released by the thread that receives, which makes progress then.
        let chores = self.chores.there().but(Chore::Holds).but(Chore::Undelivered);
        chores.but(Chore::Backlogs).any()
    }

    /// Returns `true` if messages queue for a peer that has published its address.
    pub(crate) fn has_backlog(&self) -> bool {
        self.chores.there().has(Chore::Backlogs)
            && !self.busy_ranks().iter().all(|&rank| self.is_absent(rank))
    }

    /// Returns `true` if messages wait for a peer that has published no address.
    pub(crate) fn waits_for_absent(&self) -> bool {
        self.busy_ranks().iter().any(|&rank| self.is_absent(rank))
    }

    fn is_absent(&self, rank: Rank) -> bool {
        self.known_route(rank)
            .is_some_and(|route| route.linked().is_none() && route.down().is_none())
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

    /// Ends the operations of a backlog that `why` concerns.
    pub(crate) fn end_backlog(&self, route: &Route, why: &Ending<'_>, ended: &mut Vec<Ended>) {
        let mut backlog = route.backlog();
        let mut taken = Vec::new();
        for parked in std::mem::take(&mut *backlog) {
            match why {
                // It ends late when its engine has copied it.
                Ending::Late(_, left) if !parked.is_idle() => left.note(parked.op.deadline),
                _ if why.takes(&parked.op) => {
                    taken.push(parked);
                    continue;
                }
                _ => {}
            }
            backlog.push_back(parked);
        }
        route.set_waiting(backlog.len());
        if backlog.is_empty() {
            self.not_busy(route.rank);
        }
        drop(backlog);
        let error = why.error(route.rank);
        ended.extend(taken.into_iter().map(|parked| parked.into_status(Some(error.clone()))));
    }

    /// Leaves signals to progress, for callers that hold locks.
    pub(crate) fn tell_later(&self, ended: impl IntoIterator<Item = Ended>) {
        self.undelivered.tell_later(About::Operation, ended);
    }

    /// Leaves it to progress to end everything with a peer that has broken the protocol.
    #[cold]
    pub(crate) fn break_with(&self, rank: Rank, why: String) {
        if self.known_route(rank).is_none_or(|route| route.down().is_none()) {
            self.undelivered.note_broken(rank, DownCause::Protocol(why));
        }
    }

    /// Leaves it to progress to end everything with a gone rank, if this device has made no link to
    /// it. A link tells of the end by itself. The failure of one link to come up says nothing about
    /// others.
    #[cold]
    pub(crate) fn hear_of_gone(&self, rank: Rank, cause: &DownCause) {
        if matches!(cause, DownCause::Lacking(_) | DownCause::Refused(_)) {
            return;
        }
        let Some(route) = self.route(rank) else { return };
        if route.linked().is_none() && route.down().is_none() {
            self.undelivered.note_broken(rank, cause.clone());
        }
    }

    /// Returns `true` if a peer wants messages to be offered.
    #[inline]
    pub(crate) fn offers_all(&self, rank: Rank) -> bool {
        self.known_route(rank).is_some_and(|route| route.is_held())
    }

    /// Notes the hold that a peer tells this device.
    pub(crate) fn hold(&self, peer: Rank, hold: Hold, turn: u64) {
        if let Some(route) = self.route(peer) {
            route.hold(hold, turn);
            if hold.room == Room::OffersOnly {
                self.deaf.set_refused();
            }
        }
    }

    /// Lets nothing be posted any more.
    pub(crate) fn set_closed(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Closes the device of each transport, and ends the operations that links have.
    fn close(&self, ended: &mut Vec<Ended>) {
        self.set_closed();
        let mut end = |op: OpContext, buffer| ended.push(op.end(buffer, Some(OpError::Closed)));
        let mut batch = Batch::new(64);
        for lane in &self.lanes {
            lane.device.close();
            // The buffers of the links' operations come back.
            while lane.device.poll(&mut batch, &mut |_: &mut Batch| {}) == Polled::Some {
                for event in batch.drain() {
                    if let Event::Completion { token, buffer, .. } = event
                        && let Some(on_link) = self.outstanding.take(token.0)
                    {
                        end(on_link.op, buffer);
                    }
                }
            }
        }
        self.await_copies();
        self.outstanding.drain().into_iter().for_each(|left| end(left.op, Buffer::Empty));
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

    /// Returns the rank of a peer in an event: transports return the numbers that the runtime gave
    /// them.
    pub(crate) fn rank_of(&self, peer: PeerId) -> Rank {
        Rank(peer.0)
    }
}

/// The operations in backlogs, and those that links have, which end by their transport's event.
impl Holder for Endpoint {
    fn end(&self, why: &Ending<'_>, ended: &mut Vec<Ended>) {
        let ranks = match *why {
            Ending::Down(rank, _) => vec![rank],
            Ending::Late(..) | Ending::Closing => self.busy_ranks(),
            Ending::Gone(rank, cause) => return self.hear_of_gone(rank, cause),
            Ending::Closed => return,
        };
        for route in ranks.into_iter().filter_map(|rank| self.known_route(rank)) {
            self.end_backlog(route, why, ended);
        }
        if matches!(why, Ending::Closing) {
            self.close(ended);
        }
    }

    fn list(&self, list: &mut dyn FnMut(PendingOp)) {
        for route in self.busy_ranks().into_iter().filter_map(|rank| self.known_route(rank)) {
            let link = route.waits_for(self.index);
            route.backlog().iter().for_each(|parked| list(parked.pending(link.as_deref())));
        }
        for _ in 0..self.outstanding.len() {
            list(PendingOp {
                what: "message that a link holds",
                rank: Rank::ANY,
                tag: Tag::ANY,
                size: 0,
                waits_for: "the link".into(),
            });
        }
    }

    fn count(&self) -> usize {
        self.busy.count() as usize + self.outstanding.len()
    }
}
