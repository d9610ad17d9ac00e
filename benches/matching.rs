//! Time of matching, for a rank that sends to itself over loopback. Either a message finds its
//! receive (hit), or the message waits for it (miss), with one or 100,000 others outstanding. The
//! table is private; the figures show that the time does not grow with their number.

use carrack::{Counter, Outcome, PostError, Rank, Runtime, Tag};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use std::error::Error;

const ME: Rank = Rank(0);
const TAG: Tag = Tag(u64::MAX - 1);

fn matching(criterion: &mut Criterion) {
    if let Err(error) = measure(criterion) {
        eprintln!("matching was not measured: {error}");
    }
}

fn send(runtime: &Runtime, tag: Tag) -> Result<(), Box<dyn Error>> {
    while runtime.post_send(ME, &[7; 8], tag).try_submit()?.is_retry() {
        runtime.progress()?;
    }
    Ok(())
}

fn receive(runtime: &Runtime, arrived: &Counter, tag: Tag) -> Result<Outcome, PostError> {
    runtime.post_recv(ME, vec![0; 8], tag).comp(arrived).try_submit()
}

fn measure(criterion: &mut Criterion) -> Result<(), Box<dyn Error>> {
    let mut group = criterion.benchmark_group("matching");
    group.throughput(Throughput::Elements(1));
    for outstanding in [1, 100_000] {
        let runtime = Runtime::in_process(1)?.remove(0);
        let arrived = Counter::new();
        for tag in 0..outstanding {
            let _posted = receive(&runtime, &arrived, Tag(tag))?;
        }
        group.bench_with_input(
            BenchmarkId::new("hit", outstanding),
            &runtime,
            |bencher, runtime| {
                bencher.iter(|| {
                    let goal = arrived.get() + 1;
                    let posted =
                        receive(runtime, &arrived, TAG).is_ok_and(|outcome| outcome.is_posted());
                    let sent = send(runtime, TAG).is_ok();
                    assert!(posted && sent);
                    while arrived.get() < goal {
                        let _ = runtime.progress();
                    }
                });
            },
        );
        drop(runtime);

        // Messages wait in place of receives. They are short, so they hold no packets.
        let runtime = Runtime::in_process(1)?.remove(0);
        for tag in 0..outstanding {
            send(&runtime, Tag(tag))?;
        }
        let engine = runtime.default_matching_engine();
        runtime.wait(|| engine.waiting().0 as u64 == outstanding)?;
        group.bench_with_input(
            BenchmarkId::new("miss", outstanding),
            &runtime,
            |bencher, runtime| {
                bencher.iter(|| {
                    let arrives = send(runtime, TAG).is_ok() && runtime.progress().is_ok();
                    assert!(arrives);
                    let done =
                        receive(runtime, &arrived, TAG).is_ok_and(|outcome| outcome.is_done());
                    assert!(done, "the message was there");
                });
            },
        );
    }
    group.finish();
    Ok(())
}

criterion_group!(benches, matching);
criterion_main!(benches);
