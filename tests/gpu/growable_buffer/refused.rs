//! Impossible requests: each error says what to do, and changes nothing.

#![expect(unsafe_code, reason = "memory of a GPU is named by its address")]

use super::{STRIPE, buffer, check, fill};
use crate::support::gpu_ranks::{Gpus, PATIENCE, can_order, completed};
use crate::support::{Job, OverShm, Watchdog, gpus};
use carrack::alloc::{GrowableBuffer, GrowableError};
use carrack::buffer::raw;
use carrack::transports::gpu::{Driver, Gpu};
use carrack::{MR_UNKNOWN, Rank, Synchronizer, Tag};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use std::sync::Arc;

#[test]
fn buffers_that_cannot_be_are_refused_before_any_address_is_taken() {
    let _watchdog = Watchdog::over("cannot be");
    let gpus = Gpus::here();
    let all = &gpus.all;
    let refused =
        |gpus: &[Arc<dyn Gpu>], most| GrowableBuffer::reserve(gpus, most).build().unwrap_err();
    for most in [0, usize::MAX, isize::MAX as usize] {
        let why = refused(all, most);
        assert!(
            matches!(why, GrowableError::Most { .. })
                && why.to_string().contains(&most.to_string()),
            "{why}"
        );
    }
    assert!(matches!(refused(&[], 1), GrowableError::NoGpu));
    let why = refused(&[all[0].clone(), all[0].clone()], 1);
    assert!(matches!(why, GrowableError::Twice { gpu } if gpu == all[0].info().uuid), "{why}");
    let granularity = all[0].granularity().unwrap();
    for (stripe, instead) in [
        (0, granularity.to_string()),
        (1, granularity.to_string()),
        (granularity + 1, format!("{granularity} or {}", 2 * granularity)),
    ] {
        let why = GrowableBuffer::reserve(all, 1 << 30).stripe(stripe).build().unwrap_err();
        let GrowableError::Stripe { stripe: told, granularity: by, .. } = why else {
            panic!("{why}")
        };
        assert_eq!((told, by), (stripe, granularity));
        let says = why.to_string();
        assert!(says.contains(&format!("{stripe} bytes")) && says.ends_with(&instead), "{says}");
    }
    let why = GrowableBuffer::reserve(all, 1)
        .stripe(usize::MAX / granularity * granularity)
        .build()
        .unwrap_err();
    assert!(matches!(why, GrowableError::Most { most: 1 }), "{why}");
    for builder in [
        GrowableBuffer::reserve(&all[..1], 1).readers(all),
        GrowableBuffer::reserve(&all[..1], 1).writers(all),
        GrowableBuffer::reserve(all, 1).readers(&all[..1]),
    ] {
        let why = builder.build().unwrap_err();
        assert!(matches!(why, GrowableError::Twice { gpu } if gpu == all[0].info().uuid), "{why}");
    }
    assert!(GrowableBuffer::reserve(&all[..1], 1).readers(&[]).writers(&[]).build().is_ok());
    if let Some(fake) = &gpus.fake {
        assert_eq!(fake.counters().reservations, 1, "the last one's");
        assert_eq!(fake.counters().allocs, 0);
    }
}

#[test]
fn gpus_that_do_not_reach_each_other_or_have_no_such_memory_are_named_with_the_drivers_reason() {
    let _watchdog = Watchdog::over("apart");
    if !can_order("what a driver refuses") {
        return;
    }
    let driver =
        FakeDriver::new(FakeConfig { no_peer: vec![(0, 1)], ..FakeConfig::devices(3) }).unwrap();
    let gpus = driver.devices().unwrap();
    let why = GrowableBuffer::reserve(&gpus[..2], 1).build().unwrap_err();
    let GrowableError::Apart { gpu, owner, cause } = &why else { panic!("{why}") };
    assert_eq!(
        (*gpu, *owner, cause.code),
        (gpus[0].info().uuid, gpus[1].info().uuid, 217),
        "{why}"
    );
    assert!(why.to_string().contains("leave one of the two out"), "{why}");
    let ends = [gpus[0].clone(), gpus[2].clone()];
    let mut buffer = GrowableBuffer::reserve(&ends, 4 * STRIPE).stripe(STRIPE).build().unwrap();
    buffer.grow_to(2 * STRIPE).unwrap();
    // Two drivers know nothing of each other.
    let other = FakeDriver::new(FakeConfig { seed: 5, ..FakeConfig::devices(1) })
        .unwrap()
        .devices()
        .unwrap();
    let why = GrowableBuffer::reserve(&[gpus[0].clone(), other[0].clone()], 1).build().unwrap_err();
    assert!(matches!(why, GrowableError::Apart { .. }), "{why}");
    driver.faults().refuse_reservations(true);
    let why = GrowableBuffer::reserve(&gpus[..1], 1).build().unwrap_err();
    let GrowableError::Unsupported { gpu, cause } = &why else { panic!("{why}") };
    assert_eq!((*gpu, cause.code), (gpus[0].info().uuid, 801), "{why}");
    assert!(why.to_string().contains("ordered to be refused"), "{why}");
    let why = buffer.grow_to(4 * STRIPE).unwrap_err();
    assert!(matches!(why, GrowableError::NotAllocated { .. }), "{why}");
    assert_eq!(buffer.len(), 2 * STRIPE);
    driver.faults().refuse_reservations(false);
    // More addresses than a simulated device has.
    let why = GrowableBuffer::reserve(&gpus[..1], 1 << 45).build().unwrap_err();
    assert!(matches!(why, GrowableError::NotReserved { most, .. } if most == 1 << 45), "{why}");
}

#[test]
fn growth_beyond_the_reservation_and_ranges_that_are_not_there_are_refused_with_both_numbers() {
    let _watchdog = Watchdog::over("beyond");
    let gpus = Gpus::here();
    let mut buffer = buffer(&gpus, 4);
    buffer.grow_to(2 * STRIPE).unwrap();
    for len in [4 * STRIPE + 1, usize::MAX] {
        let why = buffer.grow_to(len).unwrap_err();
        let GrowableError::Beyond { len: asked, capacity } = why else { panic!("{why}") };
        assert_eq!((asked, capacity), (len, 4 * STRIPE));
        let says = why.to_string();
        assert!(says.contains(&len.to_string()) && says.contains(&capacity.to_string()), "{says}");
    }
    assert_eq!(buffer.len(), 2 * STRIPE);
    let nowhere = [
        (0, 0),
        (2 * STRIPE, 1),
        (0, 2 * STRIPE + 1),
        (usize::MAX, 1),
        (1, usize::MAX),
        (2 * STRIPE, 0),
    ];
    for (offset, len) in nowhere {
        for why in
            [buffer.region(offset, len).unwrap_err(), buffer.pieces(offset, len).unwrap_err()]
        {
            assert!(
                matches!(why, GrowableError::Outside { held, .. } if held == 2 * STRIPE),
                "{why}"
            );
        }
    }
}

/// No driver promises copies between all GPUs of a range. So a trial decides, and the error names
/// its result.
#[test]
fn a_range_over_gpus_between_which_no_copy_goes_is_no_region_and_its_pieces_are() {
    let _watchdog = Watchdog::over("across");
    let driver = FakeDriver::new(FakeConfig::devices(3)).unwrap();
    let gpus = driver.devices().unwrap();
    let mut buffer = GrowableBuffer::reserve(&gpus, 5 * STRIPE).stripe(STRIPE).build().unwrap();
    buffer.grow_to(5 * STRIPE).unwrap();
    driver.faults().refuse_copies_across(true);
    let before = driver.counters();
    let why = buffer.region(STRIPE - 1, 2).unwrap_err();
    let GrowableError::OnSeveral { gpus: 2, stripe: STRIPE, cause, .. } = &why else {
        panic!("{why}")
    };
    assert!(
        cause.contains("over a border by the engines of")
            && why.to_string().contains("take the pieces"),
        "{why}"
    );
    let pieces = buffer.pieces(STRIPE - 1, 2).unwrap();
    assert_eq!(pieces.iter().map(carrack::region::Region::len).collect::<Vec<_>>(), [1, 1]);
    let after = driver.counters();
    assert_eq!(
        after.allocs - before.allocs,
        after.frees - before.frees,
        "what it was tried with is given back"
    );
    // Within a stripe there is nothing to try, nor on one GPU; nor again when it was seen to work.
    assert!(buffer.region(STRIPE, STRIPE).is_ok());
    let mut of_one =
        GrowableBuffer::reserve(&gpus[..1], 2 * STRIPE).stripe(STRIPE).build().unwrap();
    of_one.grow_to(2 * STRIPE).unwrap();
    assert!(of_one.region(STRIPE - 1, 2).is_ok());
    driver.faults().refuse_copies_across(false);
    assert!(buffer.region(1, 4 * STRIPE).is_ok());
    driver.faults().refuse_copies_across(true);
    assert!(buffer.region(1, 4 * STRIPE).is_ok());
    // Without memory for a trial, the answer stays unknown.
    driver.faults().refuse_copies_across(false);
    let mut other = GrowableBuffer::reserve(&gpus, 3 * STRIPE).stripe(STRIPE).build().unwrap();
    other.grow_to(3 * STRIPE).unwrap();
    driver.faults().refuse_reservations(true);
    let why = other.region(0, 3 * STRIPE).unwrap_err();
    assert!(why.to_string().contains("it could not be tried"), "{why}");
}

/// gpu.md, VMM rule 6.
#[test]
fn a_buffer_does_not_shrink_below_what_is_registered_in_an_operation_or_held() {
    let _watchdog = Watchdog::over("in use");
    let ranks = OverShm::ranks_with(1, OverShm::settings().gpu(gpus::choice()));
    let (rank, me) = (&ranks[0], Rank(0));
    let all = gpus::of(rank);
    let mut buffer = GrowableBuffer::reserve(&all, 8 * STRIPE).stripe(STRIPE).build().unwrap();
    let refused = |buffer: &mut GrowableBuffer, keeps: usize| {
        let held = buffer.len();
        for len in [0, 1, keeps - STRIPE] {
            let why = buffer.shrink_to(len).unwrap_err();
            let GrowableError::InUse { len: asked, used, processes } = &why else {
                panic!("{why}")
            };
            assert_eq!((*asked, *used, processes.len()), (len, keeps, 0), "{why}");
            assert!(why.to_string().contains(&format!("first {keeps} are in use")), "{why}");
            assert_eq!(buffer.len(), held, "nothing has changed");
        }
    };
    buffer.grow_to(8 * STRIPE).unwrap();
    let pieces = buffer.pieces(0, buffer.len()).unwrap();
    for (at, piece) in pieces.iter().enumerate() {
        fill(piece, at as u64);
    }
    drop(pieces);
    // A registration, of a few bytes.
    let mr = rank.register_memory(&buffer.region(3 * STRIPE + 99, 5).unwrap()).unwrap();
    refused(&mut buffer, 4 * STRIPE);
    buffer.shrink_to(4 * STRIPE).unwrap();
    buffer.grow_to(8 * STRIPE).unwrap();
    drop(mr);
    // A part of a part.
    let part = buffer
        .region(5 * STRIPE, STRIPE)
        .unwrap()
        .subregion(1, 100)
        .unwrap()
        .subregion(5, 5)
        .unwrap();
    refused(&mut buffer, 6 * STRIPE);
    drop(part);
    // An operation that waits for its message.
    let room = buffer.region(STRIPE, 100).unwrap().whole();
    let received = Synchronizer::new(1);
    assert!(!rank.post_recv(me, room, Tag(1)).comp(&received).try_submit().unwrap().is_done());
    refused(&mut buffer, 2 * STRIPE);
    completed(rank, |done| rank.post_send(me, vec![7; 100], Tag(1)).comp(done).submit())
        .unwrap()
        .ok()
        .unwrap();
    rank.wait_for(PATIENCE, || received.test()).expect("the message comes");
    // Its status has the memory.
    refused(&mut buffer, 2 * STRIPE);
    let status = received.take().unwrap().remove(0);
    assert_eq!(status.ok().unwrap().buffer.to_vec().unwrap(), [7; 100]);
    // A raw region, of which only the address tells.
    let addr = (buffer.addr() + STRIPE + 8) as *mut u8;
    // SAFETY: it is dropped before its memory goes, which is what this is about.
    let raw = unsafe { raw::region(addr, 100, MR_UNKNOWN, rank.gpu_drivers()) }.unwrap();
    refused(&mut buffer, 2 * STRIPE);
    drop(raw);
    check(&buffer.pieces(0, STRIPE).unwrap()[0], 0);
    buffer.shrink_to(0).unwrap();
}
