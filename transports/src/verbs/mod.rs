//! The transport between nodes: RDMA by verbs.
//!
//! | module | one idea |
//! |---|---|
//! | [`sys`] | libibverbs: bindings, a table of functions, objects with a safe drop order |
//! | [`options`] | options of queue pairs and paths |
//! | `survey`, `choice` | this machine's devices, and a rank's choice among them |
//! | [`port`] | choice of a port, and of its GID |
//! | `address` | a device's published address, and reachability |
//! | `wire` | the messages by which two devices make a connection |
//! | `channel` | the TCP connection that carries them, and stays open |
//! | `domain` | a port, opened for a rank |
//! | `queue_pairs` | queue pairs, and the states that they are brought into |
//! | `thread_domains` | queue pairs that the library takes no locks for |
//! | `memory`, `bounces` | memory that the NIC reads and writes |
//! | `wishes` | with its pages locked or not, and in which order it is written |
//! | `gpu_memory` | memory of GPUs, made known to the NIC |
//! | `wr_id` | names of work requests |
//! | `signs` | signals between senders and the poller |
//! | `together` | short messages that go to a peer in one request |
//! | `sending` | work requests, and the resources that they hold |
//! | `transfers` | bytes that the NIC moves between this rank's memory and a peer's |
//! | `receives` | the shared receive queue and its packets |
//! | `connection` | a queue pair to one peer's device |
//! | `entries` | all connections of a device |
//! | `credits` | those owed to peers, and peers that return none |
//! | `meeting`, `callers` | set-up and end of connections |
//! | `partings` | queue pairs that stay until their last receive has come back |
//! | `chunks` | a buffer that a peer may write to, one chunk after the other |
//! | `rails` | several NICs of one rank |
//! | `completions` | meaning of completions |
//! | `device` | the completion queue, and upkeep |
//! | `link` | the runtime's link to a peer |
//!
//! docs/transports.md describes the transport for users; docs/adr/0012-tcp-for-queue-pairs.md
//! gives the reason for the TCP connections.

pub(crate) mod address;
mod bounces;
mod callers;
pub(crate) mod channel;
mod choice;
mod chunks;
mod closing;
mod completions;
mod connection;
mod credits;
mod device;
mod domain;
mod entries;
mod gpu_memory;
mod link;
mod meeting;
mod memory;
pub mod options;
mod partings;
pub mod port;
mod queue_pairs;
mod rails;
mod receives;
mod sending;
mod settings;
mod signs;
mod survey;
pub mod sys;
mod thread_domains;
pub(crate) mod together;
mod transfers;
pub(crate) mod wire;
mod wishes;
mod wr_id;

pub use options::VerbsOptions;
pub use settings::VerbsSettings;

use crate::contract::{DeviceInfo, Domain, Identity, Transport, Unavailable};
use std::fmt;
use std::sync::{Arc, OnceLock};
use survey::Seen;
use sys::{Context, Verbs, VerbsError};

/// The transport's name.
pub const NAME: &str = "verbs";

/// The name of the same transport over simulated devices.
pub const SIMULATED: &str = "verbs-simulated";

/// RDMA by verbs.
#[derive(Clone, Debug)]
pub struct Rdma {
    source: VerbsSource,
    options: VerbsOptions,
}

/// The origin of the functions.
#[derive(Clone)]
enum VerbsSource {
    /// This machine's libibverbs, opened at the first use.
    Library(OnceLock<Result<Arc<Verbs>, VerbsError>>),
    /// A simulator, asked at the first use.
    Simulator(Arc<Open>),
}

type Open = dyn Fn() -> Result<Arc<Verbs>, VerbsError> + Send + Sync;

impl fmt::Debug for VerbsSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library(_) => f.write_str("Library"),
            Self::Simulator(_) => f.write_str("Simulator"),
        }
    }
}

impl Rdma {
    /// Uses this machine's libibverbs.
    pub fn new(options: VerbsOptions) -> Self {
        Self { source: VerbsSource::Library(OnceLock::new()), options }
    }

    /// Uses simulated devices, whose functions `open` returns.
    ///
    /// Reports call every device simulated, and only processes of one machine reach each other.
    pub fn simulated(
        open: impl Fn() -> Result<Arc<Verbs>, VerbsError> + Send + Sync + 'static,
        options: VerbsOptions,
    ) -> Self {
        Self { source: VerbsSource::Simulator(Arc::new(open)), options }
    }

    fn is_simulated(&self) -> bool {
        matches!(self.source, VerbsSource::Simulator(_))
    }

    fn verbs(&self) -> Result<Arc<Verbs>, Unavailable> {
        let verbs = match &self.source {
            VerbsSource::Library(verbs) => verbs.get_or_init(Verbs::open).clone(),
            VerbsSource::Simulator(open) => open(),
        };
        verbs.map_err(|error| Unavailable::new(self.name(), error.to_string()))
    }
}

impl Rdma {
    /// Returns the devices that answer, and those that do not.
    fn survey(&self) -> Result<(Vec<Seen>, Vec<DeviceInfo>), Unavailable> {
        let verbs = self.verbs()?;
        let names = Context::list(&verbs)
            .map_err(|error| Unavailable::new(self.name(), error.to_string()))?;
        let (mut seen, mut silent) = (Vec::new(), Vec::new());
        for name in names {
            match Seen::ask(&verbs, name.as_str(), self.is_simulated()) {
                Ok(device) => seen.push(device),
                Err(why) => {
                    silent.push(DeviceInfo { name: name.to_string(), note: why.to_string() })
                }
            }
        }
        Ok((seen, silent))
    }

    /// Returns a device, and the further ones that large messages may be spread over.
    fn rails(&self, first: &str) -> Result<Vec<String>, Unavailable> {
        let mut rails = vec![first.to_owned()];
        if self.options.rails > 1 && self.options.device.is_none() {
            let (seen, _) = self.survey()?;
            let alike = choice::rails(&seen, &choice::nodes_of_this_thread(), self.options.place);
            let others =
                alike.into_iter().map(|at| seen[at].name.clone()).filter(|name| name != first);
            rails.extend(others);
        }
        Ok(rails)
    }
}

impl Transport for Rdma {
    fn name(&self) -> &'static str {
        if self.is_simulated() { SIMULATED } else { NAME }
    }

    fn needs_a_device(&self) -> bool {
        !self.is_simulated()
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Unavailable> {
        let (seen, silent) = self.survey()?;
        let order = choice::order(&seen, &choice::nodes_of_this_thread(), self.options.place);
        let known = order.into_iter().map(|at| &seen[at]);
        let known =
            known.map(|seen| DeviceInfo { name: seen.name.clone(), note: seen.to_string() });
        Ok(known.chain(silent).collect())
    }

    fn open(
        &self,
        device: &DeviceInfo,
        identity: Identity,
    ) -> Result<Arc<dyn Domain>, Unavailable> {
        let verbs = self.verbs()?;
        let (name, options) = (self.name(), self.options.clone());
        let devices = self.rails(&device.name)?;
        let domain = domain::RdmaDomain::open(
            (&verbs, name, self.is_simulated()),
            &devices,
            options,
            identity,
        )?;
        Ok(Arc::new(domain))
    }
}
