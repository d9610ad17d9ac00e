//! The driver of a machine without a GPU.

#![expect(unsafe_code, reason = "a driver without GPUs is a driver")]

use super::{Driver, Extent, Gpu, GpuError};
use std::sync::Arc;

/// Driver without devices. Every address is host memory.
#[derive(Debug, Clone, Default)]
pub struct NoGpu {
    reason: String,
}

impl NoGpu {
    /// Creates the driver. `reason`: why there is no GPU, for reports.
    pub fn because(reason: impl Into<String>) -> Self {
        Self { reason: reason.into() }
    }
}

// SAFETY: it has no devices and gives out no memory. A program that uses it has no memory of a
// GPU.
unsafe impl Driver for NoGpu {
    fn name(&self) -> &'static str {
        "none"
    }

    fn devices(&self) -> Result<Vec<Arc<dyn Gpu>>, GpuError> {
        Err(GpuError { call: "devices", code: 100, name: "NO_DEVICE", hint: self.reason.clone() })
    }

    fn classify(&self, _addr: usize) -> Result<Option<Extent>, GpuError> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_every_address_is_host_memory_and_the_reason_is_told() {
        let none = NoGpu::because("CARRACK_GPU=none");
        assert!(none.classify(0x1000).unwrap().is_none());
        assert!(none.devices().unwrap_err().to_string().contains("CARRACK_GPU=none"));
    }
}
