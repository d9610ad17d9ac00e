//! Small copies by a resident kernel: it delays the program by no more than its lease, and
//! accesses only permitted memory. In processes of their own, because a copier stays for a
//! process's life.

use crate::busy::{Act, SORTS};
use crate::roles::Other;
use crate::support::{MIB, copy_and_check, make, need};
use crate::user;
use carrack_transports::gpu::copier::{LIFE, MOST};
use carrack_transports::gpu::{Access, CopierState, Driver, Gpu};
use carrack_transports::mem::Region;
use parking_lot::Mutex;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// If two processes want a copier on one GPU, neither has one.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

#[test]
fn a_program_that_frees_synchronises_loads_modules_and_takes_devices_goes_on_with_a_copier() {
    let Some(_) = need(1) else { return };
    let _turn = ONE_AT_A_TIME.lock();
    Other::alone("next to a copier");
}

#[test]
fn memory_of_every_kind_is_copied_with_a_copier_and_what_it_does_not_reach_is_an_engines() {
    let Some(_) = need(1) else { return };
    let _turn = ONE_AT_A_TIME.lock();
    Other::alone("kinds by a copier");
}

/// Devices with copiers.
fn with_copiers() -> Vec<Arc<dyn Gpu>> {
    let (driver, gpus) = need(1).unwrap();
    driver.use_copiers();
    gpus
}

/// Returns the number of copies given to kernels; `None` where there is no copier, with the reason
/// printed.
fn copies(gpu: &Arc<dyn Gpu>) -> Option<u64> {
    match gpu.copier() {
        CopierState::On { copies, .. } => Some(copies),
        other => {
            println!("no copier: {other:?}");
            None
        }
    }
}

/// Seconds for each action of a program, a minute in all: or `TEST_COPIER_SECONDS`.
fn time() -> Duration {
    let given =
        std::env::var("TEST_COPIER_SECONDS").ok().map(|text| text.parse().expect("seconds"));
    Duration::from_secs(given.unwrap_or(15))
}

/// Actions of the program with no copies next to them, for comparison.
const ALONE: usize = 100;

pub fn next_to_the_program() {
    let gpus = with_copiers();
    let gpu = &gpus[0];
    user::set_current(user::primary(0));
    let (dst, src) = (make(gpu, "plain", 2 * MOST), make(gpu, "plain", 2 * MOST));
    let copy = |round: u64| {
        let len = 1 + round as usize * 131 % MOST;
        copy_and_check(&**gpu, (&dst, 16), (&src, 32), len, round);
    };
    for (what, act) in SORTS {
        // The last copies' kernel has left by then.
        std::thread::sleep(10 * LIFE);
        let alone: Vec<Duration> = (0..ALONE).map(|_| duration(gpu, act)).collect();
        // The copier may be there from now on, and none of its copies is counted.
        copy(0);
        let before = copies(gpu).expect("a copier");
        let (has_ended, made) = (AtomicBool::new(false), AtomicU64::new(0));
        let meanwhile = std::thread::scope(|scope| {
            let program = scope.spawn(|| {
                let _ends = FlagGuard(&has_ended);
                user::set_current(user::primary(0));
                let (began, mut all) = (Instant::now(), Vec::new());
                // Even if the actions are slow, some copies run next to them, unless one has
                // failed.
                let is_busy = || began.elapsed() < time() || made.load(Ordering::Relaxed) < 20;
                while !has_ended.load(Ordering::Relaxed) && is_busy() {
                    all.push(duration(gpu, act));
                }
                all
            });
            let _ends = FlagGuard(&has_ended);
            for round in 1.. {
                if has_ended.load(Ordering::Relaxed) {
                    break;
                }
                copy(round);
                made.fetch_add(1, Ordering::Relaxed);
            }
            program.join().unwrap()
        });
        let by_kernel = copies(gpu).expect("a copier") - before;
        println!(
            "a program that {what}: {} next to {made:?} copies, {by_kernel} of them the kernel's; \
            {} alone",
            in_words(meanwhile),
            in_words(alone)
        );
        assert!(by_kernel > 0, "a program that {what}: no copy was the kernel's");
    }
}

fn duration(gpu: &Arc<dyn Gpu>, act: Act) -> Duration {
    let began = Instant::now();
    act(gpu);
    began.elapsed()
}

/// Formats the number of times, the median and the longest.
fn in_words(mut all: Vec<Duration>) -> String {
    all.sort_unstable();
    let (median, longest) = (all[all.len() / 2], all[all.len() - 1]);
    format!("{} times, median {median:.1?}, longest {longest:.1?},", all.len())
}

/// Sets a flag when dropped, even when the thread fails.
struct FlagGuard<'a>(&'a AtomicBool);

impl Drop for FlagGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub fn kinds() {
    let gpus = with_copiers();
    let (gpu, far) = (&gpus[0], &gpus[gpus.len() - 1]);
    let kinds = ["plain", "shareable", "pooled"];
    let each = || -> Vec<Region> {
        [gpu, far].iter().flat_map(|gpu| kinds.map(|kind| make(gpu, kind, MIB))).collect()
    };
    let (regions, sources) = (each(), each());
    let mut seed = 0;
    for dst in &regions {
        for src in &sources {
            for (to, from) in [(0, 0), (16, 48), (7, 7), (5, 1), (3, 0)] {
                for len in [1, 8, 31, 32, 33, 500, 2047, 4100, 8191, MOST, MOST + 1] {
                    seed += 1;
                    copy_and_check(&**gpu, (dst, to), (src, from), len, seed);
                }
            }
        }
    }
    // Across the border of two allocations, which may be two devices': an engine copies.
    let unit = gpu.granularity().unwrap().max(far.granularity().unwrap());
    let reservation = gpu.reserve(2 * unit).unwrap();
    let both = [gpu, far].map(|gpu| Access::read_write(gpu.info().uuid));
    let part = |(at, gpu): (usize, &Arc<dyn Gpu>)| {
        gpu.allocate_at(&reservation, at * unit, unit, &both[..gpus.len().min(2)]).unwrap()
    };
    let joined = Region::joined([(0, gpu), (1, far)].map(part).into()).unwrap();
    for at in [16, unit - 64, unit - 4000, unit - 7, unit, unit + 16] {
        for len in [1, 64, 500, 8000] {
            seed += 1;
            copy_and_check(&**gpu, (&joined, at), (&regions[0], 32), len, seed);
            copy_and_check(&**gpu, (&regions[0], 16), (&joined, at), len, seed + 1000);
        }
    }
    // To memory of another device to which this one has no access; a kernel that accesses it would
    // lose the context.
    if gpus.len() > 1 {
        user::set_current(user::primary(1));
        let mapping = user::Mapping::new(1, 1, &[1]);
        user::set_current(user::primary(0));
        let base = NonNull::new(mapping.ptr as *mut u8).unwrap();
        let extent = far.classify(mapping.ptr).unwrap().unwrap();
        // SAFETY: the mapping outlives the region.
        let closed = unsafe {
            let gpu = Some(Arc::clone(&gpus[1]));
            Region::from_parts(base, mapping.len, extent.kind, extent.id, gpu, Box::new(()))
        };
        for len in [1, 64, MOST] {
            copy_and_check(&**gpu, (&regions[0], 16), (&closed, 32), len, 70);
            copy_and_check(&**gpu, (&closed, 16), (&regions[0], 32), len, 80);
        }
    }
    // In a context of the program's own, engines copy, and the copier of the primary one stays.
    let context = user::new_context(0);
    let ptrs = [user::alloc(MIB), user::alloc(MIB)];
    user::set_current(user::primary(0));
    let own = gpu.classify(ptrs[0]).unwrap().unwrap().gpu.unwrap();
    let theirs = ptrs.map(|ptr| {
        let (base, extent) =
            (NonNull::new(ptr as *mut u8).unwrap(), gpu.classify(ptr).unwrap().unwrap());
        // SAFETY: allocated above, and freed below after the region's last use.
        unsafe {
            Region::from_parts(
                base,
                MIB,
                extent.kind,
                extent.id,
                Some(Arc::clone(&own)),
                Box::new(()),
            )
        }
    });
    copy_and_check(&*own, (&theirs[0], 16), (&theirs[1], 32), 64, 90);
    assert!(matches!(own.copier(), CopierState::Refused(why) if why.contains("primary one only")));
    drop(theirs);
    user::set_current(context);
    ptrs.into_iter().for_each(user::free);
    user::set_current(user::primary(0));
    copy_and_check(&**gpu, (&regions[0], 0), (&regions[1], 0), 8, 1);
    assert!(copies(gpu).expect("a copier") > 0, "no copy was the kernel's");
}
