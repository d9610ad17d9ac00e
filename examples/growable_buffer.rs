//! A list that grows on GPUs. Rank 0 has a buffer over all GPUs that it sees. It grows in place as
//! the other ranks append to it, by puts into the memory that they have mapped. Then all of it is
//! one region. Each rank puts from its GPU to where two stripes meet, and gets what the next one
//! has put. In the end it shrinks again, and the first elements are where they were.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 3 -- growable_buffer
//! ```

#[path = "support/gpus.rs"]
mod gpus;

use carrack::alloc::GrowableBuffer;
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{Rank, RemoteKey, Runtime};
use gpus::Result;
use std::process::ExitCode;
use std::sync::Arc;

/// Bytes that a rank appends in a step. A stripe of the buffer has room for those of all ranks.
const PIECE: usize = 100_000;
const STRIPE: usize = 4 << 20;
const STEPS: usize = 8;

fn piece(rank: Rank, step: usize) -> Vec<u8> {
    (0..PIECE).map(|at| (at * 31 + rank.0 as usize * 97 + step * 13) as u8).collect()
}

fn main() -> ExitCode {
    // A trial shows whether the driver keeps a GPU that may read from writing. It runs in a
    // process of its own: this program, started for the trial.
    carrack::trial::answer();
    gpus::play(append)
}

/// Puts to and gets from a list whose stripes lie on GPUs in turn. Its owner can shrink it once all
/// have dropped the key.
fn cross(runtime: &Runtime, gpu: &Arc<dyn Gpu>, list: RemoteKey) -> Result<()> {
    let (me, size) = (runtime.rank(), runtime.size());
    // Half of a piece lies in the stripe before the edge.
    let place = |rank: Rank| ((STEPS + 1 + rank.0 as usize) * STRIPE - PIECE / 2) as u64;
    let memory = gpu.allocate(PIECE, Flavour::Plain)?.whole();
    memory.write(&piece(me, STEPS))?;
    runtime.post_put(Rank(0), memory.clone(), &list, place(me)).wait()?;
    runtime.barrier()?;
    let next = Rank((me.0 + 1) % size);
    runtime.post_get(Rank(0), memory.clone(), &list, place(next)).wait()?;
    if memory.to_vec()? != piece(next, STEPS) {
        return Err(format!("{me} has not got what {next} has put").into());
    }
    println!("{me} has got what {next} has put over two stripes");
    Ok(runtime.barrier()?)
}

fn append(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> Result<()> {
    let (me, others) = (runtime.rank(), 1..runtime.size());
    if me != Rank(0) {
        for step in 0..STEPS {
            let stripe = RemoteKey::from_bytes(&runtime.world().broadcast(Rank(0), &[])?)?;
            let place = (me.0 as usize - 1) * PIECE;
            runtime.post_put(Rank(0), piece(me, step), &stripe, place as u64).wait()?;
            runtime.barrier()?;
        }
        let whole = RemoteKey::from_bytes(&runtime.world().broadcast(Rank(0), &[])?)?;
        cross(runtime, gpu, whole)?;
        return Ok(runtime.barrier()?);
    }

    let all = gpus::all();
    let mut list = GrowableBuffer::reserve(all, 64 * STRIPE).stripe(STRIPE).build()?;
    let (addr, mut registered) = (list.addr(), Vec::new());
    for step in 0..STEPS {
        list.grow_to((step + 1) * STRIPE)?;
        // Peers map single stripes. Those that they have mapped before stay as they were.
        let stripe = list.region(step * STRIPE, STRIPE)?;
        registered.push(runtime.register_memory(&stripe)?);
        let name = registered[step].remote_key().to_bytes();
        runtime.world().broadcast(Rank(0), &name)?;
        runtime.barrier()?;
    }
    list.grow_to((STEPS + 1 + runtime.size() as usize) * STRIPE)?;
    let whole = runtime.register_memory(&list.region(0, list.len())?)?;
    runtime.world().broadcast(Rank(0), &whole.remote_key().to_bytes())?;
    cross(runtime, gpu, whole.remote_key())?;
    drop(whole);
    for (rank, step) in others.flat_map(|rank| (0..STEPS).map(move |step| (Rank(rank), step))) {
        let at = step * STRIPE + (rank.0 as usize - 1) * PIECE;
        if list.region(at, PIECE)?.whole().to_vec()? != piece(rank, step) {
            return Err(format!("what {rank} has appended in step {step} is not there").into());
        }
    }
    let refused = list.shrink_to(STRIPE).err().ok_or("it has shrunk under a registration")?;
    println!("{STEPS} stripes on {} GPU(s) at {addr:#x}, all right; {refused}", all.len());
    registered.truncate(1);
    // The others wait in a barrier meanwhile, and close their mappings of withdrawn memory.
    while list.shrink_to(STRIPE).is_err() {
        runtime.progress()?;
    }
    assert_eq!(list.region(0, PIECE)?.whole().to_vec()?, piece(Rank(1), 0));
    println!("and {} bytes again, where they were", list.len());
    if let [first, others @ ..] = all
        && !others.is_empty()
    {
        // A list in one GPU's memory, which the others read. A driver that lets them write is
        // refused, with the result of the trial.
        match GrowableBuffer::reserve(std::slice::from_ref(first), STRIPE).readers(others).build() {
            Ok(list) => {
                println!("{:?} may do with another list what they may, and no more", list.access())
            }
            Err(why) => println!("no list that others only read: {why}"),
        }
    }
    Ok(runtime.barrier()?)
}
