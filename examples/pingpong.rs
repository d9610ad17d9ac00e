//! Ranks 0 and 1 send 8 bytes to and fro, and rank 0 prints how long one way takes.
//!
//! ```sh
//! cargo run --release --example pingpong                  # alone: two ranks on two threads
//! cargo build --release --examples
//! cargo run --release -- run -n 2 -- pingpong             # two processes, over shared memory
//! ```

use carrack::{Buffer, CompQueue, Rank, Runtime, Tag};
use std::error::Error;
use std::time::{Duration, Instant};

const WARM_UP: u32 = 1_000;
const ROUNDS: u32 = 100_000;
const BALL: Tag = Tag(1);

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Result<()> {
    let runtime = Runtime::start()?;
    if runtime.size() > 1 {
        return play(&runtime);
    }
    // A job of one rank has no partner, so two ranks in this process play, each on a thread.
    let ranks = Runtime::in_process(2)?;
    std::thread::scope(|threads| {
        let players: Vec<_> = ranks.iter().map(|rank| threads.spawn(|| play(rank))).collect();
        players.into_iter().try_for_each(|player| player.join().map_err(|_| "a player panicked")?)
    })
}

fn play(runtime: &Runtime) -> Result<()> {
    if runtime.rank().0 < 2 {
        let one_way = rally(runtime)?;
        if runtime.rank() == Rank(0) {
            let path = runtime.explain(Duration::ZERO)[1].chosen().unwrap_or("no path");
            println!("one way takes {:.0} ns over {path}", one_way.as_secs_f64() * 1e9);
        }
    }
    // Ranks beyond the second wait here, asleep.
    Ok(runtime.barrier()?)
}

fn rally(runtime: &Runtime) -> Result<Duration> {
    let (serves, peer) = (runtime.rank() == Rank(0), Rank(1 - runtime.rank().0));
    let arrived = CompQueue::new(1);
    let mut buffer = Buffer::from(vec![0; 8]);
    let mut start = Instant::now();
    for round in 0..WARM_UP + ROUNDS {
        if round == WARM_UP {
            start = Instant::now();
        }
        // The receive is there before the ball can be, so the ball lands in its buffer straight
        // away.
        runtime.post_recv(peer, buffer, BALL).comp(&arrived).submit()?;
        if serves {
            hit(runtime, peer)?;
        }
        runtime.wait(|| !arrived.is_empty())?;
        buffer = arrived.pop().ok_or("a ball that was seen has gone")?.ok()?.buffer;
        if !serves {
            hit(runtime, peer)?;
        }
    }
    Ok(start.elapsed() / (2 * ROUNDS))
}

fn hit(runtime: &Runtime, peer: Rank) -> Result<()> {
    let mut send = runtime.post_send(peer, &[7; 8], BALL);
    while send.try_submit()?.is_retry() {
        runtime.progress()?;
    }
    Ok(())
}
