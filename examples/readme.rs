//! The program of the README, word for word: a message to the next rank.

use carrack::prelude::*;

fn main() -> Result<(), carrack::Error> {
    let runtime = Runtime::start()?;
    let inbox = CompQueue::new(16);
    let name = runtime.register_comp(&inbox)?;
    runtime.barrier()?; // from here on every rank has an inbox of that name

    let next = Rank((runtime.rank().0 + 1) % runtime.size());
    runtime.post_am(next, b"ahoy", name).submit()?;

    let message = inbox.wait_pop(&runtime)?; // makes progress; sleeps when there is nothing to do
    let text = message.bytes().map(String::from_utf8_lossy);
    println!("{} got {text:?} from {}", runtime.rank(), message.rank);
    Ok(runtime.barrier()?)
}
