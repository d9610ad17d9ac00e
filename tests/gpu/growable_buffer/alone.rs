//! One process: the layout of a buffer, and its stability.

use super::{STRIPE, buffer, check, fill, stripes};
use crate::support::Watchdog;
use crate::support::gpu_ranks::{Gpus, enough_for, filled};
use crate::support::words::{are_all, wrong};
use carrack::alloc::{GrowableBuffer, GrowableError};
use carrack::ipc::{IpcError, ipc_export};
use carrack::region::Region;
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::transports::mem::{MemKind, Transfer};
use std::sync::Arc;

/// Returns `true` if the driver knows memory there. A real one may answer with an error for
/// addresses without memory.
fn has_memory(gpus: &Gpus, addr: usize) -> bool {
    matches!(gpus.driver.classify(addr), Ok(Some(_)))
}

#[test]
fn what_is_there_stays_where_and_as_it_is_while_the_buffer_grows_and_shrinks() {
    let _watchdog = Watchdog::over("stays");
    let gpus = Gpus::here();
    let mut buffer = buffer(&gpus, 16);
    assert_eq!((buffer.len(), buffer.capacity(), buffer.stripe()), (0, 16 * STRIPE, STRIPE));
    assert!(buffer.is_empty());
    let addr = buffer.addr();
    // By steps of different lengths, of which each is rounded up.
    for (turn, (asked, held)) in
        [(1, 1), (STRIPE, 1), (STRIPE + 1, 2), (5 * STRIPE - 1, 5), (16 * STRIPE, 16)]
            .into_iter()
            .enumerate()
    {
        let before = buffer.len() / STRIPE;
        buffer.grow_to(asked).unwrap();
        assert_eq!(buffer.len(), held * STRIPE);
        let all = stripes(&buffer);
        for (at, stripe) in all.iter().enumerate() {
            assert_eq!((stripe.addr(), stripe.len()), (addr + at * STRIPE, STRIPE));
        }
        for (at, stripe) in all.iter().enumerate().take(before) {
            check(stripe, at as u64);
        }
        for (at, stripe) in all.iter().enumerate().skip(before) {
            fill(stripe, at as u64);
        }
        // A shorter length is no change.
        buffer.grow_to(0).unwrap();
        buffer.shrink_to(usize::MAX).unwrap();
        assert_eq!(buffer.len(), held * STRIPE, "turn {turn}");
    }
    for (asked, held) in [(15 * STRIPE + 1, 16), (7 * STRIPE + 5, 8), (3 * STRIPE, 3), (1, 1)] {
        buffer.shrink_to(asked).unwrap();
        assert_eq!(buffer.len(), held * STRIPE);
        for (at, stripe) in stripes(&buffer).iter().enumerate() {
            check(stripe, at as u64);
        }
        assert!(!has_memory(&gpus, addr + held * STRIPE), "nothing is behind it");
    }
    buffer.grow_to(4 * STRIPE).unwrap();
    check(&stripes(&buffer)[0], 0);
    assert_eq!(buffer.addr(), addr);
    buffer.shrink_to(0).unwrap();
    assert!(buffer.is_empty());
}

/// gpu.md, VMM rules 1, 2.
#[test]
fn stripes_are_dealt_out_to_the_gpus_in_turn_and_each_is_an_allocation_of_its_own() {
    let _watchdog = Watchdog::over("stripes");
    let gpus = Gpus::here();
    let mut buffer = buffer(&gpus, 8);
    buffer.grow_to(3 * STRIPE).unwrap();
    buffer.grow_to(6 * STRIPE).unwrap();
    for (at, stripe) in stripes(&buffer).iter().enumerate() {
        let owner = &gpus.all[at % gpus.all.len()];
        assert_eq!(stripe.kind(), MemKind::Device(owner.info().uuid));
        assert_eq!(stripe.gpu().unwrap().info().uuid, owner.info().uuid);
        let extent = gpus.driver.classify(stripe.addr() + 5).unwrap().expect("memory of a device");
        assert_eq!((extent.base, extent.len), (stripe.addr(), STRIPE), "one handle");
        assert_eq!((extent.kind, extent.context), (stripe.kind(), None));
        fill(stripe, at as u64);
        check(stripe, at as u64);
    }
    assert_eq!(gpus.driver.extents(buffer.addr(), buffer.len()).unwrap().len(), 6);
    assert!(gpus.driver.extents(buffer.addr(), buffer.len() + 1).is_err());
    // Ordinary memory lies elsewhere.
    for _ in 0..4 {
        let other = gpus.plain(1);
        assert!(
            other.addr() + (2 << 20) <= buffer.addr()
                || other.addr() >= buffer.addr() + buffer.capacity()
        );
    }
}

#[test]
fn every_gpu_of_the_buffer_copies_from_and_to_all_of_it() {
    let _watchdog = Watchdog::over("every");
    if !enough_for("stripes of several GPUs", 2) {
        return;
    }
    let gpus = Gpus::here();
    let mut buffer = buffer(&gpus, 4);
    buffer.grow_to(4 * STRIPE).unwrap();
    for (turn, gpu) in gpus.all.iter().enumerate() {
        let (near, stream) = (gpu.allocate(STRIPE, Flavour::Plain).unwrap(), gpu.stream().unwrap());
        let copied = |to: &Region, from: &Region| {
            let copy =
                Transfer::start_on(&*stream, to.whole().into(), from.whole().into()).unwrap();
            drop(copy.into_buffers());
        };
        for (at, stripe) in stripes(&buffer).iter().enumerate() {
            let salt = (turn * 10 + at) as u64;
            fill(&near, salt);
            copied(stripe, &near);
            check(stripe, salt);
            fill(stripe, salt + 100);
            copied(&near, stripe);
            check(&near, salt + 100);
        }
    }
}

/// There is no gap between two stripes, and no write reaches outside of its range.
#[test]
fn a_range_over_several_stripes_of_one_gpu_or_of_several_is_one_region() {
    let _watchdog = Watchdog::over("one region");
    let gpus = Gpus::here();
    for owners in [&gpus.all[..1], &gpus.all] {
        ranges(owners);
    }
}

fn ranges(owners: &[Arc<dyn Gpu>]) {
    let mut buffer = GrowableBuffer::reserve(owners, 5 * STRIPE).stripe(STRIPE).build().unwrap();
    buffer.grow_to(5 * STRIPE).unwrap();
    let poison = vec![0xee; buffer.len()];
    for (at, len) in
        [(5, 100), (STRIPE - 3, 7), (77, 4 * STRIPE + 99), (0, 5 * STRIPE), (STRIPE, STRIPE)]
    {
        let all = buffer.region(0, buffer.len()).unwrap();
        all.whole().write(&poison).unwrap();
        let part = buffer.region(at, len).unwrap();
        assert_eq!((part.addr(), part.len()), (buffer.addr() + at, len));
        // What it is said to be is what its first byte is.
        let first = owners[at / STRIPE % owners.len()].info().uuid;
        assert_eq!((part.kind(), part.gpu().unwrap().info().uuid), (MemKind::Device(first), first));
        fill(&part, len as u64);
        check(&part, len as u64);
        let bytes = all.whole().to_vec().unwrap();
        assert_eq!(wrong(&bytes[at..at + len], len as u64, 0), None);
        assert!(are_all(&[&bytes[..at], &bytes[at + len..]], 0xee), "{at}+{len}");
        // Other processes open one allocation by a name.
        let named = ipc_export(&all.subregion(at, len).unwrap());
        match (at + len - 1) / STRIPE - at / STRIPE + 1 {
            1 => assert_eq!(named.unwrap().len(), len),
            several => assert!(matches!(named, Err(IpcError::Several(count)) if count == several)),
        }
        // In pieces, it is the same.
        let pieces = buffer.pieces(at, len).unwrap();
        let bytes: Vec<u8> =
            pieces.iter().flat_map(|piece| piece.whole().to_vec().unwrap()).collect();
        assert_eq!(wrong(&bytes, len as u64, 0), None);
        assert!(pieces.iter().all(|piece| !piece.is_empty()));
        drop((all, pieces));
        let error = buffer.shrink_to(0).unwrap_err();
        let GrowableError::InUse { used, .. } = error else { panic!("{error}") };
        assert_eq!(used, (at + len).next_multiple_of(STRIPE), "its stripes are held");
    }
    buffer.shrink_to(0).unwrap();
}

#[test]
fn a_buffer_that_is_dropped_leaves_what_its_regions_hold() {
    let _watchdog = Watchdog::over("dropped");
    let gpus = Gpus::here();
    let mut buffer = buffer(&gpus, 4);
    buffer.grow_to(4 * STRIPE).unwrap();
    let (second, addr) = (buffer.region(STRIPE + 7, 1000).unwrap(), buffer.addr());
    fill(&second, 4);
    drop(buffer);
    assert_eq!(second.whole().to_vec().unwrap(), filled(1000, 4));
    assert!(!has_memory(&gpus, addr) && has_memory(&gpus, addr + STRIPE), "the first has gone");
    drop(second);
    assert!(!has_memory(&gpus, addr + STRIPE));
    if let Some(fake) = &gpus.fake {
        let counters = fake.counters();
        assert_eq!(
            (counters.allocs - counters.frees, counters.reservations - counters.releases),
            (0, 0)
        );
    }
}

/// Freed memory is really free: another allocation gets it.
#[test]
fn what_a_buffer_gives_back_the_device_has_again() {
    let _watchdog = Watchdog::over("back");
    let gpus = Gpus::here();
    let gpu = &gpus.all[..1];
    let memory = usize::try_from(gpu[0].info().memory).unwrap();
    let stripe = (memory / 10).next_multiple_of(gpu[0].granularity().unwrap());
    let mut buffer = GrowableBuffer::reserve(gpu, 20 * stripe).stripe(stripe).build().unwrap();
    for _ in 0..3 {
        buffer.grow_to(6 * stripe).unwrap();
        assert_eq!(
            gpu[0].allocate(6 * stripe, Flavour::Plain).unwrap_err().code,
            2,
            "there is no room for it"
        );
        // More than there is: what was begun is given back.
        let kept = buffer.region(0, 100).unwrap();
        fill(&kept, 1);
        let why = buffer.grow_to(20 * stripe).unwrap_err();
        let GrowableError::NotAllocated { len, held, cause, .. } = &why else { panic!("{why}") };
        assert_eq!((*len, *held, cause.code), (20 * stripe, 6 * stripe, 2), "{why}");
        assert!(
            why.to_string().contains(&format!("from {} to {} bytes", 6 * stripe, 20 * stripe)),
            "{why}"
        );
        assert_eq!(buffer.len(), 6 * stripe);
        check(&kept, 1);
        drop(gpu[0].allocate(2 * stripe, Flavour::Plain).unwrap());
        drop(kept);
        buffer.shrink_to(2 * stripe).unwrap();
        let other = gpu[0].allocate(6 * stripe, Flavour::Plain).unwrap();
        let why = buffer.grow_to(6 * stripe).unwrap_err();
        assert!(matches!(why, GrowableError::NotAllocated { .. }), "{why}");
        drop(other);
    }
}
