//! The processor of the simulated NICs of one process and network: where they are plugged in, and
//! how its thread is told of work.
//!
//! It is a thread because a NIC works by itself: what a peer reads or writes is served while the
//! program does nothing. The thread sleeps when there is nothing to do, and ends with the last
//! port.

use super::address::{BLOCKS, Block, PORTS_OF_A_BLOCK, PortAddress};
use super::completion::CompletionQueue;
use super::device::Device;
use super::lock;
use super::network;
use super::processor::Processor;
use super::queue_pair::QueuePair;
use super::wire::{Body, Packet};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use std::collections::{BTreeSet, HashMap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

/// Wakes the engine's thread.
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

    /// There is something to look at.
    pub(super) fn ring(&self) {
        self.rung.store(true, Ordering::SeqCst);
        if self.sleeping.swap(false, Ordering::SeqCst) {
            // A counter that is full wakes as well as another.
            let _ = rustix::io::write(&self.fd, &1_u64.to_ne_bytes());
        }
    }

    /// There is something to look at with every device.
    pub(super) fn ring_for_all(&self) {
        self.for_all.store(true, Ordering::SeqCst);
        self.ring();
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// To be called before sleeping: whether nobody has rung meanwhile.
    pub(super) fn may_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::SeqCst);
        let quiet = !self.rung.load(Ordering::SeqCst);
        if !quiet {
            self.sleeping.store(false, Ordering::SeqCst);
        }
        quiet
    }

    /// To be called before looking at what there is. Whether it is for all devices.
    pub(super) fn heard(&self) -> bool {
        self.sleeping.store(false, Ordering::SeqCst);
        self.rung.store(false, Ordering::SeqCst);
        let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        self.for_all.swap(false, Ordering::SeqCst)
    }
}

/// What the engine's thread is told.
#[derive(Debug)]
pub(super) enum Job {
    /// A queue pair has work.
    Work(Arc<QueuePair>),
    /// A completion queue has completions that do not show yet.
    Late(Arc<CompletionQueue>),
    /// A completion queue has broken.
    Overrun(Arc<CompletionQueue>),
    /// Other processes connect here.
    Listen(OwnedFd),
    /// Somebody wants to be told when what there is to be done now has been done.
    Round(Sender<()>),
}

/// The addresses that a process has.
#[derive(Debug, Default)]
struct Addresses {
    /// Numbers that are free, by block.
    free: HashMap<Block, BTreeSet<u8>>,
    /// Ports that are plugged in.
    used: usize,
    /// The last port has gone: this engine is at its end.
    stopped: bool,
}

/// The engine.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) bell: Arc<Bell>,
    fabric: Option<String>,
    jobs: Mutex<Vec<Job>>,
    addresses: Mutex<Addresses>,
    ports: RwLock<HashMap<PortAddress, Weak<Device>>>,
}

static FABRICS: Mutex<Option<HashMap<String, Weak<Engine>>>> = Mutex::new(None);

impl Engine {
    /// The engine of a network: one for all of the process that name it, or one of its own.
    pub(super) fn of(fabric: Option<&str>) -> Result<Arc<Self>, Errno> {
        let Some(name) = fabric else { return Self::start(None) };
        let mut fabrics = lock(&FABRICS);
        let fabrics = fabrics.get_or_insert_default();
        fabrics.retain(|_, engine| engine.strong_count() > 0);
        let running = fabrics.get(name).and_then(Weak::upgrade);
        if let Some(engine) = running.filter(|engine| !lock(&engine.addresses).stopped) {
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

    /// The network's name, if other processes can be on it.
    pub(super) fn fabric(&self) -> Option<&str> {
        self.fabric.as_deref()
    }

    /// Addresses for so many ports.
    ///
    /// # Errors
    /// ESHUTDOWN: the last port has gone meanwhile, and the engine with it. EADDRNOTAVAIL: the
    /// network is full. What the socket of a block gives.
    pub(super) fn take_addresses(&self, ports: usize) -> Result<Vec<PortAddress>, Errno> {
        let mut addresses = lock(&self.addresses);
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

    fn claim(&self, addresses: &Addresses) -> Result<Block, Errno> {
        for block in (0..BLOCKS).map(Block).filter(|block| !addresses.free.contains_key(block)) {
            let Some(fabric) = self.fabric() else { return Ok(block) };
            match network::listen(fabric, block) {
                Ok(listener) => {
                    self.submit(Job::Listen(listener));
                    return Ok(block);
                }
                Err(Errno::ADDRINUSE) => {}
                Err(errno) => return Err(errno),
            }
        }
        Err(Errno::ADDRNOTAVAIL)
    }

    /// The ports of a device are on the network from now on.
    pub(super) fn plug(&self, device: &Arc<Device>) {
        let mut ports = self.ports.write().unwrap_or_else(PoisonError::into_inner);
        for port in &device.ports {
            ports.insert(port.address, Arc::downgrade(device));
        }
    }

    /// A port is gone, and its address free.
    pub(super) fn unplug(&self, address: PortAddress) {
        self.ports.write().unwrap_or_else(PoisonError::into_inner).remove(&address);
        let mut addresses = lock(&self.addresses);
        addresses.free.entry(address.block()).or_default().insert(address.number());
        addresses.used -= 1;
        drop(addresses);
        self.stop_if_unused();
    }

    /// Ends the thread if no port is plugged in.
    pub(super) fn stop_if_unused(&self) {
        let mut addresses = lock(&self.addresses);
        addresses.stopped |= addresses.used == 0;
        if addresses.stopped {
            self.bell.ring();
        }
    }

    pub(super) fn has_stopped(&self) -> bool {
        lock(&self.addresses).stopped
    }

    /// Whether a block's ports are those of this process.
    pub(super) fn has_block(&self, block: Block) -> bool {
        lock(&self.addresses).free.contains_key(&block)
    }

    /// The device that a port is of.
    pub(super) fn device(&self, address: PortAddress) -> Option<Arc<Device>> {
        self.ports.read().unwrap_or_else(PoisonError::into_inner).get(&address)?.upgrade()
    }

    /// All devices that are plugged in.
    pub(super) fn devices(&self) -> Vec<Arc<Device>> {
        let ports = self.ports.read().unwrap_or_else(PoisonError::into_inner);
        let mut devices: Vec<_> = ports.values().filter_map(Weak::upgrade).collect();
        drop(ports);
        devices.sort_by_key(|device| Arc::as_ptr(device).addr());
        devices.dedup_by(|one, other| Arc::ptr_eq(one, other));
        devices
    }

    fn submit(&self, job: Job) {
        lock(&self.jobs).push(job);
        self.bell.ring();
    }

    pub(super) fn take_jobs(&self) -> Vec<Job> {
        std::mem::take(&mut *lock(&self.jobs))
    }

    pub(super) fn work_is_there(&self, pair: &Arc<QueuePair>) {
        self.submit(Job::Work(Arc::clone(pair)));
    }

    pub(super) fn completions_are_late(&self, queue: &Arc<CompletionQueue>) {
        self.submit(Job::Late(Arc::clone(queue)));
    }

    /// Waits until the engine has done what it was given, and has delivered what came of that.
    pub(super) fn go_round(&self) {
        let (told, round) = channel();
        self.submit(Job::Round(told));
        // An engine at its end does nothing any more. Who waits for it keeps it, so others may find
        // it for a while.
        while !self.has_stopped()
            && round.recv_timeout(Duration::from_millis(10)) == Err(RecvTimeoutError::Timeout)
        {
        }
    }

    /// The engines of all networks of this process that have a name.
    pub(super) fn all() -> Vec<Arc<Self>> {
        lock(&FABRICS).iter().flat_map(HashMap::values).filter_map(Weak::upgrade).collect()
    }

    pub(super) fn completion_queue_overrun(&self, queue: &Arc<CompletionQueue>) {
        self.submit(Job::Overrun(Arc::clone(queue)));
    }
}

/// What a queue pair wants of the engine when it has had its turn.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) packets: Vec<Packet>,
    /// When it wants to be woken.
    pub(super) wakes: Vec<Instant>,
    /// Whether a test holds it.
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

    /// A packet goes nowhere: whoever waits for an answer to it, or for the answer that it is, is
    /// told.
    pub(super) fn lost(&mut self, packet: Packet) {
        match packet.body {
            Body::Request(_) => self.send(packet.reply(Body::Lost, Vec::new())),
            Body::Acknowledge | Body::Answer | Body::Original(_) | Body::Refused(_) => {
                self.send(Packet { body: Body::Lost, payload: Vec::new(), ..packet });
            }
            Body::Lost => {}
        }
    }

    /// A packet has come for a queue pair that is not there.
    pub(super) fn lost_for_nobody(&mut self, packet: &Packet) {
        if matches!(packet.body, Body::Request(_)) {
            self.send(packet.reply(Body::Lost, Vec::new()));
        }
    }
}
