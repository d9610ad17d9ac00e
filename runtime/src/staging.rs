//! Host memory on the way to and from GPUs: blocks that engines copy into and out of, used again
//! and again.
//!
//! A block is pinned, so that a copy is the engine's work alone: with pageable memory the driver's
//! call waits for it. It is given back to the system only when the runtime ends. Freeing pinned
//! memory waits for all of a device's work, streams of the program's included (gpu.md, streams rule
//! 1). A context that the program destroys takes its blocks with it, so a block's context is
//! checked before the block is used again.
//!
//! Each direction of each GPU has a pool of its own. Outgoing bytes wait for peers, and must not
//! delay the copies of incoming ones. A pool gives out [`BLOCKS`] at most, and beyond that one for
//! each peer that would have none. So a peer that makes no progress delays no other, and the
//! number of peers bounds the memory.

use carrack_transports::gpu::{Flavour, Gpu};
use carrack_transports::mem::{Buffer, GpuUuid, Region};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;

/// Bytes of a block. An engine needs some 10 µs for them at 55 GB/s. It takes as long to start a
/// copy and to hear of its end (6 to 8 µs; gpu.md, "Measured"). Larger blocks would gain little,
/// and the first parts of a message wait for the first block.
pub(crate) const BLOCK: usize = 512 << 10;

/// Blocks of a pool that are in use at a time. One is copied, one is sent or filled, and two are
/// for a second message.
pub(crate) const BLOCKS: usize = 4;

/// Bytes of a word.
pub(crate) const WORD: usize = 8;

/// The direction of the bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Direction {
    /// The way from a GPU.
    Out,
    /// The way onto a GPU.
    In,
    /// Both directions: words that are changed on the host.
    Word,
    /// Between a GPU and pageable host memory of this process, which waits for no peer.
    Through,
}

impl Direction {
    fn size(self) -> usize {
        if self == Self::Word { WORD } else { BLOCK }
    }
}

/// A runtime's blocks.
#[derive(Default)]
pub(crate) struct Staging(Mutex<HashMap<(GpuUuid, Direction), Arc<Pool>>>);

#[derive(Default)]
struct Pool(Mutex<PoolState>);

#[derive(Default)]
struct PoolState {
    free: Vec<Region>,
    /// Blocks in use.
    out: usize,
    /// `true` if pinned memory was refused: it is not requested again.
    is_refused: bool,
}

impl Staging {
    /// Takes a block for copies to or from a GPU. `None`: all are in use, and one will be free
    /// when an engine is done. A caller whose peer has no block passes `must`, and always gets
    /// one.
    pub(crate) fn take(
        &self,
        gpu: &Arc<dyn Gpu>,
        direction: Direction,
        must: bool,
    ) -> Option<StagingBlock> {
        let mut pools = self.0.lock();
        let pool = pools.entry((gpu.info().uuid, direction)).or_default().clone();
        drop(pools);
        let mut state = pool.state();
        if state.out >= BLOCKS && !must {
            return None;
        }
        state.out += 1;
        let mut gone = Vec::new();
        let kept = loop {
            match state.free.pop() {
                Some(memory) if memory.gpu().is_some_and(|gpu| gpu.check().is_err()) => {
                    gone.push(memory)
                }
                other => break other,
            }
        };
        let is_refused = state.is_refused;
        // Without the lock: the first allocations are slow.
        drop(state);
        drop(gone);
        let memory = kept.unwrap_or_else(|| pool.allocate(gpu, direction, is_refused));
        Some(StagingBlock { memory, pool })
    }
}

impl Pool {
    fn state(&self) -> MutexGuard<'_, PoolState> {
        self.0.lock()
    }

    fn allocate(&self, gpu: &Arc<dyn Gpu>, direction: Direction, is_refused: bool) -> Region {
        if !is_refused {
            match gpu.allocate(direction.size(), Flavour::Pinned) {
                Ok(memory) => return memory,
                Err(why) => {
                    if gpu.check().is_ok() && !std::mem::replace(&mut self.state().is_refused, true)
                    {
                        tracing::warn!(%why, "no pinned memory: copies to and from a GPU go \
                            through pageable memory, and take longer");
                    }
                }
            }
        }
        Region::host(direction.size())
    }
}

/// A block, in use until this is dropped. Keep it until the engine that copies to or from it is
/// done.
pub(crate) struct StagingBlock {
    memory: Region,
    pool: Arc<Pool>,
}

impl StagingBlock {
    /// Returns the first `len` bytes of the block, for a copy.
    pub(crate) fn first(&self, len: usize) -> Buffer {
        self.memory.slice(0, len).map_or(Buffer::Empty, Buffer::Region)
    }

    /// Returns the memory of the block.
    pub(crate) fn memory(&self) -> &Region {
        &self.memory
    }
}

impl Drop for StagingBlock {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.out -= 1;
        state.free.push(self.memory.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carrack_simulators::gpu::{FakeConfig, FakeDriver};
    use carrack_transports::mem::MemKind;

    #[test]
    fn blocks_are_pinned_bounded_and_used_again() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let gpu: Arc<dyn Gpu> = driver.gpu(0).unwrap();
        let staging = Staging::default();
        for _ in 0..3 {
            let mut taken: Vec<_> =
                std::iter::from_fn(|| staging.take(&gpu, Direction::Out, false))
                    .take(100)
                    .collect();
            assert_eq!(taken.len(), BLOCKS);
            assert!(taken.iter().all(|block| block.memory().kind() == MemKind::Pinned));
            taken.push(
                staging
                    .take(&gpu, Direction::Out, true)
                    .expect("a caller without a block gets one"),
            );
            assert!(
                staging.take(&gpu, Direction::In, false).is_some(),
                "the other direction has blocks of its own"
            );
        }
        let counters = driver.counters();
        assert_eq!((counters.pinned, counters.unpinned), (BLOCKS as u64 + 2, 0));
    }

    #[test]
    fn a_block_whose_context_the_program_has_destroyed_is_not_touched_again() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let gpu: Arc<dyn Gpu> = driver.gpu(0).unwrap();
        let staging = Staging::default();
        let take = || staging.take(&gpu, Direction::Out, false).unwrap().memory().id();
        let first = take();
        assert_eq!(take(), first);
        driver.faults().lose_contexts(true);
        assert_ne!(take(), first);
        driver.faults().lose_contexts(false);
        let counters = driver.counters();
        assert_eq!((counters.pinned, counters.unpinned), (2, 1));
    }

    #[test]
    fn without_pinned_memory_there_are_pageable_blocks() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        driver.faults().refuse_pinned(true);
        let gpu: Arc<dyn Gpu> = driver.gpu(0).unwrap();
        let staging = Staging::default();
        let blocks: Vec<_> =
            std::iter::from_fn(|| staging.take(&gpu, Direction::In, false)).take(100).collect();
        assert_eq!(blocks.len(), BLOCKS);
        assert!(blocks.iter().all(|block| block.memory().kind() == MemKind::Host));
        assert_eq!(driver.counters().pinned, 0);
    }
}
