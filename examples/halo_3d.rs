//! Heat spreads through a bar of cells in memory of GPUs. Each rank has a cube of the bar, and a
//! layer of the neighbour's cells on either side. Such a layer is one cell of each row, far apart
//! in memory; one strided put (`post_put_face`) transfers it before each step. The result is
//! compared with that of a rank that computes alone.
//!
//! ```sh
//! cargo run --release --example halo_3d
//! cargo run --release -- run -n 4 -- halo_3d
//! ```
//!
//! Without an NVIDIA GPU it runs on simulated ones, and says so. The host computes in place of a
//! kernel.

#[path = "support/gpus.rs"]
mod gpus;

use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{Counter, Face, Rank, Runtime};
use std::process::ExitCode;
use std::sync::Arc;

/// Cells of a cube each way, and cells of its rows with the layers on either side.
const N: usize = 16;
const ROW: usize = N + 2;
const STEPS: usize = 50;

/// Returns the initial heat in rows of `row` cells, with `from` cells of the bar before them.
fn at_first(from: usize, row: usize) -> Vec<f64> {
    let cell =
        |at: usize| ((7 * (from + at % row) + 3 * (at / row % N) + 5 * (at / row / N)) % 17) as f64;
    (0..row * N * N).map(cell).collect()
}

/// Computes one step of all cells except the outermost, which never change.
fn step(heat: &[f64], row: usize) -> Vec<f64> {
    let is_outermost = |at: usize| {
        let place = [(at % row, row), (at / row % N, N), (at / row / N, N)];
        place.iter().any(|&(at, cells)| at == 0 || at + 1 == cells)
    };
    let cell = |at: usize| {
        let around = [1, row, row * N].map(|far| heat[at - far] + heat[at + far]);
        heat[at] + 0.1 * (around.iter().sum::<f64>() - 6.0 * heat[at])
    };
    (0..heat.len()).map(|at| if is_outermost(at) { heat[at] } else { cell(at) }).collect()
}

/// Returns the part of a field with `count` cells of each row, from cell `first` on.
fn cells(first: usize, count: usize) -> Face {
    Face { offset: 8 * first, count: [8 * count, N, N], pitch: [8 * ROW, 8 * ROW * N] }
}

fn bytes(heat: &[f64]) -> Vec<u8> {
    heat.iter().flat_map(|heat| heat.to_ne_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|heat| f64::from_ne_bytes(*heat)).collect()
}

fn spread(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> gpus::Result<()> {
    let (me, size) = (runtime.rank().0 as usize, runtime.size() as usize);
    let neighbours = [me.checked_sub(1), Some(me + 1).filter(|&right| right < size)];
    // A step reads one field and writes the other one, in turn. A neighbour is one step ahead at
    // most, and then puts into the field that is not read.
    let field = |flavour| gpu.allocate(8 * ROW * N * N, flavour);
    let (fields, staging) =
        ([field(Flavour::Plain)?, field(Flavour::Plain)?], field(Flavour::Pinned)?);
    let (arrived, mut names) = ([Counter::new(), Counter::new()], Vec::new());
    let (mut registered, mut rmrs) = (Vec::new(), Vec::new());
    for (field, arrived) in fields.iter().zip(&arrived) {
        field.whole().write(&bytes(&at_first(me * N, ROW)))?;
        names.push(runtime.register_comp(arrived)?);
        let mr = runtime.register_memory(field)?;
        rmrs.push(runtime.exchange_keys(&mr)?);
        registered.push(mr);
    }
    for number in 0..STEPS {
        let now = number % 2;
        for (side, to) in [(0, neighbours[0]), (1, neighbours[1])] {
            let Some(to) = to else { continue };
            // This rank's first layer goes behind the neighbour's last one, and its last before
            // the first.
            let (ours, theirs) = [(cells(1, 1), cells(N + 1, 1)), (cells(N, 1), cells(0, 1))][side];
            let put = runtime.post_put_face(
                Rank(to as u32),
                &fields[now],
                &ours,
                &rmrs[now][to],
                &theirs,
            );
            put.remote_comp(names[1 - side]).wait()?;
        }
        let has_come =
            |side: usize| neighbours[side].is_none() || arrived[side].get() > number as u64;
        // A rank that has ended sends no layer, and the counter alone does not show that.
        let is_gone = |side: usize| {
            neighbours[side].filter(|&rank| runtime.peer_down(Rank(rank as u32)).is_some())
        };
        runtime.wait(|| (0..2).all(|side| has_come(side) || is_gone(side).is_some()))?;
        if let Some(lost) = (0..2).filter(|&side| !has_come(side)).find_map(is_gone) {
            return Err(
                format!("rank {lost} went before its layer for step {number} had come").into()
            );
        }
        staging.whole().write(&bytes(&step(&floats(&fields[now].whole().to_vec()?), ROW)))?;
        // Without the layers on either side: a neighbour may have put its next one already.
        let (own, inner) = (&rmrs[1 - now][me], cells(1, N));
        runtime.post_put_face(Rank(me as u32), &staging, &inner, own, &inner).wait()?;
    }
    let whole = size * N + 2;
    let alone = (0..STEPS).fold(at_first(0, whole), |heat, _| step(&heat, whole));
    let found = floats(&fields[STEPS % 2].whole().to_vec()?);
    let is_right =
        |at: usize| found[at / N * ROW + 1 + at % N] == alone[at / N * whole + me * N + 1 + at % N];
    if let Some(wrong) = (0..N.pow(3)).find(|&at| !is_right(at)) {
        return Err(format!("rank {me}: cell {wrong} is wrong").into());
    }
    println!("rank {me}: its {N} of {} layers after {STEPS} steps as if computed alone", size * N);
    Ok(runtime.barrier()?)
}

fn main() -> ExitCode {
    gpus::play(spread)
}
