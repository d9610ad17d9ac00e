//! The sockets of a device.
//!
//! A poll reads sockets on which something came a moment ago directly. The others wait in an epoll
//! set, which a poll reads at intervals, so that idle links cost other transports next to nothing.

use super::address::TcpAddress;
use super::closing::TcpClosing;
use super::flusher::Flusher;
use super::hot::{HOT, Hot};
use super::incoming::{Inbound, Read, ReadFault, Receiving};
use super::link::TcpLink;
use super::looks::Looks;
use super::outgoing::Outgoing;
use super::pending::{PendingConnection, ProvedConnection};
use super::shared::{BELL, LINK, LISTENER, PENDING, TIMER, TcpShared};
use super::{NAME, TcpOptions, socket};
use crate::contract::{
    AddressBlob, Armed, Batch, Closing, Cost, Device, DownCause, Identity, Link, Matcher, PeerId,
    Polled, Reach, SubmitError, Unavailable, close_all,
};
use crate::fork::Owner;
use crate::mem::PacketSource;
use crate::net::key::DeviceKey;
use crate::net::pending::Pending;
use crate::net::shortage::Shortage;
use crate::net::{self, interfaces};
use crate::sync::{BiasedLock, Sleepers};
use parking_lot::Mutex;
use rustix::event::Timespec;
use rustix::event::epoll::{self, CreateFlags, EventFlags};
use rustix::io::Errno;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Bytes that one call of a socket receives, of all but puts.
const SCRATCH: usize = 64 << 10;

/// Events that are read before a poll asks for them, at most.
const AHEAD: usize = 64;

/// Time between two looks at connections that stand still, or are not up.
const TICK: Duration = Duration::from_millis(50);

/// Time without such a look after which this process has not asked its peers.
const IDLE: Duration = Duration::from_millis(1500);

#[derive(Debug)]
pub(super) struct TcpPolling {
    pub(super) listener: Option<TcpListener>,
    pub(super) pending: Pending<PendingConnection>,
    /// Connections of peers to which this device is dialling at the same time.
    pub(super) crossed: Vec<ProvedConnection>,
    /// Receiving ends, each at the place of its sending end.
    pub(super) inbound: Vec<Option<Inbound>>,
    pub(super) hot: Vec<Hot>,
    scratch: Box<[u8]>,
    looks: Looks,
    ticked_at: Instant,
    /// Interval of the timer, which ticks for a thread that sleeps.
    span: Option<Timespec>,
    /// Events that were read for acknowledgements, before a poll asked for them.
    ahead: Option<Batch>,
    /// Frames wait that were taken off a connection and found no room in a batch.
    pub(super) has_backlog: bool,
    /// Turn of the connection that is read first.
    turn: usize,
    /// The last batch was full: some sockets may have found no room in it, and come first.
    is_crowded: bool,
    /// The listener is not watched, because a resource is short.
    pub(super) is_deaf: bool,
    /// Connections are not up or stand still, as of the last look.
    pub(super) is_troubled: bool,
    /// Set when the device closes: what comes is then dropped, and acknowledged by the kernel
    /// alone.
    pub(super) closing: Option<TcpClosing>,
}

/// Sockets of a device.
#[derive(Debug)]
pub(super) struct TcpDevice {
    pub(super) shared: Arc<TcpShared>,
    pub(super) polling: BiasedLock<TcpPolling>,
    timer: OwnedFd,
    this: Weak<Self>,
    /// Set by `arm` and `disarm`: the next poll reads the epoll set at once.
    armed: AtomicBool,
}

impl TcpDevice {
    pub(super) fn open(
        options: TcpOptions,
        identity: Identity,
        packets: Arc<dyn PacketSource>,
    ) -> Result<Arc<Self>, Unavailable> {
        let unavailable = |why: String| Unavailable::new(NAME, why);
        let boot = net::boot_id().map_err(unavailable)?;
        let own = interfaces::reachable(&options.interface)
            .map_err(|error| unavailable(format!("CARRACK_TCP_INTERFACE: {error}")))?;
        let listener = socket::listen(&options.ports, &options.congestion).map_err(|error| {
            unavailable(format!(
                "it cannot listen: {error}; free a port of CARRACK_PORTS, or raise the limit on \
                     open files (`ulimit -n`)"
            ))
        })?;
        let opened = || -> Result<Arc<Self>, std::io::Error> {
            let port = listener.local_addr()?.port();
            let hosts = own.iter().map(|interface| interface.address).collect();
            let address = TcpAddress { key: DeviceKey::fresh()?, boot, port, hosts };
            let shared = TcpShared {
                identity,
                address,
                own: own.clone(),
                options,
                packets,
                windows: Arc::default(),
                epoll: Arc::new(epoll::create(CreateFlags::CLOEXEC)?),
                owner: Owner::this_process(),
                sleepers: Sleepers::fenced()?,
                outgoing: Mutex::default(),
                news: AtomicBool::new(false),
                left: Mutex::default(),
                flusher: Flusher::default(),
                expected: Mutex::default(),
                events: Mutex::default(),
                deaths: Mutex::default(),
                looks_soon: AtomicBool::new(false),
                shortage: Shortage::default(),
                closed: AtomicBool::new(false),
            };
            let timer = rustix::time::timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )?;
            shared.watch(listener.as_fd(), LISTENER, EventFlags::IN)?;
            shared.watch(shared.sleepers.as_fd(), BELL, EventFlags::IN)?;
            shared.watch(timer.as_fd(), TIMER, EventFlags::IN)?;
            let polling = TcpPolling {
                listener: Some(listener),
                pending: Pending::of_ranks(shared.identity.ranks),
                crossed: Vec::new(),
                inbound: Vec::new(),
                hot: Vec::with_capacity(HOT),
                scratch: vec![0; SCRATCH].into(),
                looks: Looks::new(),
                ticked_at: Instant::now(),
                span: None,
                ahead: None,
                has_backlog: false,
                turn: 0,
                is_crowded: false,
                is_deaf: false,
                is_troubled: false,
                closing: None,
            };
            Ok(Arc::new_cyclic(|this| Self {
                shared: Arc::new(shared),
                polling: BiasedLock::new(polling),
                timer,
                this: this.clone(),
                armed: AtomicBool::new(false),
            }))
        };
        opened().map_err(|error| {
            unavailable(format!(
                "its sockets could not be made: {error}; raise the limit on open files \
                 (`ulimit -n`)"
            ))
        })
    }

    /// Handles what other threads, and links, have left for a poll.
    #[cold]
    fn news(&self, polling: &mut TcpPolling, batch: &mut Batch) {
        self.shared.news.store(false, Ordering::Relaxed);
        // The flag goes first: what is added meanwhile sets it again.
        std::sync::atomic::fence(Ordering::SeqCst);
        if let Some(mut ahead) = polling.ahead.take() {
            ahead.drain().for_each(|event| batch.push(event));
        }
        if self.shared.looks_soon.swap(false, Ordering::Acquire) {
            self.tick(polling);
        }
        self.shared.send_left(0);
        self.shared.expected.lock().drain(..).for_each(|index| polling.warm(index));
        if self.shared.yields(batch) || !self.shared.deaths.lock().is_empty() {
            self.shared.news.store(true, Ordering::Relaxed);
        }
    }

    /// Reads a connection, for the acknowledgements on it. The next poll yields the rest.
    pub(super) fn read_ahead(&self, index: u32) {
        let Some(mut polling) = self.polling.try_lock_at_once() else { return };
        let mut ahead = polling.ahead.take().unwrap_or_else(|| Batch::new(AHEAD));
        if !ahead.is_full() {
            self.receive(&mut polling, index, &mut ahead);
        }
        if !ahead.is_empty() {
            polling.ahead = Some(ahead);
            self.shared.has_news();
        }
    }

    /// Takes up frames that found no room in an earlier batch.
    #[cold]
    fn read_backlog(&self, polling: &mut TcpPolling, batch: &mut Batch) {
        polling.has_backlog = false;
        let longest = self.shared.packets.packet_size();
        // One that fills each batch is not the first again.
        polling.turn = polling.turn.wrapping_add(1);
        let (first, links) = (polling.turn, polling.inbound.len());
        for index in (0..links).map(|at| first.wrapping_add(at) % links) {
            let entry = polling.inbound.get(index).and_then(Option::as_ref);
            if entry.is_some_and(|entry| entry.incoming.has_whole(longest)) {
                self.receive(polling, u32::try_from(index).unwrap_or(u32::MAX), batch);
            }
        }
    }

    /// Takes in what has come on a connection. Returns `true` if something has.
    pub(super) fn receive(&self, polling: &mut TcpPolling, index: u32, batch: &mut Batch) -> bool {
        let TcpPolling { inbound, scratch, closing, .. } = polling;
        let Some(Some(entry)) = inbound.get_mut(index as usize) else { return false };
        let (packets, windows) = (&*self.shared.packets, &*self.shared.windows);
        let drops = closing.is_some();
        let mut to = Receiving { packets, windows, batch, scratch, drops };
        let read = entry.incoming.read(entry.socket.as_deref(), &mut to);
        if let Some(acked) = entry.incoming.take_acked() {
            entry.link.acknowledge(&self.shared, acked);
        }
        match read {
            Ok(read) => {
                let has_ended = entry.incoming.has_ended && !drops;
                if !drops {
                    entry.acknowledge(&self.shared, has_ended);
                }
                if read == Read::Some {
                    // Behind the acknowledgement, which is no message.
                    entry.link.has_heard();
                }
                if has_ended {
                    self.end(polling, index, DownCause::Closed);
                    return true;
                }
                polling.has_backlog |= entry.incoming.has_whole(packets.packet_size());
                if read == Read::End {
                    self.lose(polling, index);
                }
                read == Read::Some
            }
            Err(ReadFault::Broken(error)) => {
                tracing::info!(peer = %entry.incoming.peer, %error, "a connection has broken");
                self.lose(polling, index);
                true
            }
            Err(ReadFault::Protocol(why)) => {
                self.end(polling, index, DownCause::Protocol(why));
                true
            }
        }
    }

    /// Ends both ends of a connection. The peer begins neither anew before its end is reported.
    fn end(&self, polling: &mut TcpPolling, index: u32, cause: DownCause) {
        if let Some(Some(entry)) = polling.inbound.get(index as usize) {
            entry.link.fail(&self.shared, cause.clone());
            if !self.shared.is_closed() {
                self.shared.has_died(entry.incoming.peer, cause);
            }
        }
        polling.leave(index);
    }

    /// Takes up that a connection has ended without the end of its links. One side makes another,
    /// or is dead.
    fn lose(&self, polling: &mut TcpPolling, index: u32) {
        let Some(Some(entry)) = polling.inbound.get_mut(index as usize) else { return };
        let Some(socket) = entry.socket.take() else { return };
        // The next connection begins in the epoll set.
        polling.hot.iter_mut().filter(|hot| hot.place == index).for_each(|hot| hot.streak = 0);
        entry.link.lost(&self.shared, &socket, entry.incoming.received);
        self.shared.look_soon();
    }

    /// Returns `true` if nothing can come but a peer that connects.
    fn is_alone(&self, polling: &TcpPolling) -> bool {
        polling.inbound.iter().all(Option::is_none)
            && polling.pending.is_empty()
            && self.shared.outgoing.lock().is_empty()
    }

    /// Reads the epoll set.
    #[cold]
    fn look(&self, polling: &mut TcpPolling, batch: &mut Batch) {
        polling.looks.begin();
        self.excuse(polling);
        if self.shared.is_closed() {
            return;
        }
        let mut space = [const { std::mem::MaybeUninit::uninit() }; 32];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let Ok((ready, _)) = epoll::wait(&self.shared.epoll, &mut space[..], Some(&now)) else {
            return;
        };
        polling.looks.end(!ready.is_empty(), self.is_alone(polling));
        // One that fills each batch is not the first again.
        polling.turn = polling.turn.wrapping_add(1);
        ready.rotate_left(polling.turn % ready.len().max(1));
        for event in ready {
            let name = event.data.u64();
            let [place, kind] = [name & 0xffff_ffff, name & !0xffff_ffff];
            let place = u32::try_from(place).unwrap_or(u32::MAX);
            match kind {
                LINK => {
                    self.advance(polling, place);
                    if self.receive(polling, place, batch) {
                        polling.warm(place);
                    }
                }
                PENDING => self.hear_pending(polling, place),
                _ if name == LISTENER => self.accept(polling),
                _ if name == TIMER => {
                    let _ = rustix::io::read(&self.timer, &mut [0; 8]);
                    polling.is_troubled = true;
                }
                // The bell: its sleepers silence it.
                _ => {}
            }
        }
        // Only a tick finds a connection on which bytes stand still.
        let pause = if polling.is_troubled { TICK } else { 10 * TICK };
        if polling.ticked_at.elapsed() >= pause {
            self.tick(polling);
        }
    }

    /// Goes on with a connection that is being made, or has room.
    pub(super) fn advance(&self, polling: &mut TcpPolling, index: u32) {
        if let Some(link) = self.shared.link(index)
            && let Some(risen) = link.advance(&self.shared)
        {
            self.attach(polling, &link, risen);
        }
    }

    /// Looks after connections that are not up, or stand still.
    fn tick(&self, polling: &mut TcpPolling) {
        self.excuse(polling);
        polling.ticked_at = Instant::now();
        polling.inbound.iter_mut().flatten().for_each(|it| it.rest(&self.shared));
        if std::mem::take(&mut polling.is_deaf)
            && let Some(listener) = &polling.listener
        {
            let watched = self.shared.rewatch(listener.as_fd(), LISTENER, EventFlags::IN);
            polling.is_deaf = watched.is_err();
        }
        // One may have waited for a resource that was short.
        for place in polling.pending.places() {
            self.hear_pending(polling, place);
        }
        for connection in std::mem::take(&mut polling.crossed) {
            self.admit(polling, connection);
        }
        let pending = &mut polling.pending;
        pending.expire(Instant::now());
        polling.is_troubled = !pending.is_empty() || !polling.crossed.is_empty();
        let longest = self.shared.packets.packet_size();
        let links = self.shared.outgoing.lock().clone();
        for link in links.iter().flatten() {
            let entry = polling.inbound.get(link.index as usize).and_then(Option::as_ref);
            if !link.has_ended() {
                self.advance(polling, link.index);
                polling.is_troubled |= link.look_after();
            } else if entry.is_none_or(|it| it.socket.is_none() && !it.incoming.has_whole(longest))
            {
                polling.leave(link.index);
                self.shared.outgoing.lock()[link.index as usize] = None;
            }
        }
    }

    /// Does not count a time against peers in which this process did not ask them.
    fn excuse(&self, polling: &mut TcpPolling) {
        let span = polling.ticked_at.elapsed();
        if span > IDLE.max(self.shared.options.timeout / 8) {
            polling.ticked_at = Instant::now();
            let links = self.shared.outgoing.lock().clone();
            links.iter().flatten().for_each(|link| link.excuse(span));
        }
    }
}

impl TcpPolling {
    /// Forgets a receiving end.
    pub(super) fn leave(&mut self, index: u32) {
        if let Some(entry) = self.inbound.get_mut(index as usize) {
            *entry = None;
        }
        self.hot.retain(|hot| hot.place != index);
    }
}

impl Device for TcpDevice {
    fn address(&self) -> AddressBlob {
        self.shared.address.encode()
    }

    fn reach(&self, to: &AddressBlob) -> Reach {
        let Some(to) = TcpAddress::decode(to) else {
            return Reach::No("its address is not one of this transport's".into());
        };
        if to.candidates(self.shared.address.boot, &self.shared.own).is_empty() {
            return Reach::No("it has a loopback address only, and is on another machine".into());
        }
        Reach::Yes(Cost { latency_ns: 5000 })
    }

    fn connect(&self, to: &AddressBlob, peer: PeerId) -> Result<Arc<dyn Link>, SubmitError> {
        let address = TcpAddress::decode(to).ok_or(SubmitError::Address(to.0.len()))?;
        if self.shared.is_closed() {
            return Err(SubmitError::Down { peer, cause: DownCause::Closed });
        }
        let lacking = |error: Errno| SubmitError::Lacking(format!("random bytes: {error}"));
        let key = DeviceKey::fresh().map_err(lacking)?;
        let candidates = address.candidates(self.shared.address.boot, &self.shared.own);
        let mut links = self.shared.outgoing.lock();
        let takes = |it: &&Arc<Outgoing>| {
            (it.peer, it.device) == (peer, address.key) && it.serve(&self.shared, &candidates)
        };
        let known = links.iter().flatten().find(takes).cloned();
        let outgoing = known.unwrap_or_else(|| {
            let new = TcpShared::begin(&mut links, (peer, address.key), key);
            new.serve(&self.shared, &candidates);
            new
        });
        drop(links);
        self.shared.look_soon();
        let (shared, device) = (self.shared.clone(), self.this.clone());
        Ok(Arc::new(TcpLink { outgoing, shared, device }))
    }

    #[inline]
    fn poll(&self, batch: &mut Batch, matcher: &mut dyn Matcher) -> Polled {
        let Some(mut polling) = self.polling.try_lock() else { return Polled::Busy };
        let polling = &mut *polling;
        if self.shared.news.load(Ordering::Relaxed) {
            self.news(polling, batch);
        }
        if polling.is_crowded && polling.looks.is_past() {
            self.look(polling, batch);
        }
        if polling.has_backlog {
            self.read_backlog(polling, batch);
        }
        if !polling.hot.is_empty() {
            self.read_hot(polling, batch);
        }
        // What was read is delivered first: it is what the sleep has ended for, most often.
        let is_armed = batch.is_empty()
            && self.armed.load(Ordering::Relaxed)
            && self.armed.swap(false, Ordering::Acquire);
        if is_armed || polling.looks.is_due(batch.is_empty()) {
            self.look(polling, batch);
        }
        if self.shared.news.load(Ordering::Relaxed) && !self.shared.deaths.lock().is_empty() {
            self.report(polling, batch);
        }
        polling.is_crowded = batch.is_full();
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
        self.shared.sleepers.begin();
        let all_told = (0..polling.hot.len()).all(|at| self.put_back(&mut polling, at));
        if !all_told || self.shared.news.load(Ordering::Acquire) || polling.has_backlog {
            self.shared.sleepers.end();
            return Armed::Ready;
        }
        let links = self.shared.outgoing.lock();
        let is_moving = |link: &Arc<Outgoing>| !link.has_ended() && link.is_moving();
        let needs_time = links.iter().flatten().any(is_moving)
            || !polling.pending.is_empty()
            || !polling.crossed.is_empty()
            || polling.is_deaf;
        // Another thread may send meanwhile, and the peer's machine fall silent.
        let is_used = links.iter().flatten().any(|link| !link.has_ended());
        drop(links);
        let span = match (needs_time, is_used) {
            (true, _) => Timespec { tv_sec: 0, tv_nsec: i64::from(TICK.subsec_nanos()) },
            (false, true) => Timespec { tv_sec: 1, tv_nsec: 0 },
            (false, false) => Timespec { tv_sec: 0, tv_nsec: 0 },
        };
        // It goes on by itself.
        if polling.span.replace(span) != Some(span) {
            let spec = Itimerspec { it_interval: span, it_value: span };
            let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec);
        }
        Armed::Wait(self.shared.epoll.as_fd())
    }

    fn disarm(&self, is_told: bool) {
        self.shared.sleepers.end();
        if is_told {
            self.armed.store(true, Ordering::Release);
        }
    }

    fn advance_close(&self) -> Closing {
        if self.shared.owner.is_here() { self.advance_end() } else { Closing::Over }
    }

    fn close(&self) {
        close_all(&[self]);
    }
}

impl Drop for TcpDevice {
    fn drop(&mut self) {
        self.close();
    }
}
