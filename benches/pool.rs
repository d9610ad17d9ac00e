//! Taking a packet from a pool and giving it back. The baseline is crossbeam's `ArrayQueue` full of
//! boxes, which neither grows nor knows of other kinds of memory.

use carrack::packet::{HostAllocator, PacketPool};
use criterion::{Bencher, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use crossbeam_queue::ArrayQueue;
use std::hint::black_box;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

const SIZE: usize = 8 << 10;
const PACKETS: usize = 256;

/// Runs `once` `count` times on each of `threads` threads, all at once. Returns the time of the
/// slowest.
fn together(threads: usize, count: u64, once: &(impl Fn() + Sync)) -> Duration {
    let ready = Barrier::new(threads);
    let work = || {
        ready.wait();
        let start = Instant::now();
        (0..count).for_each(|_| once());
        start.elapsed()
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().filter_map(|worker| worker.join().ok()).max().unwrap_or_default()
    })
}

fn pools(criterion: &mut Criterion) {
    let pool = PacketPool::new(Arc::new(HostAllocator), SIZE, PACKETS);
    let boxes = ArrayQueue::new(PACKETS);
    (0..PACKETS).for_each(|_| drop(boxes.push(vec![0_u8; SIZE].into_boxed_slice())));
    let from_pool = || drop(black_box(pool.take_with_len(64)));
    let from_queue = || {
        if let Some(packet) = black_box(boxes.pop()) {
            let _ = boxes.push(packet);
        }
    };

    let mut group = criterion.benchmark_group("pool");
    group.throughput(Throughput::Elements(1));
    let cores = thread::available_parallelism().map_or(2, usize::from);
    for threads in [1, cores.clamp(2, 8)] {
        let run =
            |b: &mut Bencher<'_>, n: &usize| b.iter_custom(|count| together(*n, count, &from_pool));
        group.bench_with_input(BenchmarkId::new("take and drop, threads", threads), &threads, run);
        let run = |b: &mut Bencher<'_>, n: &usize| {
            b.iter_custom(|count| together(*n, count, &from_queue))
        };
        group.bench_with_input(
            BenchmarkId::new("ArrayQueue of boxes, threads", threads),
            &threads,
            run,
        );
    }
    group.finish();
}

criterion_group!(benches, pools);
criterion_main!(benches);
