//! A process for each GPU. Each rank puts its token into the GPU memory of the next one, with a
//! notification. It passes arriving tokens on until every token has been everywhere.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 4 -- ring_ipc
//! ```

#[path = "support/gpus.rs"]
mod gpus;

use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{Counter, Rank, Runtime};
use gpus::Result;
use std::process::ExitCode;
use std::sync::Arc;

/// Bytes of a token.
const LEN: usize = 1 << 20;

fn token(rank: u32) -> Vec<u8> {
    (0..LEN).map(|at| (at * 13 + rank as usize * 101) as u8).collect()
}

fn main() -> ExitCode {
    gpus::play(ring)
}

fn ring(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> Result<()> {
    let (me, size) = (runtime.rank().0, runtime.size());
    let next = Rank((me + 1) % size);
    // A place for each step, so that no put overwrites a token that its owner still passes on.
    let places = gpu.allocate((size as usize + 1) * LEN, Flavour::Plain)?;
    let place = |step: u32| places.slice(step as usize * LEN, LEN).ok_or("beyond the places");
    place(0)?.write(&token(me))?;

    let arrived = Counter::new();
    let name = runtime.register_comp(&arrived)?;
    let registered = runtime.register_memory(&places)?;
    let rmr = runtime.exchange_keys(&registered)?.swap_remove(next.0 as usize);

    for step in 0..size {
        let done = Counter::new();
        let at = (step as u64 + 1) * LEN as u64;
        let put = runtime.post_put(next, place(step)?, &rmr, at).remote_comp(name);
        put.comp(&done).submit()?;
        // The token of the next step has arrived when its notification has.
        runtime.wait(|| {
            done.get() + done.failed() > 0 && arrived.get() + arrived.failed() > u64::from(step)
        })?;
        if done.failed() + arrived.failed() > 0 {
            return Err(format!("{}: a put failed in step {step}", runtime.rank()).into());
        }
        let from = (me + size - 1 - step) % size;
        if place(step + 1)?.to_vec()? != token(from) {
            return Err(format!("{}: the token of rank {from} came changed", runtime.rank()).into());
        }
    }
    println!("{}: {size} tokens of {LEN} bytes came unchanged", runtime.rank());
    Ok(runtime.barrier()?)
}
