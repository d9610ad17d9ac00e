//! Queues: shared ones, full ones, and ones that wake a thread; and the states of queue pairs.

use crate::verbs::*;
use carrack_transports::verbs::sys::bindings as ibv;
use carrack_transports::verbs::sys::{CompletionQueue, QueuePair, SharedReceiveQueue};
use std::sync::Arc;
use std::time::Duration;

fn shared_by_two(bench: &Bench) -> (Arc<SharedReceiveQueue>, [Arc<QueuePair>; 4]) {
    let options = Options::default();
    let srq = SharedReceiveQueue::create(&bench.b.domain, 32, 1).unwrap();
    let make = || {
        let qa = bench.a.queue_pair(&options, None);
        let qb = bench.b.queue_pair(&options, Some(&srq));
        connect(&bench.a, &qa, &bench.b, &qb, &options);
        (qa, qb)
    };
    let ((a1, b1), (a2, b2)) = (make(), make());
    (srq, [a1, b1, a2, b2])
}

#[test]
fn a_shared_receive_queue_serves_its_queue_pairs_in_order() {
    let bench = Bench::chosen();
    let (srq, [a1, b1, a2, b2]) = shared_by_two(&bench);
    let (a, b) = (bench.a.buffer(100), bench.b.buffer(8 * 128));
    for at in 0..8 {
        post_shared(&srq, at, &[b.piece(at as usize * 128..at as usize * 128 + 128)]).unwrap();
    }
    for at in 0..8 {
        let (from, to) = if at % 2 == 1 { (&a2, &b2) } else { (&a1, &b1) };
        let sent = a.fill(at as u8);
        Request::send(&[a.whole()]).immediate(at).post(from);
        bench.a.success();
        let found = bench.b.success();
        assert_eq!(
            (found.wr_id, immediate(&found), found.qp_num),
            (u64::from(at), at, to.number())
        );
        assert_eq!(b.read(at as usize * 128..at as usize * 128 + 100), sent);
    }
    post_shared(&srq, 8, &[]).unwrap();
    Request::write(&[a.whole()], b.remote(0)).immediate(5).post(&a2);
    bench.a.success();
    let found = bench.b.success();
    assert_eq!((found.wr_id, immediate(&found)), (8, 5));
}

#[test]
fn a_shared_receive_queue_tells_when_it_runs_low() {
    let bench = Bench::chosen();
    let (srq, [a1, _b1, ..]) = shared_by_two(&bench);
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    (0..5).for_each(|id| post_shared(&srq, id, &[b.whole()]).unwrap());
    srq.set_limit(4).unwrap();
    Request::send(&[a.whole()]).post(&a1);
    bench.b.success();
    assert_eq!(
        bench.b.event(Duration::from_millis(if bench.is_simulated() { 0 } else { 100 })),
        None
    );
    Request::send(&[a.whole()]).post(&a1);
    assert_eq!(bench.b.event(PATIENCE), Some(ibv::IBV_EVENT_SRQ_LIMIT_REACHED));
}

#[test]
fn a_completion_wakes_a_thread_that_waits_for_it() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(64));
    bench.b.cq.request_notification().unwrap();
    assert!(!readable(bench.b.channel.fd(), Duration::ZERO));
    post_receive(&qb, 1, &[b.whole()]);
    Request::send(&[a.whole()]).post(&qa);
    assert!(readable(bench.b.channel.fd(), PATIENCE));
    assert_eq!(bench.b.channel.take_events(), 1);
    bench.b.success();
    bench.a.success();
    // One request, one notification.
    post_receive(&qb, 2, &[b.whole()]);
    Request::send(&[a.whole()]).post(&qa);
    bench.b.success();
    assert!(!readable(bench.b.channel.fd(), Duration::ZERO));
}

#[test]
fn a_solicited_completion_wakes_a_thread_that_waits_for_these_only() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(64));
    request_solicited(&bench.b.cq);
    for (flag, wakes) in [(0, false), (ibv::IBV_SEND_SOLICITED, true)] {
        post_receive(&qb, 1, &[b.whole()]);
        Request::send(&[a.whole()]).flag(flag).post(&qa);
        bench.b.success();
        bench.a.success();
        let patience = if wakes { PATIENCE } else { Duration::ZERO };
        assert_eq!(readable(bench.b.channel.fd(), patience), wakes);
    }
    assert_eq!(bench.b.channel.take_events(), 1);
}

#[test]
fn one_completion_ends_all_that_was_posted_before_it() {
    let bench = Bench::chosen();
    let (qa, _qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(65536), bench.b.buffer(65536));
    let sent = a.fill(8);
    let requests: Vec<Request> = (0..32)
        .map(|at| {
            let range = at * 2048..at * 2048 + 2048;
            let request =
                Request::write(&[a.piece(range.clone())], b.remote(range.start)).id(at as u64);
            if at == 31 { request } else { request.unsignalled() }
        })
        .collect();
    for _ in 0..10 {
        post_all(&qa, &requests).unwrap();
        assert_eq!(bench.a.success().wr_id, 31);
    }
    assert!(b.read(0..65536) == sent);
}

#[test]
fn a_full_send_queue_refuses_until_a_completion_was_polled() {
    let bench = Bench::chosen();
    let (qa, _qb) = bench.connect(&Options { depth: 4, ..Options::default() });
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    let write = || Request::write(&[a.whole()], b.remote(0));
    let most = qa.send_depth() as usize;
    let all = vec![write(); most + 3];
    let (taken, errno) = post_all(&qa, &all).unwrap_err();
    assert_eq!((taken, errno), (most, libc::ENOMEM));
    bench.a.success();
    write().post(&qa);
    for _ in 0..most {
        bench.a.success();
    }
}

#[test]
fn what_was_posted_is_flushed_in_order_when_a_queue_pair_fails() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(64));
    (0..4).for_each(|id| post_receive(&qb, id, &[b.whole()]));
    go_to(&qb, ibv::IBV_QPS_ERR);
    post_receive(&qb, 4, &[b.whole()]);
    let sends =
        [Request::send(&[b.whole()]).id(5), Request::send(&[b.whole()]).id(6).unsignalled()];
    post_all(&qb, &sends).unwrap();
    let found: Vec<_> = (0..7).map(|_| bench.b.completion()).collect();
    assert!(found.iter().all(|found| found.status == ibv::IBV_WC_WR_FLUSH_ERR));
    let ids = |range: std::ops::Range<u64>| {
        let of: Vec<_> =
            found.iter().map(|found| found.wr_id).filter(|id| range.contains(id)).collect();
        assert_eq!(of, range.collect::<Vec<_>>(), "in order, and each of them");
    };
    ids(0..5);
    ids(5..7);
    drop((qa, a));
}

#[test]
fn a_queue_pair_that_was_reset_can_be_connected_again() {
    let bench = Bench::chosen();
    let options = Options::default();
    let (qa, qb) = bench.connect(&options);
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(64));
    post_receive(&qb, 1, &[b.whole()]);
    for qp in [&qa, &qb] {
        go_to(qp, ibv::IBV_QPS_ERR);
        go_to(qp, ibv::IBV_QPS_RESET);
        assert_eq!(qp.state().unwrap(), ibv::IBV_QPS_RESET);
    }
    while completion_within(&bench.b.cq, Duration::ZERO).is_some() {}
    connect(&bench.a, &qa, &bench.b, &qb, &options);
    let sent = a.fill(3);
    post_receive(&qb, 2, &[b.whole()]);
    Request::send(&[a.whole()]).post(&qa);
    bench.a.success();
    assert_eq!(bench.b.success().wr_id, 2);
    assert_eq!(b.read(0..64), sent);
}

#[test]
fn work_is_refused_in_states_that_do_not_take_it() {
    let bench = Bench::chosen();
    let (a, options) = (bench.a.buffer(8), Options::default());
    let qp = bench.a.queue_pair(&options, None);
    assert_eq!(qp.state().unwrap(), ibv::IBV_QPS_RESET);
    assert!(Request::send(&[a.whole()]).try_post(&qp).is_err());
    assert!(try_post_receive(&qp, 1, &[a.whole()]).is_err());
    initialize(&qp, &options);
    assert!(Request::send(&[a.whole()]).try_post(&qp).is_err());
    assert!(try_post_receive(&qp, 1, &[a.whole()]).is_ok());
    let mut attr = ibv::ibv_qp_attr { qp_state: ibv::IBV_QPS_RTS, ..ibv::ibv_qp_attr::default() };
    assert!(qp.modify(&mut attr, ibv::IBV_QP_STATE).is_err(), "INIT to RTS");
    assert_eq!(qp.state().unwrap(), ibv::IBV_QPS_INIT);
}

#[test]
fn a_completion_queue_can_grow() {
    let bench = Bench::chosen();
    let cq = CompletionQueue::create(&bench.a.context, 16, None).unwrap();
    cq.resize(512).unwrap();
    assert!(cq.depth() >= 512);
}
