//! Heat spreads through a block in memory of GPUs. Each rank has a part of it, with a layer of cells around that are its neighbours', and
//! puts its six outermost layers there before each step: each by one call, whichever way its cells lie apart in memory. All of it is
//! compared with what one rank computes alone.
//!
//! ```sh
//! cargo run --release --example halo_3d
//! cargo run --release -- run -n 8 -- halo_3d
//! ```
//!
//! Without an NVIDIA GPU it runs on simulated ones, and says so. The host computes in the place of a kernel.

#[path = "support/gpus.rs"]
mod gpus;

use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{Counter, Face, Outcome, Rank, Rmr, Runtime};
use std::sync::Arc;

/// Cells of a rank's part each way, and with the layers around.
const N: usize = 12;
const WIDE: usize = N + 2;
const STEPS: usize = 25;

/// How many parts there are each way, and which of them is a rank's.
fn grid(size: usize) -> [usize; 3] {
    let cut = |of: usize, ways: u32| (1..=of).rfind(|n| of % n == 0 && n.pow(ways) <= of).unwrap_or(1);
    let z = cut(size, 3);
    [size / z / cut(size / z, 2), cut(size / z, 2), z]
}

fn part(rank: usize, [x, y, _]: [usize; 3]) -> [usize; 3] {
    [rank % x, rank / x % y, rank / x / y]
}

/// Cells of a field of `WIDE` each way, of 8 bytes each.
fn cells([x, y, z]: [usize; 3], count: [usize; 3]) -> Face {
    let offset = 8 * ((z * WIDE + y) * WIDE + x);
    Face { offset, count: [8 * count[0], count[1], count[2]], pitch: [8 * WIDE, 8 * WIDE * WIDE] }
}

/// One layer, `at` cells along an axis.
fn layer(axis: usize, at: usize) -> Face {
    let along = |other: usize, here: usize| std::array::from_fn(|way| if way == axis { here } else { other });
    cells(along(1, at), along(N, 1))
}

/// The heat at first, of so many cells each way from a place in the block on: nothing at its edges.
fn at_first(from: [usize; 3], wide: [usize; 3], block: [usize; 3]) -> Vec<f64> {
    let cell = |at: usize| {
        let place = part(at, wide);
        let [x, y, z] = std::array::from_fn(|way| from[way] + place[way]);
        let is_edge = [x, y, z].iter().zip(block).any(|(&at, n)| at == 0 || at > n);
        if is_edge { 0.0 } else { ((7 * x + 3 * y + 5 * z * z) % 17) as f64 }
    };
    (0..wide.iter().product()).map(cell).collect()
}

/// One step of all cells but the outermost.
fn step(heat: &[f64], wide: [usize; 3]) -> Vec<f64> {
    let cell = |at: usize| {
        if part(at, wide).iter().zip(wide).any(|(&at, n)| at == 0 || at + 1 == n) {
            return heat[at];
        }
        let around = [1, wide[0], wide[0] * wide[1]].map(|far| heat[at - far] + heat[at + far]);
        heat[at] + 0.1 * (around.iter().sum::<f64>() - 6.0 * heat[at])
    };
    (0..heat.len()).map(cell).collect()
}

fn bytes(heat: &[f64]) -> Vec<u8> {
    heat.iter().flat_map(|heat| heat.to_ne_bytes()).collect()
}

fn floats(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks().0.iter().map(|heat| f64::from_ne_bytes(*heat)).collect()
}

fn over(outcome: Outcome) -> gpus::Result<()> {
    let Outcome::Done(status) = outcome else { return Err("a call that waits did not".into()) };
    Ok(status.ok().map(drop)?)
}

fn spread(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> gpus::Result<()> {
    let (me, size) = (runtime.rank().0 as usize, runtime.size() as usize);
    let (grid, block) = (grid(size), grid(size).map(|parts| parts * N));
    let (mine, from) = (part(me, grid), part(me, grid).map(|part| part * N));
    // On either side of each axis: whose part it is, if it is anybody's.
    let beyond: [_; 6] = std::array::from_fn(|side| {
        let (axis, far) = (side / 2, [1, grid[0], grid[0] * grid[1]][side / 2]);
        if side % 2 == 0 { (mine[axis] > 0).then(|| me - far) } else { (mine[axis] + 1 < grid[axis]).then(|| me + far) }
    });
    // A step reads one field and makes the other. A neighbour that is a step ahead writes to the other one, and cannot be two ahead.
    let field = || gpu.allocate(8 * WIDE.pow(3), Flavour::Plain);
    let (fields, staging) = ([field()?, field()?], gpu.allocate(8 * WIDE.pow(3), Flavour::Pinned)?);
    let registered = [runtime.register_memory(&fields[0])?, runtime.register_memory(&fields[1])?];
    let arrived: [Counter; 6] = std::array::from_fn(|_| Counter::new());
    let names = arrived.iter().map(|counter| runtime.register_comp(counter)).collect::<Result<Vec<_>, _>>()?;
    let first = bytes(&at_first(from, [WIDE; 3], block));
    fields.iter().try_for_each(|field| field.whole().write(&first))?;
    let mut rmrs = Vec::new();
    for mr in &registered {
        let all = runtime.allgather(&runtime.get_rmr(mr).to_bytes())?;
        rmrs.push(all.iter().map(|bytes| Rmr::from_bytes(bytes)).collect::<Result<Vec<_>, _>>()?);
    }
    for number in 0..STEPS {
        let now = number % 2;
        for (side, to) in beyond.iter().enumerate().filter_map(|(side, to)| Some((side, (*to)?))) {
            // Our first layer is the one behind its last, and our last the one before its first.
            let (ours, theirs) = if side % 2 == 0 { (1, N + 1) } else { (N, 0) };
            let (ours, theirs) = (layer(side / 2, ours), layer(side / 2, theirs));
            let put = runtime.post_put_face(Rank(to as u32), &fields[now], &ours, &rmrs[now][to], &theirs);
            over(put.remote_comp(names[side ^ 1]).allow_posted(false).call()?)?;
        }
        let has_come = |side: usize| beyond[side].is_none() || arrived[side].get() > number as u64;
        runtime.wait(|| (0..6).all(has_come))?;
        staging.whole().write(&bytes(&step(&floats(&fields[now].whole().to_vec()?), [WIDE; 3])))?;
        // Not the layers around: a neighbour may have written there already.
        let (own, inner) = (&rmrs[1 - now][me], cells([1; 3], [N; 3]));
        over(runtime.post_put_face(Rank(me as u32), &staging, &inner, own, &inner).allow_posted(false).call()?)?;
    }
    let whole = block.map(|n| n + 2);
    let alone = (0..STEPS).fold(at_first([0; 3], whole, block), |heat, _| step(&heat, whole));
    let found = floats(&fields[STEPS % 2].whole().to_vec()?);
    for at in 0..N.pow(3) {
        let [x, y, z] = part(at, [N; 3]).map(|at| at + 1);
        let there = ((from[2] + z) * whole[1] + from[1] + y) * whole[0] + from[0] + x;
        if found[(z * WIDE + y) * WIDE + x] != alone[there] {
            return Err(format!("rank {me}: the cell at {:?} is wrong", [x, y, z]).into());
        }
    }
    println!("rank {me}: its part of {grid:?} after {STEPS} steps as if computed alone");
    Ok(runtime.barrier()?)
}

fn main() -> gpus::Result<()> {
    gpus::play(spread)
}
