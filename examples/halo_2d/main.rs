//! A heat equation on a grid of GPUs, with a rank for each. Neighbours exchange the edges of their
//! blocks by puts in the order of streams: kernel, put, notification, kernel. The host waits for no
//! GPU. While edges travel, the interior is computed.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 2 -- halo_2d 8192 200 field.svg
//! ```
//!
//! The arguments are the size of a rank's block in cells, the number of steps, and a picture.
//! Before the measurement, a small field is compared with one that a CPU has computed alone. So are
//! three rows of each block of the large field. The picture shows the small one.
//!
//! One rank (`run -n 1`) exchanges nothing: its times are the baseline for more ranks. Without an
//! NVIDIA GPU the example runs on simulated ones, whose closures do the work of the kernels, and
//! says so. Simulated times say nothing, and simulated memory holds blocks of some 3000 cells each
//! way.

mod cuda;
mod field;
#[path = "../support/gpus.rs"]
mod gpus;
mod grid;
mod heat;
#[path = "../support/kernel.rs"]
mod kernel;
mod picture;
mod simulated;
#[path = "../support/steps.rs"]
mod steps;

use carrack::Runtime;
use carrack::transports::gpu::Gpu;
use field::Field;
use gpus::Result;
use grid::Grid;
use std::process::ExitCode;
use std::sync::Arc;

/// Cells and steps of the field that is compared. All numbers differ, so that no two are confused.
const SMALL: [usize; 2] = [96, 80];
const STEPS: u64 = 60;
/// Steps before the measurement.
const WARM: u64 = 10;

fn main() -> ExitCode {
    gpus::play_from(1, solve)
}

fn solve(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [size, steps] = steps::asked(&words, 3..=1 << 15, [128, 50])
        .and_then(|asked| match words.get(3) {
            Some(more) => Err(format!("{more} is one argument too many")),
            None => Ok(asked),
        })
        .map_err(|why| format!("{why}; halo_2d [CELLS [STEPS [PICTURE.svg]]]"))?;
    let (size, picture) = (size as usize, words.get(2));
    steps::agree(runtime, &[size as u64, steps, u64::from(picture.is_some())])?;

    let grid = Grid::of(runtime);
    let mut field = Field::new(runtime, gpu, grid, SMALL)?;
    field.exchange(STEPS)?;
    let worst = field.compare(0..SMALL[0])?;
    let found = field.cells(0..SMALL[0])?;
    // Collective: dropping a field waits for all ranks, so each rank does it before it goes on.
    drop(field);
    if let Some(path) = picture {
        picture::draw(runtime, &grid, &found, SMALL, path.as_ref())?;
    }

    let mut field = Field::new(runtime, gpu, grid, [size, size])?;
    field.exchange(steps.min(WARM))?;
    // Checks the two outermost rows of the measured field, and one in the middle.
    for row in [0, size / 2, size - 1] {
        field.compare(row..row + 1)?;
    }
    let with = field.exchange(steps)?;
    let without = field.compute(steps)?;
    let Grid { me, rows, columns } = grid;
    println!(
        "rank {me} of {rows} x {columns}: {STEPS} steps as one CPU computes them, to {worst:.1e}, \
        all right"
    );
    let simulated = if gpu.info().simulated { " (simulated: says nothing)" } else { "" };
    let (with, without, share) = (with * 1e6, without * 1e6, with / without);
    println!(
        "rank {me}: {size}² cells: {with:.1} us a step, {without:.1} without the exchange: \
        {share:.3}{simulated}"
    );
    runtime.barrier()?;
    Ok(())
}
