//! Ranks 0 and 1 send GPU memory to and fro. For each size rank 0 prints the time of one way, and
//! the bytes a second.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 2 -- gpu_pingpong
//! ```

#[path = "support/gpus.rs"]
mod gpus;

use carrack::buffer::RegionSlice;
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{Counter, Rank, Runtime, Tag};
use gpus::Result;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

const SIZES: [usize; 5] = [8, 4 << 10, 64 << 10, 1 << 20, 16 << 20];
/// Messages on their way at a time, when bytes a second are counted.
const WINDOW: usize = 8;

fn main() -> ExitCode {
    gpus::play(|runtime, gpu| {
        if runtime.rank().0 < 2 {
            rally(runtime, gpu)?;
        }
        // Ranks beyond the second wait here, asleep.
        Ok(runtime.barrier()?)
    })
}

fn rally(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> Result<()> {
    let (serves, peer) = (runtime.rank() == Rank(0), Rank(1 - runtime.rank().0));
    let send = |slice: &RegionSlice| -> Result<()> {
        let sent = Counter::new();
        runtime.post_send(peer, slice.clone(), Tag(1)).comp(&sent).submit()?;
        runtime.wait(|| sent.get() + sent.failed() > 0)?;
        if sent.failed() > 0 { Err("a send failed")? } else { Ok(()) }
    };
    let receive = |slice: &RegionSlice, count: usize| -> Result<()> {
        let came = Counter::new();
        for _ in 0..count {
            runtime.post_recv(peer, slice.clone(), Tag(1)).comp(&came).submit()?;
        }
        runtime.wait(|| came.get() + came.failed() >= count as u64)?;
        if came.failed() > 0 { Err("a receive failed")? } else { Ok(()) }
    };
    for size in SIZES {
        let memory = gpu.allocate(2 * size, Flavour::Plain)?;
        let halves =
            [memory.slice(0, size), memory.slice(size, size)].map(|half| half.ok_or("half of it"));
        let [ball, back] = halves;
        let (ball, back) = (ball?, back?);
        let period: Vec<u8> = (0..size.min(256)).map(|at| (at * 31 + size) as u8).collect();
        let bytes = period.repeat(size.div_ceil(256));
        if serves {
            ball.write(&bytes)?;
        }
        let rounds: u32 = if size < 1 << 20 { 200 } else { 20 };
        let start = Instant::now();
        for _ in 0..rounds {
            if serves {
                send(&ball)?;
                receive(&back, 1)?;
            } else {
                receive(&ball, 1)?;
                send(&ball)?;
            }
        }
        let one_way = start.elapsed() / (2 * rounds);
        // What came back has been in the memory of the other rank.
        let right = if serves { &back } else { &ball };
        if right.to_vec()? != bytes {
            return Err(format!("{}: {size} bytes came wrong", runtime.rank()).into());
        }
        let start = Instant::now();
        for _ in 0..rounds as usize / WINDOW {
            if serves {
                (0..WINDOW).try_for_each(|_| send(&ball))?;
                receive(&back, 1)?;
            } else {
                receive(&back, WINDOW)?;
                send(&ball)?;
            }
        }
        if serves {
            let sent = (rounds as usize / WINDOW * WINDOW * size) as f64;
            let rate = sent / start.elapsed().as_secs_f64() / 1e9;
            println!(
                "{size:>9} B  {:>9.2} us one way  {rate:>8.3} GB/s",
                one_way.as_secs_f64() * 1e6
            );
        }
    }
    println!("{}: all {} sizes came back unchanged", runtime.rank(), SIZES.len());
    Ok(())
}
