//! Wrong requests end with the status of the specification, and flush the requests behind them.

use crate::verbs::*;
use carrack_transports::verbs::sys::bindings as ibv;
use carrack_transports::verbs::sys::{AccessFlags, ProtectionDomain, QueuePair};
use std::time::{Duration, Instant};

/// Posts two requests of which the first is wrong, and returns its status. The second one is
/// flushed, which gives a completion although it is unsignalled.
fn ends_with(bench: &Bench, qa: &QueuePair, wrong: Request, right: Request) -> u32 {
    let _ = post_all(qa, &[wrong.id(1), right.id(2).unsignalled()]);
    let first = bench.a.completion();
    let second = bench.a.completion();
    assert_eq!((first.wr_id, second.wr_id), (1, 2));
    assert_eq!(failure(&second), ibv::IBV_WC_WR_FLUSH_ERR);
    assert_eq!(qa.state().unwrap(), ibv::IBV_QPS_ERR);
    failure(&first)
}

#[test]
fn a_key_that_is_none_fails_with_a_remote_access_error() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(4096), bench.b.buffer(4096));
    let (addr, key) = b.remote(0);
    let write = |key| Request::write(&[a.piece(0..64)], (addr, key));
    assert_eq!(ends_with(&bench, &qa, write(key ^ 0x55), write(key)), ibv::IBV_WC_REM_ACCESS_ERR);
    assert_eq!(b.read(0..64), [0; 64]);
    if bench.is_simulated() {
        assert_eq!(bench.b.event(PATIENCE), Some(ibv::IBV_EVENT_QP_ACCESS_ERR));
        assert_eq!(qb.state().unwrap(), ibv::IBV_QPS_ERR);
    }
}

#[test]
fn a_range_or_purpose_that_the_key_is_not_for_fails_with_a_remote_access_error() {
    let bench = Bench::chosen();
    let (a, b) = (bench.a.buffer(8192), bench.b.buffer(4096));
    let read_only =
        Buffer::new(&bench.b.domain, 4096, AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ);
    let other = ProtectionDomain::alloc(&bench.b.context).unwrap();
    let elsewhere = Buffer::new(&other, 4096, all_access());
    let wrong = [
        Request::write(&[a.piece(0..4097)], b.remote(0)),
        Request::write(&[a.piece(0..64)], b.remote(4033)),
        Request::read(&[a.piece(0..64)], b.remote(4033)),
        Request::write(&[a.piece(0..64)], read_only.remote(0)),
        Request::fetch_add(a.piece(0..8), read_only.remote(0), 1),
        Request::write(&[a.piece(0..64)], elsewhere.remote(0)),
    ];
    for (case, wrong) in wrong.into_iter().enumerate() {
        let (qa, _qb) = bench.connect(&Options::default());
        let right = Request::write(&[a.piece(0..64)], b.remote(0));
        assert_eq!(ends_with(&bench, &qa, wrong, right), ibv::IBV_WC_REM_ACCESS_ERR, "case {case}");
    }
}

#[test]
fn a_queue_pair_that_allows_no_writes_is_not_written_to() {
    let bench = Bench::chosen();
    let (qa, _qb) =
        bench.connect(&Options { access: AccessFlags::REMOTE_READ, ..Options::default() });
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(64));
    a.fill(1);
    let write = Request::write(&[a.whole()], b.remote(0));
    let status = ends_with(&bench, &qa, write, write);
    assert!(
        [ibv::IBV_WC_REM_INV_REQ_ERR, ibv::IBV_WC_REM_ACCESS_ERR].contains(&status),
        "{status}"
    );
    assert_eq!(b.read(0..64), [0; 64]);
}

#[test]
fn a_local_key_that_is_none_fails_locally() {
    let bench = Bench::chosen();
    let (qa, _qb) = bench.connect(&Options::default());
    let a = bench.a.buffer(4096);
    let mut wrong = a.piece(0..64);
    wrong.lkey ^= 0x33;
    Request::send(&[wrong]).post(&qa);
    let status = failure(&bench.a.completion());
    assert!(status == ibv::IBV_WC_LOC_PROT_ERR || !bench.is_simulated(), "{status}");
}

#[test]
fn a_receive_with_a_wrong_local_key_fails_on_both_sides() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(64));
    let mut wrong = b.whole();
    wrong.lkey ^= 0x33;
    post_receive(&qb, 5, &[wrong]);
    Request::send(&[a.whole()]).post(&qa);
    let (sent, received) = (bench.a.completion(), bench.b.completion());
    assert_eq!(received.wr_id, 5);
    let statuses = (failure(&sent), failure(&received));
    let right = (ibv::IBV_WC_REM_OP_ERR, ibv::IBV_WC_LOC_PROT_ERR);
    assert!(statuses == right || !bench.is_simulated(), "{statuses:?}");
}

#[test]
fn without_a_receive_a_send_is_tried_again_as_often_as_was_said() {
    let bench = Bench::chosen();
    let (qa, _qb) = bench.connect(&Options { rnr_retries: 2, ..Options::default() });
    let a = bench.a.buffer(64);
    Request::send(&[a.whole()]).post(&qa);
    assert_eq!(bench.a.completion().status, ibv::IBV_WC_RNR_RETRY_EXC_ERR);
}

#[test]
fn a_send_waits_for_its_receive_for_ever_if_it_may() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(100), bench.b.buffer(300));
    let sent = a.fill(4);
    let sends: Vec<Request> = (0..3).map(|id| Request::send(&[a.whole()]).id(id)).collect();
    post_all(&qa, &sends).unwrap();
    assert!(completion_within(&bench.a.cq, Duration::from_millis(20)).is_none());
    for at in 0..3 {
        post_receive(&qb, at as u64, &[b.piece(at * 100..at * 100 + 100)]);
    }
    for id in 0..3 {
        assert_eq!((bench.a.success().wr_id, bench.b.success().wr_id), (id, id));
    }
    assert_eq!(b.read(0..300), [&sent[..], &sent, &sent].concat());
}

#[test]
fn too_small_a_receive_fails_on_both_sides_and_nothing_is_written_behind_it() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(64));
    a.fill(1);
    post_receive(&qb, 1, &[b.piece(0..10)]);
    Request::send(&[a.whole()]).post(&qa);
    let sent = failure(&bench.a.completion());
    if bench.is_simulated() {
        assert_eq!(sent, ibv::IBV_WC_REM_INV_REQ_ERR);
        assert_eq!(bench.b.completion().status, ibv::IBV_WC_LOC_LEN_ERR);
    }
    assert_eq!(b.read(10..64), [0; 54]);
}

#[test]
fn a_peer_that_is_gone_is_noticed_when_all_retries_have_failed() {
    for (timeout, retries) in [(8, 1), (12, 3), (8, 0)] {
        let bench = Bench::chosen();
        let (qa, qb) = bench.connect(&Options { timeout, retries, ..Options::default() });
        let (a, b) = (bench.a.buffer(64), bench.b.buffer(64));
        drop(qb);
        let start = Instant::now();
        Request::write(&[a.whole()], b.remote(0)).post(&qa);
        assert_eq!(bench.a.completion().status, ibv::IBV_WC_RETRY_EXC_ERR);
        let least = Duration::from_nanos(4096 << timeout) * (u32::from(retries) + 1);
        assert!(start.elapsed() >= least, "{:?}, no sooner than {least:?}", start.elapsed());
        assert_eq!(b.read(0..64), [0; 64]);
    }
}
