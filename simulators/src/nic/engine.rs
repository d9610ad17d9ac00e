//! The engine: the processor of the simulated NICs of one process and network. Ports are plugged
//! into it, and its thread is told of work.
//!
//! It is a thread because a NIC works by itself: a peer's reads and writes are served while the
//! program is idle. The thread sleeps without work, and ends with the last port.

use super::address::{BLOCKS, PORTS_OF_A_BLOCK, PortAddress, PortBlock};
use super::completion::CompletionQueue;
use super::device::NicDevice;
use super::network;
use super::processor::Processor;
use super::queue_pair::QueuePair;
use super::wire::{Body, Packet};
use parking_lot::{Mutex, RwLock};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Waker of the engine's thread.
#[derive(Debug)]
pub(super) struct Bell {
    fd: OwnedFd,
    sleeping: AtomicBool,
    rung: AtomicBool,
    for_all: AtomicBool,
}

impl Bell {
    pub(super) fn new() -> Result<Self, Errno> {
        let fd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let off = || AtomicBool::new(false);
        Ok(Self { fd, sleeping: off(), rung: off(), for_all: off() })
    }

    /// Signals new work.
    pub(super) fn ring(&self) {
        self.rung.store(true, Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // A counter that is full wakes, too.
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }

    /// Signals work for every device.
    pub(super) fn ring_for_all(&self) {
        self.for_all.store(true, Ordering::SeqCst);
        self.ring();
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Returns `true` if there was no ring since the last look. Called before sleeping.
    pub(super) fn may_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        let quiet = !self.rung.load(Ordering::SeqCst);
        if !quiet {
            self.sleeping.store(false, Ordering::SeqCst);
        }
        quiet
    }

    /// Clears the signal, before a look at the work. Returns `true` if it is for all devices.
    pub(super) fn heard(&self) -> bool {
        self.sleeping.store(false, Ordering::SeqCst);
        self.rung.store(false, Ordering::SeqCst);
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        self.for_all.swap(false, Ordering::SeqCst)
    }
}

/// Messages to the engine's thread.
#[derive(Debug)]
pub(super) enum NicJob {
    /// A queue pair has work.
    Work(Arc<QueuePair>),
    /// A completion queue has completions that are not visible yet.
    Late(Arc<CompletionQueue>),
    /// A completion queue has broken.
    Overrun(Arc<CompletionQueue>),
    /// Other processes connect here.
    Listen(OwnedFd),
    /// A thread waits for the end of the present work.
    Round(Sender<()>),
}

/// The addresses of a process.
#[derive(Debug, Default)]
struct Addresses {
    /// Numbers that are free, by block.
    free: HashMap<PortBlock, BTreeSet<u8>>,
    /// Ports that are plugged in.
    used: usize,
    /// Set once the last port has gone: this engine is at its end.
    stopped: bool,
}

/// The engine.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) bell: Arc<Bell>,
    fabric: Option<String>,
    jobs: Mutex<Vec<NicJob>>,
    addresses: Mutex<Addresses>,
    ports: RwLock<HashMap<PortAddress, Weak<NicDevice>>>,
}

static FABRICS: Mutex<Option<HashMap<String, Weak<Engine>>>> = Mutex::new(None);

impl Engine {
    /// Returns the engine of a network: one shared by all users of a name in the process, or a
    /// private one.
    pub(super) fn of(fabric: Option<&str>) -> Result<Arc<Self>, Errno> {
        let Some(name) = fabric else { return Self::start(None) };
        let mut fabrics = FABRICS.lock();
        let fabrics = fabrics.get_or_insert_default();
        fabrics.retain(|_, engine| engine.strong_count() > 0);
        let running = fabrics.get(name).and_then(Weak::upgrade);
        if let Some(engine) = running.filter(|engine| !engine.addresses.lock().stopped) {
            return Ok(engine);
        }
        let engine = Self::start(Some(name.to_owned()))?;
        fabrics.insert(name.to_owned(), Arc::downgrade(&engine));
        Ok(engine)
    }

    fn start(fabric: Option<String>) -> Result<Arc<Self>, Errno> {
        let engine = Arc::new(Self {
            bell: Arc::new(Bell::new()?),
            fabric,
            jobs: Mutex::default(),
            addresses: Mutex::default(),
            ports: RwLock::default(),
        });
        let processor = Processor::new(&engine)?;
        std::thread::Builder::new()
            .name("simulated-nic".into())
            .spawn(move || processor.run())
            .map_err(|why| Errno::from_io_error(&why).unwrap_or(Errno::AGAIN))?;
        Ok(engine)
    }

    /// Returns the network's name, if other processes can be on it.
    pub(super) fn fabric(&self) -> Option<&str> {
        self.fabric.as_deref()
    }

    /// Takes addresses for `ports` ports.
    ///
    /// # Errors
    /// ESHUTDOWN: the last port has gone meanwhile, and the engine with it. EADDRNOTAVAIL: the
    /// network is full. The error of the socket of a block.
    pub(super) fn take_addresses(&self, ports: usize) -> Result<Vec<PortAddress>, Errno> {
        let mut addresses = self.addresses.lock();
        if addresses.stopped {
            return Err(Errno::SHUTDOWN);
        }
        let mut taken = Vec::with_capacity(ports);
        while taken.len() < ports {
            let free = addresses
                .free
                .iter_mut()
                .find_map(|(block, free)| Some((*block, free.pop_first()?)));
            match free {
                Some((block, number)) => taken.push(PortAddress::new(block, number)),
                None => {
                    let block = self.claim(&addresses)?;
                    addresses.free.insert(block, (1..=PORTS_OF_A_BLOCK).collect());
                }
            }
        }
        addresses.used += ports;
        Ok(taken)
    }

    fn claim(&self, addresses: &Addresses) -> Result<PortBlock, Errno> {
        for block in (0..BLOCKS).map(PortBlock).filter(|block| !addresses.free.contains_key(block))
        {
            let Some(fabric) = self.fabric() else { return Ok(block) };
            match network::listen(fabric, block) {
                Ok(listener) => {
                    self.submit(NicJob::Listen(listener));
                    return Ok(block);
                }
                Err(Errno::ADDRINUSE) => {}
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::ADDRNOTAVAIL)
    }

    /// Puts the ports of a device on the network.
    pub(super) fn plug(&self, device: &Arc<NicDevice>) {
        let mut ports = self.ports.write();
        for port in &device.ports {
            ports.insert(port.address, Arc::downgrade(device));
        }
    }

    /// Removes a port, and frees its address.
    pub(super) fn unplug(&self, address: PortAddress) {
        self.ports.write().remove(&address);
        let mut addresses = self.addresses.lock();
        addresses.free.entry(address.block()).or_default().insert(address.number());
        addresses.used -= 1;
        drop(addresses);
        self.stop_if_unused();
    }

    /// Ends the thread if no port is plugged in.
    pub(super) fn stop_if_unused(&self) {
        let mut addresses = self.addresses.lock();
        addresses.stopped |= addresses.used == 0;
        if addresses.stopped {
            self.bell.ring();
        }
    }

    pub(super) fn has_stopped(&self) -> bool {
        self.addresses.lock().stopped
    }

    /// Returns `true` if a block's ports are those of this process.
    pub(super) fn has_block(&self, block: PortBlock) -> bool {
        self.addresses.lock().free.contains_key(&block)
    }

    /// Returns the device of a port.
    pub(super) fn device(&self, address: PortAddress) -> Option<Arc<NicDevice>> {
        self.ports.read().get(&address)?.upgrade()
    }

    /// Returns all devices that are plugged in.
    pub(super) fn devices(&self) -> Vec<Arc<NicDevice>> {
        let ports = self.ports.read();
        let mut devices: Vec<_> = ports.values().filter_map(Weak::upgrade).collect();
        drop(ports);
        devices.sort_by_key(|device| Arc::as_ptr(device).addr());
        devices.dedup_by(|one, other| Arc::ptr_eq(one, other));
        devices
    }

    fn submit(&self, job: NicJob) {
        self.jobs.lock().push(job);
        self.bell.ring();
    }

    pub(super) fn take_jobs(&self) -> Vec<NicJob> {
        std::mem::take(&mut *self.jobs.lock())
    }

    pub(super) fn work_is_there(&self, pair: &Arc<QueuePair>) {
        self.submit(NicJob::Work(Arc::clone(pair)));
    }

    pub(super) fn completions_are_late(&self, queue: &Arc<CompletionQueue>) {
        self.submit(NicJob::Late(Arc::clone(queue)));
    }

    /// Waits until the engine has done its present work, and has delivered the results.
    pub(super) fn go_round(&self) {
        let (told, round) = channel();
        self.submit(NicJob::Round(told));
        // An engine at its end does no more work. A waiting thread keeps it alive, so others may
        // find it for a while.
        while !self.has_stopped()
            && round.recv_timeout(Duration::from_millis(10)) == Err(RecvTimeoutError::Timeout)
        {
        }
    }

    /// Returns the engines of all named networks of this process.
    pub(super) fn all() -> Vec<Arc<Self>> {
        FABRICS.lock().iter().flat_map(HashMap::values).filter_map(Weak::upgrade).collect()
    }

    pub(super) fn completion_queue_overrun(&self, queue: &Arc<CompletionQueue>) {
        self.submit(NicJob::Overrun(Arc::clone(queue)));
    }
}

/// Requests of a queue pair to the engine, at the end of its turn.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) packets: Vec<Packet>,
    /// Times at which it has to be woken.
    pub(super) wakes: Vec<Instant>,
    /// Set if a test holds it.
    pub(super) held: bool,
}

impl Outbox {
    pub(super) fn send(&mut self, packet: Packet) {
        self.packets.push(packet);
    }

    pub(super) fn wake_at(&mut self, when: Instant) {
        self.wakes.push(when);
    }

    pub(super) fn hold(&mut self) {
        self.held = true;
    }

    /// Loses a packet. The queue pair that waits for an answer to it, or for the answer that it
    /// is, is told.
    pub(super) fn lost(&mut self, packet: Packet) {
        match packet.body {
            Body::Request(_) => self.send(packet.reply(Body::Lost, Vec::new())),
            Body::Acknowledge | Body::Answer | Body::Original(_) | Body::Refused(_) => {
                self.send(Packet { body: Body::Lost, payload: Vec::new(), ..packet });
            }
            Body::Lost => {}
        }
    }

    /// Handles a packet for a queue pair that does not exist.
    pub(super) fn lost_without_queue_pair(&mut self, packet: &Packet) {
        if matches!(packet.body, Body::Request(_)) {
            self.send(packet.reply(Body::Lost, Vec::new()));
        }
    }
}
