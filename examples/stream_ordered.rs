//! Blocks of 1 MiB go round a ring of GPUs. A stream orders a put, its notification, the work that
//! needs the block, and the next put. The host queues all operations in advance and makes progress.
//! It waits for no GPU until the end.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 2 -- stream_ordered
//! ```
//!
//! Without an NVIDIA GPU it runs on simulated ones, and says so.

use carrack::transports::gpu::cuda::CudaDriver;
use carrack::transports::gpu::{Driver, Flavour};
use carrack::transports::mem::Transfer;
use carrack::{Counter, Rank, RemoteKey, Runtime, StreamCounter};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: usize = 1 << 20;
const STEPS: u64 = 200;
/// Steps that the host queues in advance. A stream has room for some hundred operations, and then
/// blocks the thread that adds more.
const AHEAD: u64 = 40;

fn main() -> Result<(), carrack::Error> {
    let driver: Arc<dyn Driver> = match CudaDriver::initialise() {
        Ok(cuda) => Arc::new(cuda),
        Err(_) => {
            Arc::new(FakeDriver::new(FakeConfig { memory: 1 << 30, ..FakeConfig::devices(8) })?)
        }
    };
    let runtime = Runtime::builder().gpu_driver(driver.clone()).start()?;
    let (me, size) = (runtime.rank().0 as usize, runtime.size() as usize);
    let gpus = driver.devices()?;
    let gpu = &gpus[me % gpus.len()];
    let stream = gpu.stream()?;

    // The left neighbour can be `size` steps ahead, so the window has one place more than that.
    let places = size + 1;
    let window = gpu.allocate(places * BLOCK, Flavour::Plain)?;
    let block =
        |at: u64| window.slice(at as usize % places * BLOCK, BLOCK).expect("a place of the window");
    let own = gpu.allocate(BLOCK, Flavour::Plain)?;
    own.whole().write(&vec![me as u8; BLOCK])?;
    let (sent, arrived) = (Counter::new(), StreamCounter::new(&runtime, gpu)?);
    let name = runtime.register_comp(&arrived)?;
    arrived.watch(Rank(((me + size - 1) % size) as u32));
    let registered = runtime.register_memory(&window)?;
    let rmrs = runtime.allgather(&registered.remote_key().to_bytes())?;
    let (right, rmr) = ((me + 1) % size, RemoteKey::from_bytes(&rmrs[(me + 1) % size])?);

    let (mut host, mut work) = (Vec::with_capacity(STEPS as usize), Vec::new());
    for step in 0..STEPS {
        let began = Instant::now();
        let at = (step as usize % places * BLOCK) as u64;
        let put = runtime.post_put(Rank(right as u32), own.whole(), &rmr, at).remote_comp(name);
        put.on_stream(&stream).comp(&sent).submit()?;
        arrived.wait_on(&stream, step + 1)?;
        host.push(began.elapsed());
        // Here a kernel would compute the next block from the one that has arrived.
        let next = Transfer::start_on(&*stream, own.whole().into(), block(step).into());
        work.push(next.map_err(|refused| refused.cause)?);
        runtime.progress()?;
        runtime.wait(|| sent.get() + sent.failed() + AHEAD > step)?;
    }
    let done = stream.record()?;
    while sent.get() + sent.failed() < STEPS || !done.query()? {
        runtime.progress()?;
    }
    if let Some(error) = arrived.error() {
        return Err(error.into());
    }
    if sent.failed() > 0 {
        return Err("a block has not reached the neighbour".into());
    }
    // After `STEPS` steps the block is that of the rank `STEPS` places to the left.
    let from = (me + size * STEPS as usize - STEPS as usize) % size;
    assert!(
        own.whole().to_vec()?.iter().all(|&byte| byte == from as u8),
        "not the block of rank {from}"
    );
    // The first step maps the neighbour's memory.
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let (kind, first) = (driver.name(), micros(host[0]));
    host.sort_unstable();
    let step = micros(host[host.len() / 2]);
    println!(
        "rank {me}: {STEPS} steps of 1 MiB on {kind}, all right; {step:.1} us of the host's time a \
        step, {first:.0} us the first"
    );
    runtime.barrier()?;
    Ok(())
}
