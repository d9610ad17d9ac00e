//! Simulated NICs: a libibverbs in software, for machines without RDMA.
//!
//! Code for libibverbs runs on it unchanged: [`SimulatedNic::verbs`] is a table of functions like
//! the real library's. Devices of processes of one user and machine reach each other when they
//! name the same network ([`Config::fabric`]). Timing and speed are not simulated, and results
//! prove nothing about hardware. The specification's rules for queue pairs, keys, orders and
//! errors hold here. Failures of real drivers are available on request ([`Faults`]).
//!
//! In the order of a work request's way:
//!
//! | module | one idea |
//! |---|---|
//! | `config` | configuration of a NIC: [`Config`], [`Limits`], [`LinkLayer`] |
//! | `abi` | libibverbs' functions and structures: the only part that programs see |
//! | `device` | ports, tables, limits |
//! | `queue_pair` | queue pairs: states, requests, answers |
//! | `receives` | receive queues, and lists of pieces |
//! | `memory` | registered memory: the only part that touches a program's bytes |
//! | `completion` | completion queues |
//! | `events` | events behind descriptors |
//! | `engine` | plugging ports in, and telling the engine of work |
//! | `processor` | the engine's thread: the NIC's own processor |
//! | `wire` | packets |
//! | `network` | sockets between processes |
//! | `address` | addresses on the network |
//! | `faults` | faults on request: [`Faults`] |
//!
//! Timeouts run only when a packet is known to be lost: a port is down, or a queue pair or a
//! process is gone. A busy machine or a stopped process fails no request, as a real NIC goes on
//! answering for its program.
//!
//! Where drivers differ, the simulation takes the harsher way, so that it shows a program's
//! mistakes. A queue's place is free only when its completion has been polled. Of a failed
//! completion only the fields that the specification names are right. Completions of a queue pair
//! that is destroyed or reset are gone. Completion queues have exactly the requested size. Not
//! simulated: unreliable connections, XRC, memory windows, multicast, partitions, the drained
//! states, extended posting and polling (`ibv_qp_ex`, `ibv_cq_ex`).

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
pub use faults::{Call, Faults, HeldWork, Visibility, Which};
pub use memory::{MemoryCounters, Registered};

use abi::DeviceList;
use carrack_transports::verbs::sys::{Verbs, VerbsError};
use carrack_transports::verbs::{Rdma, VerbsOptions};
use device::NicDevice;
use engine::Engine;
use rustix::io::Errno;
use std::sync::{Arc, OnceLock};
use wire::PAYLOADS;

/// Returns the verbs transport over this process's simulated NIC, which is made at the first use.
pub fn transport(options: VerbsOptions) -> Rdma {
    static NIC: OnceLock<Result<SimulatedNic, VerbsError>> = OnceLock::new();
    let verbs = || match NIC.get_or_init(SimulatedNic::from_env) {
        Ok(nic) => Ok(nic.verbs()),
        Err(why) => Err(why.clone()),
    };
    Rdma::simulated(verbs, options)
}

/// A simulated NIC: devices, and the libibverbs that has them.
///
/// It has to live while devices are listed and opened; open contexts stay valid without it. A
/// process can have 256 at a time, each with any number of devices.
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
    devices: Vec<Arc<NicDevice>>,
    faults: Arc<Faults>,
    _list: Arc<DeviceList>,
}

impl SimulatedNic {
    /// Creates a NIC as the configuration says, plugged into its network.
    ///
    /// # Errors
    /// EINVAL: more than 255 ports a device, none, or a packet size that is out of range. EMFILE:
    /// the process has 256 simulated NICs, or no descriptor left. EADDRNOTAVAIL: the network has
    /// no more addresses. The system's error if it gives no thread or socket.
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
            // Without a device, on purpose or by failure, only this call ends the engine.
            engine.stop_if_unused();
            match nic {
                // The engine was at its end: the next attempt finds another.
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
                NicDevice::new(index, config, addresses, Arc::clone(&faults), Arc::clone(engine));
            engine.plug(&device);
            devices.push(device);
        }
        let list = DeviceList::new(&devices)?;
        let verbs = abi::verbs(&list);
        Ok(Self { verbs, devices, faults, _list: list })
    }

    /// Creates a NIC for a process of a job: [`Config::from_env`].
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_env() -> Result<Self, VerbsError> {
        Self::new(Config::from_env())
    }

    /// Returns the libibverbs with only these devices.
    pub fn verbs(&self) -> Arc<Verbs> {
        Arc::clone(&self.verbs)
    }

    /// Returns the verbs transport over this NIC, and keeps the NIC as long as that lives.
    pub fn transport(self: &Arc<Self>, options: VerbsOptions) -> Rdma {
        let nic = Arc::clone(self);
        Rdma::simulated(move || Ok(nic.verbs()), options)
    }

    /// Returns the faults that a test can order.
    pub fn faults(&self) -> &Arc<Faults> {
        &self.faults
    }

    /// Takes a port's link down, or up again. While it is down packets are lost, and all contexts
    /// of the device get the event. Devices count from 0, ports from 1. Returns `true` if there is
    /// such a port.
    pub fn set_port(&self, device: usize, port: u8, up: bool) -> bool {
        self.devices.get(device).is_some_and(|device| device.set_port(port, up))
    }

    /// Returns the present number of thread domains of a device.
    pub fn thread_domains(&self, device: usize) -> u32 {
        self.devices.get(device).map_or(0, |device| device.thread_domains.now())
    }

    /// Makes all writes visible, as the flush of a GPU does for a NIC's writes to its memory.
    pub fn flush(&self) {
        self.devices.iter().for_each(|device| device.settle_writes(Visibility::WithRead));
    }

    /// Returns the memory counters of a device, for all that have it open. Devices count from 0.
    pub fn memory_counters(&self, device: usize) -> Option<MemoryCounters> {
        self.devices.get(device).map(|device| device.regions.counters())
    }

    /// Takes a device out of the machine: all contexts get the event, calls fail with EIO, and no
    /// work in flight ends. Returns `true` if there is such a device.
    pub fn remove(&self, device: usize) -> bool {
        let device = self.devices.get(device);
        device.inspect(|device| device.remove()).is_some()
    }
}

/// Returns when every simulated NIC of this process has done its present work, and has delivered
/// the results.
///
/// For tests that wait until all is quiet. Between two polls that find nothing a NIC may have a
/// packet in flight: its thread may not have run, however far apart they are. Not waited for are
/// timers, held work, other processes, and NICs on a network without a name.
pub fn go_round() {
    Engine::all().iter().for_each(|engine| engine.go_round());
}
