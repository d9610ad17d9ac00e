//! Cost of a message between two cores, in the ring of the shared-memory transport, on the heap.
//! Both ends spin, so the figures for two threads need two idle cores.

#![expect(unsafe_code, reason = "the ends of a ring are made by unsafe functions")]

use carrack_transports::mem::MemRef;
use carrack_transports::sync::ring::heap::HeapSlots;
use carrack_transports::sync::ring::{Consumer, Producer};
use criterion::{Bencher, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::hint::{black_box, spin_loop};
use std::thread;
use std::time::{Duration, Instant};

const SLOTS: usize = 256;

fn ring() -> (Producer<HeapSlots>, Consumer<HeapSlots>) {
    let slots = HeapSlots::new(SLOTS);
    // SAFETY: one end of each sort.
    unsafe { (Producer::new(slots.clone()), Consumer::new(slots)) }
}

fn push(producer: &mut Producer<HeapSlots>, payload: &[u8]) {
    while producer.push(1, [1, 2], MemRef::host(payload)).is_err() {
        spin_loop();
    }
}

fn pop(consumer: &mut Consumer<HeapSlots>, to: &mut [u8]) {
    loop {
        let taken = consumer.pop(|record| {
            record.copy_to(to);
            Some(record.header())
        });
        if black_box(taken).is_ok_and(|header| header.is_some()) {
            return;
        }
        spin_loop();
    }
}

fn one_thread(bencher: &mut Bencher<'_>, len: &usize) {
    let (mut producer, mut consumer) = ring();
    let (payload, mut to) = (vec![7; *len], vec![0; *len]);
    bencher.iter(|| {
        push(&mut producer, &payload);
        pop(&mut consumer, &mut to);
    });
}

/// Measures the time for each record while one side pushes as fast as it can and the other takes.
fn stream(bencher: &mut Bencher<'_>, len: &usize) {
    bencher.iter_custom(|count| {
        let (mut producer, mut consumer) = ring();
        let (payload, mut to) = (vec![7; *len], vec![0; *len]);
        thread::scope(|threads| {
            threads.spawn(move || (0..count).for_each(|_| push(&mut producer, &payload)));
            let start = Instant::now();
            (0..count).for_each(|_| pop(&mut consumer, &mut to));
            start.elapsed()
        })
    });
}

/// Measures the time for the round trip through two rings, there and back.
fn round_trip(bencher: &mut Bencher<'_>, len: &usize) {
    bencher.iter_custom(|count| {
        let ((mut there, mut far), (mut back, mut near)) = (ring(), ring());
        let payload = vec![7; *len];
        let (mut to, mut echoed) = (payload.clone(), payload.clone());
        thread::scope(|threads| -> Duration {
            threads.spawn(move || {
                for _ in 0..count {
                    pop(&mut far, &mut echoed);
                    push(&mut back, &echoed);
                }
            });
            let start = Instant::now();
            for _ in 0..count {
                push(&mut there, &payload);
                pop(&mut near, &mut to);
            }
            start.elapsed()
        })
    });
}

fn ring_benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ring");
    group.throughput(Throughput::Elements(1));
    // In one slot, filling it, and in all four.
    for len in [8, 40, 208] {
        group.bench_with_input(BenchmarkId::new("one thread", len), &len, one_thread);
        group.bench_with_input(BenchmarkId::new("two threads, stream", len), &len, stream);
        group.bench_with_input(BenchmarkId::new("two threads, round trip", len), &len, round_trip);
    }
    group.finish();
}

criterion_group!(benches, ring_benches);
criterion_main!(benches);
