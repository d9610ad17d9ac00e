//! The queue behind `CompQueue`, and crossbeam's `ArrayQueue` as the baseline. The figures for two
//! threads need two cores that are idle otherwise.

use carrack_transports::sync::Queue;
use criterion::{Bencher, Criterion, Throughput, criterion_group, criterion_main};
use crossbeam_queue::ArrayQueue;
use std::hint::{black_box, spin_loop};
use std::thread;
use std::time::Instant;

const LENGTH: usize = 1024;
/// Entry of the size of a status.
type Entry = [u64; 12];
const ENTRY: Entry = [7; 12];

fn one_thread(
    bencher: &mut Bencher<'_>,
    push: impl Fn(Entry) -> Result<(), Entry>,
    pop: impl Fn() -> Option<Entry>,
) {
    bencher.iter(|| {
        let _ = push(black_box(ENTRY));
        black_box(pop())
    });
}

/// Measures the time for each entry while one thread pushes and another pops.
fn two_threads(
    bencher: &mut Bencher<'_>,
    push: impl Fn(Entry) -> Result<(), Entry> + Sync,
    pop: impl Fn() -> Option<Entry>,
) {
    bencher.iter_custom(|count| {
        thread::scope(|threads| {
            threads.spawn(|| {
                for _ in 0..count {
                    while push(ENTRY).is_err() {
                        spin_loop();
                    }
                }
            });
            let start = Instant::now();
            for _ in 0..count {
                while black_box(pop()).is_none() {
                    spin_loop();
                }
            }
            start.elapsed()
        })
    });
}

fn queues(criterion: &mut Criterion) {
    let (ours, theirs) = (Queue::new(LENGTH), ArrayQueue::new(LENGTH));
    let mut group = criterion.benchmark_group("queue");
    group.throughput(Throughput::Elements(1));
    group.bench_function("one thread", |b| one_thread(b, |entry| ours.push(entry), || ours.pop()));
    group.bench_function("one thread, ArrayQueue", |b| {
        one_thread(b, |entry| theirs.push(entry), || theirs.pop())
    });
    group
        .bench_function("two threads", |b| two_threads(b, |entry| ours.push(entry), || ours.pop()));
    group.bench_function("two threads, ArrayQueue", |b| {
        two_threads(b, |entry| theirs.push(entry), || theirs.pop())
    });
    group.finish();
}

criterion_group!(benches, queues);
criterion_main!(benches);
