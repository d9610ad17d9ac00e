//! Memory of GPUs over verbs, which only the NIC moves. NIC and GPUs are simulated. An access of
//! the CPU to memory of the GPUs ends the process. Their engines count their copies, of which
//! there are none.

mod fixture;
mod refused;
mod visible;

use crate::support::sink::Sink;
use crate::support::{Watchdog, pattern, sent, settle};
use carrack::packet::GpuAllocator;
use carrack::transports::gpu::Gpu;
use carrack::{Rank, Tag};
use fixture::{GpuFixture, Place};
use std::sync::Arc;

/// Lengths: one byte, inline, within a packet and above it, written by a NIC, and many parts of a
/// message.
const SIZES: [usize; 9] = [1, 7, 64, 221, 4096, 8193, 32 << 10, 100_003, 3 << 20];

/// Length of messages that a NIC writes.
const WRITTEN: usize = 32 << 10;

#[test]
fn puts_and_gets_between_all_kinds_move_every_byte_and_no_engine_copies_one() {
    let _watchdog = Watchdog::over("puts and gets of GPU memory");
    let fixture = GpuFixture::new();
    for (seed, size) in (0_u64..).zip(SIZES) {
        for (here, there) in Place::PAIRS {
            let bytes = pattern(seed, size);
            let (source, target) = (fixture.full(0, here, &bytes), fixture.empty(1, there, size));
            let rmr = fixture.known(&target);
            let copies = fixture.copies();
            fixture.put(&source, &rmr);
            assert_eq!(fixture.copies(), copies, "put of {size} B from {here:?} to {there:?}");
            target.assert_holds(&bytes);

            let bytes = pattern(!seed, size);
            let (source, target) = (fixture.full(1, there, &bytes), fixture.empty(0, here, size));
            let rmr = fixture.known(&source);
            let copies = fixture.copies();
            fixture.get(&target, &rmr);
            assert_eq!(fixture.copies(), copies, "get of {size} B from {there:?} to {here:?}");
            target.assert_holds(&bytes);
            source.assert_holds(&bytes);
        }
    }
    assert!(fixture.drivers.iter().all(|driver| driver.counters().dmabufs > 0));
}

#[test]
fn messages_between_all_kinds_arrive_and_no_engine_copies_those_that_the_nic_writes() {
    let _watchdog = Watchdog::over("messages of GPU memory");
    let fixture = GpuFixture::new();
    for (seed, size) in (0_u64..).zip(SIZES) {
        for (here, there) in Place::PAIRS {
            for (from, to) in [(0, 1), (1, 0)] {
                let bytes = pattern(seed, size);
                let (source, target) =
                    (fixture.full(from, here, &bytes), fixture.empty(to, there, size));
                let copies = fixture.copies();
                fixture.send((from, &source), (to, &target));
                if size >= WRITTEN {
                    assert_eq!(fixture.copies(), copies, "{size} B from {here:?} to {there:?}");
                }
                target.assert_holds(&bytes);
                source.assert_holds(&bytes);
            }
        }
    }
}

#[test]
fn active_messages_from_a_gpu_arrive_in_host_memory_and_on_a_gpu() {
    let _watchdog = Watchdog::over("active messages of GPU memory");
    let fixture = GpuFixture::new();
    let ranks = &fixture.ranks;
    let allocator = GpuAllocator::on(fixture.drivers[1].gpu(0).unwrap());
    let pool = ranks[1].packet_pool(Arc::new(allocator));
    let devices =
        [ranks[0].device().build().unwrap(), ranks[1].device().packet_pool(&pool).build().unwrap()];
    let sink = Sink::keeping();
    let name = ranks[1].register_comp(&sink).unwrap();
    for device in [None, Some(&devices[0])] {
        sent(ranks, || match device {
            None => ranks[0].post_am(Rank(1), b"up", name).try_submit(),
            Some(device) => ranks[0].post_am(Rank(1), b"up", name).device(device).try_submit(),
        });
        drop(sink.one(ranks));
        for (seed, size) in (0_u64..).zip(SIZES) {
            let bytes = pattern(seed, size);
            let source = fixture.full(0, Place::Gpu, &bytes);
            let copies = fixture.copies();
            let mut am = ranks[0].post_am(Rank(1), source.slice(), name).tag(Tag(seed));
            if let Some(device) = device {
                am = am.device(device);
            }
            sent(ranks, || am.try_submit());
            let status = sink.one(ranks);
            if size >= WRITTEN {
                assert_eq!(fixture.copies(), copies, "{size} B");
            }
            assert!(status.error.is_none(), "{status:?}");
            let gpu = device.map(|_| fixture.drivers[1].gpus()[0].info().uuid);
            assert_eq!((status.buffer.kind().gpu(), status.tag), (gpu, Tag(seed)));
            assert!(status.buffer.to_vec().unwrap()[..size] == bytes, "{size} B");
        }
    }
}

#[test]
fn memory_is_registered_once_for_each_allocation_and_again_when_that_is_another() {
    let _watchdog = Watchdog::over("registrations of GPU memory");
    let fixture = GpuFixture::new();
    let target = fixture.empty(1, Place::Host, 4096);
    let rmr = fixture.known(&target);
    let dmabufs = || fixture.drivers[0].counters().dmabufs;
    let before = dmabufs();
    let source = fixture.full(0, Place::Gpu, &pattern(1, 4096));
    for _ in 0..10 {
        fixture.put(&source, &rmr);
    }
    assert_eq!(dmabufs(), before + 1, "parts of one allocation are parts of one registration");
    drop(source);
    settle(&fixture.ranks);
    // At the same address, and another allocation.
    fixture.drivers[0].faults().reuse_addresses(true);
    let bytes = pattern(2, 4096);
    let source = fixture.full(0, Place::Gpu, &bytes);
    fixture.put(&source, &rmr);
    assert_eq!(dmabufs(), before + 2);
    target.assert_holds(&bytes);
}

#[test]
fn a_region_whose_registration_has_ended_is_no_longer_reached() {
    let _watchdog = Watchdog::over("a withdrawn region of GPU memory");
    let fixture = GpuFixture::new();
    let target = fixture.empty(1, Place::Gpu, 4096);
    let rmr = fixture.known(&target);
    let bytes = pattern(1, 4096);
    let source = fixture.full(0, Place::Gpu, &bytes);
    fixture.put(&source, &rmr);
    let found = target.slice().region().whole().to_vec().unwrap();
    fixture.withdraw(&rmr);
    assert!(fixture.try_put(&source, &rmr).is_err());
    assert_eq!(target.slice().region().whole().to_vec().unwrap(), found);
}
