//! Active messages land in memory of a GPU: a handler gets packets there, keeps them, and their
//! bytes are looked at later.
//!
//! ```sh
//! cargo build --release --examples
//! cargo run --release -- run -n 2 -- am_into_gpu
//! ```
//!
//! Where there is no GPU, a simulated one takes its place, and the output says so.

use carrack::packet::GpuAllocator;
use carrack::transports::gpu::{Driver, Gpu};
use carrack::{Handler, Rank, Runtime, Tag};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use parking_lot::Mutex;
use std::sync::Arc;

/// Sizes from eager messages to rendezvous ones. All of them arrive in memory of the GPU.
const SIZES: [usize; 5] = [8, 100, 5000, 8192, 1 << 20];

/// Returns a GPU of this machine, in turn by rank, or a simulated one.
fn gpu(runtime: &Runtime) -> Result<Arc<dyn Gpu>, carrack::Error> {
    let found = runtime.gpu_drivers().iter().find_map(|driver| driver.devices().ok());
    let gpus = match found {
        Some(gpus) => gpus,
        None => FakeDriver::new(FakeConfig::default())?.devices()?,
    };
    Ok(gpus[runtime.rank().0 as usize % gpus.len()].clone())
}

/// Returns the message that rank `from` sends with tag `at`.
fn message(from: Rank, at: usize) -> Vec<u8> {
    (0..SIZES[at]).map(|place| (place * 7 + at + from.0 as usize) as u8).collect()
}

fn main() -> Result<(), carrack::Error> {
    let runtime = Runtime::start()?;
    let (me, size) = (runtime.rank(), runtime.size());
    let gpu = gpu(&runtime)?;

    // Messages that come to this device land in packets of the pool, and these lie on the GPU.
    let pool = runtime.packet_pool(Arc::new(GpuAllocator::on(gpu.clone())));
    let device = runtime.device().packet_pool(&pool).build()?;

    // The handler gets no reference to the bytes, which a CPU must not touch. It keeps the
    // packets, which it owns now.
    let kept = Arc::new(Mutex::new(Vec::new()));
    let into = kept.clone();
    let keep = Handler::new(move |status| {
        assert!(status.bytes().is_none(), "bytes on a GPU, and a reference to them");
        into.lock().push(status);
    });
    let name = runtime.register_comp(&keep)?;
    runtime.barrier()?;

    let next = Rank((me.0 + 1) % size);
    for at in 0..SIZES.len() {
        let am = runtime.post_am(next, message(me, at), name).tag(Tag(at as u64));
        am.device(&device).submit()?;
    }
    runtime.wait(|| kept.lock().len() == SIZES.len())?;

    // Later, and from any thread: a kernel would get this address. Here the bytes are copied back.
    let kept = std::mem::take(&mut *kept.lock());
    for status in kept {
        let addr = status.buffer.device_addr().ok_or("a message that is not on the GPU")?;
        if status.buffer.to_vec()? != message(status.rank, status.tag.0 as usize) {
            return Err(format!("wrong bytes at {addr:#x}").into());
        }
        // Here the packet goes back to its pool.
    }
    println!("{me}: {} messages lay in memory of {}, all right", SIZES.len(), gpu.info().name);
    runtime.barrier()?;
    Ok(())
}
