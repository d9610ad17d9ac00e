//! Configuration of a simulated NIC.

use carrack_transports::gpu::Driver;
use std::sync::Arc;

/// Addressing of the ports of a simulated NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LinkLayer {
    /// RoCE: no LID, and a table of four GIDs a port, as real drivers fill it: link-local and
    /// IPv4, version 1 and 2 of each.
    Ethernet,
    /// InfiniBand: a LID, and one GID.
    InfiniBand,
}

/// Limits of a simulated device. Requests beyond them are refused, as by a real driver.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Queue pairs.
    pub queue_pairs: u32,
    /// Work requests of a queue.
    pub work_requests: u32,
    /// Pieces of a work request.
    pub pieces: u32,
    /// Bytes of a work request that is posted inline; 0 is a device that has no inline data.
    pub inline: u32,
    /// Completion queues.
    pub completion_queues: u32,
    /// Entries of a completion queue.
    pub completions: u32,
    /// Shared receive queues.
    pub shared_receive_queues: u32,
    /// Work requests of a shared receive queue.
    pub shared_receives: u32,
    /// Memory regions.
    pub memory_regions: u32,
    /// Protection domains.
    pub protection_domains: u32,
    /// Reads and atomic operations of a queue pair in flight, in each direction.
    pub reads: u8,
    /// Set if it does atomic operations: atomic among those of one device (`IBV_ATOMIC_HCA`).
    pub atomics: bool,
    /// Set if it pages on demand, for reads, writes and words of reliable connections.
    pub on_demand: bool,
    /// Bytes that may be registered with locking. A real kernel takes the limit from
    /// `RLIMIT_MEMLOCK`.
    pub locked: u64,
    /// Thread domains; 0 is a device that has none.
    pub thread_domains: u32,
    /// Bytes of a message.
    pub message: u32,
}

impl Default for Limits {
    /// Returns the limits of a modern adapter, as far as programs notice them.
    fn default() -> Self {
        Self {
            queue_pairs: 1 << 18,
            work_requests: 1 << 15,
            pieces: 30,
            inline: 956,
            completion_queues: 1 << 24,
            completions: (1 << 22) - 1,
            shared_receive_queues: 1 << 20,
            shared_receives: (1 << 15) - 1,
            memory_regions: 1 << 24,
            protection_domains: 1 << 23,
            reads: 16,
            atomics: true,
            on_demand: true,
            locked: u64::MAX,
            thread_domains: 1 << 10,
            message: 1 << 30,
        }
    }
}

/// Configuration of a simulated NIC.
///
/// ```
/// use carrack_simulators::nic::{Config, Limits};
/// // Two devices of two ports each, without inline data.
/// let config = Config { ports: 2, limits: Limits { inline: 0, ..Limits::default() },
/// ..Config::devices(2) };
/// # assert_eq!(config.devices, 2);
/// ```
#[derive(Clone, Debug)]
pub struct Config {
    /// Devices, which are called `sim0`, `sim1` and so on.
    pub devices: usize,
    /// Ports of each device.
    pub ports: u8,
    /// Addressing of the ports.
    pub link_layer: LinkLayer,
    /// Limits of each device.
    pub limits: Limits,
    /// Name of the network that the ports are plugged into. Devices of all processes of one user
    /// and machine meet there. `None` is a private network of these devices, which needs no
    /// socket.
    pub fabric: Option<String>,
    /// Bytes of a message that travel in one packet, 1 to 60 KiB. Independent of the port's MTU.
    pub packet: usize,
    /// Set if contexts offer libibverbs' extended calls (`verbs_context`); else they are those of
    /// an old library.
    pub extended: bool,
    /// Drivers whose memory can be registered by its address, as with a peer-memory module in the
    /// kernel.
    pub gpus: Vec<Arc<dyn Driver>>,
}

impl Default for Config {
    /// Returns one RoCE device of one port, on a network of its own.
    fn default() -> Self {
        Self {
            devices: 1,
            ports: 1,
            link_layer: LinkLayer::Ethernet,
            limits: Limits::default(),
            fabric: None,
            packet: 16 << 10,
            extended: true,
            gpus: Vec::new(),
        }
    }
}

impl Config {
    /// Returns the defaults with that number of devices.
    pub fn devices(devices: usize) -> Self {
        Self { devices, ..Self::default() }
    }

    /// Returns the configuration for a process of a job: one device, on the network that
    /// [`FABRIC_VARIABLE`] names. Without the variable, the network is one for all processes of
    /// this user.
    pub fn from_env() -> Self {
        let of_the_user = || format!("user {}", rustix::process::geteuid().as_raw());
        let fabric = std::env::var(FABRIC_VARIABLE).unwrap_or_else(|_| of_the_user());
        Self { fabric: Some(fabric), ..Self::default() }
    }
}

/// Variable with the name of the network, for [`Config::from_env`].
pub const FABRIC_VARIABLE: &str = "CARRACK_SIMULATED_FABRIC";
