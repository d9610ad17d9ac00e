//! The completion queue of a device, and its upkeep: calls, ends of connections, and the NIC's
//! events.

use super::address::{Fabric, Host, RdmaAddress, THIS_MACHINE, ip_of};
use super::bounces::Bounces;
use super::callers::Callers;
use super::closing::RdmaClosing;
use super::domain::DomainShared;
use super::entries::Entries;
use super::link::RdmaLink;
use super::partings::Partings;
use super::rails::{self, Rails, Ways};
use super::receives::Receives;
use super::signs::Signs;
use super::sys::bindings::ibv_wc;
use super::sys::{CompletionChannel, CompletionQueue, VerbsError};
use super::together::OpenedAggregate;
use super::transfers;
use crate::clock::ticks;
use crate::contract::{
    AddressBlob, Armed, Batch, Closing, Device, DownCause, Event, Link, Matcher, PeerId, Polled,
    Reach, SubmitError, Unavailable, close_all,
};
use crate::fork::Owner;
use crate::mem::PacketSource;
use crate::net::key::DeviceKey;
use crate::net::sockets;
use crate::sync::BiasedLock;
use crate::upkeep::Upkeep;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

const LISTENER: u64 = 0;
const COMPLETIONS: u64 = 1;
const ASYNC: u64 = 2;
const RAIL: u64 = 3;
pub(super) const CALL: u64 = 1 << 32;
pub(super) const PENDING: u64 = 2 << 32;

/// Completions that one poll of the queue takes.
pub(super) const AT_ONCE: usize = 16;

/// Staging buffers for copied messages that do not go inline.
const BOUNCES: usize = 32;

/// See the [module](self).
pub(super) struct RdmaDevice {
    address: RdmaAddress,
    me: Weak<Self>,
    shared: Arc<DomainShared>,
    epoll: OwnedFd,
    completions: Arc<CompletionChannel>,
    pub(super) polling: BiasedLock<RdmaPolling>,
    /// This rank's further NICs.
    pub(super) rails: Rails,
    /// Set if the next poll has upkeep to do.
    attention: AtomicBool,
    signs: Arc<Signs>,
    /// A forked child has its memory, but not its queue pairs.
    owner: Owner,
}

/// State that only the poller touches.
pub(super) struct RdmaPolling {
    pub(super) shared: Arc<DomainShared>,
    pub(super) key: DeviceKey,
    pub(super) entries: Entries,
    pub(super) callers: Callers,
    /// Connections whose peers are called again once this process has the resources, with the
    /// error of the last call.
    pub(super) undialled: Vec<(u32, String)>,
    pub(super) receives: Receives,
    pub(super) queue: Arc<CompletionQueue>,
    pub(super) bounces: Arc<Bounces>,
    /// Completions for which the queue has room, and those that may be outstanding.
    pub(super) reserved: u32,
    /// Signals from senders.
    pub(super) signs: Arc<Signs>,
    /// Events to report.
    pub(super) pending: VecDeque<Event>,
    /// Connections that owe their peers credits for messages taken in.
    pub(super) owing: Vec<u32>,
    /// Ends that are due when the completion queue is found empty.
    pub(super) partings: Partings,
    /// The reason why the device has failed.
    pub(super) broken: Option<String>,
    /// Space for completions that are polled.
    pub(super) space: Box<[ibv_wc; AT_ONCE]>,
    /// Connections with ended operations on memory that are not reported yet.
    pub(super) ending: Vec<u32>,
    /// Messages of one request that are not all reported yet.
    pub(super) opened: Option<OpenedAggregate>,
    /// Completions for which the batch had no room, or that were polled before sleeping, or for
    /// the cause of a queue pair's failure.
    pub(super) stash: VecDeque<ibv_wc>,
    pub(super) listener: Option<TcpListener>,
    pub(super) epoll: OwnedFd,
    upkeep: Upkeep,
    /// The time, in ticks, of the last requests to peers that return no credits.
    pub(super) asked_at: u64,
    /// Number of the domain's events that were handled.
    pub(super) heard: usize,
    pub(super) closing: Option<RdmaClosing>,
    pub(super) closed: bool,
}

impl RdmaDevice {
    pub(super) fn open(
        shared: Arc<DomainShared>,
        packets: Arc<dyn PacketSource>,
        rails: Vec<Arc<Self>>,
    ) -> Result<Arc<Self>, Unavailable> {
        let failed =
            |what: &str, why: String| Unavailable::new(shared.name, format!("{what}: {why}"));
        let verbs = |error: VerbsError| failed("its queues could not be made", error.to_string());
        let system = |error: std::io::Error| {
            let why = format!("{error}; raise the limit on open files (`ulimit -n`)");
            failed("its sockets could not be made", why)
        };
        let port = &shared.port;
        // Half of the packets at most: the runtime needs the other half.
        let half = u32::try_from(packets.limit() / 2).unwrap_or(u32::MAX);
        // Half of the completions at most: the other half is for sends.
        let most = port.most_receives.min(port.most_completions / 2);
        let depth = shared.options.receives.min(half).min(most).max(1);
        let completions = CompletionChannel::create(&shared.context).map_err(verbs)?;
        let room = (depth + 4 * shared.options.send_depth).min(port.most_completions).max(1);
        let queue =
            CompletionQueue::create(&shared.context, room, Some(&completions)).map_err(verbs)?;
        let bounces =
            Arc::new(Bounces::new(shared.protection.clone(), shared.options.packet_size, BOUNCES));
        let mut receives = Receives::new(&shared.protection, depth, packets).map_err(verbs)?;
        // Posted now, not with the first message, so that a NIC that cannot receive is known at
        // the start.
        receives.refill(|_| {});
        receives.post();
        if let Some(why) = receives.failed() {
            return Err(failed("nothing could be received", why));
        }
        let key = DeviceKey::fresh().map_err(|error| system(error.into()))?;
        let listener = match at(&shared) {
            Some(address) => sockets::listen(address, true),
            None => sockets::listen_everywhere(0, true),
        };
        let listener = listener.map_err(system)?;
        let tcp_port = listener.local_addr().map_err(system)?.port();
        let hosts = hosts(&shared);
        if hosts.is_empty() {
            return Err(failed(
                "no peer could call it",
                "this machine has no IP address but its own".into(),
            ));
        }
        let (fabric, gid) = (port.fabric, port.gid);
        let address = RdmaAddress { key, fabric, boot: shared.boot, gid, tcp_port, hosts };
        let set = epoll::create(CreateFlags::CLOEXEC).map_err(|error| system(error.into()))?;
        let watched = [
            (listener.as_fd(), LISTENER),
            (completions.fd(), COMPLETIONS),
            (shared.context.async_fd(), ASYNC),
        ];
        for (fd, name) in watched {
            epoll::add(&set, fd, EventData::new_u64(name), EventFlags::IN)
                .map_err(|error| system(error.into()))?;
        }
        let signs = Arc::new(Signs::new());
        for rail in &rails {
            epoll::add(&set, rail.epoll.as_fd(), EventData::new_u64(RAIL), EventFlags::IN)
                .map_err(|error| system(error.into()))?;
        }
        let polling = RdmaPolling {
            key,
            entries: Entries::default(),
            callers: Callers::of(shared.identity.ranks),
            undialled: Vec::new(),
            receives,
            queue,
            bounces,
            reserved: depth,
            signs: signs.clone(),
            opened: None,
            pending: VecDeque::new(),
            owing: Vec::new(),
            ending: Vec::new(),
            partings: Partings::default(),
            broken: None,
            space: Box::new([ibv_wc::default(); AT_ONCE]),
            stash: VecDeque::new(),
            listener: Some(listener),
            epoll: rustix::io::dup(&set).map_err(|error| system(error.into()))?,
            upkeep: Upkeep::default(),
            asked_at: ticks(),
            heard: 0,
            closing: None,
            closed: false,
            shared: shared.clone(),
        };
        Ok(Arc::new_cyclic(|me| Self {
            address,
            me: me.clone(),
            shared,
            epoll: set,
            completions,
            polling: BiasedLock::new(polling),
            rails: Rails::new(rails),
            attention: AtomicBool::new(true),
            signs,
            owner: Owner::this_process(),
        }))
    }

    /// Ends connections that lost their last link. If another thread polls, or this one is within
    /// a poll, the next poll does so.
    pub(super) fn link_has_gone(&self) {
        if !self.owner.is_here() {
            return;
        }
        self.attention.store(true, Ordering::Release);
        if let Some(mut polling) = self.polling.try_lock_at_once() {
            polling.end_unwanted();
        }
    }

    /// Runs the periodic upkeep. Not inlined: the instruction count of a message excludes it.
    #[cold]
    #[inline(never)]
    fn look_by_the_clock(&self, polling: &mut RdmaPolling, batch: &mut Batch) {
        self.look_after(polling);
        polling.tell(batch);
    }

    /// Handles the ready descriptors of the epoll set, and the requests of other threads.
    #[cold]
    pub(super) fn look_after(&self, polling: &mut RdmaPolling) {
        if polling.closed {
            return;
        }
        polling.end_unwanted();
        polling.post_receives();
        polling.dial_again();
        polling.ask_silent();
        let mut space = [const { MaybeUninit::uninit() }; 32];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((ready, _)) = epoll::wait(&self.epoll, &mut space[..], Some(&now)) else { return };
        for event in ready {
            let name = event.data.u64();
            let number = u32::try_from(name & 0xffff_ffff).unwrap_or(0);
            match name & !0xffff_ffff {
                CALL => polling.hear(number),
                PENDING => polling.hear_caller(number),
                _ if name == COMPLETIONS => self.woken(),
                _ if name == ASYNC => polling.hear_nic(),
                // All rails are polled below.
                _ if name == RAIL => {}
                _ => polling.accept(),
            }
        }
        // They may come from another device of this domain.
        polling.heed_nic();
        if !self.rails.devices().is_empty() {
            self.poll_rails(polling);
        }
    }

    /// Polls this rank's further NICs, and again at the next poll if chunks are in flight there.
    pub(super) fn poll_rails(&self, polling: &mut RdmaPolling) {
        self.rails.poll(polling);
        if self.rails.are_busy() {
            self.look_soon();
        }
    }

    pub(super) fn address_of(&self) -> &RdmaAddress {
        &self.address
    }

    /// Has the next poll look after the device, its rails included.
    pub(super) fn look_soon(&self) {
        self.attention.store(true, Ordering::Release);
    }

    /// Returns a link to a peer's device of that address.
    pub(super) fn link_to(&self, to: &AddressBlob, peer: PeerId) -> Result<RdmaLink, SubmitError> {
        let (to, further) = rails::split(to).ok_or(SubmitError::Address(to.0.len()))?;
        let mut polling = self.polling.lock();
        if polling.closed || polling.closing.is_some() {
            return Err(SubmitError::Down { peer, cause: DownCause::Closed });
        }
        let connection = polling.call(&to, peer)?;
        self.attention.store(true, Ordering::Release);
        let (device, shared) = (self.me.clone(), polling.shared.clone());
        let ways = Ways::to(further, &self.rails);
        Ok(RdmaLink { connection, device, shared, ways })
    }

    /// Takes the queue's events when no thread sleeps any more: one event wakes all sleepers. No
    /// thread goes to sleep meanwhile, as `arm` takes the lock.
    fn woken(&self) {
        if !self.signs.gathered.is_asleep() {
            self.completions.take_events();
        }
    }
}

/// Returns the address to listen at.
fn at(shared: &DomainShared) -> Option<SocketAddr> {
    let ip = match shared.port.fabric {
        Fabric::Simulated => THIS_MACHINE,
        Fabric::Ethernet if shared.is_routed => ip_of(shared.port.gid),
        Fabric::Ethernet | Fabric::InfiniBand => return None,
    };
    Some(Host::of(ip).at(0, shared.port.interface))
}

/// Returns the addresses that are published.
fn hosts(shared: &DomainShared) -> Vec<Host> {
    at(shared).map_or_else(Host::of_this_machine, |address| vec![Host::of(address.ip())])
}

impl RdmaPolling {
    /// Watches a descriptor: edge-triggered, since its input is always read to the end.
    pub(super) fn watch(&self, fd: BorrowedFd<'_>, name: u64) -> rustix::io::Result<()> {
        let changes = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&self.epoll, fd, EventData::new_u64(name), changes)
    }

    /// Takes completions off the queue, up to the room of the batch.
    #[inline]
    pub(super) fn poll(&mut self, batch: &mut Batch) {
        self.make_good();
        if self.signs.gathered.has_any() {
            self.send_off();
        }
        if self.opened.is_some() {
            self.take_out(batch);
        }
        while !batch.is_full()
            && let Some(completion) = self.stash.pop_front()
        {
            self.complete(&completion, batch);
        }
        let room = batch.room().min(AT_ONCE);
        if room > 0 && self.stash.is_empty() {
            match self.queue.poll(&mut self.space[..room]).map(<[_]>::len) {
                Ok(count) => {
                    for at in 0..count {
                        // Messages of one request may have filled the batch.
                        if batch.is_full() {
                            self.stash.extend(&self.space[at..count]);
                            break;
                        }
                        self.complete_at(at, batch);
                    }
                    let all_seen = self.stash.is_empty() && self.opened.is_none();
                    if count < room && !self.partings.is_empty() && all_seen {
                        self.part();
                    }
                }
                Err(error) => self.lose(&error.to_string()),
            }
        }
        if batch.is_empty() && self.receives.are_missed() {
            self.post_receives();
        }
        if !self.ending.is_empty() {
            self.end_transfers();
        }
        self.tell(batch);
    }

    /// Reposts receives and returns credits of messages taken in. It is left to the next poll: the
    /// messages, and the answers to them, are more urgent.
    #[inline(always)]
    fn make_good(&mut self) {
        if self.receives.is_hungry() {
            self.refill();
        }
        if self.receives.is_due() {
            self.post_receives();
        }
        if !self.owing.is_empty() {
            self.pay();
        }
    }

    #[inline(never)]
    fn post_receives(&mut self) {
        self.receives.post();
        if let Some(why) = self.receives.failed() {
            self.lose_everybody(&why);
        }
    }

    /// Sends the messages that wait for more.
    #[cold]
    fn send_off(&mut self) {
        for index in self.signs.gathered.take_up() {
            let Some(entry) = self.entries.get(index) else { continue };
            if !entry.connection.send_off() {
                // This is the poller, so no thread has to be woken.
                let _ = self.signs.gathered.put(index);
            }
        }
    }

    /// Reports operations on memory that have ended.
    #[cold]
    fn end_transfers(&mut self) {
        let Self { entries, pending, ending, .. } = self;
        ending.retain(|&index| {
            let Some(entry) = entries.get(index) else { return false };
            let Some(ended) = entry.connection.ended() else { return true };
            pending.extend(transfers::told(ended));
            false
        });
    }

    /// Moves pending events into the batch, as far as there is room.
    fn tell(&mut self, batch: &mut Batch) {
        while !batch.is_full()
            && let Some(event) = self.pending.pop_front()
        {
            batch.push(event);
        }
    }

    #[cold]
    fn refill(&mut self) {
        let Self { receives, entries, owing, .. } = self;
        receives.refill(|index| {
            if let Some(entry) = entries.get(index) {
                entry.take_in(owing);
            }
        });
        if let Some(why) = receives.failed() {
            self.lose_everybody(&why);
        }
    }

    /// Gives the device up: the completion queue cannot be read any more.
    #[cold]
    pub(super) fn lose(&mut self, why: &str) {
        self.lose_everybody(why);
        self.part();
    }

    /// Returns `true` if a poll would find something, as far as is known.
    fn has_something(&mut self) -> bool {
        if self.closing.is_some()
            || !self.pending.is_empty()
            || self.opened.is_some()
            || self.signs.gathered.has_any()
            || !self.owing.is_empty()
            || !self.ending.is_empty()
        {
            return true;
        }
        self.has_completion()
    }

    /// Returns `true` if a completion waits.
    pub(super) fn has_completion(&mut self) -> bool {
        if !self.stash.is_empty() {
            return true;
        }
        match self.queue.poll(&mut self.space[..]) {
            Ok(completions) => self.stash.extend(completions),
            Err(_) => return true,
        }
        !self.stash.is_empty()
    }
}

impl Device for RdmaDevice {
    fn address(&self) -> AddressBlob {
        let further = self.rails.devices().iter().map(|rail| rail.address.encode());
        rails::join(std::iter::once(self.address.encode()).chain(further).collect())
    }

    fn reach(&self, to: &AddressBlob) -> Reach {
        match rails::split(to) {
            Some((to, _)) => self.address.reach(&to),
            None => Reach::No("its address is not one of this transport's".into()),
        }
    }

    fn connect(&self, to: &AddressBlob, peer: PeerId) -> Result<Arc<dyn Link>, SubmitError> {
        self.link_to(to, peer).map(|link| -> Arc<dyn Link> { Arc::new(link) })
    }

    #[inline]
    fn poll(&self, batch: &mut Batch, matcher: &mut dyn Matcher) -> Polled {
        let Some(mut polling) = self.polling.try_lock() else { return Polled::Busy };
        let polling = &mut *polling;
        if self.attention.load(Ordering::Relaxed) && self.attention.swap(false, Ordering::Acquire) {
            if polling.closing.is_some() {
                // Some messages were dropped already, and none may come behind the gap.
                self.look_soon();
                return Polled::Busy;
            }
            self.look_after(polling);
        }
        polling.poll(batch);
        if polling.upkeep.is_due(batch.is_empty()) {
            self.look_by_the_clock(polling, batch);
        }
        if batch.is_empty() {
            return Polled::Idle;
        }
        matcher.match_all(batch);
        Polled::Some
    }

    fn shortage(&self) -> Option<String> {
        self.shared.shortage.describe()
    }

    fn arm(&self) -> Armed<'_> {
        let Some(mut polling) = self.polling.try_lock() else { return Armed::Ready };
        self.signs.gathered.sleep();
        self.attention.store(true, Ordering::Relaxed);
        let asked = polling.queue.request_notification();
        polling.make_good();
        // The peer may wait for receives that were not worth a doorbell.
        polling.receives.post();
        if asked.is_err() || polling.has_something() || !self.rails.arm() {
            self.signs.gathered.wake();
            return Armed::Ready;
        }
        Armed::Wait(self.epoll.as_fd())
    }

    fn disarm(&self, _is_told: bool) {
        self.signs.gathered.wake();
        self.rails.disarm();
        self.attention.store(true, Ordering::Release);
    }

    fn advance_close(&self) -> Closing {
        if self.owner.is_here() { self.advance_end() } else { Closing::Over }
    }

    fn close(&self) {
        close_all(&[self]);
    }
}

impl Drop for RdmaDevice {
    fn drop(&mut self) {
        self.close();
    }
}
