//! Simulated NICs: a libibverbs in software, for machines without RDMA.
//!
//! What is written for libibverbs runs on it unchanged: [`SimulatedNic::verbs`] is a table of
//! functions like the real library's. Devices of processes of one user and machine reach each other
//! when they name the same network ([`Config::fabric`]). Timing and speed are not simulated, nor is
//! anything a proof of what hardware does; but what the specification says of queue pairs, keys,
//! orders and errors holds here, and what real drivers make a program suffer from can be had to
//! order ([`Faults`]).
//!
//! In the order in which a work request passes through:
//!
//! | module | one idea |
//! |---|---|
//! | `config` | what a NIC is told to be: [`Config`], [`Limits`], [`LinkLayer`] |
//! | `abi` | libibverbs' functions and structures: the only part that programs see |
//! | `device` | ports, tables, limits |
//! | `queue_pair` | queue pairs: states, requests, answers |
//! | `receives` | receive queues, and lists of pieces |
//! | `memory` | registered memory, of the host and of GPUs: the only part that touches a program's bytes |
//! | `completion` | completion queues |
//! | `events` | what a program sleeps for |
//! | `engine` | where ports are plugged in, and how the engine is told of work |
//! | `processor` | the engine's thread: the NIC's own processor |
//! | `wire` | packets |
//! | `network` | sockets between processes |
//! | `address` | who is who on the network |
//! | `faults` | misbehaviour to order: [`Faults`] |
//!
//! Timeouts run only when something is known to be lost: a port that is down, a queue pair or a
//! process that is gone. A machine that is busy, or a process that is stopped, fails nobody, as a
//! real NIC goes on answering for its program.
//!
//! Where drivers differ the harsher way was taken, so that what is wrong in a program shows here: a
//! queue's place is free only when its completion has been polled; of a completion that failed only
//! the fields that the specification names are right; completions of a queue pair that is destroyed
//! or reset are gone; completion queues have exactly the size that was asked for. Not simulated:
//! unreliable connections, XRC, memory windows, multicast, partitions, the drained states, extended
//! posting and polling (`ibv_qp_ex`, `ibv_cq_ex`).

mod abi;
mod address;
mod completion;
mod config;
mod device;
mod engine;
mod events;
mod faults;
mod memory;
mod network;
mod processor;
mod queue_pair;
mod receives;
mod wire;

pub use config::{Config, FABRIC_VARIABLE, Limits, LinkLayer};
pub use faults::{Call, Faults, Held, Visibility, Which};
pub use memory::{MemoryCounters, Registered};

use abi::DeviceList;
use carrack_transports::verbs::sys::{Verbs, VerbsError};
use carrack_transports::verbs::{Options, Rdma};
use device::Device;
use engine::Engine;
use rustix::io::Errno;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use wire::PAYLOADS;

/// Returns the verbs transport over this process's simulated NIC, which is made at the first use.
pub fn transport(options: Options) -> Rdma {
    static NIC: OnceLock<Result<SimulatedNic, VerbsError>> = OnceLock::new();
    let verbs = || match NIC.get_or_init(SimulatedNic::from_env) {
        Ok(nic) => Ok(nic.verbs()),
        Err(why) => Err(why.clone()),
    };
    Rdma::simulated(verbs, options)
}

/// A simulated NIC: devices, and the libibverbs that has them.
///
/// To be kept for as long as devices are to be listed and opened; contexts that are open stay good
/// without it. A process can have 64 at a time, each with as many devices as it likes.
///
/// ```
/// use carrack_simulators::nic::{Config, SimulatedNic};
/// use carrack_transports::verbs::sys::Context;
///
/// let nic = SimulatedNic::new(Config::devices(2))?;
/// let names = Context::list(&nic.verbs())?;
/// assert_eq!(names.len(), 2);
/// let context = Context::open(&nic.verbs(), "sim1")?;
/// assert_eq!(context.port_attr(1)?.active_mtu, 5);
/// # Ok::<(), carrack_transports::verbs::sys::VerbsError>(())
/// ```
#[derive(Debug)]
pub struct SimulatedNic {
    verbs: Arc<Verbs>,
    devices: Vec<Arc<Device>>,
    faults: Arc<Faults>,
    _list: Arc<DeviceList>,
}

impl SimulatedNic {
    /// A NIC as the configuration says, plugged into its network.
    ///
    /// # Errors
    /// EINVAL: more than 255 ports a device, none, or a packet size that is out of range. EMFILE:
    /// the process has 256 simulated NICs, or no descriptor left. EADDRNOTAVAIL: the network has no
    /// more addresses. What the system says when it gives no thread or socket.
    pub fn new(config: Config) -> Result<Self, VerbsError> {
        Self::build(&config)
            .map_err(|errno| VerbsError::new("SimulatedNic::new", errno.raw_os_error()))
    }

    fn build(config: &Config) -> Result<Self, Errno> {
        if config.ports == 0 || !PAYLOADS.contains(&config.packet) {
            return Err(Errno::INVAL);
        }
        loop {
            let engine = Engine::of(config.fabric.as_deref())?;
            let nic = Self::plug_in(config, &engine);
            // Without a device, by wish or by failure, nobody else would end the engine.
            engine.stop_if_unused();
            match nic {
                // It was at its end: the next one is another.
                Err(Errno::SHUTDOWN) => {}
                nic => return nic,
            }
        }
    }

    fn plug_in(config: &Config, engine: &Arc<Engine>) -> Result<Self, Errno> {
        let faults = Arc::new(Faults::new(Arc::clone(&engine.bell)));
        let mut devices = Vec::with_capacity(config.devices);
        for index in 0..config.devices {
            let addresses = engine.take_addresses(usize::from(config.ports))?;
            let device =
                Device::new(index, config, addresses, Arc::clone(&faults), Arc::clone(engine));
            engine.plug(&device);
            devices.push(device);
        }
        let list = DeviceList::new(&devices)?;
        let verbs = abi::verbs(&list);
        Ok(Self { verbs, devices, faults, _list: list })
    }

    /// A NIC for a process of a job: [`Config::from_env`].
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_env() -> Result<Self, VerbsError> {
        Self::new(Config::from_env())
    }

    /// The libibverbs that has these devices, and no others.
    pub fn verbs(&self) -> Arc<Verbs> {
        Arc::clone(&self.verbs)
    }

    /// Returns the verbs transport over this NIC, and keeps the NIC as long as that lives.
    pub fn transport(self: &Arc<Self>, options: Options) -> Rdma {
        let nic = Arc::clone(self);
        Rdma::simulated(move || Ok(nic.verbs()), options)
    }

    /// Misbehaviour to order.
    pub fn faults(&self) -> &Arc<Faults> {
        &self.faults
    }

    /// Takes a port's link down, or up again: packets are lost, and all contexts of the device are
    /// told. Devices count from 0, ports from 1. Whether there is such a port.
    pub fn set_port(&self, device: usize, port: u8, up: bool) -> bool {
        self.devices.get(device).is_some_and(|device| device.set_port(port, up))
    }

    /// How many thread domains of a device there are at the moment.
    pub fn thread_domains(&self, device: usize) -> u32 {
        self.devices.get(device).map_or(0, |device| device.thread_domains.now())
    }

    /// Lets all that was written be seen: what the flush of a GPU whose memory it lies in does to a
    /// NIC's writes.
    pub fn flush(&self) {
        self.devices.iter().for_each(|device| device.settle_writes(Visibility::WithRead));
    }

    /// What a device's memory has come to so far, of all that have it open. Devices count from 0.
    pub fn memory_counters(&self, device: usize) -> Option<MemoryCounters> {
        self.devices.get(device).map(|device| device.regions.counters())
    }

    /// Takes a device out of the machine: all contexts are told, calls fail with EIO, and nothing
    /// that was under way ends. Whether there is such a device.
    pub fn remove(&self, device: usize) -> bool {
        let device = self.devices.get(device);
        device.inspect(|device| device.remove()).is_some()
    }
}

/// Returns when every simulated NIC of this process has done what it was given before, and has
/// delivered what came of that.
///
/// For tests that wait for stillness: between two polls that find nothing a NIC may have something
/// on its way, and however long they are apart, its thread may have got no time to run. What waits
/// for a timer, is held, or comes from another process is not waited for, nor is a NIC on a network
/// without a name.
pub fn go_round() {
    Engine::all().iter().for_each(|engine| engine.go_round());
}

/// Locks a mutex; a panic of somebody who held it is not passed on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
