//! An array spread over all ranks. Every rank puts its share of each part, adds to the counters of
//! the others, and gets the whole array back to check it.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 4 -- distributed_array
//! ```

use carrack::{Rank, Runtime};

/// Words of the array that each rank holds, after one word that counts.
const PART: usize = 100_000;

fn value(at: usize) -> u64 {
    (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn main() -> Result<(), carrack::Error> {
    let runtime = Runtime::start()?;
    let (me, size) = (runtime.rank().0 as usize, runtime.size() as usize);

    // Each rank allocates its part where the others can map it, and tells them how to reach it.
    let part = runtime.allocate(8 * (1 + PART))?;
    let registered = runtime.register_memory(&part)?;
    let parts = runtime.exchange_keys(&registered)?;

    // Every rank fills a share of every rank's part, in pieces, and adds the number of its words
    // to the part's counter. `wait` returns when an operation is
    // complete.
    let share = |rank: usize| rank * PART / size..(rank + 1) * PART / size;
    for (owner, rmr) in parts.iter().enumerate() {
        let to = Rank(owner as u32);
        for first in share(me).step_by(1000) {
            let last = (first + 1000).min(share(me).end);
            let bytes: Vec<u8> =
                (first..last).flat_map(|at| value(owner * PART + at).to_le_bytes()).collect();
            let at = 8 * (1 + first as u64);
            let _over = runtime.post_put(to, &bytes[..], rmr, at).wait()?;
        }
        let _over = runtime.post_fetch_add(to, rmr, 0, share(me).len() as u64).wait()?;
    }
    runtime.barrier()?;

    // Behind the barrier the array is complete, for all ranks.
    for (owner, rmr) in parts.iter().enumerate() {
        let whole = runtime.post_get(Rank(owner as u32), vec![0; 8 * (1 + PART)], rmr, 0).wait()?;
        let bytes = whole.buffer.to_vec()?;
        let words: Vec<u64> =
            bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let right =
            words.iter().skip(1).enumerate().all(|(at, word)| *word == value(owner * PART + at));
        if words[0] != PART as u64 || !right {
            return Err(format!("rank {me}: the part of rank {owner} is wrong").into());
        }
    }
    println!("rank {me}: {} words, all right", size * PART);
    runtime.barrier()?;
    Ok(())
}
