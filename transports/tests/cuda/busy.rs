//! Work that a program does with its devices at any time, next to the library's copies.

use crate::kernels::{self, Module};
use crate::roles::Other;
use crate::support::{MIB, copy_and_check, make, need, payload};
use crate::user;
use carrack_transports::gpu::Gpu;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// gpu.md, streams rule 1: no work of the library stays on a device. So the program may free,
/// synchronise, load modules and take the whole device for a kernel at any time, and the library's
/// copies go on. In a process of its own, because it does all of this at once.
#[test]
fn a_program_that_frees_synchronises_loads_modules_and_takes_devices_goes_on_during_our_copies() {
    let Some(_) = need(1) else { return };
    Other::alone("busy program");
}

/// Action that a program repeats on a device.
pub type Act = fn(&Arc<dyn Gpu>);

/// Actions, each done by a thread of its own.
pub const SORTS: [(&str, Act); 4] = [
    ("allocates and frees", |_| {
        let ptr = user::alloc(3 * MIB);
        user::free(ptr);
    }),
    ("synchronises the device", |_| user::synchronize_all()),
    ("loads and unloads a module", |_| drop(Module::load())),
    ("takes the whole device for a kernel", |gpu| {
        let (module, words) = (Module::load(), user::alloc(8));
        let blocks = module.gather(device(gpu), words);
        user::synchronize_all();
        assert_eq!(kernels::words(words), [blocks, 0], "all blocks were there at one time");
        user::free(words);
    }),
];

/// Rounds of each action.
const ROUNDS: u64 = 100;

fn device(gpu: &Arc<dyn Gpu>) -> i32 {
    i32::try_from(gpu.info().ordinal).unwrap()
}

/// Copies while threads repeat the actions of [`SORTS`], in the process that the test above starts.
pub fn busy_program() {
    let (_, gpus) = need(1).unwrap();
    let mut other = Other::start("export: plain", &[]);
    let handle = other.wire.hear_handle();
    let theirs = gpus[0].open(&handle).unwrap();
    let (left, copies) = (AtomicUsize::new(SORTS.len()), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for (number, (what, act)) in SORTS.into_iter().enumerate() {
            let (gpu, left, copies) = (&gpus[number % gpus.len()], &left, &copies);
            scope.spawn(move || {
                let _done = Leaves(left);
                user::set_current(user::primary(device(gpu)));
                for _ in 0..ROUNDS {
                    act(gpu);
                }
                // Even if the actions were quick, some copies run next to them.
                let seen = copies.load(Ordering::Relaxed);
                while copies.load(Ordering::Relaxed) < seen + 3 {
                    act(gpu);
                }
                println!(
                    "a thread that {what} has done so, {} copies so far",
                    copies.load(Ordering::Relaxed)
                );
            });
        }
        let _ends = CountGuard(&copies);
        let far = &gpus[gpus.len() - 1];
        let places =
            [make(&gpus[0], "plain", MIB), make(far, "shareable", MIB), make(far, "pooled", MIB)];
        let pinned = make(&gpus[0], "pinned", MIB);
        for round in 0.. {
            if left.load(Ordering::Relaxed) == 0 {
                break;
            }
            for (dst, src) in [(0, 1), (1, 2), (2, 0)] {
                copy_and_check(&*gpus[0], (&places[dst], 3), (&places[src], 5), 500_001, round);
            }
            copy_and_check(&*gpus[0], (&places[0], 1), (&pinned, 2), 700_003, round);
            copy_and_check(&*gpus[0], (&pinned, 1), (&places[0], 2), 700_003, round);
            let part = theirs.slice(handle.offset, MIB).unwrap();
            assert!(part.to_vec().unwrap() == payload(MIB, 11), "memory of another process");
            copies.fetch_add(1, Ordering::Relaxed);
        }
    });
    drop(theirs);
    other.kill();
}

/// Counts down, even when its thread fails: otherwise the copies would never end.
struct Leaves<'a>(&'a AtomicUsize);

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Adds more copies than any thread waits for, even when one has failed: otherwise the threads
/// would go on.
struct CountGuard<'a>(&'a AtomicU64);

impl Drop for CountGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1 << 40, Ordering::Relaxed);
    }
}
