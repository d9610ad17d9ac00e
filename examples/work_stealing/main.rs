//! A tree search spread over the ranks by work stealing, checked against one thread's result.
//!
//! ```sh
//! cargo run --release --example work_stealing             # alone
//! cargo build --release --examples
//! cargo run --release -- run -n 4 -- work_stealing        # four processes, on however many cores
//! ```
//!
//! `search` is the tree, `steal` the protocol between the ranks and how they notice the end.

mod search;
mod steal;

use carrack::{Rank, Runtime};
use std::time::Instant;

type Result<T> = std::result::Result<T, carrack::Error>;

fn main() -> Result<()> {
    let runtime = Runtime::start()?;
    let mut worker = steal::Worker::new(&runtime)?;
    let start = Instant::now();
    worker.run()?;
    let took = start.elapsed();

    let mine = [worker.visited.to_le_bytes(), worker.steals.to_le_bytes()].concat();
    let all = runtime.allgather(&mine)?;
    if runtime.rank() == Rank(0) {
        let sum = |at: usize| -> u64 {
            all.iter()
                .filter_map(|bytes| bytes.as_chunks().0.get(at))
                .map(|n| u64::from_le_bytes(*n))
                .sum()
        };
        let (nodes, steals) = (sum(0), sum(1));
        println!("{nodes} nodes by {} ranks in {took:.0?}, {steals} steals", runtime.size());
        let alone = search::count_alone();
        if nodes != alone {
            return Err(format!("the tree has {alone} nodes, and the ranks counted {nodes}").into());
        }
        println!("verified");
    }
    Ok(())
}
