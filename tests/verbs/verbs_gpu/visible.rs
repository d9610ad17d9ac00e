//! A GPU that does not see a NIC's writes in order is flushed before the user hears of their
//! arrival.

use super::fixture::{GpuFixture, Place};
use crate::support::guard::Guarded;
use crate::support::sink::{Sink, Sort};
use crate::support::{Watchdog, pattern, until};
use carrack::Rank;
use carrack::transports::gpu::RemoteWrites;
use carrack_simulators::nic::Visibility;

const LEN: usize = 100_003;

/// Operation that brings bytes onto a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Message,
    Put,
    SmallPut,
    NotifyingPut,
    Flush,
    Get,
}

const WAYS: [Way; 6] =
    [Way::Message, Way::Put, Way::SmallPut, Way::NotifyingPut, Way::Flush, Way::Get];

/// Creates a fixture whose NICs hold back what they write to GPUs until they are flushed, or read
/// from.
fn fixture(gpus_say: RemoteWrites) -> GpuFixture {
    let fixture = GpuFixture::new();
    for (driver, nic) in fixture.drivers.iter().zip(&fixture.nics) {
        driver.faults().order_remote_writes(gpus_say.clone());
        nic.faults().write_visibility(Visibility::WithRead, true);
    }
    fixture
}

/// Transfers bytes to a GPU. Returns two flags: the bytes are there at the end, and their GPU was
/// flushed.
fn arrive(fixture: &GpuFixture, way: Way) -> (bool, bool) {
    let ranks = &fixture.ranks;
    let len = if way == Way::SmallPut { 5 } else { LEN };
    let bytes = pattern(len as u64, len);
    let there = |target: &Guarded| target.slice().to_vec().unwrap() == bytes;
    let sink = Sink::keeping();
    match way {
        Way::Message => {
            let (source, target) =
                (fixture.full(0, Place::Host, &bytes), fixture.empty(1, Place::Gpu, len));
            let flushes = fixture.flushes(1);
            fixture.send((0, &source), (1, &target));
            (there(&target), fixture.flushes(1) > flushes)
        }
        Way::Get => {
            let (source, target) =
                (fixture.full(1, Place::Host, &bytes), fixture.empty(0, Place::Gpu, len));
            let rmr = fixture.known(&source);
            let flushes = fixture.flushes(0);
            fixture.get(&target, &rmr);
            (there(&target), fixture.flushes(0) > flushes)
        }
        Way::Put | Way::SmallPut | Way::NotifyingPut | Way::Flush => {
            let target = fixture.empty(1, Place::Gpu, len);
            let rmr = fixture.known(&target);
            let flushes = fixture.flushes(1);
            // What is small is not registered, if it is no region.
            let mut put = ranks[0].post_put(Rank(1), bytes.clone(), &rmr, 0).comp(&sink);
            let told = Sink::new(Sort::Queue);
            if way == Way::NotifyingPut {
                put = put.remote_comp(ranks[1].register_comp(&told).unwrap());
            }
            put.submit().unwrap();
            match way {
                Way::NotifyingPut => {
                    until(ranks, || told.count() == 1);
                    assert!(told.take()[0].error.is_none());
                }
                Way::Flush => {
                    let done = Sink::keeping();
                    let mut flush = ranks[0].post_flush(Rank(1)).comp(&done);
                    flush.submit().unwrap();
                    assert!(done.one(ranks).error.is_none());
                }
                _ => {
                    let status = sink.one(ranks);
                    assert!(status.error.is_none(), "{status:?}");
                }
            }
            (there(&target), fixture.flushes(1) > flushes)
        }
    }
}

/// Streams rule 3.
#[test]
fn what_a_gpu_sees_late_is_flushed_before_anybody_hears_of_it() {
    let _watchdog = Watchdog::over("late writes that are flushed");
    let fixture = fixture(RemoteWrites::AfterFlush);
    for way in WAYS {
        let (there, flushed) = arrive(&fixture, way);
        assert!(there, "{way:?}: it was told too early");
        // The initiator of a put has followed it by a read, so the owner does not flush.
        let by_owner = matches!(way, Way::Message | Way::NotifyingPut | Way::Get);
        assert!(flushed || !by_owner, "{way:?}: no side has flushed");
    }
}

/// Shows that the test above can fail: the GPU claims to need no flush, and the NICs hold writes
/// back.
#[test]
fn without_the_flush_it_is_not_there() {
    let _watchdog = Watchdog::over("late writes that are not flushed");
    let fixture = fixture(RemoteWrites::InOrder);
    for way in WAYS {
        assert_eq!(arrive(&fixture, way), (false, false), "{way:?}");
        fixture.nics.iter().for_each(|nic| nic.flush());
    }
}

#[test]
fn a_gpu_that_sees_writes_in_order_is_never_flushed() {
    let _watchdog = Watchdog::over("writes in order");
    let fixture = GpuFixture::new();
    for way in WAYS {
        assert_eq!(arrive(&fixture, way), (true, false), "{way:?}");
    }
}
