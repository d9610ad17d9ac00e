//! Driver calls of operations on memory of a GPU, counted by the mock library. Each call takes as
//! long as a small message (gpu.md, "Measured"), so one more call fails a test.

#![expect(unsafe_code, reason = "memory of a GPU is named by its address")]

pub(crate) mod instructions;

use crate::support::mock;
use crate::support::{Job, OverShm, Watchdog, built, connect, unstarted};
use carrack::buffer::raw;
use carrack::region::Region;
use carrack::transports::gpu::{Driver, Flavour, Gpu};
use carrack::{
    Buffer, Counter, MR_DEVICE, MR_UNKNOWN, Piece, Rank, RemoteKey, Runtime, StreamCounter,
    Strided, Tag,
};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Calls of the driver.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Calls {
    copies: i32,
    records: i32,
    /// Queries for the end of work.
    queries: i32,
    waits: i32,
    /// Contexts made current, and no longer so.
    switches: i32,
    /// Questions about addresses and devices.
    questions: i32,
}

/// A rank alone, with a GPU of the mock's.
struct CostsFixture {
    library: PathBuf,
    runtime: Runtime,
    gpu: Arc<dyn Gpu>,
    _watchdog: Watchdog,
}

impl CostsFixture {
    fn new(test: &'static str) -> Self {
        Self::of(test, "-DPINNED", false)
    }

    fn with_copier(test: &'static str) -> Self {
        Self::of(test, "-DCOPIER", true)
    }

    fn of(test: &'static str, define: &str, has_copier: bool) -> Self {
        let library = mock::library(test, define);
        let driver = mock::open(&library);
        if has_copier {
            driver.use_copiers();
        }
        let gpu = driver.devices().unwrap().remove(0);
        let runtime = Runtime::builder().gpu_driver(Arc::new(driver)).start().unwrap();
        Self { library, runtime, gpu, _watchdog: Watchdog::over(test) }
    }

    /// Returns one of the mock's own words.
    fn word(&self, name: &str) -> i32 {
        mock::word(&self.library, name)
    }

    fn plain(&self) -> Region {
        self.gpu.allocate(64, Flavour::Plain).unwrap()
    }

    /// Returns the calls so far.
    fn calls(&self) -> Calls {
        Calls {
            copies: self.word("mock_copies"),
            records: self.word("mock_records"),
            queries: self.word("mock_queries"),
            waits: self.word("mock_waits"),
            switches: self.word("mock_switches"),
            questions: self.word("mock_questions"),
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

/// Initialising CUDA takes a rank 0.2 s for each GPU, one rank of a node after the other.
#[test]
fn a_rank_that_has_host_memory_only_does_not_initialise_cuda() {
    let test = "a_rank_that_has_host_memory_only_does_not_initialise_cuda";
    let _watchdog = Watchdog::over(test);
    let library = mock::library(test, "-DPINNED");
    let driver = Arc::new(mock::open(&library));
    let runtime = Runtime::builder().gpu_driver(driver.clone()).start().unwrap();
    let received = Counter::new();
    runtime.post_recv(Rank(0), vec![0; 1 << 20], Tag(1)).comp(&received).submit().unwrap();
    runtime.post_send(Rank(0), vec![1; 1 << 20], Tag(1)).wait().unwrap();
    while received.get() == 0 {
        runtime.progress().unwrap();
    }
    let kinds = |kind: &str| {
        let paths = runtime.explain(Duration::ZERO).remove(0).kinds;
        paths.into_iter().filter(|path| path.memory.starts_with(kind)).collect::<Vec<_>>()
    };
    let unused = kinds("device").into_iter().filter_map(|kind| kind.why);
    assert!(unused.into_iter().any(|why| why.contains("not initialised")));
    assert_eq!(mock::word(&library, "mock_inits"), 0);
    driver.devices().unwrap();
    assert_eq!(kinds("device 0").len(), 1);
}

/// Puts of device memory to the rank itself.
fn put(fixture: &CostsFixture, from: impl Into<Buffer>, to: &RemoteKey, comp: &Counter) {
    let mut put = fixture.runtime.post_put(Rank(0), from.into(), to, 0).comp(comp);
    put.submit().unwrap();
}

/// Returns a count of `copies` copies and `switches` changes of the context, without any query.
fn copies(copies: i32, switches: i32) -> Calls {
    Calls { copies, switches, records: 0, queries: 0, waits: 0, questions: 0 }
}

#[test]
fn puts_of_known_memory_cost_a_copy_each_and_a_question_for_many() {
    let fixture = CostsFixture::new("put");
    let (from, window) = (fixture.plain(), fixture.plain());
    let registered = fixture.runtime.register_memory(&window).unwrap();
    let (to, ended) = (registered.remote_key(), Counter::new());
    put(&fixture, from.whole(), &to, &ended);
    fixture.until(|| ended.get() == 1);
    for many in [1, 16, 2000] {
        let wanted = ended.get() + many as u64;
        let post = || (0..many).for_each(|_| put(&fixture, from.whole(), &to, &ended));
        assert_eq!(fixture.during(post), copies(many, 2 * many));
        // The mock's engine is found done when it is asked for the third time; and of many, an
        // event is recorded.
        let ends = fixture.during(|| fixture.until(|| ended.get() == wanted));
        assert!(ends.queries <= 3 && ends.records <= 1 && ends.questions == 0, "{many}: {ends:?}");
    }
    // With any number in flight, progress asks for one of them, once.
    fixture.word("mock_hold");
    let wanted = ended.get() + 40;
    (0..40).for_each(|_| put(&fixture, from.whole(), &to, &ended));
    let progress =
        |calls: i32| fixture.during(|| (0..calls).for_each(|_| drop(fixture.runtime.progress())));
    assert_eq!(progress(1).records, 1);
    assert_eq!(progress(100), Calls { queries: 100, ..copies(0, 200) });
    fixture.word("mock_release");
    fixture.until(|| ended.get() == wanted);
    // Where the thread has the context, as programs of the CUDA runtime have, it stays.
    fixture.word("mock_enter");
    let post = || (0..9).for_each(|_| put(&fixture, from.whole(), &to, &ended));
    assert_eq!(fixture.during(post), copies(9, 0));
    fixture.word("mock_leave");
    // As it does where the thread was given it: then progress changes none, either, not even for
    // its first question.
    fixture.gpu.make_current().unwrap();
    let wanted = ended.get() + 18;
    assert_eq!(fixture.during(post), copies(9, 0));
    let ends = fixture.during(|| fixture.until(|| ended.get() == wanted));
    assert!(ends.queries <= 3 && ends.switches == 0, "{ends:?}");
    fixture.word("mock_leave");
}

#[test]
fn a_thousand_pieces_cost_one_call_and_a_strided_block_another() {
    const PIECES: usize = 1000;
    let fixture = CostsFixture::new("pieces");
    let region = |len| fixture.gpu.allocate(len, Flavour::Plain).unwrap();
    let (from, window) = (region(PIECES * 128), region(PIECES * 128));
    let registered = fixture.runtime.register_memory(&window).unwrap();
    let (to, ended) = (registered.remote_key(), Counter::new());
    let batches = || (fixture.word("mock_batches"), fixture.word("mock_grids"));
    // In another order here than there.
    let piece = |at: usize| {
        let start = (at ^ 1) * 128;
        Piece { local: &from, range: start..start + 64, rmr: &to, offset: at as u64 * 128 }
    };
    let pieces: Vec<_> = (0..PIECES).map(piece).collect();
    let put = || {
        let mut put = fixture.runtime.post_put_batch(Rank(0), &pieces).comp(&ended);
        put.submit().unwrap();
    };
    // The first question of all is asked twice: this thread turns out to have no context.
    put();
    fixture.until(|| ended.get() == 1);
    let before = batches();
    assert_eq!(fixture.during(put), copies(0, 2));
    assert_eq!(batches(), (before.0 + 1, before.1));
    let ends = fixture.during(|| fixture.until(|| ended.get() == 2));
    assert!(ends.queries <= 3 && ends.records == 0, "{ends:?}");

    let block = Strided { offset: 0, count: [64, 20, 50], pitch: [128, 128 * 20] };
    let put = || {
        let mut put =
            fixture.runtime.post_put_strided(Rank(0), &from, &block, &to, &block).comp(&ended);
        put.submit().unwrap();
    };
    assert_eq!(fixture.during(put), copies(0, 2));
    assert_eq!(batches(), (before.0 + 1, before.1 + 1));
    fixture.until(|| ended.get() == 3);
    // On a stream of the program's: with an event behind it.
    let stream = fixture.gpu.stream().unwrap();
    let put = || {
        let mut put =
            fixture.runtime.post_put_batch(Rank(0), &pieces).comp(&ended).on_stream(&stream);
        put.submit().unwrap();
    };
    assert_eq!(fixture.during(put), Calls { records: 1, ..copies(0, 2) });
    assert_eq!(batches(), (before.0 + 2, before.1 + 1));
    fixture.until(|| ended.get() == 4);
}

#[test]
fn a_put_of_raw_memory_costs_one_question_where_nothing_is_promised() {
    let fixture = CostsFixture::new("raw");
    let (from, window) = (fixture.plain(), fixture.plain());
    let registered = fixture.runtime.register_memory(&window).unwrap();
    let (to, ended) = (registered.remote_key(), Counter::new());
    let region = |hint| {
        // SAFETY: `from` stays to the end, and there are no references to its bytes.
        unsafe { raw::region(from.addr() as *mut u8, 8, hint, fixture.runtime.gpu_drivers()) }
            .unwrap()
    };
    drop(region(MR_UNKNOWN));
    for (hint, questions) in [(MR_UNKNOWN, 1), (MR_DEVICE, 0)] {
        let mut kept = None;
        let fresh = || put(&fixture, kept.insert(region(hint)).whole(), &to, &ended);
        assert_eq!(
            fixture.during(fresh),
            Calls { questions, ..copies(1, 2) },
            "{hint:?}, the first time"
        );
        let again = || put(&fixture, kept.as_ref().unwrap().whole(), &to, &ended);
        assert_eq!(fixture.during(again), Calls { questions, ..copies(1, 2) }, "{hint:?}, again");
    }
    fixture.until(|| ended.get() == 4);
}

#[test]
fn a_message_of_known_memory_costs_its_receiver_a_copy_and_its_sender_nothing() {
    let fixture = CostsFixture::new("send");
    let start = |bootstrap| {
        let driver = Arc::new(mock::open(&fixture.library));
        let builder = Runtime::builder().settings(built(OverShm::settings())).gpu_driver(driver);
        builder.bootstrap(Box::new(bootstrap)).start().unwrap()
    };
    let ranks: Vec<Runtime> = unstarted(2).into_iter().map(start).collect();
    connect(&ranks);
    let (from, to) = (fixture.plain(), fixture.plain());
    let (sent, received) = (Counter::new(), Counter::new());
    for message in 1..=3 {
        let receive =
            ranks[1].post_recv(Rank(0), to.whole(), Tag(1)).comp(&received).try_submit().unwrap();
        assert!(receive.is_posted());
        let send = fixture.during(|| {
            let mut send = ranks[0].post_send(Rank(1), from.whole(), Tag(1)).comp(&sent);
            send.submit().unwrap();
            ranks[0].progress().unwrap();
        });
        let arrival = fixture.during(|| {
            while received.get() < message {
                ranks[1].progress().unwrap();
            }
        });
        let end = fixture.during(|| {
            while sent.get() < message {
                ranks[0].progress().unwrap();
            }
        });
        if message == 1 {
            // The region is exported, and the receiver maps it.
            continue;
        }
        assert_eq!((send, end), (copies(0, 0), copies(0, 0)), "message {message}");
        // The mock's engine is found done when it is asked for the third time, each time in a
        // context.
        assert_eq!(arrival, Calls { queries: 3, ..copies(1, 8) }, "message {message}");
    }
}

#[test]
fn a_step_of_a_ring_costs_a_copy_an_event_and_a_wait() {
    const AHEAD: u64 = 16;
    let fixture = CostsFixture::new("ring");
    let (from, window) = (fixture.plain(), fixture.plain());
    let registered = fixture.runtime.register_memory(&window).unwrap();
    let (to, sent) = (registered.remote_key(), Counter::new());
    let arrived = StreamCounter::new(&fixture.runtime, &fixture.gpu).unwrap();
    let name = fixture.runtime.register_comp(&arrived).unwrap();
    let stream = fixture.gpu.stream().unwrap();
    // From now on there is a stream that could be asked.
    let before = Counter::new();
    put(&fixture, from.whole(), &to, &before);
    fixture.until(|| before.get() == 1);
    for step in 0..200 {
        let calls = fixture.during(|| {
            let put = fixture.runtime.post_put(Rank(0), from.whole(), &to, 0).remote_comp(name);
            put.on_stream(&stream).comp(&sent).submit().unwrap();
            arrived.wait_on(&stream, step + 1).unwrap();
        });
        // The first step asks for the device's properties. No step queries earlier waits.
        let questions = i32::from(step == 0);
        let wanted = Calls { copies: 1, records: 1, waits: 1, queries: 0, switches: 4, questions };
        assert_eq!(calls, wanted, "step {step}");
        fixture.until(|| sent.get() + AHEAD > step);
    }
    fixture.until(|| sent.get() == 200 && arrived.value() == 200);
}
