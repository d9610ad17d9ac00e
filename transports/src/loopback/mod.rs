//! The transport within a process: the reference implementation, and the test transport.
//!
//! It does the plainest thing that keeps every promise of the [contract](crate::contract). Each
//! link has a queue under a mutex, and each device a list of the queues that are not empty. It has
//! no memory of its own, so it can send from memory of any kind. A message from a GPU stays in
//! flight until the GPU's engine has copied it into a packet of host memory. It does not receive
//! into GPU memory: the runtime copies such messages there.
//!
//! Any number of ranks of one process can talk through it, each with devices of its own.

mod link;

use crate::contract::{
    AddressBlob, Armed, Batch, Caps, Cost, Device, DeviceInfo, Domain, DownCause, Event, Exported,
    Header, Identity, Imported, Link, Locality, Matcher, OpFailure, OpToken, Payload, PeerId,
    Polled, Reach, SubmitError, Transport, Unavailable, WireKey,
};
use crate::fork::Owner;
use crate::gpu::Gpu;
use crate::mem::{Buffer, MapError, PacketSource, Region, SmallBytes, Transfer};
use crate::sync::{Sleepers, TryLock};
use link::LoopbackLink;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, VecDeque};
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The transport's name.
pub const NAME: &str = "loopback";

/// Messages taken from one queue before the next queue.
const TURN: usize = 16;

/// The loopback transport.
#[derive(Debug, Clone, Copy)]
pub struct Loopback {
    max_message: usize,
}

impl Loopback {
    /// Makes the transport for messages of up to `max_message` bytes, at most the size of a
    /// packet.
    pub fn new(max_message: usize) -> Self {
        Self { max_message }
    }
}

impl Transport for Loopback {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Unavailable> {
        Ok(vec![DeviceInfo { name: "process".into(), note: "queues within this process".into() }])
    }

    fn open(
        &self,
        _device: &DeviceInfo,
        identity: Identity,
    ) -> Result<Arc<dyn Domain>, Unavailable> {
        Ok(Arc::new(self.domain(identity)))
    }
}

impl Loopback {
    fn domain(&self, identity: Identity) -> LoopbackDomain {
        let caps = Caps {
            am_inline: SmallBytes::MAX,
            am_copied: self.max_message,
            am_owned: self.max_message,
            am_from_device: true,
            remote_memory: false,
            windows: false,
            polls_kernel: false,
            chunk: usize::MAX,
            locality: Locality::Process,
        };
        LoopbackDomain { caps, identity }
    }
}

struct LoopbackDomain {
    caps: Caps,
    identity: Identity,
}

impl Domain for LoopbackDomain {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn export(&self, region: &Region) -> Result<Exported, MapError> {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let guard = Arc::new(());
        regions().lock().insert(number, (region.clone(), Arc::downgrade(&guard)));
        let key = WireKey(LoopbackName::of(number).as_bytes().to_vec());
        Ok(Exported::new(key, Withdraw { number, _guard: guard }))
    }

    fn import(&self, key: &WireKey, _: Option<&Arc<dyn Gpu>>) -> Result<Imported, MapError> {
        let LoopbackName { process, number } = LoopbackName::ref_from_bytes(&key.0)
            .map_err(|_| "its key is not one of this transport's")?;
        if *process != this_process() {
            return Err("it is in another process".into());
        }
        let regions = regions().lock();
        let (region, guard) = regions.get(&number.get()).ok_or("it is not registered any more")?;
        Ok(Imported::own(region.clone(), guard.clone()))
    }

    fn device(&self, packets: Arc<dyn PacketSource>) -> Result<Arc<dyn Device>, Unavailable> {
        Ok(Arc::new(self.open_device(packets)?))
    }
}

impl LoopbackDomain {
    fn open_device(&self, packets: Arc<dyn PacketSource>) -> Result<LoopbackDevice, Unavailable> {
        if !packets.kind().is_host() {
            // The runtime's own messages lie in them, too.
            let reason =
                format!("it receives into host packets, not into {} memory", packets.kind());
            return Err(Unavailable::new(NAME, reason));
        }
        let sleepers = Sleepers::new().map_err(|error| {
            Unavailable::new(
                NAME,
                format!("no eventfd: {error}; raise the limit on open files (`ulimit -n`)"),
            )
        })?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let inbox = Arc::new(LoopbackInbox {
            id,
            packets,
            max_message: self.caps.am_copied,
            ready: Mutex::default(),
            waiting: Arc::default(),
            sleepers,
            owner: Owner::this_process(),
            closed: AtomicBool::new(false),
            sources: Mutex::default(),
            targets: Mutex::default(),
        });
        directory().insert(id, Arc::downgrade(&inbox));
        Ok(LoopbackDevice { inbox, identity: self.identity.clone(), polling: TryLock::new(()) })
    }
}

/// Guard that withdraws a region when its export ends.
struct Withdraw {
    number: u64,
    _guard: Arc<()>,
}

impl Drop for Withdraw {
    fn drop(&mut self) {
        // Without the lock: a region's owner may be any code.
        let withdrawn = regions().lock().remove(&self.number);
        drop(withdrawn);
    }
}

type Regions = HashMap<u64, (Region, Weak<()>)>;

/// Returns the regions of this process that can be imported, by number.
fn regions() -> &'static Mutex<Regions> {
    static REGIONS: OnceLock<Mutex<Regions>> = OnceLock::new();
    REGIONS.get_or_init(Mutex::default)
}

static NEXT: AtomicU64 = AtomicU64::new(1);

/// Returns the devices of this process, by number.
fn directory() -> MutexGuard<'static, HashMap<u64, Weak<LoopbackInbox>>> {
    static DEVICES: OnceLock<Mutex<HashMap<u64, Weak<LoopbackInbox>>>> = OnceLock::new();
    DEVICES.get_or_init(Mutex::default).lock()
}

/// Name of a region or a device among all processes.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct LoopbackName {
    process: [u8; 16],
    number: U64,
}

impl LoopbackName {
    fn of(number: u64) -> Self {
        Self { process: this_process(), number: number.into() }
    }
}

/// Returns a number that no other process has, by which an address names this very process.
fn this_process() -> [u8; 16] {
    static TOKEN: OnceLock<[u8; 16]> = OnceLock::new();
    *TOKEN.get_or_init(|| {
        crate::net::random().unwrap_or_else(|_| {
            let pid = u128::from(std::process::id());
            (pid << 64 | u128::from(crate::clock::ticks())).to_ne_bytes()
        })
    })
}

/// State that a device shares with the links to it.
#[derive(Debug)]
struct LoopbackInbox {
    id: u64,
    packets: Arc<dyn PacketSource>,
    max_message: usize,
    ready: Mutex<Ready>,
    /// Entries of `ready`; read without the lock by polls that find nothing.
    waiting: Arc<AtomicU32>,
    sleepers: Sleepers,
    /// A fork shares the descriptor that wakes this process's threads.
    owner: Owner,
    closed: AtomicBool,
    /// The devices with links to this one, with the names that they use for its rank. They are
    /// told of its end.
    sources: Mutex<Vec<(PeerId, Weak<Self>)>>,
    /// The queues of the links from this device, with their targets.
    targets: Mutex<Vec<(Arc<LinkQueue>, Weak<Self>)>>,
}

#[derive(Debug, Default)]
struct Ready {
    /// Queues that are not empty, each at most once.
    queues: VecDeque<Arc<LinkQueue>>,
    /// Completions of operations posted from here, and news of links.
    news: VecDeque<Event>,
}

impl LoopbackInbox {
    fn announce(&self, what: impl FnOnce(&mut Ready)) {
        let mut ready = self.ready.lock();
        what(&mut ready);
        let count = ready.queues.len() + ready.news.len();
        self.waiting.store(u32::try_from(count).unwrap_or(u32::MAX), Ordering::Release);
        drop(ready);
        self.sleepers.wake();
    }

    /// Completes, for their senders, the operations in flight to this device, which has closed.
    fn abandon(&self) {
        let queues = std::mem::take(&mut self.ready.lock().queues);
        queues.iter().for_each(|queue| queue.abandon());
    }
}

/// Messages that one link has sent and the target has not taken yet.
#[derive(Debug)]
struct LinkQueue {
    from: PeerId,
    messages: Mutex<VecDeque<LoopbackMessage>>,
    /// `true` while it is on the target's list.
    listed: AtomicBool,
    /// `true` once its last entry was made.
    ended: AtomicBool,
}

impl LinkQueue {
    /// Completes the operations in flight to a device that has closed.
    fn abandon(&self) {
        let left: Vec<_> = self.messages.lock().drain(..).collect();
        for message in left {
            if let OnItsWay::Landing(transfer, sender) = message.payload {
                let (_, buffer) = transfer.into_buffers();
                sender.tell(buffer, Err(Box::new(OpFailure::Down(DownCause::Closed))));
            }
        }
    }

    /// Makes the last entry, once.
    fn end(self: &Arc<Self>, target: &LoopbackInbox) {
        if self.ended.swap(true, Ordering::AcqRel) {
            return;
        }
        let payload = OnItsWay::End(DownCause::Closed);
        self.messages.lock().push_back(LoopbackMessage { header: Header::default(), payload });
        if !self.listed.swap(true, Ordering::SeqCst) {
            target.announce(|ready| ready.queues.push_back(self.clone()));
        }
    }

    /// Completes the operations that its sender still has in flight, before the sender goes.
    fn take_back(&self) {
        let mut messages = self.messages.lock();
        let (kept, back): (VecDeque<_>, VecDeque<_>) = messages
            .drain(..)
            .partition(|message| !matches!(message.payload, OnItsWay::Landing(..)));
        *messages = kept;
        drop(messages);
        for message in back {
            if let OnItsWay::Landing(transfer, sender) = message.payload {
                sender.tell(transfer.into_buffers().1, Err(Box::new(OpFailure::Closed)));
            }
        }
    }
}

#[derive(Debug)]
struct LoopbackMessage {
    header: Header,
    payload: OnItsWay,
}

#[derive(Debug)]
enum OnItsWay {
    There(Payload),
    /// A copy of GPU memory, by its engine; the sender is told when its buffer is free.
    Landing(Transfer, SendNotice),
    /// The sender has gone: the last entry of its queue.
    End(DownCause),
}

/// Inbox to tell when a message has left its sender's buffer.
#[derive(Debug)]
struct SendNotice(Arc<LoopbackInbox>, OpToken);

impl SendNotice {
    fn tell(self, buffer: Buffer, outcome: Result<(), Box<OpFailure>>) {
        let Self(inbox, token) = self;
        inbox.announce(|ready| ready.news.push_back(Event::Completion { token, buffer, outcome }));
    }
}

#[derive(Debug)]
struct LoopbackDevice {
    inbox: Arc<LoopbackInbox>,
    identity: Identity,
    polling: TryLock<()>,
}

impl LoopbackDevice {
    fn link_to(&self, to: &AddressBlob, peer: PeerId) -> Result<LoopbackLink, SubmitError> {
        let (process, id) = parse(to).ok_or(SubmitError::Address(to.0.len()))?;
        let target =
            directory().get(&id).and_then(Weak::upgrade).filter(|_| process == this_process());
        let target = target.filter(|target| !target.closed.load(Ordering::Acquire));
        if target.is_none() && !self.has_messages_of(peer) {
            return Err(SubmitError::Down { peer, cause: DownCause::Closed });
        }
        let queue = LinkQueue {
            from: self.identity.me,
            messages: Mutex::new(VecDeque::with_capacity(TURN)),
            listed: AtomicBool::new(false),
            ended: AtomicBool::new(target.is_none()),
        };
        let (queue, home) = (Arc::new(queue), self.inbox.clone());
        let Some(target) = target else {
            // A poll tells of its end, behind its messages.
            return Ok(LoopbackLink { peer, target: home.clone(), home, queue });
        };
        target.sources.lock().push((peer, Arc::downgrade(&self.inbox)));
        self.inbox.targets.lock().push((queue.clone(), Arc::downgrade(&target)));
        let link = LoopbackLink { peer, home, target, queue };
        self.inbox.announce(|ready| ready.news.push_back(Event::Connected { peer }));
        Ok(link)
    }

    /// Returns `true` if messages of a peer wait here.
    fn has_messages_of(&self, peer: PeerId) -> bool {
        // No poll has a queue in its hands.
        let _polling = self.polling.lock();
        self.inbox.ready.lock().queues.iter().any(|queue| queue.from == peer)
    }

    fn take_turn(&self, queue: &Arc<LinkQueue>, batch: &mut Batch) -> bool {
        let mut messages = queue.messages.lock();
        for _ in 0..TURN {
            if batch.is_full() {
                break;
            }
            let Some(front) = messages.front_mut() else { break };
            if let OnItsWay::Landing(transfer, _) = &mut front.payload
                && transfer.poll().is_none()
            {
                // Later messages wait: messages of one link arrive in order.
                break;
            }
            let Some(LoopbackMessage { header, payload }) = messages.pop_front() else { break };
            match payload {
                OnItsWay::There(payload) => batch.push(Event::arrived(queue.from, header, payload)),
                OnItsWay::Landing(mut transfer, sender) => {
                    let outcome = transfer.poll().unwrap_or(Ok(()));
                    let (packet, buffer) = transfer.into_buffers();
                    if let (Ok(()), Buffer::Packet(packet)) = (&outcome, packet) {
                        let payload = Payload::Packet(packet);
                        batch.push(Event::arrived(queue.from, header, payload));
                    }
                    sender.tell(buffer, outcome.map_err(|error| Box::new(OpFailure::from(error))));
                }
                OnItsWay::End(cause) => batch.push(Event::PeerDown { peer: queue.from, cause }),
            }
        }
        !messages.is_empty()
    }
}

impl Device for LoopbackDevice {
    fn address(&self) -> AddressBlob {
        AddressBlob(LoopbackName::of(self.inbox.id).as_bytes().to_vec())
    }

    fn reach(&self, to: &AddressBlob) -> Reach {
        match parse(to) {
            None => Reach::No("its address is not one of this transport's".into()),
            Some((process, _)) if process != this_process() => {
                Reach::No("it is in another process".into())
            }
            Some(_) => Reach::Yes(Cost { latency_ns: 100 }),
        }
    }

    fn connect(&self, to: &AddressBlob, peer: PeerId) -> Result<Arc<dyn Link>, SubmitError> {
        Ok(Arc::new(self.link_to(to, peer)?))
    }

    fn poll(&self, batch: &mut Batch, matcher: &mut dyn Matcher) -> Polled {
        if self.inbox.waiting.load(Ordering::Acquire) == 0 {
            return Polled::Idle;
        }
        let Some(_polling) = self.polling.try_lock() else { return Polled::Busy };
        let mut turns = {
            let mut ready = self.inbox.ready.lock();
            while !batch.is_full() {
                let Some(event) = ready.news.pop_front() else { break };
                batch.push(event);
            }
            ready.queues.len()
        };
        while turns > 0 && !batch.is_full() {
            turns -= 1;
            let Some(queue) = self.inbox.ready.lock().queues.pop_front() else { break };
            let more = self.take_turn(&queue, batch);
            if !more {
                queue.listed.store(false, Ordering::SeqCst);
            }
            // A sender that pushed a message between the two lines above saw the queue still
            // listed.
            if more
                || !queue.messages.lock().is_empty() && !queue.listed.swap(true, Ordering::SeqCst)
            {
                self.inbox.ready.lock().queues.push_back(queue);
                // The device may have closed while this queue was not on the list that it
                // abandons.
                if self.inbox.closed.load(Ordering::Acquire) {
                    self.inbox.abandon();
                }
            }
        }
        let ready = self.inbox.ready.lock();
        let count = ready.queues.len() + ready.news.len();
        self.inbox.waiting.store(u32::try_from(count).unwrap_or(u32::MAX), Ordering::Release);
        drop(ready);
        if batch.is_empty() {
            return Polled::Idle;
        }
        matcher.match_all(batch);
        Polled::Some
    }

    fn news(&self) -> Option<Arc<AtomicU32>> {
        Some(self.inbox.waiting.clone())
    }

    fn arm(&self) -> Armed<'_> {
        self.inbox.sleepers.begin();
        if self.inbox.waiting.load(Ordering::Acquire) != 0 {
            self.inbox.sleepers.end();
            return Armed::Ready;
        }
        Armed::Wait(self.inbox.sleepers.as_fd())
    }

    fn disarm(&self, _is_told: bool) {
        self.inbox.sleepers.end();
    }

    fn close(&self) {
        if !self.inbox.owner.is_here() || self.inbox.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        directory().remove(&self.inbox.id);
        let mut told = Vec::new();
        for (queue, target) in self.inbox.targets.lock().drain(..) {
            queue.take_back();
            if let Some(target) = target.upgrade() {
                queue.end(&target);
                told.push(target.id);
            }
        }
        for (peer, source) in self.inbox.sources.lock().drain(..) {
            // A source to which this device sends gets the end behind the last message, not
            // before.
            if let Some(source) = source.upgrade().filter(|source| !told.contains(&source.id)) {
                let cause = DownCause::Closed;
                source.announce(|ready| ready.news.push_back(Event::PeerDown { peer, cause }));
            }
        }
        self.inbox.abandon();
    }
}

impl Drop for LoopbackDevice {
    fn drop(&mut self) {
        self.close();
    }
}

fn parse(blob: &AddressBlob) -> Option<([u8; 16], u64)> {
    let LoopbackName { process, number } = LoopbackName::ref_from_bytes(&blob.0).ok()?;
    Some((*process, number.get()))
}

#[cfg(test)]
mod tests;
