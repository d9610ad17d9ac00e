//! Ports that go down and up, devices that disappear, and the events that report it.

use crate::verbs::*;
use carrack_simulators::nic::Config;
use carrack_transports::verbs::sys::bindings as ibv;
use carrack_transports::verbs::sys::{Context, SharedReceiveQueue};
use std::time::Duration;

fn bench() -> Bench {
    Bench::simulated(Config::devices(2))
}

#[test]
fn a_link_that_comes_back_in_time_loses_nothing() {
    for down in [0, 1] {
        let bench = bench();
        let (qa, _qb) = bench.connect(&Options { timeout: 10, ..Options::default() });
        let (a, b) = (bench.a.buffer(1 << 20), bench.b.buffer(1 << 20));
        let sent = a.fill(3);
        assert!(bench.nic().set_port(down, 1, false));
        let node = if down == 0 { &bench.a } else { &bench.b };
        assert_eq!(node.event(PATIENCE), Some(ibv::IBV_EVENT_PORT_ERR));
        assert_eq!(node.context.port_attr(1).unwrap().state, ibv::IBV_PORT_DOWN);
        Request::write(&[a.whole()], b.remote(0)).post(&qa);
        assert!(completion_within(&bench.a.cq, Duration::from_millis(2)).is_none());
        bench.nic().set_port(down, 1, true);
        assert_eq!(node.event(PATIENCE), Some(ibv::IBV_EVENT_PORT_ACTIVE));
        bench.a.success();
        assert!(b.read(0..1 << 20) == sent);
    }
}

#[test]
fn a_link_that_stays_down_ends_the_connection() {
    let bench = bench();
    let (qa, _qb) = bench.connect(&Options { timeout: 8, retries: 1, ..Options::default() });
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    bench.nic().set_port(1, 1, false);
    Request::write(&[a.whole()], b.remote(0)).post(&qa);
    assert_eq!(bench.a.completion().status, ibv::IBV_WC_RETRY_EXC_ERR);
}

#[test]
fn a_network_that_loses_packets_loses_and_doubles_nothing_of_what_they_carry() {
    const ROUNDS: u64 = 40;
    let bench = bench();
    let (qa, qb) = bench.connect(&Options { timeout: 4, retries: 7, ..Options::default() });
    let (a, b) = (bench.a.buffer(300_000), bench.b.buffer(300_000));
    let (word, old) = (bench.b.buffer(8), bench.a.buffer(8));
    let sent = a.fill(5);
    bench.nic().faults().lose_packets(15);
    for round in 0..ROUNDS {
        post_receive(&qb, round, &[b.piece(0..100_000)]);
        let requests = [
            Request::send(&[a.piece(0..100_000)]).immediate(round as u32),
            Request::write(&[a.piece(100_000..200_000)], b.remote(100_000)),
            Request::fetch_add(old.whole(), word.remote(0), 1),
            Request::read(&[a.piece(200_000..300_000)], b.remote(0)),
        ];
        post_all(&qa, &requests).unwrap();
        for _ in 0..4 {
            bench.a.success();
        }
        let found = bench.b.success();
        assert_eq!((found.wr_id, immediate(&found)), (round, round as u32));
        assert_eq!(old.word(0), round, "each addition was done once");
        assert!(a.read(200_000..300_000) == sent[..100_000]);
    }
    bench.nic().faults().lose_packets(0);
    assert!(b.read(0..200_000) == sent[..200_000]);
    assert_eq!(word.word(0), ROUNDS);
}

#[test]
fn a_device_that_goes_tells_so_and_answers_nothing_any_more() {
    let bench = bench();
    let (qa, qb) = bench.connect(&Options { timeout: 8, retries: 0, ..Options::default() });
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    assert!(bench.nic().remove(1) && !bench.nic().remove(2));
    assert_eq!(bench.b.event(PATIENCE), Some(ibv::IBV_EVENT_DEVICE_FATAL));
    assert_eq!(bench.b.context.device_attr().err().map(|why| why.errno), Some(libc::EIO));
    assert_eq!(qb.state().err().map(|why| why.errno), Some(libc::EIO));
    Request::write(&[b.whole()], a.remote(0)).post(&qb);
    Request::write(&[a.whole()], b.remote(0)).post(&qa);
    assert_eq!(bench.a.completion().status, ibv::IBV_WC_RETRY_EXC_ERR);
    assert!(completion_within(&bench.b.cq, Duration::ZERO).is_none());
    let left = Context::list(&bench.nic().verbs()).unwrap();
    assert_eq!(left.iter().map(|name| name.as_str()).collect::<Vec<_>>(), ["sim0"]);
}

#[test]
fn a_program_that_is_slow_to_go_to_rts_is_told_that_its_peer_has_begun() {
    let bench = bench();
    let options = Options::default();
    let (qa, qb) = (bench.a.queue_pair(&options, None), bench.b.queue_pair(&options, None));
    bring_up(&qa, &bench.a.route_to(&bench.b), qb.number(), 5, &options);
    initialize(&qb, &options);
    let mut attr = ibv::ibv_qp_attr {
        qp_state: ibv::IBV_QPS_RTR,
        path_mtu: 5,
        dest_qp_num: qa.number(),
        rq_psn: 100,
        max_dest_rd_atomic: 1,
        ah_attr: bench.b.route_to(&bench.a),
        ..ibv::ibv_qp_attr::default()
    };
    qb.modify(&mut attr, TO_RTR).unwrap();
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    Request::write(&[a.whole()], b.remote(0)).post(&qa);
    bench.a.success();
    assert_eq!(bench.b.event(PATIENCE), Some(ibv::IBV_EVENT_COMM_EST));
    assert_eq!(bench.b.event(Duration::ZERO), None);
}

#[test]
fn a_queue_pair_that_fails_tells_that_it_takes_no_more_from_its_shared_queue() {
    let bench = bench();
    let srq = SharedReceiveQueue::create(&bench.b.domain, 4, 1).unwrap();
    let b = bench.b.buffer(8);
    post_shared(&srq, 1, &[b.whole()]).unwrap();
    let options = Options::default();
    let (qa, qb) = (bench.a.queue_pair(&options, None), bench.b.queue_pair(&options, Some(&srq)));
    connect(&bench.a, &qa, &bench.b, &qb, &options);
    go_to(&qb, ibv::IBV_QPS_ERR);
    assert_eq!(bench.b.event(PATIENCE), Some(ibv::IBV_EVENT_QP_LAST_WQE_REACHED));
    assert!(
        completion_within(&bench.b.cq, Duration::ZERO).is_none(),
        "the receive stays for others"
    );
}
