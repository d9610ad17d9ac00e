//! Copies by the engines.

use crate::roles::Other;
use crate::support::{MIB, cause, copy_and_check, make, need, payload, start};
use crate::user;
use carrack_transports::gpu::Driver;
use carrack_transports::mem::{CopyError, MemKind, Region};
use std::ptr::NonNull;
use std::sync::Arc;

/// Every pair of kinds, of one device and of two, at odd places.
#[test]
fn bytes_arrive_whole_between_all_kinds_and_leave_the_guards_alone() {
    let Some((_, gpus)) = need(1) else { return };
    const ROOM: usize = 3 * MIB;
    let mut places = vec![("host".to_owned(), Region::host(ROOM))];
    places.push(("pinned".to_owned(), make(&gpus[0], "pinned", ROOM)));
    for gpu in gpus.iter().take(2) {
        for kind in ["plain", "shareable", "pooled"] {
            places.push((format!("{kind}{}", gpu.info().ordinal), make(gpu, kind, ROOM)));
        }
    }
    let twins: Vec<Region> = gpus
        .iter()
        .take(2)
        .flat_map(|gpu| ["plain", "shareable", "pooled"].map(|kind| make(gpu, kind, ROOM)))
        .collect();
    let mut seed = 100;
    for (at, (to, dst)) in places.iter().enumerate() {
        for (from, src) in &places {
            // The engine that the copy function takes: of the target, else of the source.
            let engines = [dst, src].into_iter().filter(|region| !region.kind().is_host());
            for engine in engines.filter_map(Region::gpu) {
                let src = if to == from { &twins[at - 2] } else { src };
                for len in [1, 7, 64, 4095, 65_536, 2 * MIB + 3] {
                    seed += 2;
                    copy_and_check(&**engine, (dst, 13), (src, 31), len, seed);
                }
            }
        }
    }
}

/// Managed memory is refused by name.
#[test]
fn managed_memory_is_refused_by_name() {
    let Some((_, gpus)) = need(1) else { return };
    let (managed, plain) = (make(&gpus[0], "managed", 100), make(&gpus[0], "plain", 100));
    let refused = managed.whole().write(&[1; 100]).unwrap_err();
    assert!(matches!(refused, CopyError::Managed { .. }), "{refused}");
    for pair in [((&managed, 0), (&plain, 0)), ((&plain, 0), (&managed, 0))] {
        let why = start(&*gpus[0], pair.0, pair.1, 100).unwrap_err();
        assert!(why.name == "NOT_SUPPORTED" && why.hint.contains("managed"), "{why}");
    }
}

/// Life and death rule 3. Access to a region whose memory was freed is the driver's error. It is
/// no crash, and no fault on the device, after which the context would be lost.
#[test]
fn a_copy_of_freed_memory_is_an_error_and_the_device_goes_on() {
    let Some(_) = need(1) else { return };
    Other::alone("freed memory");
}

/// Copies from and to freed memory, in the process that the test above starts: alone in case the
/// driver takes such a copy.
pub fn of_freed_memory() {
    let (_, gpus) = need(1).unwrap();
    user::set_current(user::primary(0));
    let (plain, host) = (make(&gpus[0], "plain", 100), Region::host(100));
    // The last allocation: a free address is given out again at once.
    let (mapping, large) = (user::Mapping::new(0, 1, &[0]), make(&gpus[0], "plain", 64 * MIB));
    let (unmapped, freed, kind) = (mapping.ptr, large.addr(), MemKind::Device(gpus[0].info().uuid));
    drop((mapping, large));
    for (what, addr) in [("unmapped", unmapped), ("freed", freed), ("never allocated", 0x10)] {
        let nowhere = (addr as *mut u8, kind);
        let ends = [(plain.addr() as *mut u8, kind), (host.addr() as *mut u8, MemKind::Host)];
        for other in ends {
            for (to, from) in [(nowhere, other), (other, nowhere)] {
                // SAFETY: there is no memory at one end, which is the point; the driver refuses.
                let refused = unsafe { gpus[0].copy(to, (from.0.cast_const(), from.1), 100) };
                let why = refused.unwrap_err();
                println!("{what} memory: {why}");
                assert!(why.name == "INVALID_VALUE" && !why.hint.is_empty(), "{why}");
            }
        }
    }
    let base = NonNull::new(0x10 as *mut u8).unwrap();
    // SAFETY: as above.
    let nowhere = unsafe {
        let gpu = Some(Arc::clone(&gpus[0]));
        Region::from_parts(base, 100, plain.kind(), plain.id(), gpu, Box::new(()))
    };
    assert_eq!(cause(nowhere.whole().write(&[1; 100])).name, "INVALID_VALUE");
    // Longer than the allocation, which ends where its mapping does.
    let (small, large) =
        (make(&gpus[0], "shareable", 2 * MIB), make(&gpus[0], "shareable", 64 * MIB));
    assert!(small.slice(0, 2 * MIB + 1).is_none(), "a slice of a region cannot ask for that");
    let beyond = start(&*gpus[0], (&small, 0), (&large, 0), 64 * MIB);
    println!("beyond an allocation: {:?}", beyond.map(drop));
    plain.whole().write(&payload(100, 5)).unwrap();
    assert_eq!(plain.whole().to_vec().unwrap(), payload(100, 5), "the device goes on");
}

/// gpu.md, "Measured": VMM memory without access for the engine's device takes a peer copy.
#[test]
fn vmm_memory_without_access_is_copied_between_two_contexts() {
    let Some((driver, gpus)) = need(2) else { return };
    user::set_current(user::primary(1));
    let mapping = user::Mapping::new(1, 1, &[1]);
    let near = make(&gpus[0], "plain", mapping.len);
    user::set_current(user::primary(0));
    assert!(user::copy_is_refused(near.addr(), mapping.ptr, 100), "a plain copy is refused");
    let extent = driver.classify(mapping.ptr).unwrap().unwrap();
    let base = NonNull::new(mapping.ptr as *mut u8).unwrap();
    // SAFETY: the mapping outlives the region.
    let far = unsafe {
        let gpu = Some(Arc::clone(&gpus[1]));
        Region::from_parts(base, mapping.len, extent.kind, extent.id, gpu, Box::new(()))
    };
    for len in [1, 4097, MIB + 1] {
        copy_and_check(&*gpus[0], (&near, 3), (&far, 5), len, 70);
        copy_and_check(&*gpus[0], (&far, 3), (&near, 5), len, 80);
    }
}

#[test]
fn a_copy_of_nothing_has_been_done() {
    let Some((_, gpus)) = need(1) else { return };
    let region = make(&gpus[0], "plain", 10);
    let event = start(&*gpus[0], (&region, 0), (&region, 0), 0).unwrap();
    assert_eq!(event.query(), Ok(true));
    event.wait().unwrap();
    gpus[0].stream().unwrap().wait(&event).unwrap();
}

#[test]
fn events_can_be_asked_by_any_thread_and_dropped_before_they_fire() {
    let Some((_, gpus)) = need(1) else { return };
    let (src, dst) = (make(&gpus[0], "plain", 64 * MIB), make(&gpus[0], "plain", 64 * MIB));
    src.whole().write(&payload(64 * MIB, 9)).unwrap();
    for _ in 0..200 {
        // Dropped at once: its event is recorded again by the next copy.
        drop(start(&*gpus[0], (&dst, 0), (&src, 0), 64 * MIB).unwrap());
    }
    let last = start(&*gpus[0], (&dst, 0), (&src, 0), 64 * MIB).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                assert_eq!(user::current(), 0, "this thread has no context");
                while !last.query().unwrap() {
                    std::hint::spin_loop();
                }
                last.wait().unwrap();
                assert_eq!(user::current(), 0);
            });
        }
    });
    assert!(dst.whole().to_vec().unwrap() == payload(64 * MIB, 9));
}

/// One event of the driver stands for many copies: none may be reported complete before it is.
#[test]
fn a_copy_among_many_is_complete_only_when_its_bytes_are_there() {
    const BLOCK: usize = 64 << 10;
    const BLOCKS: usize = 150;
    let Some((_, gpus)) = need(1) else { return };
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let gpu = &gpus[0];
            scope.spawn(move || {
                let (src, dst) =
                    (make(gpu, "plain", BLOCK * BLOCKS), make(gpu, "pinned", BLOCK * BLOCKS));
                for round in 0..10 {
                    let sent = payload(src.len(), thread * 100 + round);
                    src.whole().write(&sent).unwrap();
                    let begun =
                        |at: usize| start(&**gpu, (&dst, at * BLOCK), (&src, at * BLOCK), BLOCK);
                    let copies: Vec<_> = (0..BLOCKS).map(|at| begun(at).unwrap()).collect();
                    // Queried out of order: the last, the middle, and then by strides.
                    for at in (0..BLOCKS).map(|turn| (BLOCKS - 1 + turn * 77) % BLOCKS) {
                        while !copies[at].query().unwrap() {
                            std::hint::spin_loop();
                        }
                        let got = dst.slice(at * BLOCK, BLOCK).unwrap().to_vec().unwrap();
                        assert!(
                            got == sent[at * BLOCK..][..BLOCK],
                            "thread {thread}, round {round}, block {at}"
                        );
                    }
                }
            });
        }
    });
}

#[test]
fn threads_that_copy_at_the_same_time_do_not_disturb_each_other() {
    let Some((_, gpus)) = need(1) else { return };
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let gpu = &gpus[usize::try_from(thread).unwrap() % gpus.len()];
            scope.spawn(move || {
                let places =
                    ["plain", "pinned", "shareable", "pooled"].map(|kind| make(gpu, kind, 200_000));
                for round in 0..100 {
                    let pick = |by: u64| &places[usize::try_from((round * 7 + by) % 4).unwrap()];
                    let (dst, src) = (pick(thread), pick(thread + 1));
                    copy_and_check(&**gpu, (dst, 17), (src, 3), 150_001, thread * 1000 + round);
                }
            });
        }
    });
}

#[test]
fn peer_access_that_the_program_has_enabled_before_us_is_fine() {
    let Some((_, gpus)) = need(2) else { return };
    user::set_current(user::primary(0));
    user::enable_peer(user::primary(1));
    gpus[0].reaches(gpus[1].info().uuid).unwrap();
    gpus[0].reaches(gpus[1].info().uuid).unwrap();
    let (near, far) = (make(&gpus[0], "plain", MIB), make(&gpus[1], "plain", MIB));
    copy_and_check(&*gpus[0], (&near, 1), (&far, 2), 100_000, 60);
}
