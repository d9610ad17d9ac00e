//! GPUs whose memory a NIC cannot access, or not by the first way. All bytes still arrive, and the
//! explanation names the reason.

use super::fixture::{GpuFixture, Place};
use crate::support::{Watchdog, pattern};
use carrack::transports::contract::{Identity, PeerId, Transport};
use carrack::transports::gpu::{Driver, RemoteWrites};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use carrack_simulators::nic::{Call, Config, SimulatedNic, Which};
use carrack_transports::verbs::VerbsOptions;
use std::sync::Arc;

/// Sends bytes from each kind of memory to each other one, on any path.
fn everything_arrives(fixture: &GpuFixture) {
    for (seed, size) in (0_u64..).zip([1, 5000, 40_001, 3 << 20]) {
        for (here, there) in Place::PAIRS {
            let bytes = pattern(seed, size);
            let (source, target) = (fixture.full(0, here, &bytes), fixture.empty(1, there, size));
            fixture.send((0, &source), (1, &target));
            target.assert_holds(&bytes);
            let target = fixture.empty(1, there, size);
            fixture.put(&source, &fixture.known(&target));
            target.assert_holds(&bytes);
            let back = fixture.empty(0, here, size);
            fixture.get(&back, &fixture.known(&target));
            back.assert_holds(&bytes);
        }
    }
}

#[test]
fn without_dma_bufs_memory_is_registered_by_its_address_and_it_is_said_why() {
    let _watchdog = Watchdog::over("GPU memory by its address");
    let fixture = GpuFixture::with(true);
    fixture.drivers.iter().for_each(|driver| driver.faults().refuse_dmabufs(true));
    everything_arrives(&fixture);
    let (way, why) = fixture.explained(0);
    assert!(
        way.contains("by the NIC, which reaches it by its address, as with nvidia-peermem"),
        "{way}"
    );
    assert!(way.contains("not by a dma-buf") && way.contains("ordered by a test"), "{way}");
    assert_eq!(why, None);
}

#[test]
fn dma_bufs_are_what_is_taken_where_both_work() {
    let _watchdog = Watchdog::over("GPU memory by dma-bufs");
    let fixture = GpuFixture::with(true);
    let (way, why) = fixture.explained(0);
    assert!(way.contains("by the NIC, which reaches it by a dma-buf:"), "{way}");
    assert_eq!(why, None);
}

#[test]
fn where_both_ways_are_refused_everything_is_staged_and_it_is_said_why() {
    let _watchdog = Watchdog::over("GPU memory that no NIC reaches");
    let fixture = GpuFixture::new();
    fixture.drivers.iter().for_each(|driver| driver.faults().refuse_dmabufs(true));
    let copies = fixture.copies();
    everything_arrives(&fixture);
    assert!(fixture.copies() > copies, "engines have brought it");
    for rank in [0, 1] {
        let (way, why) = fixture.explained(rank);
        assert!(way.contains("pinned host memory"), "{way}");
        let why = why.expect("a reason");
        for part in [
            "the NIC does not reach it",
            "by a dma-buf: export_dmabuf",
            "by its address",
            "ibv_reg_mr",
        ] {
            assert!(why.contains(part), "{part}: {why}");
        }
    }
}

#[test]
fn where_only_one_side_is_reached_the_other_stages_what_it_has() {
    for refused in [0, 1] {
        let _watchdog = Watchdog::over("GPU memory that one NIC reaches");
        let fixture = GpuFixture::new();
        fixture.drivers[refused].faults().refuse_dmabufs(true);
        everything_arrives(&fixture);
        assert!(fixture.explained(refused).1.is_some());
        assert_eq!(fixture.explained(1 - refused).1, None);
    }
}

#[test]
fn a_gpu_that_neither_orders_nor_flushes_writes_is_left_alone() {
    let _watchdog = Watchdog::over("GPU memory whose writes are not ordered");
    let fixture = GpuFixture::new();
    let when = RemoteWrites::Unordered("said by a test".into());
    fixture.drivers.iter().for_each(|driver| driver.faults().order_remote_writes(when.clone()));
    everything_arrives(&fixture);
    assert!(fixture.explained(0).1.unwrap().contains("said by a test"));
}

#[test]
fn a_registration_that_fails_for_want_of_something_is_tried_again_and_one_that_is_refused_is_not() {
    let _watchdog = Watchdog::over("registrations that fail");
    for (errno, tried_again) in [(libc::ENOMEM, true), (libc::EOPNOTSUPP, false)] {
        let fixture = GpuFixture::new();
        let is_staged = || {
            let bytes = pattern(1, 100_000);
            let (source, target) =
                (fixture.full(0, Place::Gpu, &bytes), fixture.empty(1, Place::Host, 100_000));
            let copies = fixture.copies();
            fixture.send((0, &source), (1, &target));
            target.assert_holds(&bytes);
            fixture.copies() > copies
        };
        fixture.nics[0].faults().fail_call(Call::RegDmabufMr, Which::Nth(1), errno);
        assert!(is_staged(), "{errno}");
        assert_eq!(is_staged(), !tried_again, "{errno}");
    }
}

/// dma-buf rule 1.
#[test]
fn what_one_nic_refuses_of_a_gpu_another_may_take() {
    let driver = FakeDriver::new(FakeConfig::devices(2)).unwrap();
    let gpus = driver.devices().unwrap();
    let nics = [(); 2].map(|()| Arc::new(SimulatedNic::new(Config::devices(2)).unwrap()));
    nics[0].faults().fail_call(Call::RegDmabufMr, Which::All, libc::EOPNOTSUPP);
    let identity = Identity { me: PeerId(0), ranks: 1, secret: [1; 16] };
    for (nic, works) in nics.iter().zip([false, true]) {
        let transport = nic.transport(VerbsOptions::default());
        for device in transport.devices().unwrap() {
            let domain = transport.open(&device, identity.clone()).unwrap();
            for gpu in &gpus {
                let said = domain.reaches_gpu(&**gpu).expect("it has a NIC");
                assert_eq!(said.is_ok(), works, "{}: {said:?}", device.name);
            }
        }
    }
}
