//! Time of an active message of 8 bytes from a rank to itself, over either transport. The post is
//! measured alone, and together with the progress that delivers the message.

use carrack::settings::{Settings, TransportChoice};
use carrack::{Counter, Rank, Runtime};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use std::error::Error;
use std::time::{Duration, Instant};

/// Posts between two readings of the clock: less than any ring or queue holds.
const BURST: u64 = 64;

fn post_overhead(criterion: &mut Criterion) {
    for transport in [TransportChoice::Loopback, TransportChoice::Shm] {
        if let Err(error) = over(criterion, transport) {
            eprintln!("post overhead over {transport:?} was not measured: {error}");
        }
    }
}

fn over(criterion: &mut Criterion, transport: TransportChoice) -> Result<(), Box<dyn Error>> {
    let settings = Settings::builder().transports([transport]).build()?;
    let runtime = Runtime::in_process_with(1, &settings)?.remove(0);
    let arrived = Counter::new();
    let name = runtime.register_comp(&arrived)?;
    let post = || runtime.post_am(Rank(0), &[7; 8], name).try_submit();
    // The first message connects.
    while post()?.is_retry() {
        runtime.progress()?;
    }
    runtime.wait(|| arrived.get() == 1)?;

    let mut group = criterion.benchmark_group(format!("post_am of 8 B to self, {transport:?}"));
    group.throughput(Throughput::Elements(1));
    group.bench_function("post", |bencher| {
        bencher.iter_custom(|count| {
            let (mut left, mut took) = (count, Duration::ZERO);
            while left > 0 {
                let burst = left.min(BURST);
                let goal = arrived.get() + burst;
                let start = Instant::now();
                let posted = (0..burst).all(|_| post().is_ok_and(|outcome| outcome.is_done()));
                took += start.elapsed();
                assert!(posted, "a burst fits");
                while arrived.get() < goal {
                    let _ = runtime.progress();
                }
                left -= burst;
            }
            took
        });
    });
    group.bench_function("post and progress", |bencher| {
        bencher.iter(|| {
            let goal = arrived.get() + 1;
            let posted = post().is_ok_and(|outcome| outcome.is_done());
            assert!(posted, "there is room");
            while arrived.get() < goal {
                let _ = runtime.progress();
            }
        });
    });
    group.finish();
    Ok(())
}

criterion_group!(benches, post_overhead);
criterion_main!(benches);
