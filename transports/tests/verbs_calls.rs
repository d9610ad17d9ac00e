//! What the transport takes for granted of verbs, call by call, between two devices of one process.
//!
//! The same tests run on the simulated NIC (the default) and on a real libibverbs: see [`verbs`]. Where devices are known to
//! differ, the simulated one has to be as the specification says, and others are let be.

mod verbs;

use carrack_transports::verbs::sys::bindings as ibv;
use carrack_transports::verbs::sys::{
    Access, CompletionQueue, ProtectionDomain, QueuePairKind, SharedReceiveQueue,
};
use std::sync::Arc;
use std::time::{Duration, Instant};
use verbs::*;

fn datagrams() -> Options {
    Options { kind: QueuePairKind::Datagram, ..Options::default() }
}

#[test]
fn a_device_tells_what_it_can_do() {
    let bench = Bench::chosen();
    let attr = bench.a.context.device_attr().unwrap();
    assert!(attr.max_qp > 0 && attr.max_qp_wr > 0 && attr.max_sge > 0 && attr.max_cqe > 0 && attr.max_mr > 0);
    assert!(attr.max_qp_rd_atom > 0 && attr.phys_port_cnt >= 1);
    let port = bench.a.port;
    assert_eq!(port.state, ibv::IBV_PORT_ACTIVE);
    assert!(port.max_msg_sz >= 1 << 20 && port.gid_tbl_len > 0);
    assert!(bench.a.context.port_attr(200).is_err());
    assert_ne!(bench.a.gid.gid, bench.b.gid.gid);
}

fn one_send(len: usize, options: &Options, request: impl Fn(Request) -> Request) -> ibv::ibv_wc {
    let bench = Bench::chosen();
    let (a, b) = (bench.a.buffer(len), bench.b.buffer(len));
    let (qa, qb) = bench.connect(options);
    let sent = a.fill(3);
    post_receive(&qb, 9, &[b.whole()]);
    request(Request::send(&[a.whole()])).post(&qa);
    let found = bench.a.success();
    assert_eq!((found.opcode, found.wr_id, found.qp_num), (ibv::IBV_WC_SEND, 0x77, qa.number()));
    let found = bench.b.success();
    assert_eq!((found.opcode, found.wr_id, found.qp_num), (ibv::IBV_WC_RECV, 9, qb.number()));
    assert_eq!(found.byte_len as usize, len);
    assert_eq!(b.read(0..len), sent);
    found
}

#[test]
fn a_send_arrives_whole() {
    for len in [1, 4096, 100_000] {
        one_send(len, &Options::default(), |request| request);
    }
}

#[test]
fn a_send_brings_its_immediate_value() {
    let found = one_send(4096, &Options::default(), |request| request.immediate(0xabcd_1234));
    assert_eq!(immediate(&found), 0xabcd_1234);
}

#[test]
fn inline_data_is_copied_when_it_is_posted() {
    let bench = Bench::chosen();
    let options = Options { inline: 200, ..Options::default() };
    let (qa, qb) = bench.connect(&options);
    assert!(qa.inline() >= 200);
    let (a, b) = (bench.a.buffer(200), bench.b.buffer(200));
    let sent = a.fill(5);
    post_receive(&qb, 1, &[b.whole()]);
    // The key counts for nothing, and the bytes may change at once.
    let mut piece = a.whole();
    piece.lkey = 0;
    Request::send(&[piece]).flag(ibv::IBV_SEND_INLINE).post(&qa);
    a.fill(99);
    bench.a.success();
    bench.b.success();
    assert_eq!(b.read(0..200), sent);
    let sent = a.fill(6);
    Request::write(&[a.whole()], b.remote(0)).flag(ibv::IBV_SEND_INLINE).post(&qa);
    bench.a.success();
    assert_eq!(b.read(0..200), sent);
}

#[test]
fn more_inline_data_than_was_granted_is_refused() {
    let bench = Bench::chosen();
    let (qa, _qb) = bench.connect(&Options { inline: 64, ..Options::default() });
    let a = bench.a.buffer(4096);
    let long = a.piece(0..qa.inline() + 1);
    assert!(Request::send(&[long]).flag(ibv::IBV_SEND_INLINE).try_post(&qa).is_err());
}

#[test]
fn a_write_of_any_length_is_there_when_it_has_completed() {
    let bench = Bench::chosen();
    let (qa, _qb) = bench.connect(&Options::default());
    for len in [1, 4095, 4096, 1 << 20] {
        let (a, b) = (bench.a.buffer(len), bench.b.buffer(len));
        let sent = a.fill(7);
        Request::write(&[a.whole()], b.remote(0)).post(&qa);
        assert_eq!(bench.a.success().opcode, ibv::IBV_WC_RDMA_WRITE);
        assert!(b.read(0..len) == sent, "{len} bytes");
    }
}

#[test]
fn a_write_with_an_immediate_value_takes_a_receive() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(12345), bench.b.buffer(12345));
    let sent = a.fill(8);
    for (pieces, len) in [(vec![a.whole()], 12345), (vec![], 0)] {
        post_receive(&qb, 11, &[]);
        Request::write(&pieces, b.remote(0)).immediate(42).post(&qa);
        bench.a.success();
        let found = bench.b.success();
        assert_eq!((found.opcode, found.wr_id), (ibv::IBV_WC_RECV_RDMA_WITH_IMM, 11));
        assert_eq!((immediate(&found), found.byte_len), (42, len));
    }
    assert_eq!(b.read(0..12345), sent);
}

#[test]
fn a_read_brings_what_is_there() {
    let bench = Bench::chosen();
    let (qa, _qb) = bench.connect(&Options::default());
    for len in [1, 5000, 1 << 20] {
        let (a, b) = (bench.a.buffer(len), bench.b.buffer(len));
        let there = b.fill(9);
        Request::read(&[a.whole()], b.remote(0)).post(&qa);
        let found = bench.a.success();
        assert_eq!((found.opcode, found.byte_len as usize), (ibv::IBV_WC_RDMA_READ, len));
        assert!(a.read(0..len) == there, "{len} bytes");
    }
}

#[test]
fn atomic_operations_change_the_word_and_bring_what_it_was() {
    let bench = Bench::chosen();
    let (qa, _qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(16));
    b.write(8, &1000_u64.to_ne_bytes());
    let word = b.remote(8);
    let steps = [
        (Request::fetch_add(a.whole(), word, 5), ibv::IBV_WC_FETCH_ADD, 1000, 1005),
        (Request::compare_swap(a.whole(), word, 1005, 77), ibv::IBV_WC_COMP_SWAP, 1005, 77),
        (Request::compare_swap(a.whole(), word, 1, 99), ibv::IBV_WC_COMP_SWAP, 77, 77),
        (Request::fetch_add(a.whole(), word, u64::MAX), ibv::IBV_WC_FETCH_ADD, 77, 76),
    ];
    for (request, opcode, before, after) in steps {
        request.post(&qa);
        assert_eq!(bench.a.success().opcode, opcode);
        assert_eq!((a.word(0), b.word(8)), (before, after));
    }
    assert_eq!(b.word(0), 0);
}

#[test]
fn an_atomic_operation_on_a_word_that_is_not_aligned_fails() {
    let bench = Bench::chosen();
    let (qa, _qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(16));
    match Request::fetch_add(a.whole(), b.remote(3), 5).try_post(&qa) {
        Ok(()) => assert_eq!(bench.a.completion().status, ibv::IBV_WC_REM_INV_REQ_ERR),
        Err(_) => assert!(!bench.is_simulated(), "soft devices refuse it at once"),
    }
}

#[test]
fn pieces_are_gathered_and_scattered_in_order() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(65536), bench.b.buffer(65536));
    let bytes = a.fill(1);
    let pieces = [a.piece(100..150), a.piece(7000..16001), a.piece(60000..60003)];
    let sent = [&bytes[100..150], &bytes[7000..16001], &bytes[60000..60003]].concat();
    Request::write(&pieces, b.remote(5)).post(&qa);
    bench.a.success();
    assert_eq!(b.read(5..5 + sent.len()), sent);
    assert_eq!(b.read(5 + sent.len()..6 + sent.len()), [0]);
    post_receive(&qb, 1, &[b.piece(20000..20010), b.piece(0..0), b.piece(30000..50000)]);
    Request::send(&pieces).post(&qa);
    bench.a.success();
    assert_eq!(bench.b.success().byte_len as usize, sent.len());
    assert_eq!([b.read(20000..20010), b.read(30000..30000 + sent.len() - 10)].concat(), sent);
    Request::read(&[a.piece(0..3), a.piece(500..600)], b.remote(5)).post(&qa);
    bench.a.success();
    assert_eq!([a.read(0..3), a.read(500..600)].concat(), sent[..103]);
}

fn shared_by_two(
    bench: &Bench,
) -> (Arc<SharedReceiveQueue>, [Arc<carrack_transports::verbs::sys::QueuePair>; 4]) {
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
        assert_eq!((found.wr_id, immediate(&found), found.qp_num), (u64::from(at), at, to.number()));
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
    assert_eq!(bench.b.event(Duration::from_millis(if bench.is_simulated() { 0 } else { 100 })), None);
    Request::send(&[a.whole()]).post(&a1);
    assert_eq!(bench.b.event(PATIENCE), Some(ibv::IBV_EVENT_SRQ_LIMIT_REACHED));
}

#[test]
fn a_completion_wakes_whoever_waits_for_it() {
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
    // Asked once, told once.
    post_receive(&qb, 2, &[b.whole()]);
    Request::send(&[a.whole()]).post(&qa);
    bench.b.success();
    assert!(!readable(bench.b.channel.fd(), Duration::ZERO));
}

#[test]
fn a_solicited_completion_wakes_whoever_waits_for_these_only() {
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
fn a_datagram_arrives_behind_the_route_it_came_by() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&datagrams());
    let (a, b) = (bench.a.buffer(512), bench.b.buffer(1024));
    let sent = a.fill(2);
    post_receive(&qb, 1, &[b.whole()]);
    let address = bench.a.address_of(&bench.b);
    Request::send(&[a.whole()]).immediate(6).datagram(&address, qb.number(), DATAGRAM_KEY).post(&qa);
    assert_eq!(bench.a.success().opcode, ibv::IBV_WC_SEND);
    let found = bench.b.success();
    assert_eq!((found.byte_len, found.src_qp, immediate(&found)), (552, qa.number(), 6));
    assert_ne!(found.wc_flags & ibv::IBV_WC_GRH, 0);
    assert_eq!(b.read(40..552), sent);
    if bench.a.gid.gid.starts_with(&[0; 10]) {
        assert_eq!(b.read(32..36), bench.a.gid.gid[12..], "the sender's IPv4 address");
    }
}

#[test]
fn a_datagram_with_a_wrong_key_or_without_a_receive_is_lost_without_a_word() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&datagrams());
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(64));
    let address = bench.a.address_of(&bench.b);
    let send = |id, key| {
        a.write(0, &[id]);
        Request::send(&[a.whole()]).datagram(&address, qb.number(), key).post(&qa);
        bench.a.success();
    };
    send(1, DATAGRAM_KEY);
    // Nothing says that the first one has come to its end but that this one, behind it, arrives.
    let deadline = Instant::now() + PATIENCE;
    loop {
        post_receive(&qb, 1, &[b.whole()]);
        send(2, DATAGRAM_KEY + 1);
        send(3, DATAGRAM_KEY);
        if bench.b.success().byte_len == 48 && b.read(40..41) == [3] {
            return;
        }
        assert!(Instant::now() < deadline, "a datagram with the wrong key arrived: {:?}", b.read(40..41));
    }
}

#[test]
fn a_fenced_write_comes_after_the_read_before_it() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(8192), bench.b.buffer(8192));
    b.write(0, &[55]);
    a.write(4096, &[66]);
    post_receive(&qb, 1, &[b.piece(4096..4160)]);
    Request::read(&[a.piece(0..1)], b.remote(0)).post(&qa);
    Request::write(&[a.piece(4096..4097)], b.remote(0)).flag(ibv::IBV_SEND_FENCE).post(&qa);
    Request::send(&[a.piece(0..1)]).flag(ibv::IBV_SEND_FENCE).post(&qa);
    for _ in 0..3 {
        bench.a.success();
    }
    bench.b.success();
    assert_eq!((a.read(0..1), b.read(0..1), b.read(4096..4097)), (vec![55], vec![66], vec![55]));
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
            let request = Request::write(&[a.piece(range.clone())], b.remote(range.start)).id(at as u64);
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

/// Two requests of which the first is wrong: how it ends, and that the second one is flushed.
fn ends_with(
    bench: &Bench,
    qa: &carrack_transports::verbs::sys::QueuePair,
    wrong: Request,
    right: Request,
) -> u32 {
    let _ = post_all(qa, &[wrong.id(1), right.id(2)]);
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
    let read_only = Buffer::new(&bench.b.domain, 4096, Access::LOCAL_WRITE | Access::REMOTE_READ);
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
fn a_queue_pair_that_lets_nobody_write_is_not_written_to() {
    let bench = Bench::chosen();
    let (qa, _qb) = bench.connect(&Options { access: Access::REMOTE_READ, ..Options::default() });
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(64));
    a.fill(1);
    let write = Request::write(&[a.whole()], b.remote(0));
    let status = ends_with(&bench, &qa, write, write);
    assert!([ibv::IBV_WC_REM_INV_REQ_ERR, ibv::IBV_WC_REM_ACCESS_ERR].contains(&status), "{status}");
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

#[test]
fn what_was_posted_is_flushed_in_order_when_a_queue_pair_fails() {
    let bench = Bench::chosen();
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(64));
    (0..4).for_each(|id| post_receive(&qb, id, &[b.whole()]));
    go_to(&qb, ibv::IBV_QPS_ERR);
    post_receive(&qb, 4, &[b.whole()]);
    let sends = [Request::send(&[b.whole()]).id(5), Request::send(&[b.whole()]).id(6).unsignalled()];
    post_all(&qb, &sends).unwrap();
    let found: Vec<_> = (0..7).map(|_| bench.b.completion()).collect();
    assert!(found.iter().all(|found| found.status == ibv::IBV_WC_WR_FLUSH_ERR));
    let ids = |range: std::ops::Range<u64>| {
        let of: Vec<_> = found.iter().map(|found| found.wr_id).filter(|id| range.contains(id)).collect();
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
fn a_large_region_is_registered_and_used_to_its_end() {
    let bench = Bench::chosen();
    let len = 64 << 20;
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(len));
    let (qa, _qb) = bench.connect(&Options::default());
    let sent = a.fill(6);
    Request::write(&[a.whole()], b.remote(len - 64)).post(&qa);
    bench.a.success();
    assert_eq!(b.read(len - 64..len), sent);
}

#[test]
fn memory_may_be_registered_for_relaxed_ordering() {
    let bench = Bench::chosen();
    drop(Buffer::new(&bench.a.domain, 8192, all_access() | Access::RELAXED_ORDERING));
}

#[test]
fn memory_that_is_not_there_is_not_registered() {
    let bench = Bench::chosen();
    assert!(nowhere(&bench.a.domain).is_err());
}

#[test]
fn a_completion_queue_can_grow() {
    let bench = Bench::chosen();
    let cq = CompletionQueue::create(&bench.a.context, 16, None).unwrap();
    cq.resize(512).unwrap();
    assert!(cq.depth() >= 512);
}
