//! Within one process: the rules against deadlock, counters, and bad input.

#![expect(unsafe_code, reason = "GPU memory and words of streams are used by address")]

use super::{Brake, driver, filled, is_past, memory, raise};
use crate::support::sink::Sink;
use crate::support::{
    Job, OverShm, Watchdog, built, connect, happens, sent, settle, unstarted, until,
};
use carrack::transports::gpu::{Driver, Flavour, Gpu, Stream};
use carrack::transports::mem::Region;
use carrack::{Buffer, CompQueue, OpError, PostError, Rank, Runtime, StreamCounter, Tag};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Tests of one process share its contexts, and so the streams that may wait: they come one after
/// the other.
static TURN: Mutex<()> = Mutex::new(());

/// Two ranks of this process, and a GPU.
pub(crate) struct Fixture {
    pub(crate) ranks: Vec<Runtime>,
    pub(crate) gpu: Arc<dyn Gpu>,
    driver: Arc<dyn Driver>,
    _turn: MutexGuard<'static, ()>,
    _watchdog: Watchdog,
}

impl Fixture {
    pub(crate) fn new(what: &str) -> Self {
        Self::over(what, driver())
    }

    fn over(what: &str, driver: Arc<dyn Driver>) -> Self {
        let turn = TURN.lock();
        let start = |bootstrap| {
            let builder =
                Runtime::builder().settings(built(OverShm::settings())).gpu_driver(driver.clone());
            builder.bootstrap(Box::new(bootstrap)).start().unwrap()
        };
        let ranks: Vec<_> = unstarted(2).into_iter().map(start).collect();
        connect(&ranks);
        let gpu = driver.devices().unwrap().remove(0);
        Self { ranks, gpu, driver, _turn: turn, _watchdog: Watchdog::over(what) }
    }

    /// Returns a stream that stands still.
    pub(crate) fn held(&self, brake: &Brake) -> Arc<dyn Stream> {
        let stream = self.gpu.stream().unwrap();
        brake.hold(&stream);
        stream
    }

    pub(crate) fn brake(&self) -> Brake {
        Brake::new(&self.ranks[0], &self.gpu)
    }

    fn is_allocated(&self, addr: usize) -> bool {
        self.driver.classify(addr).unwrap().is_some()
    }
}

// ---- rules against deadlock ---------------------------------------------------------------------

#[test]
fn rule_a_one_stream_more_than_may_wait_is_refused_and_everything_else_goes_on() {
    let fixture = Fixture::new("rule a");
    let Fixture { ranks, gpu, .. } = &fixture;
    let counter = StreamCounter::new(&ranks[0], gpu).unwrap();
    let streams: Vec<_> = (0..40).map(|_| gpu.stream().unwrap()).collect();
    let waiting = streams.iter().take_while(|stream| counter.wait_on(stream, 1).is_ok()).count();
    assert!((1..31).contains(&waiting), "{waiting} wait");
    let refused = counter.wait_on(&streams[waiting], 1).unwrap_err();
    assert_eq!(refused.name, "TOO_MANY_WAITING");
    assert!(refused.hint.contains("CUDA_DEVICE_MAX_CONNECTIONS"), "{refused}");
    counter.wait_on(&streams[0], 1).expect("one that waits may wait once more");
    // What the refused stream is given is not held up by it, and the library's copies are not by
    // the others.
    assert!(streams[waiting].synchronize().is_ok());
    let region = gpu.allocate(100_000, Flavour::Plain).unwrap();
    region.whole().write(&filled(100_000, 3)).unwrap();
    assert!(region.whole().to_vec().unwrap() == filled(100_000, 3));
    // An operation that would have one more stream wait is refused, and is the caller's as before.
    let window = ranks[1].allocate(64).unwrap();
    let mr = ranks[1].register_memory(&window).unwrap();
    let (rmr, done) = (mr.remote_key(), Sink::keeping());
    let mut put =
        ranks[0].post_put(Rank(1), vec![5; 64], &rmr, 0).on_stream(&streams[waiting]).comp(&done);
    let refused = put.try_submit();
    assert!(
        matches!(&refused, Err(PostError::Stream(why)) if why.name == "TOO_MANY_WAITING"),
        "{refused:?}"
    );
    // A copy between GPU memory is the stream's own, and has none wait.
    let mapped = gpu.allocate(100, Flavour::Plain).unwrap();
    let registered = ranks[0].register_memory(&mapped).unwrap();
    let (own, on_gpu) = (memory(gpu, 2, &filled(100, 8)), registered.remote_key());
    let on = ranks[0]
        .post_put(Rank(0), own, &on_gpu, 0)
        .on_stream(&streams[waiting])
        .comp(&done)
        .try_submit();
    assert!(on.unwrap().is_posted());
    drop(done.one(ranks).ok().unwrap());
    assert!(mapped.whole().to_vec().unwrap() == filled(100, 8));
    raise(&counter);
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    assert!(put.try_submit().unwrap().is_posted());
    assert_eq!(done.one(ranks).buffer.to_vec().unwrap(), [5; 64]);
    assert_eq!(window.whole().to_vec().unwrap(), [5; 64]);
}

/// The reason for rule a.
#[test]
fn a_simulated_device_stands_still_when_waiting_streams_take_up_all_connections() {
    let fake = FakeDriver::new(FakeConfig { connections: 8, ..FakeConfig::default() }).unwrap();
    let fixture = Fixture::over("standstill", Arc::new(fake.clone()));
    fake.faults().take_all_waits(true);
    let Fixture { ranks, gpu, .. } = &fixture;
    let counters: Vec<_> = (0..8).map(|_| StreamCounter::new(&ranks[0], gpu).unwrap()).collect();
    let streams: Vec<_> = counters.iter().map(|_| gpu.stream().unwrap()).collect();
    let free = gpu.stream().unwrap();
    for (stream, counter) in streams.iter().zip(&counters) {
        counter.wait_on(stream, 1).unwrap();
    }
    // When the last of them has come to its wait, nothing moves any more.
    let moves = loop {
        let event = free.record().unwrap();
        if !happens(ranks, Duration::from_millis(50), || is_past(&event)) {
            break event;
        }
    };
    raise(&counters[0]);
    until(ranks, || is_past(&moves));
    counters.iter().for_each(raise);
}

#[test]
fn rule_b_what_is_freed_while_a_stream_waits_is_freed_when_none_does() {
    let fixture = Fixture::new("rule b");
    let Fixture { ranks, gpu, driver, .. } = &fixture;
    let flavours = [Flavour::Plain, Flavour::Pinned, Flavour::Managed];
    let regions = flavours.map(|flavour| gpu.allocate(5000, flavour).unwrap());
    let host = Region::host(3 * 4096);
    let page = host.addr().next_multiple_of(4096);
    // SAFETY: the region outlives the registration, which ends below.
    let registration = unsafe { gpu.register_host(page as *mut u8, 4096) }.unwrap();
    let mut addresses = vec![page];
    addresses.extend(regions.iter().map(Region::addr));
    let brake = fixture.brake();
    let stream = fixture.held(&brake);
    drop((regions, registration));
    for _ in 0..3 {
        driver.look_after();
        assert!(addresses.iter().all(|addr| fixture.is_allocated(*addr)), "it would have blocked");
        settle(ranks);
    }
    brake.release();
    stream.synchronize().unwrap();
    driver.look_after();
    assert!(addresses.iter().all(|addr| !fixture.is_allocated(*addr)));
}

#[test]
fn rule_c_a_message_within_the_process_in_the_order_of_a_stream_is_refused_and_has_another_way() {
    let fixture = Fixture::new("rule c");
    let Fixture { ranks, gpu, .. } = &fixture;
    let stream = gpu.stream().unwrap();
    let arrived = StreamCounter::new(&ranks[0], gpu).unwrap();
    for peer in 0..2 {
        let mut send =
            ranks[0].post_send(Rank(peer), vec![1; 9], Tag(1)).on_stream(&stream).comp(&arrived);
        assert!(matches!(send.try_submit(), Err(PostError::OwnStream(rank)) if rank == Rank(peer)));
        let mut recv =
            ranks[0].post_recv(Rank(peer), vec![0; 9], Tag(1)).on_stream(&stream).comp(&arrived);
        assert!(matches!(recv.try_submit(), Err(PostError::OwnStream(rank)) if rank == Rank(peer)));
    }
    // The other way: both in the order of the stream, and the stream waits for both.
    for (turn, len) in [9, 300_000].into_iter().enumerate() {
        let (from, to) =
            (memory(gpu, 2, &filled(len, 4)), gpu.allocate(len, Flavour::Plain).unwrap());
        let event = stream.record().unwrap();
        let mut recv = ranks[0].post_recv(Rank(0), to.whole(), Tag(2)).after(&event).comp(&arrived);
        let mut send = ranks[0].post_send(Rank(0), from, Tag(2)).after(&event).comp(&arrived);
        recv.submit().unwrap();
        send.submit().unwrap();
        arrived.wait_on(&stream, 2 * (turn as u64 + 1)).unwrap();
        let end = stream.record().unwrap();
        until(ranks, || is_past(&end));
        assert!(to.whole().to_vec().unwrap() == filled(len, 4));
    }
    // Puts and gets to oneself are copies on the stream.
    let window = gpu.allocate(1000, Flavour::Plain).unwrap();
    let mr = ranks[0].register_memory(&window).unwrap();
    let (rmr, done) = (mr.remote_key(), Sink::keeping());
    let own = memory(gpu, 2, &filled(1000, 6));
    let mut put = ranks[0].post_put(Rank(0), own, &rmr, 0).on_stream(&stream).comp(&done);
    assert!(put.try_submit().unwrap().is_posted());
    drop(done.one(ranks).ok().unwrap());
    assert!(window.whole().to_vec().unwrap() == filled(1000, 6));
}

/// As `cudaDeviceSynchronize` and `cudaFree` of the program's: they block while a stream waits,
/// which is no deadlock as long as another thread makes progress. The same is shown on real GPUs in
/// transports/tests/cuda/streams.rs.
#[test]
fn rule_e_a_thread_that_waits_for_the_whole_device_goes_on_when_another_makes_progress() {
    let fake = FakeDriver::new(FakeConfig::default()).unwrap();
    let fixture = Fixture::over("rule e", Arc::new(fake.clone()));
    let Fixture { ranks, gpu, .. } = &fixture;
    let (stream, arrived) = (gpu.stream().unwrap(), StreamCounter::new(&ranks[0], gpu).unwrap());
    let name = ranks[0].register_comp(&arrived).unwrap();
    arrived.wait_on(&stream, 1).unwrap();
    let device = fake.gpu(0).unwrap();
    let is_back = Arc::new(AtomicBool::new(false));
    let blocked = {
        let is_back = is_back.clone();
        std::thread::spawn(move || {
            device.synchronize().unwrap();
            is_back.store(true, Ordering::SeqCst);
        })
    };
    let end = stream.record().unwrap();
    settle(ranks);
    assert!(!is_past(&end));
    sent(ranks, || ranks[1].post_am(Rank(0), b"go", name).try_submit());
    until(ranks, || is_past(&end) && is_back.load(Ordering::SeqCst));
    blocked.join().unwrap();
}

// ---- counters -----------------------------------------------------------------------------------

#[test]
fn a_counter_counts_successes_and_the_first_failure_lets_all_go() {
    let fixture = Fixture::new("counter");
    let Fixture { ranks, gpu, .. } = &fixture;
    let (stream, arrived) = (gpu.stream().unwrap(), StreamCounter::new(&ranks[0], gpu).unwrap());
    arrived.wait_on(&stream, 2).unwrap();
    let end = stream.record().unwrap();
    let receive = |room: usize| {
        let mut recv = ranks[0].post_recv(Rank(1), vec![0; room], Tag(1)).comp(&arrived);
        assert!(recv.try_submit().unwrap().is_posted());
        sent(ranks, || ranks[1].post_send(Rank(0), b"0123", Tag(1)).try_submit());
    };
    receive(4);
    until(ranks, || arrived.value() == 1);
    settle(ranks);
    assert!(!is_past(&end));
    receive(3);
    until(ranks, || is_past(&end));
    let error = arrived.error().expect("it was too long");
    assert!(matches!(error, OpError::Truncated { message: 4, buffer: 3 }), "{error}");
    assert_eq!(arrived.value(), 1);
    arrived.wait_on(&stream, 1 << 40).unwrap();
    stream.synchronize().unwrap();
    assert!(arrived.device_addr().is_multiple_of(8));
    assert_eq!(arrived.wait_on(&stream, StreamCounter::POISON).unwrap_err().name, "INVALID_VALUE");
}

#[test]
fn a_counter_that_is_dropped_lets_its_streams_go_and_its_word_is_used_again() {
    let fixture = Fixture::new("dropped");
    let Fixture { ranks, gpu, .. } = &fixture;
    let (stream, mut words) = (gpu.stream().unwrap(), HashSet::new());
    for _ in 0..500 {
        let counter = StreamCounter::new(&ranks[0], gpu).unwrap();
        assert_eq!(counter.value(), 0);
        words.insert(counter.device_addr());
        counter.wait_on(&stream, 1).unwrap();
        drop(counter);
        stream.synchronize().unwrap();
    }
    assert!(words.len() <= 128, "{} words for one counter at a time", words.len());
}

// ---- bad input ----------------------------------------------------------------------------------

#[test]
fn streams_events_and_lists_that_cannot_be_used_are_refused_with_the_reason() {
    let fixture = Fixture::new("bad input");
    let Fixture { ranks, gpu, driver, .. } = &fixture;
    let window = gpu.allocate(100, Flavour::Plain).unwrap();
    let mr = ranks[1].register_memory(&window).unwrap();
    let (rmr, stream) = (mr.remote_key(), gpu.stream().unwrap());
    // A stream of another driver: its GPU is another one.
    let config = FakeConfig { seed: 77, ..FakeConfig::default() };
    let theirs = FakeDriver::new(config).unwrap().gpu(0).unwrap().stream().unwrap();
    let mut put = ranks[0].post_put(Rank(1), memory(gpu, 2, &[1; 100]), &rmr, 0).on_stream(&theirs);
    let refused = put.try_submit().unwrap_err();
    assert!(matches!(refused, PostError::OtherGpu { .. }), "{refused}");
    // A stream of another GPU than the memory's.
    if let Some(second) = driver.devices().unwrap().get(1) {
        let own = memory(second, 2, &[1; 100]);
        let done = CompQueue::new(4);
        let mut get = ranks[0].post_get(Rank(1), own, &rmr, 0).on_stream(&stream).comp(&done);
        let refused = get.try_submit().unwrap_err();
        assert!(matches!(refused, PostError::OtherGpu { .. }), "{refused}");
        assert!(refused.to_string().contains(".after("), "{refused}");
    }
    // Pieces would be gathered too early.
    let list: Vec<Buffer> = vec![vec![1; 4].into(), vec![2; 4].into()];
    let mut send = ranks[0].post_send(Rank(1), list, Tag(1)).after(&stream.record().unwrap());
    assert!(matches!(send.try_submit(), Err(PostError::OrderedPieces)));
    // What is wrong at once is said at once.
    let brake = fixture.brake();
    let event = fixture.held(&brake).record().unwrap();
    let mut outside = ranks[0].post_put(Rank(1), vec![1; 8], &rmr, 93).after(&event);
    assert!(matches!(outside.try_submit(), Err(PostError::Outside { .. })));
    let mut read_only = ranks[0]
        .post_recv(Rank(1), Buffer::Bytes(vec![1; 8].into()), Tag(1))
        .after(&event)
        .comp(&brake.counter);
    assert!(matches!(read_only.try_submit(), Err(PostError::ReadOnly(_))));
    brake.release();
}

#[test]
fn an_event_that_fails_fails_what_waits_for_it_and_a_stream_that_failed_is_told_of() {
    let fake = FakeDriver::new(FakeConfig::default()).unwrap();
    let fixture = Fixture::over("failing", Arc::new(fake.clone()));
    let Fixture { ranks, gpu, .. } = &fixture;
    let window = ranks[1].allocate(100).unwrap();
    let mr = ranks[1].register_memory(&window).unwrap();
    let (rmr, ended) = (mr.remote_key(), CompQueue::new(8));
    let crashing = fake.gpu(0).unwrap().fake_stream().unwrap();
    let (go, gate) = std::sync::mpsc::channel::<()>();
    crashing
        .launch(move |_| {
            gate.recv().unwrap();
            panic!("a kernel that crashes")
        })
        .unwrap();
    let event = crashing.record().unwrap();
    let as_stream: Arc<dyn Stream> = crashing.clone();
    assert!(
        ranks[0]
            .post_put(Rank(1), vec![1; 4], &rmr, 0)
            .after(&event)
            .comp(&ended)
            .try_submit()
            .unwrap()
            .is_posted()
    );
    let on = ranks[0]
        .post_put(Rank(1), vec![1; 4], &rmr, 0)
        .on_stream(&as_stream)
        .comp(&ended)
        .try_submit();
    assert!(on.unwrap().is_posted());
    go.send(()).unwrap();
    until(ranks, || ended.len() == 2);
    for _ in 0..2 {
        let status = ended.pop().unwrap();
        assert_eq!(status.buffer.to_vec().unwrap(), [1; 4]);
        assert!(matches!(status.ok().unwrap_err(), OpError::Event(error) if error.code == 719));
    }
    let refused =
        ranks[0].post_put(Rank(1), vec![1; 4], &rmr, 0).after(&event).comp(&ended).try_submit();
    assert!(matches!(refused, Err(PostError::Stream(why)) if why.code == 719));
    // The device goes on.
    let counter = StreamCounter::new(&ranks[0], gpu).unwrap();
    raise(&counter);
    let stream = gpu.stream().unwrap();
    counter.wait_on(&stream, 1).unwrap();
    stream.synchronize().unwrap();
}

/// A stream may wait for an answer of this rank to a peer, whose message to this rank waits behind
/// that stream.
#[test]
fn the_runtimes_own_messages_do_not_wait_behind_a_message_that_waits_for_an_event() {
    let fixture = Fixture::new("control");
    let Fixture { ranks, .. } = &fixture;
    let (brake, left, came) = (fixture.brake(), Sink::keeping(), Sink::keeping());
    let stream = fixture.held(&brake);
    let event = stream.record().unwrap();
    // Memory that no other rank maps: its owner answers.
    let region = Region::host(64);
    let mr = ranks[0].register_memory(&region).unwrap();
    let rmr = mr.remote_key();
    for tag in 1..3 {
        let mut send = ranks[0].post_send(Rank(1), vec![1; 9], Tag(tag)).after(&event).comp(&left);
        send.submit().unwrap();
    }
    let mut add = ranks[1].post_fetch_add(Rank(0), &rmr, 8, 5).comp(&came);
    sent(ranks, || add.try_submit());
    assert_eq!(came.one(ranks).value(), Some(0));
    assert_eq!((left.count(), is_past(&event)), (0, false));
    brake.release();
    until(ranks, || left.count() == 2);
}
