//! One process and all its GPUs: each has a rank, whose token goes around the ring. It travels
//! from the memory of one GPU straight into that of the next.
//!
//! ```sh
//! cargo run --release --example ring_p2p
//! ```

#[path = "support/gpus.rs"]
mod gpus;

use carrack::transports::gpu::Flavour;
use carrack::{Counter, Rank, RemoteKey, Runtime};
use gpus::Result;

/// Bytes of a token.
const LEN: usize = 1 << 20;

fn token(rank: usize) -> Vec<u8> {
    (0..LEN).map(|at| (at * 13 + rank * 101) as u8).collect()
}

fn main() -> Result<()> {
    let settings = gpus::settings()?;
    let gpus = {
        let alone = Runtime::in_process_with(1, &settings)?;
        gpus::of(&alone[0])?
    };
    gpus::say(&gpus);
    let size = gpus.len();
    let next = |rank: usize| (rank + 1) % size;
    for (rank, gpu) in gpus.iter().enumerate().filter(|_| size > 1) {
        let link = gpu.peer(gpus[next(rank)].info().uuid)?;
        let access = if link.access { "peer access" } else { "no peer access" };
        println!(
            "GPU {rank} to {}: {access}, performance rank {}, {}",
            next(rank),
            link.performance_rank,
            link.link
        );
    }

    // A place for each step, so that nothing is overwritten that the GPU behind still reads.
    let ranks = Runtime::in_process_with(size as u32, &settings)?;
    let places = gpus.iter().map(|gpu| gpu.allocate((size + 1) * LEN, Flavour::Plain));
    let places = places.collect::<std::result::Result<Vec<_>, _>>()?;
    let registered = ranks.iter().zip(&places).map(|(rank, place)| rank.register_memory(place));
    let registered = registered.collect::<std::result::Result<Vec<_>, _>>()?;
    let names: Vec<RemoteKey> =
        ranks.iter().zip(&registered).map(|(_rank, mr)| mr.remote_key()).collect();
    let place =
        |rank: usize, step: usize| places[rank].slice(step * LEN, LEN).ok_or("beyond the places");
    for rank in 0..size {
        place(rank, 0)?.write(&token(rank))?;
    }

    for step in 0..size {
        let done = Counter::new();
        let mut wanted = 0;
        for (rank, runtime) in ranks.iter().enumerate() {
            let (to, at) = (next(rank), ((step + 1) * LEN) as u64);
            let put = runtime.post_put(Rank(to as u32), place(rank, step)?, &names[to], at);
            put.comp(&done).submit()?;
            wanted += 1;
        }
        while done.get() + done.failed() < wanted {
            ranks.iter().try_for_each(|rank| rank.progress().map(drop))?;
        }
        if done.failed() > 0 {
            return Err(format!("{} of {size} puts failed in step {step}", done.failed()).into());
        }
    }

    for rank in 0..size {
        if place(rank, size)?.to_vec()? != token(rank) {
            return Err(format!("the token of GPU {rank} came back changed").into());
        }
    }
    println!("{size} tokens of {LEN} bytes went around {size} GPUs and came back unchanged");
    Ok(())
}
