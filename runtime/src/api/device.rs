//! The making of devices.

use crate::datapath::{Device, Port};
use crate::error::ResourceError;
use crate::progress::Core;
use carrack_transports::mem::PacketPool;
use std::sync::Arc;

/// Builder of a device: see [`Runtime::device`](crate::Runtime::device).
#[must_use = "a builder does nothing until `build` is called"]
pub struct DeviceBuilder<'a> {
    pub(super) runtime: &'a Core,
    pub(super) pool: Option<PacketPool>,
}

impl DeviceBuilder<'_> {
    /// Sets the pool that active messages land in. The default is a pool of host memory of the
    /// device's own.
    ///
    /// On a GPU its engine copies them, and they are delivered in order of arrival. Messages too
    /// long for a packet are delivered when all of their bytes are there, in memory of the pool's
    /// allocator as well.
    pub fn packet_pool(mut self, pool: &PacketPool) -> Self {
        self.pool = Some(pool.clone());
        self
    }

    /// Makes it, and publishes its address.
    ///
    /// # Errors
    /// [`ResourceError::Packets`]: the pool's allocator has no memory on its GPU, or breaks its
    /// promise.
    pub fn build(self) -> Result<Device, ResourceError> {
        // One after the other, since each is published under its number. Without the lock of the
        // list, which progress takes: allocators and bootstraps may run any code.
        let _making = self.runtime.making_devices.lock();
        let index = u32::try_from(self.runtime.devices().len()).unwrap_or(u32::MAX);
        let device = Device(Arc::new(Port::open(self.runtime, index, self.pool)?));
        self.runtime.add_device(device.clone());
        let gone = self.runtime.down().clone();
        gone.iter().for_each(|(&rank, cause)| device.0.hear_of_gone(rank, cause));
        Ok(device)
    }
}
