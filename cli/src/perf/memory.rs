//! Memory of this rank's messages.

use super::benchmark::Reach;
use super::error::PerfError;
use super::plan::{Plan, Point};
use super::sides::{Kind, Sides};
use carrack::buffer::{Region, RegionSlice};
use carrack::packet::{GpuAllocator, PacketPool};
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{Buffer, Device, Rank, Runtime};
use std::sync::Arc;

/// Packets of a seat on a GPU: each is an allocation of the driver's, and those are large.
const GPU_PACKETS: usize = 16;
/// Receives of up to this number of bytes have a host buffer each. All receives that a stream has
/// posted then take half a megabyte.
const APART: usize = 256;

/// Memory to send from and to receive into, of which others read and write a part.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    /// The GPU whose driver allocates it, pinned or on the device; none for ordinary host memory.
    gpu: Option<(Arc<dyn Gpu>, Flavour)>,
    /// `true` if all ranks use host memory. Operations on remote memory then mostly complete within
    /// their call.
    all_host: bool,
}

/// A rank's memory, and memory of the other side's kind where copies within the rank are
/// measured.
#[derive(Clone, Debug)]
pub(super) struct Memories {
    pub(super) own: Memory,
    pub(super) theirs: Option<Memory>,
}

impl Memories {
    /// Returns the memories of a rank, on the GPUs of `gpus`.
    pub(super) fn choose(plan: &Plan, rank: Rank, gpus: &Runtime) -> Result<Self, PerfError> {
        let copies = rank == Rank(0) && plan.has_copies();
        let theirs = copies.then(|| Memory::choose(plan.sides, Rank(1), gpus)).transpose()?;
        Ok(Self { own: Memory::choose(plan.sides, rank, gpus)?, theirs })
    }
}

impl Memory {
    /// Finds the memory that was chosen for a rank.
    pub(super) fn choose(sides: Sides, rank: Rank, runtime: &Runtime) -> Result<Self, PerfError> {
        let kind = sides.of(rank);
        let gpu = match kind {
            Kind::Host => None,
            Kind::Pinned => Some((gpu(runtime, kind, 0)?, Flavour::Pinned)),
            Kind::Device(number) => Some((gpu(runtime, kind, number)?, Flavour::Plain)),
        };
        Ok(Self { gpu, all_host: sides.are_host() })
    }

    /// Makes its GPU's context the calling thread's, as a program that uses the GPU has it from
    /// `cudaSetDevice`.
    pub(super) fn make_current(&self) -> Result<(), PerfError> {
        Ok(self.gpu.as_ref().map_or(Ok(()), |(gpu, _)| gpu.make_current())?)
    }

    /// Returns `true` if the memory belongs to a simulated GPU.
    pub(super) fn is_simulated(&self) -> bool {
        self.gpu.as_ref().is_some_and(|(gpu, _)| gpu.info().simulated)
    }

    /// Returns `true` if operations of this point own their memory while they run: it is a driver's
    /// own, or they outlast their calls. These are large messages, and operations that a GPU's
    /// engine or the owner of remote memory carries out.
    pub(super) fn is_lent(&self, point: Point, runtime: &Runtime) -> bool {
        let is_remote = point.op.benchmark().reach == Reach::RemoteMemory;
        let outlasts = point.size > runtime.max_eager() || is_remote && !self.all_host;
        self.gpu.is_some() || outlasts
    }

    /// Returns a device for all threads of a rank, or for one of them. Its active messages land in
    /// this memory; in ordinary memory rather than pinned, for which there are no packets.
    pub(super) fn device(&self, runtime: &Runtime, is_shared: bool) -> Result<Device, PerfError> {
        Ok(match &self.gpu {
            Some((gpu, Flavour::Plain)) => {
                let allocator = Arc::new(GpuAllocator::on(gpu.clone()));
                let pool = PacketPool::new(allocator, runtime.max_eager(), GPU_PACKETS);
                runtime.device().packet_pool(&pool).build()?
            }
            _ if is_shared => runtime.default_device().clone(),
            _ => runtime.device().build()?,
        })
    }

    /// Returns buffers of `size` bytes for `count` receives that are posted at once. All of them
    /// are the same memory, as in `ucx_perftest` and `osu_bw`: one for each message would measure
    /// the memory beyond the caches. Small ones are apart, since they fit into the caches, and a
    /// vector is nearer at hand than a part of a region.
    pub(super) fn buffers(&self, count: usize, size: usize) -> Result<Vec<Buffer>, PerfError> {
        if self.gpu.is_none() && size <= APART {
            return Ok((0..count).map(|_| Buffer::Vec(vec![0; size])).collect());
        }
        let room = self.room(size)?;
        Ok((0..count).map(|_| Buffer::Region(room.clone())).collect())
    }

    /// Allocates a buffer of `size` bytes to be filled.
    pub(super) fn target(&self, size: usize) -> Result<Buffer, PerfError> {
        if self.all_host {
            return Ok(self.buffers(1, size)?.pop().unwrap_or_default());
        }
        self.room(size).map(Buffer::Region)
    }

    /// Allocates one piece of memory, of `size` bytes.
    pub(super) fn room(&self, size: usize) -> Result<RegionSlice, PerfError> {
        // A driver allocates no empty memory.
        let region = self.region(size.max(1))?;
        Ok(region.slice(0, size).unwrap_or_else(|| region.whole()))
    }

    fn region(&self, len: usize) -> Result<Region, PerfError> {
        match &self.gpu {
            Some((gpu, flavour)) => Ok(gpu.allocate(len, *flavour)?),
            None => Ok(Region::host(len)),
        }
    }

    /// Allocates memory for others to read and write. Ordinary memory is of the sort that they can
    /// map.
    pub(super) fn window(&self, runtime: &Runtime, len: usize) -> Result<Region, PerfError> {
        if self.gpu.is_some() { self.region(len) } else { Ok(runtime.allocate(len)?) }
    }
}

/// Returns the GPU of this number of the first driver that has any.
fn gpu(runtime: &Runtime, kind: Kind, number: usize) -> Result<Arc<dyn Gpu>, PerfError> {
    let mut reasons = Vec::new();
    for driver in runtime.gpu_drivers() {
        match driver.devices() {
            Ok(gpus) if gpus.is_empty() => reasons.push(format!("{} has no device", driver.name())),
            Ok(gpus) => {
                let named = |(at, gpu): (usize, &Arc<dyn Gpu>)| {
                    format!("device:{at} ({})", gpu.info().name)
                };
                return gpus.get(number).cloned().ok_or_else(|| PerfError::NoDevice {
                    kind,
                    driver: driver.name(),
                    there: gpus.iter().enumerate().map(named).collect::<Vec<_>>().join(", "),
                });
            }
            Err(error) => reasons.push(error.to_string()),
        }
    }
    Err(PerfError::NoGpu { kind, why: reasons.join("; ") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn receives_share_their_memory_unless_they_are_small() {
        let regions = |size| {
            let host = Memory { gpu: None, all_host: true };
            let buffers = host.buffers(3, size).unwrap();
            assert!(buffers.len() == 3 && buffers.iter().all(|buffer| buffer.len() == size));
            let id = |buffer| {
                if let Buffer::Region(slice) = buffer { Some(slice.region().id()) } else { None }
            };
            buffers.into_iter().map(id).collect::<Vec<_>>()
        };
        assert_eq!(regions(APART), [None; 3]);
        let large = regions(APART + 1);
        assert!(large[0].is_some() && large.iter().all(|id| *id == large[0]), "{large:?}");
    }
}
