//! Sends, writes, reads and atomic operations arrive, whole and in order.

use crate::verbs::*;
use carrack_transports::verbs::sys::bindings as ibv;

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
    // The key is ignored, and the bytes may change at once.
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
