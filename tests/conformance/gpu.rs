//! Memory that the CPU cannot touch: messages from it, into it, and in packets of it. If the
//! library itself touched a byte of it, this process would end. With `TEST_GPU=cuda` the tests run
//! on real GPUs, except those that need injected faults.

use crate::support::gpus::{self, is_for_simulated_only};
use crate::support::guard::Guarded;
use crate::support::over_each_transport_and;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::packet::{GpuAllocator, PacketPool};
use carrack::transports::gpu::{Flavour, Gpu, Stream};
use carrack::transports::mem::{CopyError, Region};
use carrack::{
    Device, OpError, Outcome, PostError, Rank, RemoteComp, Runtime, Status, Tag, UserContext,
};
use carrack_simulators::gpu::{FailAt, FakeDriver, Which};
use std::sync::Arc;
use std::time::Duration;

over_each_transport_and!(
    copiers,
    WithCopiers;
    active_messages_land_on_the_gpu_and_their_packets_can_be_kept,
    messages_go_from_and_into_device_memory_to_the_last_byte,
    a_message_into_host_memory_comes_through_a_device_whose_packets_are_on_the_gpu,
    a_message_whose_copy_takes_long_is_neither_lost_nor_overtaken,
    messages_from_device_memory_that_a_receiver_holds_off_stay_where_they_are_and_keep_their_order,
    a_flush_waits_for_puts_and_gets_that_an_engine_is_at,
    a_flush_is_well_if_an_engine_has_done_the_put_of_a_gone_rank,
    a_message_after_an_event_stays_until_it_fires_and_keeps_its_place,
    an_event_that_fails_fails_the_message_once,
    a_message_from_device_memory_whose_copy_fails_ends_once_with_the_drivers_error,
    a_receive_into_device_memory_whose_copy_fails_ends_once_with_the_drivers_error,
    an_active_message_that_cannot_be_landed_on_the_gpu_is_told_of_once,
    an_operation_from_device_memory_is_spent_once_it_was_posted,
    a_runtime_dropped_while_an_engine_is_at_work_ends_each_operation_once,
);

const SIZES: [usize; 8] = [1, 8, 40, 41, 208, 209, 8191, 8192];

struct GpuFixture {
    gpus: gpus::TestDriver,
    ranks: [Runtime; 2],
    sink: Arc<Sink>,
    name: RemoteComp,
    /// Device 1 of both ranks; the second's packets are on the GPU.
    devices: [Device; 2],
    pool: PacketPool,
}

impl GpuFixture {
    fn new<J: Job>() -> Self {
        let gpus = gpus::TestDriver::new();
        if J::HAS_COPIERS {
            gpus.driver.use_copiers();
        }
        let ranks = J::pair_with(J::settings().packets_max(16));
        let sink = Arc::new(Sink::keeping());
        let name = ranks[1].register_comp(&*sink).unwrap();
        let pool = ranks[1].packet_pool(Arc::new(GpuAllocator::on(gpus.last().clone())));
        let devices = [
            ranks[0].device().build().unwrap(),
            ranks[1].device().packet_pool(&pool).build().unwrap(),
        ];
        // Up, and the pool has its memory.
        sent(&ranks, || ranks[0].post_am(Rank(1), b"up", name).device(&devices[0]).try_submit());
        drop(sink.one(&ranks));
        Self { gpus, ranks, sink, name, devices, pool }
    }

    /// Returns the device of that number; the last one, where there are fewer.
    fn gpu(&self, number: usize) -> &Arc<dyn Gpu> {
        self.gpus.gpus.get(number).unwrap_or_else(|| self.gpus.last())
    }

    /// Returns the driver that can be told to misbehave.
    fn fake(&self) -> &FakeDriver {
        self.gpus.fake.as_ref().expect("simulated GPUs")
    }

    fn region(&self, gpu: usize, len: usize) -> Region {
        self.gpu(gpu).allocate(len, Flavour::Plain).unwrap()
    }

    /// Returns guarded device memory that holds those bytes.
    fn holding(&self, gpu: usize, bytes: &[u8]) -> Guarded {
        Guarded::within(self.region(gpu, Guarded::room(bytes.len())), bytes.len(), 7).filled(bytes)
    }
}

fn active_messages_land_on_the_gpu_and_their_packets_can_be_kept<J: Job>() {
    let fixture = GpuFixture::new::<J>();
    let GpuFixture { ranks, sink, name, devices, pool, .. } = &fixture;
    let mut rng = rng();
    let mut kept = Vec::new();
    for at in 0..16 {
        let message = random(&mut rng, SIZES[at % SIZES.len()]);
        sent(ranks, || {
            ranks[0].post_am(Rank(1), &message[..], *name).device(&devices[0]).try_submit()
        });
        let status = sink.one(ranks);
        assert!(status.error.is_none(), "{status:?}");
        assert_eq!(status.buffer.kind().gpu(), Some(fixture.gpus.last().info().uuid));
        assert!(status.bytes().is_none(), "the CPU is shown no bytes on a GPU");
        assert_eq!(
            (status.rank, status.size, status.buffer.len()),
            (Rank(0), message.len(), message.len())
        );
        kept.push((status, message));
    }
    assert!(pool.take_with_len(1).is_none(), "all are out");
    // The next waits, is not lost, and arrives when one is back.
    let last = random(&mut rng, 500);
    let mut am = ranks[0].post_am(Rank(1), last.clone(), *name).device(&devices[0]);
    am.submit().unwrap();
    assert!(!happens(ranks, Duration::from_millis(20), || sink.count() > 0));
    for (status, message) in &kept {
        assert_eq!(status.buffer.to_vec().unwrap(), *message, "kept packets keep their bytes");
    }
    kept.clear();
    until_with_errors(ranks, || sink.count() > 0);
    assert_eq!(sink.one(ranks).buffer.to_vec().unwrap(), last);
    let none = Vec::<u8>::new();
    sent(ranks, || ranks[0].post_am(Rank(1), &none[..], *name).device(&devices[0]).try_submit());
    assert_eq!(sink.one(ranks).size, 0);
}

fn messages_go_from_and_into_device_memory_to_the_last_byte<J: Job>() {
    let fixture = GpuFixture::new::<J>();
    let GpuFixture { ranks, .. } = &fixture;
    let mut rng = rng();
    // Through blocks of 512 KiB, too: one and a byte, several and a few.
    for size in SIZES.into_iter().chain([(512 << 10) + 1, (3 << 19) + 5]) {
        // From GPU 0, GPU 1 or the host, into GPU 1 or the host.
        for (from, into) in
            [(Some(0), Some(1)), (Some(1), Some(1)), (None, Some(1)), (Some(0), None)]
        {
            for expected in [true, false] {
                let payload = random(&mut rng, size);
                let guarded = |place: Option<usize>, seed| match place {
                    Some(gpu) => {
                        Guarded::within(fixture.region(gpu, Guarded::room(size)), size, seed)
                    }
                    None => Guarded::new(size, seed),
                };
                let (source, target) = (guarded(from, 1).filled(&payload), guarded(into, 2));
                let (left, came) = (Sink::keeping(), Sink::keeping());
                let receive = || {
                    let mut recv = ranks[1].post_recv(Rank(0), target.slice(), Tag(1)).comp(&came);
                    recv = recv.user_context(UserContext(2));
                    recv.submit().unwrap();
                };
                if expected {
                    receive();
                }
                let mut send = ranks[0]
                    .post_send(Rank(1), source.slice(), Tag(1))
                    .user_context(UserContext(1))
                    .comp(&left);
                send.submit().unwrap();
                if !expected {
                    until(ranks, || ranks[1].default_matching_engine().waiting().0 == 1);
                    receive();
                }
                for (sink, peer, context) in [(&left, Rank(1), 1), (&came, Rank(0), 2)] {
                    let status = sink.one(ranks);
                    assert!(status.error.is_none(), "{size} {from:?} {into:?}: {status:?}");
                    assert_eq!((status.rank, status.size), (peer, size));
                    assert_eq!(status.user_context, UserContext(context));
                    assert_eq!(status.buffer.len(), size);
                }
                source.assert_holds(&payload);
                target.assert_holds(&payload);
            }
        }
    }
    settle(ranks);
}

fn a_message_into_host_memory_comes_through_a_device_whose_packets_are_on_the_gpu<J: Job>() {
    let fixture = GpuFixture::new::<J>();
    let GpuFixture { ranks, devices, .. } = &fixture;
    for size in SIZES {
        let message = pattern(size as u64, size);
        let (source, came) = (fixture.holding(0, &message), Sink::keeping());
        let target = Guarded::new(size, 3);
        let mut recv =
            ranks[1].post_recv(Rank(0), target.slice(), Tag(1)).comp(&came).device(&devices[1]);
        assert!(recv.try_submit().unwrap().is_posted());
        sent(ranks, || {
            ranks[0].post_send(Rank(1), source.slice(), Tag(1)).device(&devices[0]).try_submit()
        });
        let status = came.one(ranks);
        assert!(status.error.is_none(), "{status:?}");
        target.assert_holds(&message);
    }
}

fn a_message_whose_copy_takes_long_is_neither_lost_nor_overtaken<J: Job>() {
    if is_for_simulated_only("no copy can be held up") {
        return;
    }
    let fixture = GpuFixture::new::<J>();
    let GpuFixture { ranks, .. } = &fixture;
    let driver = fixture.fake();
    let (slow, quick) = (pattern(1, 1000), pattern(2, 8));
    let source = fixture.holding(0, &slow);
    let (left, came) = (Sink::keeping(), Sink::keeping());
    for at in 0..2 {
        let recv = ranks[1].post_recv(Rank(0), vec![0; 1000], Tag(1)).comp(&came);
        assert!(recv.user_context(UserContext(at)).try_submit().unwrap().is_posted(), "{at}");
    }
    let held = driver.faults().hold_copies();
    let mut first = ranks[0].post_send(Rank(1), source.slice(), Tag(1)).comp(&left);
    assert!(posted(ranks, || first.try_submit()).is_posted());
    // Submitted, it waits its turn. Where the first one is fetched by the receiver's engine, its
    // offer has gone, and the second may be there earlier. It meets the second receive all the
    // same.
    let mut second = ranks[0].post_send(Rank(1), &quick[..], Tag(1)).comp(&left);
    second.submit().unwrap();
    assert!(
        !happens(ranks, Duration::from_millis(20), || came.count() > 1),
        "the first cannot have come"
    );
    drop(held);
    until(ranks, || came.count() == 2);
    assert_eq!(by_receive(came.take()), [slow, quick]);
    settle(ranks);
    assert_eq!((left.count(), left.failed()), (2, 0));
}

/// Returns the received bytes in the order in which the receives were posted.
fn by_receive(mut statuses: Vec<Status>) -> Vec<Vec<u8>> {
    statuses.sort_by_key(|status| status.user_context.0);
    statuses.iter().map(|status| status.bytes().unwrap().to_vec()).collect()
}

fn messages_from_device_memory_that_a_receiver_holds_off_stay_where_they_are_and_keep_their_order<
    J: Job,
>() {
    const COUNT: usize = 60;
    let gpus = gpus::TestDriver::new();
    let ranks = J::pair_with(J::settings().unexpected(8 << 10).packets_max(16));
    let region = gpus.last().allocate(COUNT * 2000, Flavour::Plain).unwrap();
    let message = |at: usize| pattern(at as u64, if at.is_multiple_of(2) { 2000 } else { 700 });
    let left = Sink::keeping();
    for at in 0..COUNT {
        let slice = region.slice(at * 2000, message(at).len()).unwrap();
        slice.write(&message(at)).unwrap();
        let mut send = ranks[0].post_send(Rank(1), slice, Tag(1)).comp(&left);
        send.submit().unwrap();
        settle(&ranks);
    }
    assert!(left.count() < COUNT, "the receiver has told its sender to keep them");
    for at in 0..COUNT {
        let came = Sink::keeping();
        let mut recv = ranks[1].post_recv(Rank(0), vec![0; 2000], Tag(1)).comp(&came);
        recv.submit().unwrap();
        let status = came.one(&ranks);
        assert_eq!(status.buffer.to_vec().unwrap()[..status.size], message(at), "number {at}");
    }
    until(&ranks, || left.count() == COUNT);
    assert!(left.take().iter().all(|status| status.error.is_none() && status.buffer.len() >= 700));
}

fn a_flush_waits_for_puts_and_gets_that_an_engine_is_at<J: Job>() {
    if is_for_simulated_only("a copy cannot be held up") {
        return;
    }
    let fixture = GpuFixture::new::<J>();
    let (ranks, driver) = (&fixture.ranks, fixture.fake());
    let bytes = pattern(3, 70_000);
    let (mine, theirs) = (fixture.holding(0, &bytes), fixture.region(1, 70_000));
    theirs.whole().write(&vec![0; 70_000]).unwrap();
    let registered = ranks[1].register_memory(&theirs).unwrap();
    let rmr = registered.remote_key();
    for is_put in [true, false] {
        let (done, flushed) = (Sink::keeping(), Sink::keeping());
        let held = driver.faults().hold_copies();
        let begun = if is_put {
            ranks[0].post_put(Rank(1), mine.slice(), &rmr, 0).comp(&done).try_submit()
        } else {
            ranks[0].post_get(Rank(1), mine.slice(), &rmr, 0).comp(&done).try_submit()
        };
        assert!(begun.unwrap().is_posted());
        assert!(
            ranks[0].post_flush(Rank(1)).comp(&flushed).try_submit().unwrap().is_posted(),
            "put: {is_put}"
        );
        for _ in 0..1000 {
            step(ranks);
        }
        // A NIC that has heard where the memory is needs no engine.
        if is_put || !J::IS_RDMA {
            assert_eq!((done.count(), flushed.count()), (0, 0), "put: {is_put}");
        }
        drop(held);
        assert!(flushed.one(ranks).error.is_none());
        assert!(done.one(ranks).error.is_none());
        mine.assert_holds(&bytes);
        assert_eq!(theirs.whole().to_vec().unwrap(), bytes);
    }
    drop(registered);
}

/// gpu.md, streams rule 2.
fn a_message_after_an_event_stays_until_it_fires_and_keeps_its_place<J: Job>() {
    if is_for_simulated_only("there is no kernel that a test could hold up") {
        return;
    }
    let fixture = GpuFixture::new::<J>();
    let GpuFixture { ranks, .. } = &fixture;
    let driver = fixture.fake();
    for device_memory in [false, true] {
        let stream = driver.gpu(0).unwrap().fake_stream().unwrap();
        let written = pattern(5, 300);
        let region = if device_memory { fixture.region(0, 300) } else { Region::host(300) };
        let (go, gate) = std::sync::mpsc::channel::<()>();
        let (slice, bytes) = (region.whole(), written.clone());
        stream
            .launch(move |kernel| {
                gate.recv().unwrap();
                kernel.write(&slice, &bytes)
            })
            .unwrap();
        let event = stream.record().unwrap();
        let (left, came) = (Sink::keeping(), Sink::keeping());
        for at in 0..2 {
            let recv = ranks[1].post_recv(Rank(0), vec![0; 300], Tag(1)).comp(&came);
            assert!(recv.user_context(UserContext(at)).try_submit().unwrap().is_posted());
        }
        let mut first =
            ranks[0].post_send(Rank(1), region.whole(), Tag(1)).after(&event).comp(&left);
        assert!(posted(ranks, || first.try_submit()).is_posted());
        let mut later = ranks[0].post_send(Rank(1), b"later", Tag(1)).comp(&left);
        later.submit().unwrap();
        // Nothing passes to other tags either: the order is that of the link.
        let other = ranks[0].post_send(Rank(1), b"other", Tag(2)).try_submit().unwrap();
        assert!(other.is_retry(), "{other:?}");
        assert!(!happens(ranks, Duration::from_millis(20), || came.count() + left.count() > 0));
        go.send(()).unwrap();
        until(ranks, || came.count() == 2 && left.count() == 2);
        assert_eq!(by_receive(came.take()), [written, b"later".to_vec()]);
        assert_eq!(left.failed(), 0);
    }
}

/// gpu.md, life and death rule 3.
fn an_event_that_fails_fails_the_message_once<J: Job>() {
    if is_for_simulated_only("a kernel that crashes would take the context with it") {
        return;
    }
    let fixture = GpuFixture::new::<J>();
    let GpuFixture { ranks, sink, name, .. } = &fixture;
    let driver = fixture.fake();
    let stream = driver.gpu(0).unwrap().fake_stream().unwrap();
    stream.launch(|_| panic!("a kernel that crashes")).unwrap();
    let event = stream.record().unwrap();
    let left = Sink::keeping();
    let mut am = ranks[0].post_am(Rank(1), vec![1; 10], *name).after(&event).comp(&left);
    sent(ranks, || am.try_submit());
    let status = left.one(ranks);
    assert_eq!(status.buffer.to_vec().unwrap(), [1; 10]);
    assert!(matches!(status.ok().unwrap_err(), OpError::Event(error) if error.code == 719));
    sent(ranks, || ranks[0].post_am(Rank(1), b"next", *name).try_submit());
    assert_eq!(sink.one(ranks).bytes().unwrap(), b"next");
    assert_eq!(left.count(), 0);
}

fn is_the_engines(error: &OpError, code: i32) -> bool {
    matches!(error, OpError::Copy(CopyError::Engine { cause, .. }) if cause.code == code)
}

fn a_message_from_device_memory_whose_copy_fails_ends_once_with_the_drivers_error<J: Job>() {
    if is_for_simulated_only("no copy can be made to fail") {
        return;
    }
    let fixture = GpuFixture::new::<J>();
    let GpuFixture { ranks, sink, name, devices, .. } = &fixture;
    let driver = fixture.fake();
    for at in [FailAt::Submit, FailAt::Event] {
        // Over the default devices, where the target is host memory, and over those where it is on
        // the GPU.
        for on_gpu in [false, true] {
            let message = pattern(1, 700);
            let (source, left) = (fixture.holding(0, &message), Sink::keeping());
            driver.faults().fail_copies(at, Which::Nth(1), 700);
            let mut am = ranks[0].post_am(Rank(1), source.slice(), *name).comp(&left);
            if on_gpu {
                am = am.device(&devices[0]);
            }
            assert!(posted(ranks, || am.try_submit()).is_posted());
            if on_gpu && J::NAME == "shm" {
                // Two copies: the first, which fails, is the sender's.
                settle(ranks);
            }
            let status = left.one(ranks);
            assert_eq!(status.buffer.len(), 700, "the buffer comes back");
            let error = status.ok().unwrap_err();
            assert!(is_the_engines(&error, 700), "{at:?}: {error}");
            driver.faults().heal_copies();
            settle(ranks);
            assert_eq!(
                (left.count(), sink.count()),
                (0, 0),
                "nothing arrives of it, nothing ends twice"
            );
            source.assert_holds(&message);
            // And the link goes on.
            sent(ranks, || ranks[0].post_am(Rank(1), b"next", *name).try_submit());
            assert_eq!(sink.one(ranks).bytes().unwrap(), b"next");
        }
    }
}

fn a_receive_into_device_memory_whose_copy_fails_ends_once_with_the_drivers_error<J: Job>() {
    if is_for_simulated_only("no copy can be made to fail") {
        return;
    }
    let fixture = GpuFixture::new::<J>();
    let GpuFixture { ranks, .. } = &fixture;
    let driver = fixture.fake();
    for at in [FailAt::Submit, FailAt::Event] {
        for expected in [true, false] {
            let target = Guarded::within(fixture.region(1, Guarded::room(100)), 100, 4);
            let came = Sink::keeping();
            let receive = || {
                let mut recv = ranks[1].post_recv(Rank(0), target.slice(), Tag(1)).comp(&came);
                recv.submit().unwrap();
            };
            driver.faults().fail_copies(at, Which::Nth(1), 719);
            if expected {
                receive();
            }
            sent(ranks, || ranks[0].post_send(Rank(1), &[5; 100][..], Tag(1)).try_submit());
            if !expected {
                until(ranks, || ranks[1].default_matching_engine().waiting().0 == 1);
                receive();
            }
            let status = came.one(ranks);
            assert_eq!(status.buffer.len(), 100);
            let error = status.ok().unwrap_err();
            assert!(is_the_engines(&error, 719), "{at:?}: {error}");
            driver.faults().heal_copies();
            settle(ranks);
            assert_eq!(came.count(), 0);
            target.assert_untouched();
        }
    }
}

fn an_active_message_that_cannot_be_landed_on_the_gpu_is_told_of_once<J: Job>() {
    if is_for_simulated_only("no copy can be made to fail") {
        return;
    }
    let fixture = GpuFixture::new::<J>();
    let GpuFixture { ranks, sink, name, devices, pool, .. } = &fixture;
    let driver = fixture.fake();
    for at in [FailAt::Submit, FailAt::Event] {
        for size in [8, 100, 5000] {
            let message = pattern(2, size);
            // All of them: a transport may have the runtime try once more.
            driver.faults().fail_copies(at, Which::All, 700);
            let mut am =
                ranks[0].post_am(Rank(1), &message[..], *name).tag(Tag(6)).device(&devices[0]);
            sent(ranks, || am.try_submit());
            // The sender was told Done: only the receiver can be told.
            let told = happens(ranks, LIMIT / 2, || sink.count() > 0);
            driver.faults().heal_copies();
            assert!(
                told,
                "{size} bytes, {at:?}: the sender was told Done, and the receiver nothing"
            );
            let status = sink.one(ranks);
            assert_eq!((status.rank, status.tag, status.size), (Rank(0), Tag(6), size));
            let error = status.ok().unwrap_err();
            assert!(is_the_engines(&error, 700), "{error}");
            sent(ranks, || {
                ranks[0].post_am(Rank(1), &message[..], *name).device(&devices[0]).try_submit()
            });
            assert_eq!(sink.one(ranks).buffer.to_vec().unwrap(), message);
        }
    }
    settle(ranks);
    let all: Vec<_> = std::iter::from_fn(|| pool.take_with_len(1)).collect();
    assert_eq!(all.len(), 16, "no packet was lost");
}

fn an_operation_from_device_memory_is_spent_once_it_was_posted<J: Job>() {
    let fixture = GpuFixture::new::<J>();
    let GpuFixture { ranks, sink, name, .. } = &fixture;
    let message = pattern(1, 100);
    let source = fixture.holding(0, &message);
    let left = Sink::keeping();
    let mut am = ranks[0].post_am(Rank(1), source.slice(), *name).comp(&left);
    assert!(posted(ranks, || am.try_submit()).is_posted());
    let again = am.try_submit();
    assert!(matches!(again, Err(PostError::Spent)), "{again:?}");
    assert_eq!(sink.one(ranks).bytes().unwrap(), message);
    assert!(left.one(ranks).error.is_none());
    settle(ranks);
    assert_eq!((sink.count(), left.count()), (0, 0));
}

fn a_runtime_dropped_while_an_engine_is_at_work_ends_each_operation_once<J: Job>() {
    if is_for_simulated_only("no copy can be held up") {
        return;
    }
    let fixture = GpuFixture::new::<J>();
    let message = pattern(1, 100);
    let (source, target) = (fixture.holding(0, &message), fixture.holding(1, &message));
    let (left, came) = (Arc::new(Sink::keeping()), Arc::new(Sink::keeping()));
    let GpuFixture { gpus, ranks: [zero, one], devices, .. } = fixture;
    let driver = gpus.fake.expect("simulated GPUs");
    let mut recv = one.post_recv(Rank(0), target.slice(), Tag(1)).comp(&*came);
    assert!(recv.try_submit().unwrap().is_posted());
    let held = driver.faults().hold_copies();
    // One that waits for its engine at the receiver, and one at the sender.
    while matches!(
        zero.post_send(Rank(1), &message[..], Tag(1)).try_submit().unwrap(),
        Outcome::Retry(_)
    ) {}
    let mut send = zero.post_send(Rank(1), source.slice(), Tag(2)).comp(&*left);
    assert!(send.try_submit().unwrap().is_posted());
    for _ in 0..10_000 {
        zero.progress().unwrap();
        one.progress().unwrap();
    }
    assert_eq!((left.count(), came.count()), (0, 0));
    drop(devices);
    // A closing runtime waits for engines that work on buffers of its operations.
    let release = std::thread::spawn(move || {
        std::thread::yield_now();
        drop(held);
    });
    drop(zero);
    drop(one);
    release.join().unwrap();
    assert_eq!((left.count(), came.count()), (1, 1), "each ends once");
    for status in left.take() {
        assert_eq!(status.buffer.len(), 100, "and gives its buffer back: {status:?}");
    }
    assert_eq!(came.take()[0].buffer.len(), 100);
}

fn a_flush_is_well_if_an_engine_has_done_the_put_of_a_gone_rank<J: Job>() {
    if is_for_simulated_only("a copy cannot be held up") {
        return;
    }
    let fixture = GpuFixture::new::<J>();
    let driver = fixture.fake().clone();
    let bytes = pattern(3, 70_000);
    let (mine, theirs) = (fixture.holding(0, &bytes), fixture.region(1, 70_000));
    theirs.whole().write(&vec![0; 70_000]).unwrap();
    let registered = fixture.ranks[1].register_memory(&theirs).unwrap();
    let rmr = registered.remote_key();
    let (done, flushed) = (Sink::keeping(), Sink::keeping());
    let held = driver.faults().hold_copies();
    fixture.ranks[0].post_put(Rank(1), mine.slice(), &rmr, 0).comp(&done).submit().unwrap();
    fixture.ranks[0].post_flush(Rank(1)).comp(&flushed).submit().unwrap();
    let GpuFixture { ranks, devices, pool, .. } = fixture;
    let [zero, one] = ranks;
    drop((registered, devices, pool));
    let ender = std::thread::spawn(move || drop(one));
    let ranks = [zero];
    // Some transports tell of the end only when the copy is done.
    happens(&ranks, Duration::from_millis(300), || ranks[0].peer_down(Rank(1)).is_some());
    drop(held);
    ender.join().unwrap();
    until(&ranks, || done.count() == 1 && flushed.count() == 1);
    let (put, flush) = (done.take().remove(0).ok(), flushed.take().remove(0).ok());
    let again = ranks[0].post_flush(Rank(1)).comp(&flushed).try_submit();
    assert_eq!(put.is_ok(), flush.is_ok(), "{put:?}, and {flush:?}");
    assert_eq!(put.is_ok(), again.is_ok(), "{put:?}, and then {again:?}");
}
