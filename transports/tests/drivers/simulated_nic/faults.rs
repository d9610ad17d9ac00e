//! Every fault that can be planted.

#![expect(unsafe_code, reason = "registrations of memory, and libibverbs by its functions")]

use crate::verbs::*;
use carrack_simulators::nic::{Call, Config, Faults, Visibility, Which};
use carrack_transports::verbs::sys::bindings as ibv;
use carrack_transports::verbs::sys::{
    CompletionChannel, CompletionQueue, Context, ProtectionDomain, SharedReceiveQueue,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

fn bench() -> Bench {
    Bench::simulated(Config::devices(2))
}

fn faults(bench: &Bench) -> &Arc<Faults> {
    bench.nic().faults()
}

/// Returns the error number with which a call fails.
fn errno<T>(answer: Result<T, carrack_transports::verbs::sys::VerbsError>) -> Option<i32> {
    answer.err().map(|why| why.errno)
}

#[test]
fn each_call_fails_with_the_errno_that_was_ordered_and_works_again() {
    let bench = bench();
    let (node, verbs, faults) = (&bench.a, bench.nic().verbs(), faults(&bench));
    let (qp, _qb) = bench.connect(&Options::default());
    let memory = bench.a.buffer(64);
    let asked = |call: Call, number: i32, ask: &dyn Fn() -> Option<i32>| {
        assert_eq!(ask(), None, "{call:?} before");
        faults.fail_call(call, Which::Nth(1), number);
        assert_eq!(ask(), Some(number), "{call:?}");
        assert_eq!(ask(), None, "{call:?} afterwards");
    };
    let register = || {
        // SAFETY: nothing is posted that would use it.
        errno(unsafe {
            node.domain.register(std::ptr::from_ref(&()).cast_mut().cast(), 0, all_access())
        })
    };
    asked(Call::GetDeviceList, libc::ENOSYS, &|| {
        errno(Context::list(&verbs).map(drop)).map(|_| libc::ENOSYS)
    });
    asked(Call::OpenDevice, libc::EMFILE, &|| errno(Context::open(&verbs, "sim0").map(drop)));
    asked(Call::QueryDevice, libc::EIO, &|| errno(node.context.device_attr()));
    asked(Call::QueryPort, libc::EIO, &|| errno(node.context.port_attr(1)));
    asked(Call::AllocPd, libc::ENOMEM, &|| errno(ProtectionDomain::alloc(&node.context)));
    asked(Call::CreateCompChannel, libc::EMFILE, &|| {
        errno(CompletionChannel::create(&node.context))
    });
    asked(Call::CreateCq, libc::ENOMEM, &|| errno(CompletionQueue::create(&node.context, 1, None)));
    asked(Call::ResizeCq, libc::ENOSYS, &|| errno(node.cq.resize(300)));
    asked(Call::ReqNotifyCq, libc::EIO, &|| errno(node.cq.request_notification()));
    asked(Call::CreateSrq, libc::EPERM, &|| errno(SharedReceiveQueue::create(&node.domain, 1, 1)));
    asked(Call::CreateQp, libc::EAGAIN, &|| {
        errno(node.queue_pair_with(&Options::default(), None, &node.cq))
    });
    asked(Call::QueryQp, libc::EIO, &|| errno(qp.state()));
    asked(Call::ModifyQp, libc::ETIMEDOUT, &|| {
        let mut attr = ibv::ibv_qp_attr { min_rnr_timer: 3, ..ibv::ibv_qp_attr::default() };
        errno(qp.modify(&mut attr, ibv::IBV_QP_MIN_RNR_TIMER))
    });
    asked(Call::PostSend, libc::EIO, &|| Request::send(&[memory.piece(0..8)]).try_post(&qp).err());
    asked(Call::PostRecv, libc::EIO, &|| try_post_receive(&qp, 1, &[memory.whole()]).err());
    let srq = SharedReceiveQueue::create(&node.domain, 4, 1).unwrap();
    asked(Call::PostSrqRecv, libc::EIO, &|| post_shared(&srq, 1, &[memory.whole()]).err());
    assert_eq!(register(), Some(libc::EINVAL), "no bytes are no region");
    faults.fail_call(Call::RegMr, Which::Nth(1), libc::ENOMEM);
    assert_eq!(register(), Some(libc::ENOMEM));
    faults.fail_call(Call::PollCq, Which::Nth(2), libc::EIO);
    assert!(node.cq.poll(&mut [ibv::ibv_wc::default()]).is_ok());
    assert!(node.cq.poll(&mut [ibv::ibv_wc::default()]).is_err());
    faults.fail_call(Call::QueryGid, Which::All, libc::EIO);
    assert!(node.context.gids(1).map_or(true, |gids| gids.is_empty()));
    faults.heal_call(Call::QueryGid);
    assert_eq!(node.context.gids(1).unwrap().len(), 4);
}

#[test]
fn a_list_is_taken_up_to_the_request_that_is_told_to_fail() {
    let bench = bench();
    let (qa, _qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(64), bench.b.buffer(64));
    a.fill(1);
    let all: Vec<Request> = (0..5)
        .map(|at| Request::write(&[a.piece(at..at + 1)], b.remote(at)).id(at as u64))
        .collect();
    faults(&bench).fail_call(Call::PostSend, Which::Nth(4), libc::ENOMEM);
    assert_eq!(post_all(&qa, &all), Err((3, libc::ENOMEM)));
    let ended: Vec<u64> = (0..3).map(|_| bench.a.success().wr_id).collect();
    assert_eq!(ended, [0, 1, 2]);
    assert_eq!((b.read(0..3), b.read(3..5)), (a.read(0..3), vec![0; 2]));
    post_all(&qa, &all[3..]).unwrap();
    assert_eq!((bench.a.success().wr_id, bench.a.success().wr_id), (3, 4));
}

#[test]
fn a_request_ends_with_each_status_there_is_and_takes_the_queue_pair_along() {
    for status in ibv::IBV_WC_LOC_LEN_ERR..=ibv::IBV_WC_TM_RNDV_INCOMPLETE {
        let bench = bench();
        let (qa, _qb) = bench.connect(&Options::default());
        let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
        a.fill(1);
        faults(&bench).fail_sends(Which::Nth(2), status);
        let write = |id| Request::write(&[a.piece(0..4)], b.remote(0)).id(id);
        post_all(&qa, &[write(1), write(2).unsignalled(), write(3)]).unwrap();
        assert_eq!(bench.a.success().wr_id, 1);
        let found =
            [bench.a.completion(), bench.a.completion()].map(|found| (found.wr_id, found.status));
        assert_eq!(found, [(2, status), (3, ibv::IBV_WC_WR_FLUSH_ERR)]);
        assert_eq!(qa.state().unwrap(), ibv::IBV_QPS_ERR);
    }
}

#[test]
fn a_receive_ends_with_each_status_there_is_and_the_sender_hears_of_it() {
    for status in ibv::IBV_WC_LOC_LEN_ERR..=ibv::IBV_WC_TM_RNDV_INCOMPLETE {
        let bench = bench();
        let (qa, qb) = bench.connect(&Options::default());
        let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
        faults(&bench).fail_receives(Which::Nth(1), status);
        post_receive(&qb, 4, &[b.whole()]);
        post_receive(&qb, 5, &[b.whole()]);
        Request::send(&[a.whole()]).post(&qa);
        let found =
            [bench.b.completion(), bench.b.completion()].map(|found| (found.wr_id, found.status));
        assert_eq!(found, [(4, status), (5, ibv::IBV_WC_WR_FLUSH_ERR)]);
        assert_eq!(bench.a.completion().status, ibv::IBV_WC_REM_OP_ERR);
    }
}

/// Checks a queue that has overrun: an event for it, one for each queue pair, and `left`
/// completions to poll.
fn has_broken(
    bench: &Bench,
    cq: &CompletionQueue,
    qp: &carrack_transports::verbs::sys::QueuePair,
    left: usize,
) {
    assert_eq!(bench.a.event(PATIENCE), Some(ibv::IBV_EVENT_CQ_ERR));
    assert_eq!(bench.a.event(PATIENCE), Some(ibv::IBV_EVENT_QP_FATAL));
    assert_eq!(qp.state().unwrap(), ibv::IBV_QPS_ERR);
    let mut places = [ibv::ibv_wc::default(); 20];
    assert_eq!(cq.poll(&mut places).unwrap().len(), left);
}

#[test]
fn a_completion_queue_that_overruns_is_broken() {
    let bench = bench();
    let cq = CompletionQueue::create(&bench.a.context, 4, None).unwrap();
    let options = Options::default();
    let qa = bench.a.queue_pair_with(&options, None, &cq).unwrap();
    let qb = bench.b.queue_pair(&options, None);
    connect(&bench.a, &qa, &bench.b, &qb, &options);
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    post_all(&qa, &[Request::write(&[a.whole()], b.remote(0)); 5]).unwrap();
    has_broken(&bench, &cq, &qa, 4);
}

#[test]
fn an_overrun_can_be_ordered() {
    let bench = bench();
    let (qa, _qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    faults(&bench).overrun(Which::Nth(2));
    post_all(&qa, &[Request::write(&[a.whole()], b.remote(0)); 3]).unwrap();
    has_broken(&bench, &bench.a.cq, &qa, 1);
}

#[test]
fn held_completions_show_in_order_when_they_are_released() {
    let bench = bench();
    let (qa, _qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    let sent = a.fill(1);
    let held = faults(&bench).hold_completions();
    bench.a.cq.request_notification().unwrap();
    (0..3).for_each(|id| Request::write(&[a.whole()], b.remote(0)).id(id).post(&qa));
    let deadline = Instant::now() + PATIENCE;
    while b.read(0..8) != sent {
        assert!(Instant::now() < deadline, "the work itself is done");
    }
    assert!(completion_within(&bench.a.cq, Duration::from_millis(5)).is_none());
    assert!(!readable(bench.a.channel.fd(), Duration::ZERO));
    drop(held);
    assert!(readable(bench.a.channel.fd(), PATIENCE));
    (0..3).for_each(|id| assert_eq!(bench.a.success().wr_id, id));
}

#[test]
fn delayed_completions_come_no_sooner() {
    let bench = bench();
    let (qa, _qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    let delay = Duration::from_millis(30);
    faults(&bench).delay_completions(delay);
    let start = Instant::now();
    Request::write(&[a.whole()], b.remote(0)).post(&qa);
    bench.a.success();
    assert!(start.elapsed() >= delay);
}

#[test]
fn a_queue_pair_that_is_held_is_overtaken_by_another() {
    let bench = bench();
    let ((q1, _p1), (q2, _p2)) =
        (bench.connect(&Options::default()), bench.connect(&Options::default()));
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    let held = faults(&bench).hold_queue_pair(0, q1.number());
    Request::write(&[a.piece(0..1)], b.remote(0)).id(1).post(&q1);
    a.write(1, &[7]);
    Request::write(&[a.piece(1..2)], b.remote(1)).id(2).post(&q2);
    a.write(0, &[6]);
    assert_eq!(bench.a.success().wr_id, 2);
    assert_eq!(b.read(0..2), [0, 7]);
    drop(held);
    assert_eq!(bench.a.success().wr_id, 1);
    // Posted bytes are read when they are sent: a real NIC promises no earlier time, either.
    assert_eq!(b.read(0..2), [6, 7]);
}

#[test]
fn scattered_queue_pairs_overtake_each_other_and_lose_nothing() {
    const PAIRS: usize = 8;
    let bench = bench();
    faults(&bench).scatter_queue_pairs(Duration::from_millis(3));
    let pairs: Vec<_> = (0..PAIRS).map(|_| bench.connect(&Options::default())).collect();
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(64));
    let mut overtaken = false;
    for _ in 0..20 {
        for (id, (qp, _)) in pairs.iter().enumerate() {
            Request::write(&[a.whole()], b.remote(8 * id)).id(id as u64).post(qp);
        }
        let order: Vec<u64> = (0..PAIRS).map(|_| bench.a.success().wr_id).collect();
        overtaken |= !order.is_sorted();
    }
    assert!(overtaken);
}

#[test]
fn a_late_write_shows_with_the_next_completion_of_its_target() {
    let bench = bench();
    faults(&bench).write_visibility(Visibility::WithCompletion, false);
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(16));
    let sent = a.fill(9);
    Request::write(&[a.whole()], b.remote(0)).post(&qa);
    bench.a.success();
    assert_eq!(b.read(0..8), [0; 8], "the writer's completion says nothing of when the bytes show");
    post_receive(&qb, 1, &[b.piece(8..16)]);
    Request::send(&[a.piece(0..1)]).post(&qa);
    bench.b.success();
    assert_eq!(b.read(0..8), sent);
}

#[test]
fn a_late_write_shows_with_a_read_behind_it_when_completions_do_not_tell() {
    let bench = bench();
    faults(&bench).write_visibility(Visibility::WithRead, false);
    let (qa, qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(16), bench.b.buffer(16));
    let sent = a.fill(9);
    post_receive(&qb, 1, &[]);
    Request::write(&[a.piece(0..8)], b.remote(0)).immediate(1).post(&qa);
    bench.a.success();
    bench.b.success();
    assert_eq!(b.read(0..8), [0; 8]);
    Request::read(&[a.piece(8..9)], b.remote(15)).post(&qa);
    bench.a.success();
    assert_eq!(b.read(0..8), sent[..8]);
    Request::write(&[a.piece(0..8)], b.remote(8)).post(&qa);
    bench.a.success();
    faults(&bench).write_visibility(Visibility::AtOnce, false);
    let deadline = Instant::now() + PATIENCE;
    while b.read(8..16) != sent[..8] {
        assert!(Instant::now() < deadline, "nothing holds it back any more");
    }
}

#[test]
fn a_late_write_to_memory_that_is_gone_goes_nowhere() {
    let bench = bench();
    faults(&bench).write_visibility(Visibility::WithRead, false);
    let (qa, _qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(16), bench.b.buffer(16));
    let gone = bench.b.buffer(16);
    Request::write(&[a.whole()], gone.remote(0)).post(&qa);
    bench.a.success();
    drop(gone);
    Request::read(&[a.whole()], b.remote(0)).post(&qa);
    bench.a.success();
}

#[test]
fn healed_work_goes_well() {
    let bench = bench();
    let (qa, _qb) = bench.connect(&Options::default());
    let (a, b) = (bench.a.buffer(8), bench.b.buffer(8));
    faults(&bench).fail_sends(Which::All, ibv::IBV_WC_FATAL_ERR);
    faults(&bench).heal_work();
    Request::write(&[a.whole()], b.remote(0)).post(&qa);
    bench.a.success();
}
