//! Where messages lie, on both sides.

use super::error::PerfError;
use super::options::MemoryChoice;
use carrack::buffer::{Region, RegionSlice};
use carrack::packet::{GpuAllocator, PacketPool};
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{Buffer, Device, Runtime};
use std::sync::Arc;

/// Packets of a seat on a GPU: each is an allocation of the driver's, and those are large.
const GPU_PACKETS: usize = 16;
/// Host buffers of up to so many bytes are not the same memory: those of all receives that a stream has posted are
/// half a megabyte then.
const APART: usize = 256;

/// Memory to send from and to receive into.
#[derive(Clone, Debug)]
pub(super) enum Memory {
    /// Ordinary memory.
    Host,
    /// Of this GPU.
    Gpu(Arc<dyn Gpu>),
}

impl Memory {
    /// The memory that was chosen: a GPU is the first of the first driver that has one.
    pub(super) fn choose(choice: MemoryChoice, runtime: &Runtime) -> Result<Self, PerfError> {
        if choice == MemoryChoice::Host {
            return Ok(Self::Host);
        }
        let mut reasons = Vec::new();
        for driver in runtime.gpu_drivers() {
            match driver.devices() {
                Ok(gpus) => match gpus.into_iter().next() {
                    Some(gpu) => return Ok(Self::Gpu(gpu)),
                    None => reasons.push(format!("{} has no device", driver.name())),
                },
                Err(error) => reasons.push(error.to_string()),
            }
        }
        Err(PerfError::NoGpu(reasons.join("; ")))
    }

    /// As it is called in the results. A simulated GPU says so: its figures are those of a copy by the CPU.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Gpu(gpu) if gpu.info().simulated => "device (simulated)",
            Self::Gpu(_) => "device",
        }
    }

    /// A device for all threads of a rank, whose active messages land here.
    pub(super) fn shared_device(&self, runtime: &Runtime) -> Result<Device, PerfError> {
        match self {
            Self::Host => Ok(runtime.default_device().clone()),
            Self::Gpu(_) => self.device(runtime),
        }
    }

    /// A device whose active messages land here.
    pub(super) fn device(&self, runtime: &Runtime) -> Result<Device, PerfError> {
        Ok(match self {
            Self::Host => runtime.device().build()?,
            Self::Gpu(gpu) => {
                let allocator = Arc::new(GpuAllocator::on(gpu.clone()));
                let pool = PacketPool::new(allocator, runtime.max_eager(), GPU_PACKETS);
                runtime.device().packet_pool(&pool).build()?
            }
        })
    }

    /// Buffers of `size` bytes for `count` receives that are posted at once. All of them are the same memory, as in
    /// `ucx_perftest` and `osu_bw`: one for each message would measure the memory beyond the caches. Small ones are
    /// apart, since they fit into the caches, and a vector is nearer at hand than a part of a region.
    pub(super) fn buffers(&self, count: usize, size: usize) -> Result<Vec<Buffer>, PerfError> {
        match self {
            Self::Host if size <= APART => Ok((0..count).map(|_| Buffer::Vec(vec![0; size])).collect()),
            _ => {
                let room = self.room(size)?;
                Ok((0..count).map(|_| Buffer::Region(room.clone())).collect())
            }
        }
    }

    /// One piece of memory, of `size` bytes.
    fn room(&self, size: usize) -> Result<RegionSlice, PerfError> {
        Ok(match self {
            Self::Host => Region::host(size).whole(),
            Self::Gpu(gpu) => {
                // A driver allocates no empty memory.
                let region = gpu.allocate(size.max(1), Flavour::Plain)?;
                region.slice(0, size).unwrap_or_else(|| region.whole())
            }
        })
    }

    /// A buffer that holds these bytes: one to be borrowed from, or one to be lent to every message when it is `large`,
    /// since the bytes of a large message are not copied before they are wanted.
    pub(super) fn holding(&self, bytes: &[u8], large: bool) -> Result<Buffer, PerfError> {
        match self {
            Self::Host if !large => Ok(Buffer::Vec(bytes.to_vec())),
            _ => {
                let room = self.room(bytes.len())?;
                room.write(bytes)?;
                Ok(Buffer::Region(room))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receives_share_their_memory_unless_they_are_small() {
        let regions = |size| {
            let buffers = Memory::Host.buffers(3, size).unwrap();
            assert!(buffers.len() == 3 && buffers.iter().all(|buffer| buffer.len() == size));
            let id =
                |buffer| if let Buffer::Region(slice) = buffer { Some(slice.region().id()) } else { None };
            buffers.into_iter().map(id).collect::<Vec<_>>()
        };
        assert_eq!(regions(APART), [None; 3]);
        let large = regions(APART + 1);
        assert!(large[0].is_some() && large.iter().all(|id| *id == large[0]), "{large:?}");
    }
}
