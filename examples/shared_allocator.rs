//! The ranks of a node share an array on one GPU: each writes its share, and reads those of all
//! ranks. The array is freed when all ranks have dropped it. Small pieces come from a pool.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 4 -- shared_allocator
//! ```

#[path = "support/gpus.rs"]
mod gpus;

use carrack::alloc::{Scope, SharedDeviceAllocator};
use carrack::transports::gpu::Gpu;
use carrack::{Rank, Runtime};
use gpus::Result;
use std::process::ExitCode;
use std::sync::Arc;

/// Bytes of a rank's share.
const SHARE: usize = 1 << 20;
const STEPS: u32 = 5;

fn share(rank: Rank, step: u32) -> Vec<u8> {
    let period = (0..256).map(|at| (at * 31 + rank.0 as usize * 97 + step as usize * 13) as u8);
    period.collect::<Vec<_>>().repeat(SHARE / 256)
}

fn main() -> ExitCode {
    gpus::play(together)
}

fn together(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> Result<()> {
    let (me, all) = (runtime.rank(), runtime.world());
    // Each rank brings the GPU that it works with; the memory lies on that of the lowest rank of
    // its node.
    let allocator = SharedDeviceAllocator::new(&all, gpu, Scope::Node)?;
    if allocator.is_leader() {
        println!("{}", allocator.describe());
    }
    let ranks: Vec<Rank> = allocator.ranks().collect();
    let place = |rank: Rank| ranks.iter().position(|other| *other == rank).unwrap_or(0) * SHARE;
    let array = allocator.allocate(ranks.len() * SHARE)?;
    for step in 0..STEPS {
        // A kernel would write at `array.addr()`, which differs from rank to rank.
        array.slice(place(me), SHARE).ok_or("inside")?.write(&share(me, step))?;
        runtime.barrier()?;
        for &rank in &ranks {
            if array.slice(place(rank), SHARE).ok_or("inside")?.to_vec()? != share(rank, step) {
                return Err(format!("{me}: the share of {rank} is not what it wrote").into());
            }
        }
        runtime.barrier()?;
    }

    // Small or short-lived memory comes in pieces of blocks. A piece is used again when all ranks
    // have dropped it.
    let pool = allocator.pool(2 << 20)?;
    for step in 0..100 {
        let word = pool.allocate(8)?;
        if me == ranks[step % ranks.len()] {
            word.whole().write(&step.to_le_bytes())?;
        }
        runtime.barrier()?;
        if word.whole().to_vec()? != step.to_le_bytes() {
            return Err(format!("{me}: the word of step {step} is another one").into());
        }
    }
    let (array, words) = (allocator.stats(), pool.stats());
    println!("{me}: {STEPS} steps on {SHARE} bytes of {} ranks, all right; {array:?}", ranks.len());
    assert_eq!((words.made, words.held), (100, 2 << 20), "all in one block");
    Ok(runtime.barrier()?)
}
