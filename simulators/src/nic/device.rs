//! A simulated device: ports, tables, limits. It is the hardware; programs open contexts of it.

use super::address::PortAddress;
use super::completion::CompletionQueue;
use super::engine::{Engine, Outbox};
use super::events::EventQueue;
use super::faults::{Faults, Visibility};
use super::memory::{Access, Domain, Regions, Unreachable};
use super::queue_pair::QueuePair;
use super::receives::{Piece, ReceiveQueue, parts, scatter};
use super::wire::{Body, Packet, QueueNumber, Remote};
use super::{Config, Limits, LinkLayer};
use carrack_transports::fork::Owner;
use carrack_transports::verbs::sys::bindings::{self as ibv, ibv_event_type};
use parking_lot::{Mutex, RwLock};
use rustix::io::Errno;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

/// Subject of an asynchronous event.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Queue(Arc<QueuePair>),
    Completions(Arc<CompletionQueue>),
    Receives(Arc<ReceiveQueue>),
    Port(u8),
    Device,
}

/// An asynchronous event.
#[derive(Clone, Debug)]
pub(super) struct AsyncEvent {
    pub(super) kind: ibv_event_type,
    pub(super) source: Source,
}

/// The asynchronous events of a context.
pub(super) type AsyncEvents = Arc<EventQueue<AsyncEvent>>;

/// A port.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) address: PortAddress,
    up: AtomicBool,
}

impl Port {
    pub(super) fn is_up(&self) -> bool {
        self.up.load(Ordering::SeqCst)
    }
}

/// Count of a kind of objects, with its limit.
#[derive(Debug)]
pub(super) struct Count {
    now: AtomicU32,
    limit: u32,
}

impl Count {
    fn new(limit: u32) -> Self {
        Self { now: AtomicU32::new(0), limit }
    }

    /// Counts one more object.
    ///
    /// # Errors
    /// ENOMEM: the limit is reached.
    pub(super) fn add(&self) -> Result<(), Errno> {
        let more = |now| (now < self.limit).then_some(now + 1);
        self.now
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, more)
            .map(|_| ())
            .map_err(|_| Errno::NOMEM)
    }

    pub(super) fn now(&self) -> u32 {
        self.now.load(Ordering::SeqCst)
    }

    pub(super) fn remove(&self) {
        self.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Bytes that a peer wrote, and that are not visible yet.
#[derive(Debug)]
struct LateWrite {
    domain: Domain,
    at: Remote,
    /// Required right: a peer's, or this side's own for bytes that it has read.
    right: Access,
    bytes: Vec<u8>,
    until: Visibility,
}

/// A device.
#[derive(Debug)]
pub(super) struct NicDevice {
    pub(super) name: String,
    /// Number in the list of devices.
    pub(super) index: usize,
    pub(super) layer: LinkLayer,
    pub(super) limits: Limits,
    /// Bytes of a message that travel in one packet.
    pub(super) packet: usize,
    pub(super) extended: bool,
    pub(super) ports: Vec<Port>,
    pub(super) regions: Regions,
    pub(super) faults: Arc<Faults>,
    pub(super) engine: Arc<Engine>,
    pub(super) queue_pairs: Count,
    pub(super) completion_queues: Count,
    pub(super) shared_receives: Count,
    pub(super) domains: Count,
    pub(super) thread_domains: Count,
    queues: RwLock<HashMap<QueueNumber, Arc<QueuePair>>>,
    next_queue: AtomicU32,
    next_domain: AtomicU32,
    contexts: Mutex<Vec<Weak<EventQueue<AsyncEvent>>>>,
    late_writes: Mutex<Vec<LateWrite>>,
    /// A forked child holds a copy of the thread's bell, and must not use it.
    owner: Owner,
    removed: AtomicBool,
}

impl NicDevice {
    /// Creates a device whose ports have these addresses.
    pub(super) fn new(
        index: usize,
        config: &Config,
        addresses: Vec<PortAddress>,
        faults: Arc<Faults>,
        engine: Arc<Engine>,
    ) -> Arc<Self> {
        let limits = config.limits.clone();
        let port = |address| Port { address, up: AtomicBool::new(true) };
        // Numbers begin differently on each device, so that mistaking one device's for another's
        // is noticed.
        let first = 0x100
            + addresses.first().map_or(0, |address| address.raw().wrapping_mul(977) & 0x3f_ffff);
        Arc::new(Self {
            name: format!("sim{index}"),
            index,
            layer: config.link_layer,
            packet: config.packet,
            extended: config.extended,
            ports: addresses.into_iter().map(port).collect(),
            regions: Regions::new(&limits, config.gpus.clone()),
            faults,
            engine,
            queue_pairs: Count::new(limits.queue_pairs),
            completion_queues: Count::new(limits.completion_queues),
            shared_receives: Count::new(limits.shared_receive_queues),
            domains: Count::new(limits.protection_domains),
            thread_domains: Count::new(limits.thread_domains),
            limits,
            queues: RwLock::default(),
            next_queue: AtomicU32::new(first),
            next_domain: AtomicU32::new(1),
            contexts: Mutex::default(),
            owner: Owner::this_process(),
            late_writes: Mutex::default(),
            removed: AtomicBool::new(false),
        })
    }

    /// Returns a port by its number, which starts at 1.
    pub(super) fn port(&self, number: u8) -> Option<&Port> {
        self.ports.get(usize::from(number).checked_sub(1)?)
    }

    /// Returns the port with this address.
    pub(super) fn port_at(&self, address: PortAddress) -> Option<&Port> {
        self.ports.iter().find(|port| port.address == address)
    }

    /// Opens a context. Returns its queue of events.
    pub(super) fn open(&self) -> Result<AsyncEvents, Errno> {
        self.check()?;
        let events = Arc::new(EventQueue::new()?);
        let mut contexts = self.contexts.lock();
        contexts.retain(|context| context.strong_count() > 0);
        contexts.push(Arc::downgrade(&events));
        Ok(events)
    }

    /// Checks that the device is still there.
    ///
    /// # Errors
    /// EIO: the device is gone.
    pub(super) fn check(&self) -> Result<(), Errno> {
        if self.removed.load(Ordering::SeqCst) { Err(Errno::IO) } else { Ok(()) }
    }

    fn tell_all(&self, kind: ibv_event_type, source: &Source) {
        for context in self.contexts.lock().iter().filter_map(Weak::upgrade) {
            context.push(AsyncEvent { kind, source: source.clone() });
        }
    }

    /// Takes a port's link down, or up again. Returns `true` if there is such a port.
    pub(super) fn set_port(&self, number: u8, up: bool) -> bool {
        let Some(port) = self.port(number) else { return false };
        if port.up.swap(up, Ordering::SeqCst) != up {
            let kind = if up { ibv::IBV_EVENT_PORT_ACTIVE } else { ibv::IBV_EVENT_PORT_ERR };
            self.tell_all(kind, &Source::Port(number));
        }
        true
    }

    /// Takes the device out of the machine: none of its work ends any more.
    pub(super) fn remove(&self) {
        if !self.removed.swap(true, Ordering::SeqCst) {
            self.ports.iter().for_each(|port| port.up.store(false, Ordering::SeqCst));
            self.tell_all(ibv::IBV_EVENT_DEVICE_FATAL, &Source::Device);
        }
    }

    pub(super) fn is_removed(&self) -> bool {
        self.removed.load(Ordering::SeqCst)
    }

    /// Creates a protection domain.
    pub(super) fn new_domain(&self) -> Result<Domain, Errno> {
        self.domains.add()?;
        Ok(Domain(self.next_domain.fetch_add(1, Ordering::Relaxed)))
    }

    /// Returns a number for a queue pair that is unused, and was for a long time.
    pub(super) fn new_queue_number(&self) -> QueueNumber {
        let queues = self.queues.read();
        loop {
            let number = QueueNumber(self.next_queue.fetch_add(1, Ordering::Relaxed) & 0xff_ffff);
            if number.0 > 1 && !queues.contains_key(&number) {
                return number;
            }
        }
    }

    pub(super) fn add_queue(&self, queue: &Arc<QueuePair>) {
        let mut queues = self.queues.write();
        queues.insert(queue.number, Arc::clone(queue));
    }

    pub(super) fn remove_queue(&self, number: QueueNumber) {
        self.queues.write().remove(&number);
        self.queue_pairs.remove();
    }

    pub(super) fn queue(&self, number: QueueNumber) -> Option<Arc<QueuePair>> {
        self.queues.read().get(&number).cloned()
    }

    /// Returns all present queue pairs.
    pub(super) fn queues(&self) -> Vec<Arc<QueuePair>> {
        self.queues.read().values().cloned().collect()
    }

    /// Handles a packet for one of the ports.
    pub(super) fn deliver(&self, mut packet: Packet, out: &mut Outbox) {
        let is_up = self.port_at(packet.target.0).is_some_and(Port::is_up);
        if packet.body != Body::Lost && (!is_up || self.faults.loses_packet()) {
            return out.lost(packet);
        }
        self.hand_over(&mut packet, out);
    }

    fn hand_over(&self, packet: &mut Packet, out: &mut Outbox) {
        match self.queue(packet.target.1) {
            Some(queue) => queue.deliver(packet, out),
            None => out.lost_without_queue_pair(packet),
        }
    }

    /// Writes a peer's bytes, now or later, as the faults say.
    pub(super) fn write_for_peer(
        &self,
        domain: Domain,
        at: Remote,
        bytes: Vec<u8>,
    ) -> Result<(), Unreachable> {
        let of_a_gpu = || self.regions.is_of_a_gpu(domain, at);
        let until = match self.faults.visibility(true) {
            // The harshest order that relaxed memory permits: no byte is visible before an ordered
            // completion.
            Visibility::AtOnce if self.regions.is_relaxed(domain, at) => Visibility::WithCompletion,
            Visibility::AtOnce => Visibility::AtOnce,
            _ => self.faults.visibility(of_a_gpu()),
        };
        self.regions.note_written(bytes.len());
        if until == Visibility::AtOnce {
            return self.regions.write(domain, at, Access::REMOTE_WRITE, &bytes);
        }
        self.regions.check(domain, at, bytes.len() as u64, Access::REMOTE_WRITE)?;
        let right = Access::REMOTE_WRITE;
        self.late_writes.lock().push(LateWrite { domain, at, right, bytes, until });
        Ok(())
    }

    /// Writes bytes that were read from a peer into memory of this side. In a GPU's memory they
    /// may become visible later, too. With delay until a completion, this counts as the
    /// completion.
    pub(super) fn take_in(
        &self,
        domain: Domain,
        pieces: &[Piece],
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), Unreachable> {
        if self.faults.visibility(true) != Visibility::WithRead {
            return scatter(&self.regions, domain, pieces, offset, bytes);
        }
        let mut rest = bytes;
        for part in parts(pieces, offset, bytes.len() as u64) {
            let (now, later) = rest.split_at(part.len as usize);
            rest = later;
            let (at, right) = (part.at, Access::LOCAL_WRITE);
            if !self.regions.is_of_a_gpu(domain, at) {
                self.regions.write(domain, at, right, now)?;
                continue;
            }
            self.regions.check(domain, at, now.len() as u64, right)?;
            let (bytes, until) = (now.to_vec(), Visibility::WithRead);
            self.late_writes.lock().push(LateWrite { domain, at, right, bytes, until });
        }
        Ok(())
    }

    /// Makes delayed writes visible: those that a completion releases, or, before a read, all.
    /// Also those that are not delayed by the present faults.
    pub(super) fn settle_writes(&self, by: Visibility) {
        let mut late = self.late_writes.lock();
        if late.is_empty() {
            return;
        }
        let healed = self.faults.visibility(true) == Visibility::AtOnce;
        let due = |write: &mut LateWrite| healed || by == Visibility::WithRead || write.until == by;
        for write in late.extract_if(.., due) {
            // Memory deregistered meanwhile is not written.
            let _ = self.regions.write(write.domain, write.at, write.right, &write.bytes);
        }
    }
}

impl Drop for NicDevice {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            return;
        }
        for port in &self.ports {
            self.engine.unplug(port.address);
        }
    }
}
