//! Heat spreads through a bar of cells in memory of GPUs. Each rank has a cube of it, and a layer
//! of cells on either side that are its neighbours'. Such a layer is one cell of each row, far
//! apart in memory: it is put there before each step by one call all the same. All of it is
//! compared with what one rank computes alone.
//!
//! ```sh
//! cargo run --release --example halo_3d
//! cargo run --release -- run -n 4 -- halo_3d
//! ```
//!
//! Without an NVIDIA GPU it runs on simulated ones, and says so. The host computes in the place of
//! a kernel.

#[path = "support/gpus.rs"]
mod gpus;

use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{Counter, Face, Outcome, Rank, Rmr, Runtime};
use std::process::ExitCode;
use std::sync::Arc;

/// Cells of a cube each way, and of its rows with the layers on either side.
const N: usize = 16;
const ROW: usize = N + 2;
const STEPS: usize = 50;

/// The heat at first, of rows of so many cells; `from`: how many there are before them.
fn at_first(from: usize, row: usize) -> Vec<f64> {
    let cell =
        |at: usize| ((7 * (from + at % row) + 3 * (at / row % N) + 5 * (at / row / N)) % 17) as f64;
    (0..row * N * N).map(cell).collect()
}

/// One step of all cells but the outermost, which keep theirs.
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

/// So many cells of each row, from one on.
fn cells(first: usize, count: usize) -> Face {
    Face { offset: 8 * first, count: [8 * count, N, N], pitch: [8 * ROW, 8 * ROW * N] }
}

fn bytes(heat: &[f64]) -> Vec<u8> {
    heat.iter().flat_map(|heat| heat.to_ne_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|heat| f64::from_ne_bytes(*heat)).collect()
}

/// The end of a call that waits for it.
fn over(outcome: Outcome) -> gpus::Result<()> {
    let Outcome::Done(status) = outcome else { return Err("it was not waited for".into()) };
    Ok(status.ok().map(drop)?)
}

fn spread(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> gpus::Result<()> {
    let (me, size) = (runtime.rank().0 as usize, runtime.size() as usize);
    let neighbours = [me.checked_sub(1), Some(me + 1).filter(|&right| right < size)];
    // A step reads one field and makes the other. A neighbour that is a step ahead puts into the
    // other, and cannot be two ahead.
    let field = |flavour| gpu.allocate(8 * ROW * N * N, flavour);
    let (fields, staging) =
        ([field(Flavour::Plain)?, field(Flavour::Plain)?], field(Flavour::Pinned)?);
    let (arrived, mut names) = ([Counter::new(), Counter::new()], Vec::new());
    let (mut registered, mut rmrs) = (Vec::new(), Vec::new());
    for (field, arrived) in fields.iter().zip(&arrived) {
        field.whole().write(&bytes(&at_first(me * N, ROW)))?;
        names.push(runtime.register_comp(arrived)?);
        registered.push(runtime.register_memory(field)?);
        let all =
            runtime.allgather(&runtime.get_rmr(registered.last().ok_or("none")?).to_bytes())?;
        rmrs.push(all.iter().map(|bytes| Rmr::from_bytes(bytes)).collect::<Result<Vec<_>, _>>()?);
    }
    for number in 0..STEPS {
        let now = number % 2;
        for (side, to) in [(0, neighbours[0]), (1, neighbours[1])] {
            let Some(to) = to else { continue };
            // Our first layer goes behind its last one, and our last before its first.
            let (ours, theirs) = [(cells(1, 1), cells(N + 1, 1)), (cells(N, 1), cells(0, 1))][side];
            let put = runtime.post_put_face(
                Rank(to as u32),
                &fields[now],
                &ours,
                &rmrs[now][to],
                &theirs,
            );
            over(put.remote_comp(names[1 - side]).allow_posted(false).call()?)?;
        }
        let has_come =
            |side: usize| neighbours[side].is_none() || arrived[side].get() > number as u64;
        // Nothing comes from a rank that is gone, and a counter alone would not say so.
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
        // Without the layers on either side: a neighbour may have put the next there already.
        let (own, inner) = (&rmrs[1 - now][me], cells(1, N));
        over(
            runtime
                .post_put_face(Rank(me as u32), &staging, &inner, own, &inner)
                .allow_posted(false)
                .call()?,
        )?;
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
