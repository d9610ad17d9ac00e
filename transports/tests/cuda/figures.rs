//! Costs of this layer, compared with raw calls in the same process. Not a test: `-- --ignored
//! --nocapture figures`.

use crate::support::{MIB, make, need, start};
use crate::user;
use carrack_transports::gpu::cuda::CudaDriver;
use carrack_transports::gpu::words::GpuWords;
use carrack_transports::gpu::{Driver, Gpu, GpuEvent};
use carrack_transports::mem::{KnownMemory, MR_DEVICE, MR_HOST, MR_UNKNOWN, Region};
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Returns the best of five runs of `count` calls, in nanoseconds a call.
fn best(count: usize, mut run: impl FnMut(usize)) -> f64 {
    run(count.min(10));
    let time = |_| {
        let began = Instant::now();
        run(count);
        began.elapsed().as_secs_f64() * 1e9 / count as f64
    };
    (0..5).map(time).fold(f64::INFINITY, f64::min)
}

#[test]
#[ignore = "figures, to be asked for"]
fn figures() {
    let Some((driver, gpus)) = need(1) else { return };
    println!("{}; {}", driver.version().unwrap(), gpus[0].info().name);
    user::set_current(user::primary(0));
    queries(&driver, &gpus);
    known(driver, &gpus);
    waits(&gpus[0]);
    for (name, far) in
        [("within device 0", 0), ("to device 1", 1), ("the other engine, to device 0", 1)]
    {
        if let Some(far) = gpus.get(far) {
            let (src, dst) =
                if name.starts_with("the other") { (far, &gpus[0]) } else { (&gpus[0], far) };
            copies(name, src, dst);
        }
    }
}

fn queries(driver: &dyn Driver, gpus: &[Arc<dyn Gpu>]) {
    let kinds = ["plain", "shareable", "pooled", "pinned", "host"];
    println!("\nns a call              classify  buffer_id");
    for kind in kinds {
        let region = make(&gpus[0], kind, MIB);
        let addr = region.addr() + 77;
        let classify =
            best(20_000, |count| (0..count).for_each(|_| drop(black_box(driver.classify(addr)))));
        let id =
            best(20_000, |count| (0..count).for_each(|_| drop(black_box(driver.buffer_id(addr)))));
        println!("  {kind:<20} {classify:>8.0}  {id:>9.0}");
    }
}

/// Measures raw memory as a region: the extra cost of a post of it over a post of an existing
/// region.
fn known(driver: CudaDriver, gpus: &[Arc<dyn Gpu>]) {
    let drivers: [Arc<dyn Driver>; 1] = [Arc::new(driver)];
    println!(
        "\nns a raw region          MR_HOST  MR_UNKNOWN  MR_DEVICE   MR_UNKNOWN above MR_HOST"
    );
    let others: Vec<_> = (0..200).map(|_| make(&gpus[0], "plain", MIB)).collect();
    for extents in [1, others.len()] {
        let table = KnownMemory::of(1024);
        let time = |addr: usize, hint| {
            let make = || {
                // SAFETY: the callers keep what is there; nothing is done with it.
                drop(black_box(
                    unsafe { table.region(black_box(addr as *mut u8), 8, hint, &drivers) }.unwrap(),
                ));
            };
            best(20_000, |count| (0..count).for_each(|_| make()))
        };
        for other in &others[..extents] {
            time(other.addr(), MR_DEVICE);
        }
        let host = make(&gpus[0], "host", MIB);
        let base = time(host.addr(), MR_HOST);
        println!("  host {base:>24.0} {:>11.0}", time(host.addr(), MR_UNKNOWN));
        for kind in ["plain", "shareable", "pooled", "pinned"] {
            let region = make(&gpus[0], kind, MIB);
            let unknown = time(region.addr() + 77, MR_UNKNOWN);
            let device =
                if kind == "pinned" { f64::NAN } else { time(region.addr() + 77, MR_DEVICE) };
            let name = format!("{kind}, of {} extents", table.len());
            println!(
                "  {name:<22} {:>6} {unknown:>11.0} {device:>10.0} {:>10.0}",
                "",
                unknown - base
            );
        }
    }
}

/// Measures the thread's time to make a stream wait for a word, as often as a ring is ahead.
fn waits(gpu: &Arc<dyn Gpu>) {
    let (stream, word) = (gpu.stream().unwrap(), GpuWords::of(gpu).word().unwrap());
    let mut waited = 0;
    let time = best(40, |count| {
        for _ in 0..count {
            waited += 1;
            word.hold(&*stream, waited).unwrap();
        }
        (word.get()..waited).for_each(|_| word.raise());
    });
    stream.synchronize().unwrap();
    println!("\nµs a wait of a stream for a word, with what tells of its end: {:.2}", time / 1e3);
}

fn copies(name: &str, src: &Arc<dyn Gpu>, dst: &Arc<dyn Gpu>) {
    println!("\nplain memory, {name}, engine of device {}", src.info().ordinal);
    println!("µs a copy, back to back     raw      ours   ours/raw     GB/s");
    let largest = 256 * MIB;
    let (from, to) = (make(src, "plain", largest), make(dst, "plain", largest));
    let context = user::primary(i32::try_from(src.info().ordinal).unwrap());
    user::set_current(context);
    src.reaches(dst.info().uuid).unwrap();
    let stream = user::stream(1);
    for (len, count) in [(8, 5000), (64 << 10, 5000), (MIB, 2000), (16 * MIB, 300), (256 * MIB, 30)]
    {
        let raw = best(count, |count| {
            (0..count).for_each(|_| user::copy_async(to.addr(), from.addr(), len, stream));
            user::synchronize(stream);
        });
        let ours = best(count, |count| {
            let mut last = None;
            (0..count).for_each(|_| last = Some(start(&**src, (&to, 0), (&from, 0), len).unwrap()));
            last.unwrap().wait().unwrap();
        });
        let rate = len as f64 / ours;
        println!(
            "  {len:>12} bytes   {:>9.2} {:>9.2}   {:>8.3} {rate:>8.1}",
            raw / 1e3,
            ours / 1e3,
            ours / raw
        );
    }
    kept(&**src, (&from, &to));
    println!("µs a copy, each waited for:  raw + cuStreamSynchronize, ours + poll, ours + wait");
    for len in [8, 64 << 10, MIB] {
        let raw = best(2000, |count| {
            (0..count).for_each(|_| {
                user::copy_async(to.addr(), from.addr(), len, stream);
                user::synchronize(stream);
            });
        });
        let polled = best(2000, |count| {
            (0..count).for_each(|_| {
                let event = start(&**src, (&to, 0), (&from, 0), len).unwrap();
                while !event.query().unwrap() {
                    std::hint::spin_loop();
                }
            });
        });
        let waited = best(2000, |count| {
            (0..count)
                .for_each(|_| start(&**src, (&to, 0), (&from, 0), len).unwrap().wait().unwrap());
        });
        println!(
            "  {len:>12} bytes   {:>9.2} {:>9.2} {:>9.2}",
            raw / 1e3,
            polled / 1e3,
            waited / 1e3
        );
    }
    host_costs(src, (&from, &to));
    user::set_current(user::primary(0));
}

/// Measures copies as a stream of puts makes them: `ahead` are in flight, and each is queried
/// until it has ended.
fn kept(gpu: &dyn Gpu, (from, to): (&Region, &Region)) {
    for ahead in [16, 256, 2048] {
        let time = best(20_000, |count| {
            let mut in_flight = VecDeque::new();
            let finish = |event: GpuEvent| while !event.query().unwrap() {};
            for _ in 0..count {
                if in_flight.len() == ahead {
                    in_flight.pop_front().into_iter().for_each(finish);
                }
                in_flight.push_back(start(gpu, (to, 0), (from, 0), 8).unwrap());
            }
            in_flight.into_iter().for_each(finish);
        });
        println!(
            "  {:>12} bytes   {:>9} {:>9.2}   {ahead} in flight, each queried",
            8,
            "",
            time / 1e3
        );
    }
}

/// Measures the thread's time for a call, where the device never has to wait.
fn host_costs(gpu: &Arc<dyn Gpu>, (from, to): (&Region, &Region)) {
    let own = best(500, |count| {
        let events: Vec<_> =
            (0..count).map(|_| start(&**gpu, (to, 0), (from, 0), 8).unwrap()).collect();
        events.last().unwrap().wait().unwrap();
    });
    user::set_current(0);
    let foreign = best(500, |count| {
        let events: Vec<_> =
            (0..count).map(|_| start(&**gpu, (to, 0), (from, 0), 8).unwrap()).collect();
        events.last().unwrap().wait().unwrap();
    });
    println!(
        "µs, 8 bytes back to back with its context current {:.2}, with none {:.2}",
        own / 1e3,
        foreign / 1e3
    );
}
