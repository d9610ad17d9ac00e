//! The receiving side, and the upkeep of both sides.
//!
//! A poll loads from shared memory. Events that need a system call (a peer that connects, answers,
//! or hangs up) wait in one epoll set. A poll reads it only after polls have come back empty for a
//! while, or rarely if they never do: see `Upkeep`.

use super::handshake::{ShmAddress, SocketNamespace};
use super::inbound::InboundLinks;
use super::link::{Dialled, SendingEnd, ShmLink};
use super::segment::{BellPage, Segment};
use super::{NAME, Shm};
use crate::contract::{
    AddressBlob, Armed, Batch, Cost, Device, DownCause, Event, Identity, Link, Matcher, PeerId,
    Polled, Reach, Splits, SubmitError, Unavailable,
};
use crate::fork::Owner;
use crate::mem::PacketSource;
use crate::net::packets::Listener;
use crate::net::shortage::{self, Shortage};
use crate::net::watched::Watched;
use crate::sync::BiasedLock;
use crate::sync::barrier::Barrier;
use crate::upkeep::Upkeep;
use parking_lot::{Mutex, MutexGuard};
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

const LISTENER: u64 = 0;
const WAKE: u64 = 1;
const INCOMING: u64 = 1 << 32;
const OUTGOING: u64 = 2 << 32;
const PENDING: u64 = 3 << 32;

/// State that links and the device share.
#[derive(Debug)]
pub(super) struct ShmShared {
    pub(super) identity: Identity,
    pub(super) barrier: Barrier,
    pub(super) page: BellPage,
    pub(super) page_fd: OwnedFd,
    /// A sender that finds this device asleep writes it.
    pub(super) wake: OwnedFd,
    /// Threads between `arm` and `disarm`.
    pub(super) sleepers: AtomicU32,
    pub(super) packets: Arc<dyn PacketSource>,
    epoll: Arc<OwnedFd>,
    outgoing: Mutex<Vec<Arc<SendingEnd>>>,
    /// Segments of the senders whose links lead here; kept while a sender may be copying from or
    /// to this process.
    incoming: Mutex<HashMap<PeerId, Arc<Segment>>>,
    /// Links that wait for their receiver's queue, or for a resource that is short.
    undialled: AtomicU32,
    pub(super) shortage: Shortage,
}

impl ShmShared {
    fn watch(&self, fd: BorrowedFd<'_>, key: u64) -> Result<(), Errno> {
        epoll::add(&self.epoll, fd, EventData::new_u64(key), EventFlags::IN | EventFlags::RDHUP)
    }

    pub(super) fn watch_incoming(&self, bell: u32, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        self.watch(fd, INCOMING | u64::from(bell))
    }

    pub(super) fn watch_pending(&self, place: u32, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        self.watch(fd, PENDING | u64::from(place))
    }

    /// Watches the socket of a pending connection as that of a link from now on.
    pub(super) fn watch_again(&self, bell: u32, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        let name = EventData::new_u64(INCOMING | u64::from(bell));
        epoll::modify(&self.epoll, fd, name, EventFlags::IN | EventFlags::RDHUP)
    }

    pub(super) fn watch_outgoing(&self, index: u32, fd: BorrowedFd<'_>) -> Result<(), Errno> {
        self.watch(fd, OUTGOING | u64::from(index))
    }

    /// Has a descriptor leave the epoll set before it is closed.
    pub(super) fn watched<T: AsFd>(&self, fd: T) -> Watched<T> {
        Watched::new(fd, &self.epoll)
    }

    /// Returns the segments of links that lead here.
    pub(super) fn incoming(&self) -> MutexGuard<'_, HashMap<PeerId, Arc<Segment>>> {
        self.incoming.lock()
    }

    /// Counts a link that waits for a resource that is short.
    pub(super) fn try_again(&self) {
        self.undialled.fetch_add(1, Ordering::Relaxed);
    }

    fn outgoing(&self) -> MutexGuard<'_, Vec<Arc<SendingEnd>>> {
        self.outgoing.lock()
    }
}

/// Returns `true` if the process behind a pidfd is dead.
pub(super) fn is_dead(process: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(&process, PollFlags::IN)];
    matches!(rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })), Ok(1..))
}

/// The rings that lead here, and the links that lead away.
#[derive(Debug)]
pub(super) struct ShmDevice {
    shared: Arc<ShmShared>,
    transport: Shm,
    address: ShmAddress,
    inbound: BiasedLock<ShmPolling>,
    /// A fork shares the page that peers look at, and the sockets on which they listen.
    owner: Owner,
    /// Set by `arm`: the next poll reads the epoll set at once.
    armed: AtomicBool,
    closed: AtomicBool,
}

#[derive(Debug)]
struct ShmPolling {
    inbound: InboundLinks,
    upkeep: Upkeep,
    listener: Option<Listener>,
}

impl ShmDevice {
    pub(super) fn open(
        transport: &Shm,
        identity: Identity,
        packets: Arc<dyn PacketSource>,
    ) -> Result<Arc<Self>, Unavailable> {
        let namespace = SocketNamespace::here().map_err(|reason| Unavailable::new(NAME, reason))?;
        let address = ShmAddress::fresh(namespace, &identity);
        let opened = || -> Result<Arc<Self>, Errno> {
            let (page, page_fd) = BellPage::create()?;
            let listener = Listener::bind(&address.name)?;
            let shared = Arc::new(ShmShared {
                identity,
                barrier: Barrier::between_processes(),
                page,
                page_fd,
                wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
                sleepers: AtomicU32::new(0),
                packets,
                epoll: Arc::new(epoll::create(CreateFlags::CLOEXEC)?),
                outgoing: Mutex::default(),
                incoming: Mutex::default(),
                undialled: AtomicU32::new(0),
                shortage: Shortage::default(),
            });
            shared.watch(listener.as_fd(), LISTENER)?;
            shared.watch(shared.wake.as_fd(), WAKE)?;
            let polling = ShmPolling {
                inbound: InboundLinks::of(shared.identity.ranks),
                upkeep: Upkeep::default(),
                listener: Some(listener),
            };
            Ok(Arc::new(Self {
                shared,
                transport: transport.clone(),
                address: address.clone(),
                inbound: BiasedLock::new(polling),
                owner: Owner::this_process(),
                armed: AtomicBool::new(false),
                closed: AtomicBool::new(false),
            }))
        };
        opened().map_err(|error| {
            Unavailable::new(
                NAME,
                format!(
                    "its sockets and memory could not be made: {error}; raise the limits on open \
                    files (`ulimit -n`) and memory"
                ),
            )
        })
    }

    /// Reads the epoll set.
    #[cold]
    fn look_after(&self, polling: &mut ShmPolling, batch: &mut Batch) {
        if self.closed.load(Ordering::Acquire) {
            return;
        }
        if self.shared.undialled.load(Ordering::Relaxed) > 0 {
            self.dial_again(polling, batch);
        }
        polling.inbound.welcome_again(&self.shared);
        let mut space = [const { std::mem::MaybeUninit::uninit() }; 32];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((ready, _)) = epoll::wait(&self.shared.epoll, &mut space[..], Some(&now)) else {
            return;
        };
        for event in ready {
            let key = event.data.u64();
            let number = (key & 0xffff_ffff) as u32;
            match key & !0xffff_ffff {
                INCOMING => polling.inbound.listen(number),
                PENDING => polling.inbound.hear_pending(&self.shared, number),
                OUTGOING => self.hear(polling, number, batch),
                _ if key == WAKE => self.slept(),
                _ => self.accept(polling),
            }
        }
    }

    fn accept(&self, polling: &mut ShmPolling) {
        let ShmPolling { inbound, listener: Some(listener), .. } = polling else { return };
        loop {
            let channel = match listener.accept() {
                Ok(Some(channel)) => channel,
                Ok(None) => return,
                // The caller waits in the queue, and is admitted when the resources are there.
                Err(error) => return self.shared.shortage.note(error),
            };
            if let Err(error) = inbound.admit(&self.shared, channel) {
                return self.shared.shortage.note(error);
            }
        }
    }

    fn hear(&self, polling: &mut ShmPolling, index: u32, batch: &mut Batch) {
        let link = self.shared.outgoing().get(index as usize).cloned();
        if let Some(link) = link {
            self.hear_link(polling, &link, batch);
        }
    }

    fn hear_link(&self, polling: &mut ShmPolling, link: &SendingEnd, batch: &mut Batch) {
        match link.listen(&self.shared) {
            None => {}
            Some(Ok(())) => {
                self.shared.shortage.end();
                batch.push(Event::Connected { peer: link.peer });
            }
            Some(Err(cause)) => self.ended(polling, link.peer, cause, batch),
        }
    }

    /// Ends a peer that has gone. Messages that it sent before still count, even if its hello has
    /// not been read yet: its end is reported when its rings are empty.
    fn ended(&self, polling: &mut ShmPolling, peer: PeerId, cause: DownCause, batch: &mut Batch) {
        self.accept(polling);
        if !polling.inbound.end(&self.shared, peer, &cause) {
            batch.push(Event::PeerDown { peer, cause });
        }
    }

    fn dial_again(&self, polling: &mut ShmPolling, batch: &mut Batch) {
        // Reset before the list is read: a link that another thread adds meanwhile counts for the
        // next time.
        self.shared.undialled.store(0, Ordering::SeqCst);
        let links = self.shared.outgoing().clone();
        for (index, link) in
            links.iter().enumerate().filter(|(_, link)| !link.is_up() && !link.is_down())
        {
            match link.dial(&self.shared, u32::try_from(index).unwrap_or(u32::MAX)) {
                // Its welcome may wait for a resource, too.
                Ok(Dialled::Yes) => self.hear_link(polling, link, batch),
                Ok(Dialled::Short(error)) => {
                    self.shared.shortage.note(error);
                    self.shared.try_again();
                }
                Err(cause) => {
                    link.close(&cause, false);
                    self.ended(polling, link.peer, cause, batch);
                }
            }
        }
    }

    /// Handles the eventfd that a sender has written. It is read when the last sleeper is awake. A
    /// sender writes it once for all of them, and writes nothing for a ring that this poll has
    /// warmed. No thread goes to sleep meanwhile, as `arm` takes the lock.
    fn slept(&self) {
        if self.shared.sleepers.load(Ordering::SeqCst) == 0 {
            let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
        }
    }
}

impl Device for ShmDevice {
    fn address(&self) -> AddressBlob {
        self.address.encode()
    }

    fn reach(&self, to: &AddressBlob) -> Reach {
        let Some(to) = ShmAddress::decode(to) else {
            return Reach::No("its address is not one of this transport's".into());
        };
        if to.namespace.boot != self.address.namespace.boot {
            return Reach::No("it is on another machine".into());
        }
        if to.namespace.net_namespace != self.address.namespace.net_namespace {
            return Reach::No(
                "it is in another network namespace, where this rank's sockets are \
                not seen: start both in one, or share the host's"
                    .into(),
            );
        }
        Reach::Yes(Cost { latency_ns: 150 })
    }

    fn connect(&self, to: &AddressBlob, peer: PeerId) -> Result<Arc<dyn Link>, SubmitError> {
        let address = ShmAddress::decode(to).ok_or(SubmitError::Address(to.0.len()))?;
        let outgoing = SendingEnd::new(peer, address, &self.transport).map_err(lacking)?;
        let outgoing = Arc::new(outgoing);
        // Locked: a thread that gets news of this link looks for it here.
        let mut links = self.shared.outgoing();
        let index = u32::try_from(links.len())
            .map_err(|_| SubmitError::Lacking("too many links".into()))?;
        match outgoing.dial(&self.shared, index) {
            Ok(Dialled::Yes) => {}
            Ok(Dialled::Short(Errno::AGAIN | Errno::TOOMANYREFS)) => self.shared.try_again(),
            Ok(Dialled::Short(error)) => return Err(lacking(error)),
            Err(cause) => {
                // A poll reports its end, behind the messages that it sent before, which may wait
                // here.
                outgoing.doom(cause);
                self.shared.try_again();
            }
        }
        links.push(outgoing.clone());
        drop(links);
        Ok(Arc::new(ShmLink { outgoing, owner: self.owner }))
    }

    #[inline]
    fn poll(&self, batch: &mut Batch, matcher: &mut dyn Matcher) -> Polled {
        let Some(mut polling) = self.inbound.try_lock() else { return Polled::Busy };
        let polling = &mut *polling;
        if self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::Acquire) {
            self.look_after(polling, batch);
        }
        let took = polling.inbound.poll(&self.shared, batch, matcher);
        if polling.upkeep.is_due(!took && batch.is_empty()) {
            self.look_after(polling, batch);
        }
        if batch.is_empty() {
            return if took { Polled::Some } else { Polled::Idle };
        }
        matcher.match_all(batch);
        Polled::Some
    }

    fn splits_of(&self, peer: PeerId) -> Option<Arc<dyn Splits>> {
        let segment = self.shared.incoming().get(&peer)?.clone();
        Some(segment)
    }

    fn shortage(&self) -> Option<String> {
        self.shared.shortage.describe()
    }

    fn arm(&self) -> Armed<'_> {
        let Some(mut polling) = self.inbound.try_lock() else { return Armed::Ready };
        self.shared.sleepers.fetch_add(1, Ordering::SeqCst);
        self.armed.store(true, Ordering::Relaxed);
        self.shared.page.asleep().store(1, Ordering::SeqCst);
        // Cooling runs the barrier that orders the store above before the look below.
        polling.inbound.cool_all(self.shared.barrier);
        crate::sync::attention::settle(self.shared.barrier);
        // A welcome that is owed can be sent when descriptors are free again, which wakes no
        // thread.
        if polling.inbound.owes_welcomes()
            || polling.inbound.has_something(self.shared.page.bells())
        {
            self.shared.sleepers.fetch_sub(1, Ordering::SeqCst);
            return Armed::Ready;
        }
        Armed::Wait(self.shared.epoll.as_fd())
    }

    fn disarm(&self, _is_told: bool) {
        self.shared.sleepers.fetch_sub(1, Ordering::SeqCst);
        self.armed.store(true, Ordering::Release);
    }

    fn revoke(&self, peer: PeerId) -> bool {
        let mut incoming = self.shared.incoming();
        let is_revoked = incoming.get(&peer).is_none_or(|segment| segment.access().revoke());
        if is_revoked {
            incoming.remove(&peer);
        }
        is_revoked
    }

    fn close(&self) {
        if !self.owner.is_here() {
            return;
        }
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        for link in self.shared.outgoing().drain(..) {
            if !link.is_down() {
                link.close(&DownCause::Closed, true);
            }
        }
        let mut polling = self.inbound.lock();
        polling.inbound.close();
        // Segments of peers that are copying now stay, for a later `revoke`.
        self.shared.incoming().retain(|_, segment| !segment.access().revoke());
        polling.listener = None;
    }
}

fn lacking(error: Errno) -> SubmitError {
    SubmitError::Lacking(shortage::describe(error))
}

impl Drop for ShmDevice {
    fn drop(&mut self) {
        self.close();
    }
}
