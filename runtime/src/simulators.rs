//! Simulated hardware, in builds with the feature `simulators`; elsewhere, the error that says so.

#[cfg(feature = "simulators")]
mod here {
    use carrack_simulators::gpu::{FakeConfig, FakeDriver};
    use carrack_transports::gpu::{Driver, GpuError};
    use carrack_transports::verbs::{Rdma, VerbsOptions};
    use std::sync::Arc;

    /// Makes a driver of `devices` simulated GPUs.
    pub(crate) fn gpus(devices: usize) -> Result<Arc<dyn Driver>, GpuError> {
        let config = FakeConfig { devices, ..FakeConfig::default() };
        Ok(Arc::new(FakeDriver::new(config)?))
    }

    /// Returns the verbs transport over this process's simulated NIC.
    pub(crate) fn nic(options: VerbsOptions) -> Rdma {
        carrack_simulators::nic::transport(options)
    }
}

#[cfg(not(feature = "simulators"))]
mod here {
    use carrack_transports::gpu::{Driver, GpuError};
    use carrack_transports::verbs::sys::VerbsError;
    use carrack_transports::verbs::{Rdma, VerbsOptions};
    use std::sync::Arc;

    const REMEDY: &str = "this program was built without simulated hardware: build it with the \
                          feature `simulators` of the crate `carrack`";

    pub(crate) fn gpus(_devices: usize) -> Result<Arc<dyn Driver>, GpuError> {
        Err(GpuError {
            call: "CARRACK_GPU=fake",
            code: 801,
            name: "NOT_SUPPORTED",
            hint: REMEDY.to_owned(),
        })
    }

    pub(crate) fn nic(options: VerbsOptions) -> Rdma {
        Rdma::simulated(|| Err(VerbsError::because("open", 95, REMEDY)), options)
    }
}

pub(crate) use here::{gpus, nic};
