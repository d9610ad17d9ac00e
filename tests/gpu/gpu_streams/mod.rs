//! Operations in the order of streams, and streams that wait for operations: with simulated GPUs
//! here, and with real ones where `TEST_GPU=cuda` says so. The rules a to e are the deadlock rules
//! of docs/gpu.md.
//!
//! | module | one idea |
//! |---|---|
//! | `alone` | within one process: the rules against deadlock, counters, bad input |
//! | `ends` | within one process: cancelled, late, failed, shut down |
//! | `between` | between processes: every operation, rings, a peer that is killed |

mod alone;
mod between;
mod ends;

use crate::support::gpus::{are_real as is_real, of as gpus};
use crate::support::ranks::Role;
use crate::support::words::filled;
use crate::support::{Job, OverShm};
use carrack::settings::{GpuChoice, SettingsBuilder};
use carrack::transports::gpu::cuda::CudaDriver;
use carrack::transports::gpu::{Driver, Flavour, Gpu, Stream};
use carrack::{AsCompletion, Buffer, Rank, Runtime, Status, StreamCounter, Tag, UserContext};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use std::sync::Arc;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(100);

/// Settings of ranks that are processes.
fn settings() -> SettingsBuilder {
    OverShm::settings().gpu(if is_real() { GpuChoice::Cuda } else { GpuChoice::Fake })
}

/// Starts a driver for tests of one process.
fn driver() -> Arc<dyn Driver> {
    match is_real() {
        true => Arc::new(CudaDriver::initialise().expect("a GPU")),
        false => Arc::new(FakeDriver::new(FakeConfig::devices(2)).unwrap()),
    }
}

/// Host, pinned, and device memory.
const KINDS: usize = 3;

fn memory(gpu: &Arc<dyn Gpu>, kind: usize, bytes: &[u8]) -> Buffer {
    let flavour = match kind {
        0 => return bytes.to_vec().into(),
        1 => Flavour::Pinned,
        _ => Flavour::Plain,
    };
    let slice = gpu.allocate(bytes.len(), flavour).unwrap().whole();
    slice.write(bytes).unwrap();
    slice.into()
}

/// Holds a stream up until it is released.
struct Brake {
    counter: StreamCounter,
    turns: std::cell::Cell<u64>,
}

impl Brake {
    fn new(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> Self {
        let counter = StreamCounter::new(runtime, gpu).unwrap();
        Self { counter, turns: std::cell::Cell::new(0) }
    }

    fn hold(&self, stream: &Arc<dyn Stream>) {
        self.turns.set(self.counter.value() + 1);
        self.counter.wait_on(stream, self.turns.get()).unwrap();
    }

    fn release(&self) {
        raise(&self.counter);
    }
}

/// Raises a counter like a successful operation.
fn raise(counter: &StreamCounter) {
    let (rank, tag, user_context) = (Rank(0), Tag(0), UserContext(0));
    let status = Status { rank, tag, size: 0, user_context, buffer: Buffer::Empty, error: None };
    assert!(counter.as_completion().signal(status).is_ok());
}

fn is_past(event: &carrack::transports::gpu::GpuEvent) -> bool {
    event.query().expect("no work of the stream failed")
}

#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(PATIENCE) else { return };
    match role.name.as_str() {
        "ring" => between::ring(&role),
        "killed" => between::killed(&role),
        _ => between::every(&role),
    }
}
