//! Objects of a driver in a forked child, where no call of the driver's is defined.

use crate::mock::{library as mock, open, word};
use carrack_transports::gpu::words::GpuWords;
use carrack_transports::gpu::{Driver, Flavour};
use carrack_transports::mem::{Buffer, Transfer};
use std::any::Any;
use std::path::Path;

/// Returns the ranges of a library's instructions.
fn instructions(library: &Path) -> Vec<(usize, usize)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let lines = maps.lines().filter(|line| line.ends_with(&*library.to_string_lossy()));
    let ranges = lines.filter(|line| line.contains(" r-xp ")).map(|line| {
        let (start, rest) = line.split_once('-').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(start), number(rest.split(' ').next().unwrap()))
    });
    ranges.collect()
}

/// Drops `all` in a child in which every call of the library ends the process.
#[track_caller]
fn dropped_in_a_child(library: &Path, all: Vec<Box<dyn Any>>) -> Vec<Box<dyn Any>> {
    let code = instructions(library);
    assert!(!code.is_empty(), "{} is not loaded", library.display());
    let mut all = Some(all);
    // SAFETY: the child has this thread alone. It makes the calls under test, and the C library's
    // allocator is made to work in a fork.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: takes an integer: a child that hangs ends.
            unsafe { libc::alarm(20) };
            for (start, end) in code {
                // SAFETY: whole pages of the library, whose code does not run in this process from
                // here on.
                let refused =
                    unsafe { libc::mprotect(start as *mut _, end - start, libc::PROT_NONE) };
                assert_eq!(refused, 0);
            }
            drop(all.take());
            // SAFETY: ends the child without the parent's clean-up.
            unsafe { libc::_exit(42) }
        }
        pid => {
            let mut status = 0;
            // SAFETY: waits for the child just made, and writes an integer.
            assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
            assert!(
                libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 42,
                "the child: {status:#x}"
            );
        }
    }
    all.unwrap()
}

#[test]
fn a_forked_child_that_drops_its_parents_objects_calls_no_driver() {
    let library = mock("forked", "-DPINNED");
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    let mut all: Vec<Box<dyn Any>> = Vec::new();
    for flavour in [Flavour::Plain, Flavour::Pinned] {
        all.push(Box::new(gpu.allocate(100_000, flavour).unwrap()));
    }
    all.extend(
        gpu.allocate(1000, Flavour::Pooled).ok().map(|region| -> Box<dyn Any> { Box::new(region) }),
    );
    let locked = Box::leak(vec![0_u8; 1 << 16].into_boxed_slice());
    // SAFETY: the bytes stay to the end of the process.
    let registration = unsafe { gpu.register_host(locked.as_mut_ptr(), locked.len()) };
    all.extend(registration.ok().map(|locked| -> Box<dyn Any> { Box::new(locked) }));
    // A stream that waits for a word, a gate that holds another up, and the objects that tell of
    // both.
    let (stream, other) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    let words = GpuWords::of(&gpu);
    let (held, mut gate) = (words.word().unwrap(), words.gate().unwrap());
    held.hold(&*stream, 1).unwrap();
    gate.shut(&*other).unwrap();
    all.push(Box::new((stream.record().unwrap(), other.record().unwrap())));
    // A copy in flight: the parent waits for its end.
    let from = gpu.allocate(1000, Flavour::Plain).unwrap();
    let to = gpu.allocate(1000, Flavour::Plain).unwrap();
    let copy = Transfer::start(Buffer::from(to.whole()), Buffer::from(from.whole())).unwrap();
    all.push(Box::new((copy, held, gate, words, stream, other, gpu, driver)));
    let all = dropped_in_a_child(&library, all);
    // They are all there, and their owner gives them back.
    drop(all);
    assert_eq!(word(&library, "mock_depth"), 0);
}

#[test]
fn a_forked_child_that_drops_memory_at_chosen_addresses_calls_no_driver() {
    const UNIT: usize = 2 << 20;
    let library = mock("forked-addresses", "-DVMM");
    let driver = open(&library);
    let gpu = driver.devices().unwrap().remove(0);
    let reservation = gpu.reserve(2 * UNIT).unwrap();
    let piece = gpu.allocate_at(&reservation, 0, UNIT, &[]).unwrap();
    let shareable = gpu.allocate(UNIT, Flavour::Shareable).unwrap();
    let all =
        dropped_in_a_child(&library, vec![Box::new((piece, reservation, shareable, gpu, driver))]);
    let live =
        || ["mock_reservations", "mock_memories", "mock_mappings"].map(|name| word(&library, name));
    assert_eq!(live(), [2, 2, 2]);
    drop(all);
    assert_eq!(live(), [0; 3]);
}
