//! The transports of this build: their names, their settings, and their making. A new transport is
//! one entry in each of the three.

use crate::contract::{Domain, Transport, Unavailable};
use crate::cuda_ipc::{self, CudaIpc, CudaIpcSettings};
use crate::gpu::Driver;
use crate::loopback::{self, Loopback};
use crate::settings::{AutoChoice, Choice};
use crate::shm::{self, Shm, ShmSettings};
use crate::tcp::{self, Tcp, TcpSettings};
use crate::verbs::{self, Rdma, VerbsOptions, VerbsSettings};
use std::sync::Arc;

crate::declare_choice! {
    /// A transport that `CARRACK_TRANSPORT` can name.
    pub enum TransportChoice {
        /// `loopback`: to the process itself.
        Loopback = loopback::NAME,
        /// `shm`: shared memory, to the processes of the same node.
        Shm = shm::NAME,
        /// `verbs`: RDMA, to other nodes.
        Verbs = verbs::NAME,
        /// `tcp`: TCP, to other nodes without RDMA.
        Tcp = tcp::NAME,
        /// `verbs-simulated`: the same over a NIC that is simulated on this machine, for tests.
        VerbsSimulated = verbs::SIMULATED,
    }
}

impl TransportChoice {
    /// Transports that are used by default, the preferred one first.
    pub const USUAL: [Self; 4] = [Self::Loopback, Self::Shm, Self::Verbs, Self::Tcp];

    /// Returns the transport's name.
    pub fn name(self) -> &'static str {
        self.word()
    }
}

crate::declare_settings! {
    /// The settings of the transports, each of which declares its own.
    pub struct TransportSettings {
        shm: ShmSettings;
        cuda_ipc: CudaIpcSettings;
        verbs: VerbsSettings;
        tcp: TcpSettings;
    }
}

/// Returns the transports that carry messages, the nearest first. `packet_size`: bytes; `place`:
/// the rank's on its node; `simulated`: makes the one over simulated NICs, of another crate.
pub fn all(
    settings: &TransportSettings,
    packet_size: usize,
    place: u32,
    simulated: impl FnOnce(VerbsOptions) -> Rdma,
) -> Vec<Box<dyn Transport>> {
    let options = VerbsOptions::of(settings.verbs(), packet_size, place);
    vec![
        Box::new(Loopback::new(packet_size)),
        Box::new(Shm::with(settings.shm(), packet_size)),
        Box::new(Rdma::new(options.clone())),
        Box::new(Tcp::new(tcp::TcpOptions::of(settings.tcp(), packet_size))),
        Box::new(simulated(options)),
    ]
}

/// Returns the domain that maps GPU memory of the node's other processes, with its name.
///
/// # Errors
/// The setting that forbids it.
pub fn maps_of_gpus(
    settings: &TransportSettings,
    drivers: Vec<Arc<dyn Driver>>,
) -> Result<(&'static str, Arc<dyn Domain>), Unavailable> {
    if settings.cuda_ipc().gpu_ipc() == AutoChoice::Off {
        return Err(Unavailable::new(cuda_ipc::NAME, "CARRACK_GPU_IPC=off"));
    }
    Ok((cuda_ipc::NAME, Arc::new(CudaIpc::new(drivers))))
}
