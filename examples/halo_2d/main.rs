//! A heat equation on a grid of GPUs, a rank each. Neighbours exchange the edges of their blocks by puts in the order of streams:
//! kernel, put, signal, kernel, and no GPU that is waited for. While edges travel, the interior is computed.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 2 -- halo_2d 8192 200 field.svg
//! ```
//!
//! The size is that of a rank's block, in cells; then come steps, and a picture. Before the time is taken, a small field is compared with
//! one that a CPU has computed alone, and so are three rows of each block of the large one; the picture shows the small one. One rank
//! (`run -n 1`) has nobody to exchange with: what more take is to be seen beside it. Without an NVIDIA GPU it runs on simulated ones,
//! whose closures do what the kernels do, and says so: their times say nothing.

mod cuda;
mod field;
#[path = "../support/gpus.rs"]
mod gpus;
mod grid;
mod heat;
mod picture;
mod simulated;

use carrack::Runtime;
use carrack::transports::gpu::Gpu;
use field::Field;
use gpus::Result;
use grid::Grid;
use std::sync::Arc;

/// Cells and steps of the field that is compared: of other numbers each way, so that no two are confused.
const SMALL: [usize; 2] = [96, 80];
const STEPS: u64 = 60;
/// Steps before the time is taken.
const WARM: u64 = 10;

fn main() -> Result<()> {
    gpus::play_from(1, solve)
}

fn solve(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> Result<()> {
    let mut words = std::env::args().skip(1);
    let mut number = |otherwise: u64| words.next().map_or(Ok(otherwise), |word| word.parse());
    let usage = |why| format!("{why}: halo_2d [CELLS [STEPS [PICTURE.svg]]]");
    let size = usize::try_from(number(128).map_err(usage)?)?;
    let steps = number(50).map_err(usage)?;
    let picture = words.next();
    if !(3..=1 << 15).contains(&size) || steps == 0 {
        return Err("a block has 3 to 32768 cells each way, and there is a step at least".into());
    }

    let grid = Grid::of(runtime);
    let mut field = Field::new(runtime, gpu, grid, SMALL)?;
    field.exchange(STEPS)?;
    let worst = field.compare(0..SMALL[0])?;
    let found = field.cells(0..SMALL[0])?;
    // While it is there nobody may leave: its end is a meeting of all.
    drop(field);
    if let Some(path) = picture {
        picture::draw(runtime, &grid, &found, SMALL, path.as_ref())?;
    }

    let mut field = Field::new(runtime, gpu, grid, [size, size])?;
    field.exchange(steps.min(WARM))?;
    // Of the field whose time is taken the rows at both edges, and one between them.
    for row in [0, size / 2, size - 1] {
        field.compare(row..row + 1)?;
    }
    let with = field.exchange(steps)?;
    let without = field.compute(steps)?;
    let Grid { me, rows, columns } = grid;
    println!(
        "rank {me} of {rows} x {columns}: {STEPS} steps as one CPU computes them, to {worst:.1e}, all right"
    );
    let simulated = if gpu.info().simulated { " (simulated: says nothing)" } else { "" };
    let (with, without, share) = (with * 1e6, without * 1e6, with / without);
    println!(
        "rank {me}: {size}² cells: {with:.1} us a step, {without:.1} without the exchange: {share:.3}{simulated}"
    );
    runtime.barrier()?;
    Ok(())
}
