//! Active messages in the reorder queue before a GPU: they reach their handlers in the order of
//! their arrival, in any order of the copies.

use crate::support::over_each_transport;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::packet::{GpuAllocator, PacketPool};
use carrack::settings::SettingsBuilder;
use carrack::transports::gpu::Stream;
use carrack::{
    AsCompletion, Buffer, CompQueue, Device, OpError, ProgressError, Rank, RemoteComp, Runtime, Tag,
};
use carrack_simulators::gpu::{FailAt, FakeConfig, FakeDriver, Which};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

over_each_transport!(
    quick_copies_wait_for_slow_ones_that_came_before,
    a_copy_that_is_held_holds_up_what_comes_behind_it_even_without_bytes,
    a_copy_that_fails_is_told_of_in_its_turn,
    a_full_queue_loses_nothing_of_the_line_and_others_pass,
    a_message_that_its_sender_holds_overtakes_none_in_the_line,
    packets_shorter_than_the_message_are_no_obstacle,
    a_runtime_that_ends_tells_of_what_the_reorder_queue_holds,
    a_kernel_finds_the_message_at_the_address_of_its_buffer,
    several_threads_hand_each_message_over_once,
);

struct PacketFixture {
    driver: FakeDriver,
    ranks: [Runtime; 2],
    name: RemoteComp,
    /// Device 1 of both ranks; the second's packets are on the GPU.
    devices: [Device; 2],
    pool: PacketPool,
}

impl PacketFixture {
    fn new<J: Job>(comp: &impl AsCompletion, packet_size: usize) -> Self {
        Self::with::<J>(comp, packet_size, J::settings())
    }

    fn with<J: Job>(
        comp: &impl AsCompletion,
        packet_size: usize,
        settings: SettingsBuilder,
    ) -> Self {
        let driver = FakeDriver::new(FakeConfig::default()).unwrap();
        let ranks = J::pair_with(settings.packets_max(64));
        let name = ranks[1].register_comp(comp).unwrap();
        let pool =
            PacketPool::new(Arc::new(GpuAllocator::on(driver.gpu(0).unwrap())), packet_size, 64);
        let devices = [
            ranks[0].device().build().unwrap(),
            ranks[1].device().packet_pool(&pool).build().unwrap(),
        ];
        Self { driver, ranks, name, devices, pool }
    }

    fn send(&self, tag: u64, size: usize) {
        self.send_to(self.name, tag, size);
    }

    fn send_to(&self, name: RemoteComp, tag: u64, size: usize) {
        let message = pattern(tag, size);
        let mut am = self.ranks[0].post_am(Rank(1), message, name);
        am = am.device(&self.devices[0]).tag(Tag(tag));
        while am.try_submit().unwrap().is_retry() {
            for rank in &self.ranks {
                let _ = rank.progress_all();
            }
        }
    }
}

fn quick_copies_wait_for_slow_ones_that_came_before<J: Job>() {
    let sink = Sink::keeping();
    let fixture = PacketFixture::new::<J>(&sink, 8192);
    // Several engines are at work, and every third copy takes longer than those behind it.
    for tag in 0..60_u64 {
        let slow = Duration::from_micros(if tag % 3 == 0 { 2000 } else { 0 });
        fixture.driver.faults().copy_delay(slow);
        fixture.send(tag, [8, 100, 5000, 0][tag as usize % 4]);
        step(&fixture.ranks);
    }
    until(&fixture.ranks, || sink.count() == 60);
    for (at, status) in sink.take().iter().enumerate() {
        assert_eq!(status.tag, Tag(at as u64), "one was overtaken");
        assert_eq!(status.buffer.to_vec().unwrap(), pattern(at as u64, status.size));
    }
}

fn a_copy_that_is_held_holds_up_what_comes_behind_it_even_without_bytes<J: Job>() {
    let sink = Sink::keeping();
    let fixture = PacketFixture::new::<J>(&sink, 8192);
    let PacketFixture { driver, ranks, devices, .. } = &fixture;
    let held = driver.faults().hold_copies();
    fixture.send(1, 100);
    // More of them than there are packets: they do not pile up, and cause no error. A queue pair
    // takes fewer while the receiver polls none.
    let count = if J::IS_RDMA { 10 } else { 100 };
    for _ in 0..count {
        fixture.send(2, 0);
    }
    settle(ranks);
    assert_eq!(sink.count(), 0, "it was overtaken");
    assert!(!ranks[1].test_drained(&devices[1]).unwrap());
    let pending = ranks[1].pending().to_string();
    assert!(pending.contains("tag 1, 100 B: waits for an engine of a GPU"), "{pending}");
    drop(held);
    until(ranks, || sink.count() == count + 1);
    assert_eq!(sink.take()[0].tag, Tag(1));
    settle(ranks);
    assert!(ranks[1].test_drained(&devices[1]).unwrap());
}

fn a_copy_that_fails_is_told_of_in_its_turn<J: Job>() {
    let sink = Sink::keeping();
    let fixture = PacketFixture::new::<J>(&sink, 8192);
    for at in [FailAt::Submit, FailAt::Event] {
        // The third copy to the GPU: nothing else is copied by an engine.
        fixture.driver.faults().fail_copies(at, Which::Nth(3), 719);
        for tag in 0..6 {
            fixture.send(tag, 1000);
        }
        until(&fixture.ranks, || sink.count() == 6);
        for (tag, status) in (0..).zip(sink.take()) {
            assert_eq!(status.tag, Tag(tag), "{at:?}");
            match status.ok() {
                Ok(status) => assert_eq!(status.buffer.to_vec().unwrap(), pattern(tag, 1000)),
                Err(error) => {
                    assert!(
                        tag == 2 && matches!(error, OpError::Copy(_)),
                        "{at:?}, {tag}: {error}"
                    );
                    continue;
                }
            }
            assert_ne!(tag, 2, "{at:?}: it was to fail");
        }
    }
    settle(&fixture.ranks);
    let all: Vec<_> = std::iter::from_fn(|| fixture.pool.take_with_len(1)).collect();
    assert_eq!(all.len(), 64, "no packet was lost");
}

fn a_full_queue_loses_nothing_of_the_line_and_others_pass<J: Job>() {
    // More than there are packets.
    const COUNT: u64 = 100;
    let queue = CompQueue::new(2);
    let fixture = PacketFixture::new::<J>(&queue, 8192);
    let free = Sink::keeping();
    let other = fixture.ranks[1].register_comp(&free).unwrap();
    for tag in 0..COUNT {
        fixture.send(tag, if tag % 5 == 4 { 0 } else { 300 });
    }
    fixture.send_to(other, 1, 0);
    let mut errors = until_with_errors(&fixture.ranks, || free.count() == 1);
    let mut next = 0;
    errors.extend(until_with_errors(&fixture.ranks, || {
        // Seldom, so that it is full most of the time.
        if let Some(status) = queue.pop() {
            assert_eq!(status.tag, Tag(next));
            assert_eq!(status.buffer.to_vec().unwrap(), pattern(next, status.size));
            next += 1;
        }
        next == COUNT
    }));
    let known = |error: &ProgressError| {
        matches!(error, ProgressError::CompletionFull(..) | ProgressError::NoPacket(_))
    };
    assert!(errors.iter().all(known), "{errors:?}");
    settle(&fixture.ranks);
    assert!(queue.pop().is_none());
}

fn a_message_that_its_sender_holds_overtakes_none_in_the_line<J: Job>() {
    let sink = Sink::keeping();
    let fixture = PacketFixture::with::<J>(&sink, 8192, J::settings().unexpected(4 << 10));
    let PacketFixture { driver, ranks, devices, name, .. } = &fixture;
    let held = driver.faults().hold_copies();
    fixture.send(1, 100);
    // Beyond the budget: rank 0 is told to hold.
    for tag in 0..6 {
        sent(ranks, || {
            ranks[0].post_send(Rank(1), &[7; 1000], Tag(tag)).device(&devices[0]).try_submit()
        });
    }
    settle(ranks);
    for tag in 2..6 {
        // It is offered. The ring, or the window, may be full for a moment.
        sent(ranks, || {
            let bytes = pattern(tag, 100 * (tag as usize % 2));
            ranks[0].post_am(Rank(1), bytes, *name).device(&devices[0]).tag(Tag(tag)).try_submit()
        });
    }
    settle(ranks);
    assert_eq!(sink.count(), 0, "it was overtaken");
    drop(held);
    until(ranks, || sink.count() == 5);
    assert!(sink.take().iter().map(|status| status.tag.0).eq(1..6));
}

fn packets_shorter_than_the_message_are_no_obstacle<J: Job>() {
    let sink = Sink::keeping();
    let fixture = PacketFixture::new::<J>(&sink, 512);
    let sizes = [512, 513, 8192, 1, 8193, 60_000];
    for (tag, size) in (0..).zip(sizes) {
        fixture.send(tag, size);
    }
    until(&fixture.ranks, || sink.count() == sizes.len());
    for status in sink.take() {
        let size = sizes[status.tag.0 as usize];
        assert!(status.buffer.device_addr().is_some() && status.buffer.as_slice().is_none());
        assert_eq!(matches!(status.buffer, Buffer::Packet(_)), size <= 512, "{size}");
        assert_eq!(status.buffer.to_vec().unwrap(), pattern(status.tag.0, size));
    }
    // As long as there is no room for it, it waits, and the reason is told.
    fixture.pool.limit_large(1000);
    fixture.send(9, 1001);
    let told = std::cell::Cell::new(false);
    let until_told = || {
        for rank in &fixture.ranks {
            if let Err(ProgressError::NoPacketMemory(why, _)) = rank.progress_all() {
                assert!(why.to_string().contains("1001 bytes"), "{why}");
                told.set(true);
            }
        }
        told.get()
    };
    while !until_told() {}
    assert_eq!(sink.count(), 0);
    fixture.pool.limit_large(1001);
    until(&fixture.ranks, || sink.count() == 1);
    assert_eq!(sink.take()[0].buffer.to_vec().unwrap(), pattern(9, 1001));
}

fn a_kernel_finds_the_message_at_the_address_of_its_buffer<J: Job>() {
    let sink = Sink::keeping();
    let fixture = PacketFixture::new::<J>(&sink, 8192);
    let stream = fixture.driver.gpu(0).unwrap().fake_stream().unwrap();
    for (tag, size) in [1, 40, 5000, 8192, 100_000].into_iter().enumerate() {
        fixture.send(tag as u64, size);
        let status = sink.one(&fixture.ranks);
        // Launched after the completion, it reads the data.
        let addr = status.buffer.device_addr().unwrap();
        stream
            .launch(move |kernel| {
                assert_eq!(kernel.read_at(addr, size)?, pattern(tag as u64, size));
                Ok(())
            })
            .unwrap();
        stream.record().unwrap().wait().unwrap();
    }
}

fn several_threads_hand_each_message_over_once<J: Job>() {
    const COUNT: u64 = 1500;
    let sink = Sink::keeping();
    let fixture = PacketFixture::new::<J>(&sink, 8192);
    let PacketFixture { ranks, devices, .. } = &fixture;
    let mut came = vec![0; COUNT as usize];
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !ended.load(Ordering::Relaxed) {
                    // Packets are out for as long as they are not looked at below.
                    let progress = ranks[1].progress_device(&devices[1]);
                    assert!(
                        matches!(progress, Ok(_) | Err(ProgressError::NoPacket(_))),
                        "{progress:?}"
                    );
                }
            });
        }
        let mut look = || {
            for status in sink.take() {
                assert_eq!(status.buffer.to_vec().unwrap(), pattern(status.tag.0, status.size));
                came[status.tag.0 as usize] += 1;
            }
            came.iter().sum::<u64>()
        };
        for tag in 0..COUNT {
            fixture.send(tag, [8, 0, 300, 8192][tag as usize % 4]);
            look();
        }
        let begun = Instant::now();
        while look() < COUNT && begun.elapsed() < LIMIT / 2 {
            let _ = ranks[0].progress_all();
        }
        ended.store(true, Ordering::Relaxed);
    });
    assert!(came.iter().all(|&times| times == 1), "lost, or handed over twice: {came:?}");
}

fn a_runtime_that_ends_tells_of_what_the_reorder_queue_holds<J: Job>() {
    let sink = Sink::keeping();
    let fixture = PacketFixture::new::<J>(&sink, 8192);
    let held = fixture.driver.faults().hold_copies();
    fixture.send(1, 100);
    fixture.send(2, 0);
    // Both have come, and are in the reorder queue.
    settle(&fixture.ranks);
    assert_eq!(sink.count(), 0);
    let PacketFixture { ranks: [zero, one], devices, .. } = fixture;
    drop((zero, devices));
    // The end waits for engines that work on packets.
    let release = std::thread::spawn(move || drop(held));
    drop(one);
    release.join().unwrap();
    let told: Vec<_> =
        sink.take().iter().map(|status| (status.tag, status.error.is_some())).collect();
    assert_eq!(told, [(Tag(1), true), (Tag(2), false)]);
}
