//! One allocation for all ranks: the leader makes it and the others map it, or all fail.

use super::BLOCK;
use super::error::SharedAllocError;
use super::shared::SharedAllocator;
use super::stats::{AllocCounts, CountGuard};
use super::wire::{Offer, decode_verdict, encode_verdict};
use crate::region::{Mr, Region, RemoteKey};
use carrack_transports::gpu::Flavour;

/// The guard of this rank's part of an allocation, dropped with its memory.
struct AllocationGuard {
    /// Registration at the leader of several ranks. Ends with the part; the memory is freed when no
    /// rank has it mapped.
    _mr: Option<Mr>,
    _counted: CountGuard,
}

/// The reason why no rank can map GPU memory.
const NO_IPC: &str =
    "GPU memory is not shared: CARRACK_GPU_IPC=off, or CARRACK_TRANSPORT without shm";

impl SharedAllocator {
    /// Makes a new allocation of whole blocks, and returns its first `len` bytes as a region.
    pub(super) fn fresh(
        &self,
        len: usize,
        counts: &AllocCounts,
    ) -> Result<Region, SharedAllocError> {
        let runtime = self.group.runtime();
        // Ranks close the mappings of memory that all had released before this call. The leader
        // then frees it.
        runtime.0.look_after_domains();
        self.group.barrier().map_err(|cause| self.end(cause))?;
        runtime.0.look_after_domains();
        let span = len.next_multiple_of(BLOCK);
        let is_leader = self.leader == runtime.rank();
        let (made, told) = match is_leader.then(|| self.make(span)) {
            Some(Ok((region, mr, offer))) => (Some((region, mr)), offer.encode()),
            Some(Err(why)) => (None, Offer::Failed(why).encode()),
            None => (None, Vec::new()),
        };
        let told = self.group.broadcast(self.leader, &told).map_err(|cause| self.end(cause))?;
        let mine = match (made, Offer::decode(&told)) {
            (_, Some(Offer::Failed(why))) => {
                return Err(SharedAllocError::Leader {
                    leader: self.leader,
                    ranks: self.group.size(),
                    why,
                });
            }
            (Some((whole, mr)), _) => Ok((whole, mr)),
            (None, Some(Offer::Made { rmr, refused })) => {
                self.map(&rmr, span, &refused).map(|whole| (whole, None))
            }
            (None, None) => {
                Err("its leader has sent a message that this version cannot read".to_owned())
            }
        };
        for (rank, bytes) in self.each_tells(&encode_verdict(&mine))? {
            match decode_verdict(&bytes) {
                Some(Ok(())) => {}
                Some(Err(why)) => {
                    let (leader, gpu) = (self.leader, self.device.clone());
                    return Err(SharedAllocError::NotMapped { rank, leader, gpu, why });
                }
                None => return Err(SharedAllocError::Garbled { rank }),
            }
        }
        let failed = |why| SharedAllocError::NotMapped {
            rank: runtime.rank(),
            leader: self.leader,
            gpu: self.device.clone(),
            why,
        };
        let (whole, mr) = mine.map_err(failed)?;
        let guard = AllocationGuard { _mr: mr, _counted: counts.allocation(len, span) };
        whole.subregion_with(0, len, Box::new(guard)).ok_or(SharedAllocError::Len { len })
    }

    /// Allocates `span` bytes at the leader, and exports them if the scope has other ranks.
    fn make(&self, span: usize) -> Result<(Region, Option<Mr>, Offer), String> {
        let runtime = self.group.runtime();
        let region = self.gpu.allocate(span, Flavour::Plain).map_err(|why| why.to_string())?;
        if self.group.size() == 1 {
            return Ok((region, None, Offer::Made { rmr: Vec::new(), refused: String::new() }));
        }
        let mr = runtime.register_memory(&region).map_err(|why| why.to_string())?;
        let refused = match runtime.0.maps() {
            Some((maps, _)) => {
                let refused = mr.refused().iter().find(|(name, _)| *name == maps);
                refused.map(|(_, why)| why.clone())
            }
            None => Some(NO_IPC.into()),
        };
        let offer =
            Offer::Made { rmr: mr.remote_key().to_bytes(), refused: refused.unwrap_or_default() };
        Ok((region, Some(mr), offer))
    }

    /// Maps the leader's memory at another rank, for the engines of this rank's GPU.
    fn map(&self, rmr: &[u8], span: usize, refused: &str) -> Result<Region, String> {
        let inner = &self.group.runtime().0;
        let rmr = RemoteKey::from_bytes(rmr).map_err(|why| why.to_string())?;
        if rmr.len() != span as u64 || rmr.owner() != self.leader {
            return Err(format!(
                "what its leader has sent names {} bytes of {}, and not the allocation",
                rmr.len(),
                rmr.owner()
            ));
        }
        let (_, imported) = inner.mapped(&rmr, Some(&self.gpu)).map_err(|why| {
            let here = if inner.maps().is_some() { String::new() } else { format!("; {NO_IPC}") };
            let there = if refused.is_empty() {
                String::new()
            } else {
                format!("; at its leader: {refused}")
            };
            format!("{why}{here}{there}")
        })?;
        let region = imported.region().ok_or("its leader has released it meanwhile")?.clone();
        // Mapped for another device of this process it is useless: kernels on this rank's GPU
        // would fault.
        let owner = region.kind().gpu().ok_or("it is not memory of a GPU")?;
        let own = self.gpu.info();
        if imported.is_own() {
            self.gpu
                .reaches(owner)
                .map_err(|why| format!("{}, in the same process: {why}", own.uuid))?;
        } else if !self.gpu.reaches_region(&region) {
            let why = self.gpu.reaches(owner).err().map_or_else(
                || "the driver opens it for another device of this process only".to_owned(),
                |why| why.to_string(),
            );
            return Err(format!("{}: {why}", own.uuid));
        }
        Ok(region)
    }
}
