//! A pipeline of futures. Each rank fetches blocks of numbers from the next one, several at a time,
//! squares them, and sends the sums on. Groups of even and odd ranks gather theirs at the same
//! time. Every rank checks what it got.
//!
//! ```sh
//! cargo run --release --example futures                   # alone: the next one is itself
//! cargo build --release --examples
//! cargo run --release -- run -n 4 -- futures              # four processes
//! ```

use carrack::{AwaitError, Rank, RemoteKey, Runtime, Tag};

/// Blocks of each rank, and words of a block.
const BLOCKS: u64 = 64;
const WORDS: u64 = 512;
/// Blocks that are fetched at the same time.
const AHEAD: usize = 8;

/// Returns the word that `rank` has at `at`.
fn word(rank: Rank, at: u64) -> u64 {
    u64::from(rank.0) * 1_000_003 + at
}

fn squares(bytes: &[u8]) -> u64 {
    let words =
        bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()));
    words.fold(0, |sum, word| sum.wrapping_add(word.wrapping_mul(word)))
}

/// Fetches all words of the rank whose memory `rmr` names, and returns the sum of their squares.
async fn fetch(runtime: &Runtime, from: Rank, rmr: &RemoteKey) -> Result<u64, AwaitError> {
    let block =
        |at: u64| runtime.post_get(from, vec![0; WORDS as usize * 8], rmr, at * WORDS * 8).start();
    // Started now, awaited later: so AHEAD blocks are on their way while one is worked on.
    let mut in_flight: std::collections::VecDeque<_> = (0..AHEAD as u64).map(block).collect();
    let mut sum = 0_u64;
    for next in AHEAD as u64..BLOCKS + AHEAD as u64 {
        let Some(first) = in_flight.pop_front() else { break };
        let status = first.await?;
        if next < BLOCKS {
            in_flight.push_back(block(next));
        }
        sum = sum.wrapping_add(squares(status.bytes().unwrap_or_default()));
    }
    Ok(sum)
}

async fn work(runtime: &Runtime) -> Result<(), carrack::Error> {
    let (me, size) = (runtime.rank(), runtime.size());
    let (next, previous) = (Rank((me.0 + 1) % size), Rank((me.0 + size - 1) % size));

    let memory = runtime.allocate((BLOCKS * WORDS * 8) as usize)?;
    let words: Vec<u8> = (0..BLOCKS * WORDS).flat_map(|at| word(me, at).to_le_bytes()).collect();
    memory.whole().write(&words)?;
    let registered = runtime.register_memory(&memory)?;

    // The remote keys of all ranks. The allgather is also a barrier: all memory is filled behind
    // it.
    let world = runtime.world();
    let names = world.allgather_async(&registered.remote_key().to_bytes()).await?;
    let theirs = RemoteKey::from_bytes(&names[next.0 as usize])?;
    let sum = fetch(runtime, next, &theirs).await?;

    // The owner of the words gets the sum, and compares it with its own.
    let send = runtime.post_send(next, sum.to_le_bytes().to_vec(), Tag(1)).start();
    let mine = runtime.post_recv(previous, vec![0; 8], Tag(1)).await?;
    send.await?;
    let want = squares(&words).to_le_bytes();
    assert_eq!(mine.bytes(), Some(&want[..]), "{previous} has another sum of {me}'s squares");

    // Even and odd ranks, each among themselves.
    let alike: Vec<Rank> = (me.0 % 2..size).step_by(2).map(Rank).collect();
    let group = runtime.group(1 + me.0 % 2, &alike)?;
    let sums = group.allgather_async(&want).await?;
    println!(
        "{me} of {size}: {BLOCKS} blocks fetched from {next}, all right; {} sums gathered",
        sums.len()
    );
    world.barrier_async().await?;
    Ok(())
}

fn main() -> Result<(), carrack::Error> {
    let runtime = Runtime::start()?;
    runtime.block_on(work(&runtime))?
}
