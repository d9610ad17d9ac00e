//! Each rank greets the next one with an active message, and a handler there prints the greeting.
//!
//! ```sh
//! cargo run --release --example hello_am                  # alone: the next one is itself
//! cargo build --release --examples
//! cargo run --release -- run -n 4 -- hello_am             # four processes
//! ```

use carrack::{AsCompletion, Counter, Handler, Rank, Runtime};

fn main() -> Result<(), carrack::Error> {
    let runtime = Runtime::start()?;
    let (me, size) = (runtime.rank(), runtime.size());

    // The handler runs on the thread that makes progress: here, on this one, while it waits.
    let greeted = Counter::new();
    let count = greeted.as_completion().clone();
    let greet = Handler::new(move |status| {
        let text = status.bytes().map(String::from_utf8_lossy).unwrap_or_default();
        println!("{me} of {size} got \"{text}\" from {}", status.rank);
        // A counter takes every status.
        let _ = count.signal(status);
    });

    // Every rank registers the same objects in the same order, so this name means the handler on
    // all of them. The barrier keeps a rank from sending before the others have registered.
    let name = runtime.register_comp(&greet)?;
    runtime.barrier()?;

    // If there is no room on the way, the runtime keeps the message and sends it later.
    let next = Rank((me.0 + 1) % size);
    let text = format!("hello from {me}");
    runtime.post_am(next, text.as_bytes(), name).submit()?;

    runtime.wait(|| greeted.get() == 1)?;
    // A rank that leaves too early ends with its own greeting still in flight.
    runtime.barrier()?;
    Ok(())
}
