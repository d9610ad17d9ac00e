//! Heat spreads through a bar of cells in memory of GPUs. Each rank has a cube of the bar, and a
//! layer of either neighbour's cells. Such a layer is a row of each depth, far apart in memory: one
//! strided put (`post_put_strided`) transfers it, in the order of streams. The result is compared
//! with that of a CPU that computes alone.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 2 -- halo_3d 512 100
//! ```
//!
//! The arguments are the cells of a cube each way, and the number of steps. One rank (`run -n 1`)
//! exchanges nothing: its times are the baseline for more ranks. Without an NVIDIA GPU the example
//! runs on simulated ones, and says so. Simulated times say nothing.

mod cube;
#[path = "../support/gpus.rs"]
mod gpus;
mod heat;
#[path = "../support/kernel.rs"]
mod kernel;
mod kernels;
#[path = "../support/steps.rs"]
mod steps;

use carrack::Runtime;
use carrack::transports::gpu::Gpu;
use cube::Cube;
use gpus::Result;
use std::process::ExitCode;
use std::sync::Arc;

/// Cells and steps of the bar that is compared as a whole.
const SMALL: usize = 16;
const STEPS: u64 = 20;
/// Steps before the measurement.
const WARM: u64 = 10;

fn main() -> ExitCode {
    gpus::play_from(1, spread)
}

fn spread(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [cells, steps] = steps::asked(&words, 3..=1024, [32, 20])
        .and_then(|asked| match words.get(2) {
            Some(more) => Err(format!("{more} is one argument too many")),
            None => Ok(asked),
        })
        .map_err(|why| format!("{why}; halo_3d [CELLS [STEPS]]"))?;
    steps::agree(runtime, &[cells, steps])?;

    let mut bar = Cube::new(runtime, gpu, SMALL)?;
    bar.exchange(STEPS)?;
    bar.compare(&[0..SMALL, 0..SMALL, 0..SMALL])?;
    let (me, layers) = (runtime.rank().0, runtime.size() as usize * SMALL);
    println!("rank {me}: its {SMALL} of {layers} layers after {STEPS} steps as if computed alone");
    // Collective: dropping it waits for all ranks, so each rank does it before it goes on.
    drop(bar);

    let side = cells as usize;
    let mut bar = Cube::new(runtime, gpu, side)?;
    bar.exchange(steps.min(WARM))?;
    // Lines through all layers of the measured cube: one in the middle, two near its edges.
    for at in [1, side / 2, side - 2] {
        bar.compare(&[at..at + 1, 0..side, at..at + 1])?;
    }
    let (with, without) = (bar.exchange(steps)?, bar.compute(steps)?);
    let simulated = if gpu.info().simulated { " (simulated: says nothing)" } else { "" };
    let (with, without, share) = (with * 1e6, without * 1e6, with / without);
    println!(
        "rank {me}: {cells}³ cells: {with:.1} us a step, {without:.1} without the exchange: \
        {share:.3}{simulated}"
    );
    Ok(runtime.barrier()?)
}
