//! The transports of this build.

use crate::contract::{Domain, Transport};
use crate::cuda_ipc::{self, CudaIpc};
use crate::gpu::Driver;
use crate::loopback::Loopback;
use crate::shm::{Geometry, Shm};
use crate::verbs::{Options, Rdma};
use std::sync::Arc;

/// Returns the transports that carry messages, the nearest first. `packet_size`: bytes.
pub fn all(
    packet_size: usize,
    geometry: Geometry,
    kernel_copy: bool,
    verbs: &Options,
) -> Vec<Box<dyn Transport>> {
    vec![
        Box::new(Loopback::new(packet_size)),
        Box::new(Shm::new(geometry).kernel_copy(kernel_copy)),
        Box::new(Rdma::new(verbs.clone())),
    ]
}

/// Returns the domain that maps GPU memory of the node's other processes, with its name.
pub fn maps_of_gpus(drivers: Vec<Arc<dyn Driver>>) -> (&'static str, Arc<dyn Domain>) {
    (cuda_ipc::NAME, Arc::new(CudaIpc::new(drivers)))
}
