//! Where messages lie, on both sides.

use super::error::PerfError;
use super::options::MemoryChoice;
use carrack::buffer::Region;
use carrack::packet::{GpuAllocator, PacketPool};
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{Buffer, Device, Runtime};
use std::sync::Arc;

/// Packets of a seat on a GPU: each is an allocation of the driver's, and those are large.
const GPU_PACKETS: usize = 16;

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

    /// `count` buffers of `size` bytes each, in one allocation where allocations are large.
    pub(super) fn buffers(&self, count: usize, size: usize) -> Result<Vec<Buffer>, PerfError> {
        match self {
            Self::Host => Ok((0..count).map(|_| Buffer::Vec(vec![0; size])).collect()),
            Self::Gpu(gpu) => {
                let region = gpu.allocate((count * size).max(1), Flavour::Plain)?;
                let slices = (0..count).map(|number| region.slice(number * size, size));
                Ok(slices.map(|slice| slice.map_or(Buffer::Empty, Buffer::Region)).collect())
            }
        }
    }

    /// A buffer that holds these bytes: one to be borrowed from, or one to be given away when it is `large`, since
    /// the bytes of a large message are not copied before they are wanted.
    pub(super) fn holding(&self, bytes: &[u8], large: bool) -> Result<Buffer, PerfError> {
        match self {
            Self::Host if large => {
                let region = Region::host(bytes.len());
                region.whole().write(bytes)?;
                Ok(Buffer::Region(region.whole()))
            }
            Self::Host => Ok(Buffer::Vec(bytes.to_vec())),
            Self::Gpu(gpu) => {
                // A driver allocates no empty memory.
                let region = gpu.allocate(bytes.len().max(1), Flavour::Plain)?;
                region.whole().write(bytes)?;
                Ok(region.slice(0, bytes.len()).map_or(Buffer::Empty, Buffer::Region))
            }
        }
    }
}
