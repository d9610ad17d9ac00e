//! What operations on memory of a GPU cost in calls of the driver, counted by the mock library: with each they take longer by as
//! much as a small message takes (gpu.md, measured), so a call more is a test that fails.

#[path = "../transports/tests/mock/mod.rs"]
mod mock;
mod support;

use carrack::region::Region;
use carrack::transports::gpu::cuda::CudaDriver;
use carrack::transports::gpu::{Driver, Flavour, Gpu};
use carrack::{Counter, Rank, Runtime, StreamCounter};
use std::path::PathBuf;
use std::sync::Arc;
use support::Watchdog;

/// Calls of the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Calls {
    copies: i32,
    records: i32,
    /// Whether work is over.
    queries: i32,
    waits: i32,
    /// Contexts made current, and no longer so.
    switches: i32,
    /// What an address or a device is.
    questions: i32,
}

/// A rank alone, with a GPU of the mock's.
struct Ground {
    library: PathBuf,
    runtime: Runtime,
    gpu: Arc<dyn Gpu>,
    _watchdog: Watchdog,
}

impl Ground {
    fn new(test: &'static str) -> Self {
        let library = mock::library(test, "-DPINNED");
        let driver = CudaDriver::at(&library);
        let gpu = driver.devices().unwrap().remove(0);
        let runtime = Runtime::builder().gpu_driver(Arc::new(driver)).start().unwrap();
        Self { library, runtime, gpu, _watchdog: Watchdog::over(test) }
    }

    fn plain(&self) -> Region {
        self.gpu.allocate(64, Flavour::Plain).unwrap()
    }

    /// What has been called so far.
    fn calls(&self) -> Calls {
        let word = |name| mock::word(&self.library, name);
        Calls {
            copies: word("mock_copies"),
            records: word("mock_records"),
            queries: word("mock_queries"),
            waits: word("mock_waits"),
            switches: word("mock_switches"),
            questions: word("mock_questions"),
        }
    }

    fn during(&self, what: impl FnOnce()) -> Calls {
        let before = self.calls();
        what();
        let after = self.calls();
        Calls {
            copies: after.copies - before.copies,
            records: after.records - before.records,
            queries: after.queries - before.queries,
            waits: after.waits - before.waits,
            switches: after.switches - before.switches,
            questions: after.questions - before.questions,
        }
    }

    fn until(&self, done: impl Fn() -> bool) {
        while !done() {
            self.runtime.progress().unwrap();
        }
    }
}

#[test]
fn a_step_of_a_ring_costs_a_copy_an_event_and_a_wait() {
    const AHEAD: u64 = 16;
    let ground = Ground::new("ring");
    let (from, window) = (ground.plain(), ground.plain());
    let registered = ground.runtime.register_memory(&window).unwrap();
    let (to, sent) = (ground.runtime.get_rmr(&registered), Counter::new());
    let arrived = StreamCounter::new(&ground.runtime, &ground.gpu).unwrap();
    let name = ground.runtime.register_comp(&arrived).unwrap();
    let stream = ground.gpu.stream().unwrap();
    for step in 0..200 {
        let calls = ground.during(|| {
            let put = ground.runtime.post_put(Rank(0), from.whole(), &to, 0).remote_comp(name);
            assert!(put.on_stream(&stream).comp(&sent).allow_retry(false).call().unwrap().is_posted());
            arrived.wait_on(&stream, step + 1).unwrap();
        });
        // The first one asks what the device is like. Nobody is ever asked how far the waits before it are.
        let questions = i32::from(step == 0);
        let wanted = Calls { copies: 1, records: 1, waits: 1, queries: 0, switches: 4, questions };
        assert_eq!(calls, wanted, "step {step}");
        ground.until(|| sent.get() + AHEAD > step);
    }
    ground.until(|| sent.get() == 200 && arrived.value() == 200);
}
