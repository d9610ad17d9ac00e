//! Configuration of a simulated driver.

use super::error::{INVALID_DEVICE, INVALID_VALUE, error};
use super::memory::GRANULE;
use carrack_transports::gpu::{GpuError, GpuInfo, waits};
use carrack_transports::mem::GpuUuid;
use std::time::Duration;

/// Configuration of a simulated driver. Processes with the same `seed` see the same devices.
///
/// ```
/// use carrack_simulators::gpu::FakeConfig;
/// // Two devices, which this process counts the other way round.
/// let config = FakeConfig { devices: 2, visible: Some(vec![1, 0]), ..FakeConfig::default() };
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FakeConfig {
    /// Devices of the machine.
    pub devices: usize,
    /// Memory of each device in bytes; used in blocks of 2 MiB.
    pub memory: usize,
    /// Seed of the UUIDs.
    pub seed: u64,
    /// The machine's devices that this process can see, in its order, as `CUDA_VISIBLE_DEVICES`:
    /// ordinal 0 is the first one named. `None` for all, in the machine's order.
    pub visible: Option<Vec<usize>>,
    /// NUMA nodes of the machine's devices, in their order; devices beyond the list have none.
    pub numa: Vec<u32>,
    /// Pairs of the machine's devices without peer access, in either direction.
    pub no_peer: Vec<(usize, usize)>,
    /// Minimum duration of each copy.
    pub copy_delay: Duration,
    /// Delay of each kernel's start.
    pub launch_delay: Duration,
    /// Connections of a process to a device, as `CUDA_DEVICE_MAX_CONNECTIONS`: when this number of
    /// streams wait for words, nothing moves.
    pub connections: usize,
}

impl Default for FakeConfig {
    /// Returns one device of 256 MiB, without delays, with the connections of a real one.
    fn default() -> Self {
        Self {
            devices: 1,
            memory: 256 << 20,
            seed: 0x6361_7272_6163_6b00,
            visible: None,
            numa: Vec::new(),
            no_peer: Vec::new(),
            copy_delay: Duration::ZERO,
            launch_delay: Duration::ZERO,
            connections: waits::connections(),
        }
    }
}

impl FakeConfig {
    /// Returns the defaults with that number of devices.
    pub fn devices(devices: usize) -> Self {
        Self { devices, ..Self::default() }
    }

    /// Returns the UUID of the machine's n-th device, visible to this process or not.
    pub fn uuid(&self, physical: usize) -> GpuUuid {
        let first = mix(self.seed ^ mix(physical as u64 + 1));
        let bytes = [first, mix(first)].map(u64::to_le_bytes);
        let mut uuid = [0; 16];
        for (to, from) in uuid.iter_mut().zip(bytes.as_flattened()) {
            *to = *from;
        }
        GpuUuid(uuid)
    }

    /// Returns the machine's devices that this process can see, checked.
    pub(super) fn visible(&self) -> Result<Vec<usize>, GpuError> {
        if self.memory < GRANULE {
            let hint = format!("devices of {} bytes: the least is {GRANULE}", self.memory);
            return Err(error("fake driver", INVALID_VALUE, hint));
        }
        let visible = self.visible.clone().unwrap_or_else(|| (0..self.devices).collect());
        for (at, device) in visible.iter().enumerate() {
            let wrong = |what: &str| {
                error(
                    "fake driver",
                    INVALID_DEVICE,
                    format!("visible device {device} {what}: {visible:?}"),
                )
            };
            if *device >= self.devices {
                return Err(wrong("does not exist"));
            }
            if visible.iter().take(at).any(|before| before == device) {
                return Err(wrong("is named twice"));
            }
        }
        Ok(visible)
    }

    pub(super) fn info(&self, ordinal: usize, physical: usize) -> GpuInfo {
        GpuInfo {
            uuid: self.uuid(physical),
            ordinal: u32::try_from(ordinal).unwrap_or(u32::MAX),
            name: "Carrack Fake GPU (simulated)".into(),
            pci: format!("fa4e:{:02x}:00.0", physical + 1),
            memory: self.memory as u64,
            simulated: true,
        }
    }
}

/// Applies splitmix64's finisher: distinct inputs give distinct outputs.
fn mix(from: u64) -> u64 {
    let mut z = from.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_do_not_exist_or_are_named_twice_are_refused() {
        let with =
            |visible| FakeConfig { visible: Some(visible), ..FakeConfig::devices(2) }.visible();
        assert_eq!(with(vec![1, 0]).unwrap(), [1, 0]);
        assert_eq!(with(vec![1]).unwrap(), [1]);
        assert_eq!(with(vec![2]).unwrap_err().code, INVALID_DEVICE);
        assert_eq!(with(vec![0, 0]).unwrap_err().code, INVALID_DEVICE);
    }

    #[test]
    fn uuids_follow_from_the_seed_and_differ_between_devices() {
        let config = FakeConfig::default();
        assert_eq!(config.uuid(3), FakeConfig::default().uuid(3));
        assert_ne!(config.uuid(0), config.uuid(1));
        assert_ne!(config.uuid(0), FakeConfig { seed: 7, ..config.clone() }.uuid(0));
    }
}
