//! Queue pairs and shared receive queues.

use super::super::device::{AsyncEvent, Source};
use super::super::faults::Call;
use super::super::queue_pair::{PairParts, QueuePair};
use super::super::receives::ReceiveQueue;
use super::completion::known_cq;
use super::device::known_context;
use super::memory::{OneAtATime, known_domain, vector};
use super::{free, known, make, number, pointer};
use carrack_transports::verbs::sys::bindings::{
    self as ibv, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr, ibv_srq, ibv_srq_attr,
    ibv_srq_init_attr,
};
use rustix::io::Errno;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Returns the state of a shared receive queue.
///
/// # Safety
/// As [`known`].
pub(super) unsafe fn known_srq<'a>(srq: *mut ibv_srq) -> &'a Arc<ReceiveQueue> {
    // SAFETY: passed on.
    unsafe { known(srq) }
}

pub(super) unsafe extern "C" fn create_srq(
    pd: *mut ibv_pd,
    attr: *mut ibv_srq_init_attr,
) -> *mut ibv_srq {
    // SAFETY: of the contract.
    let (domain, wanted, srq_context, context) =
        unsafe { (known_domain(pd), (*attr).attr, (*attr).srq_context, (*pd).context) };
    let device = &domain.device;
    let create = || {
        device.check()?;
        device.faults.check(Call::CreateSrq)?;
        let fits = (1..=device.limits.shared_receives).contains(&wanted.max_wr)
            && wanted.max_sge <= device.limits.pieces;
        fits.then_some(()).ok_or(Errno::INVAL)?;
        device.shared_receives.add()?;
        domain.users.fetch_add(1, Ordering::SeqCst);
        // SAFETY: of the contract.
        let events = Arc::clone(&unsafe { known_context(context) }.events);
        let queue = ReceiveQueue::new(domain.number, wanted.max_wr, wanted.max_sge, events);
        // SAFETY: all of its fields are numbers, pointers and locks of the C library, for which
        // zero is valid.
        let mut structure: ibv_srq = unsafe { std::mem::zeroed() };
        (structure.context, structure.srq_context, structure.pd) = (context, srq_context, pd);
        let srq = make(structure, Arc::clone(&queue));
        queue.handle.store(srq.expose_provenance(), Ordering::SeqCst);
        Ok(srq)
    };
    pointer(create())
}

pub(super) unsafe extern "C" fn modify_srq(
    srq: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: of the contract.
    let (queue, wanted) = unsafe { (known_srq(srq), (*attr).srq_limit) };
    match mask.cast_unsigned() {
        ibv::IBV_SRQ_LIMIT if wanted <= queue.max_work => {
            queue.set_limit(wanted);
            0
        }
        ibv::IBV_SRQ_LIMIT => Errno::INVAL.raw_os_error(),
        _ => Errno::OPNOTSUPP.raw_os_error(),
    }
}

pub(super) unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: of the contract; a domain outlives the objects made in it, and a context its
    // domains.
    let (queue, domain, context) = unsafe {
        let pd = (*srq).pd;
        (known_srq(srq), known_domain(pd), known_context((*pd).context))
    };
    if queue.users.load(Ordering::SeqCst) > 0 {
        return Errno::BUSY.raw_os_error();
    }
    let is_own = |event: &AsyncEvent| match &event.source {
        Source::Receives(of) => Arc::ptr_eq(of, queue),
        _ => false,
    };
    context.events.forget(is_own);
    queue.given.wait();
    domain.device.shared_receives.remove();
    domain.users.fetch_sub(1, Ordering::SeqCst);
    // SAFETY: of the contract: it is not used any more.
    drop(unsafe { free::<ibv_srq, Arc<ReceiveQueue>>(srq) });
    0
}

/// State of a queue pair.
pub(super) struct KnownPair {
    pub(super) pair: Arc<QueuePair>,
    /// Thread domain of its protection domain, if that is for one thread at a time.
    pub(super) thread: Option<Arc<OneAtATime>>,
    cap: ibv_qp_cap,
}

/// Returns the state of a queue pair.
///
/// # Safety
/// As [`known`].
pub(super) unsafe fn known_pair<'a>(qp: *mut ibv_qp) -> &'a KnownPair {
    // SAFETY: passed on.
    unsafe { known(qp) }
}

pub(super) unsafe extern "C" fn create_qp(
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    // SAFETY: of the contract.
    let (domain, context, wanted) = unsafe { (known_domain(pd), (*pd).context, &mut *init) };
    let (device, limits) = (&domain.device, &domain.device.limits);
    let mut create = || {
        device.check()?;
        device.faults.check(Call::CreateQp)?;
        if wanted.qp_type != ibv::IBV_QPT_RC {
            return Err(Errno::OPNOTSUPP);
        }
        let cap = &mut wanted.cap;
        let fits = cap.max_send_wr <= limits.work_requests
            && cap.max_recv_wr <= limits.work_requests
            && cap.max_send_sge <= limits.pieces
            && cap.max_recv_sge <= limits.pieces
            && cap.max_inline_data <= limits.inline;
        let complete = fits && !wanted.send_cq.is_null() && !wanted.recv_cq.is_null();
        complete.then_some(()).ok_or(Errno::INVAL)?;
        // SAFETY: of the contract.
        let events = Arc::clone(&unsafe { known_context(context) }.events);
        let shared = !wanted.srq.is_null();
        let receives = if shared {
            (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
            // SAFETY: of the contract.
            Arc::clone(unsafe { known_srq(wanted.srq) })
        } else {
            ReceiveQueue::new(domain.number, cap.max_recv_wr, cap.max_recv_sge, Arc::clone(&events))
        };
        // SAFETY: of the contract.
        let (send_cq, recv_cq) =
            unsafe { (Arc::clone(known_cq(wanted.send_cq)), Arc::clone(known_cq(wanted.recv_cq))) };
        let parts = PairParts {
            domain: domain.number,
            send_cq,
            recv_cq,
            receives,
            shared,
            signal_all: wanted.sq_sig_all != 0,
            max_send: cap.max_send_wr,
            max_send_pieces: cap.max_send_sge,
            max_inline: cap.max_inline_data,
            events,
        };
        let pair = QueuePair::new(device, parts)?;
        domain.users.fetch_add(1, Ordering::SeqCst);
        // SAFETY: all of its fields are numbers, pointers and locks of the C library, for which
        // zero is valid.
        let mut structure: ibv_qp = unsafe { std::mem::zeroed() };
        (structure.context, structure.qp_context, structure.pd) = (context, wanted.qp_context, pd);
        (structure.send_cq, structure.recv_cq, structure.srq) =
            (wanted.send_cq, wanted.recv_cq, wanted.srq);
        (structure.qp_num, structure.handle) = (pair.number.0, pair.number.0);
        (structure.state, structure.qp_type) = (ibv::IBV_QPS_RESET, wanted.qp_type);
        let qp = make(
            structure,
            KnownPair { pair: Arc::clone(&pair), thread: domain.thread.clone(), cap: *cap },
        );
        pair.handle.store(qp.expose_provenance(), Ordering::SeqCst);
        Ok(qp)
    };
    pointer(create())
}

pub(super) unsafe extern "C" fn modify_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: of the contract.
    let (pair, wanted) = unsafe { (&known_pair(qp).pair, &*attr) };
    let mask = mask.cast_unsigned();
    let has_vector = mask & ibv::IBV_QP_AV != 0;
    // SAFETY: it is part of the attributes.
    let vector = has_vector.then(|| unsafe { vector(&raw const wanted.ah_attr) });
    let result = pair.device.check().and_then(|()| pair.device.faults.check(Call::ModifyQp));
    let result = result.and_then(|()| pair.modify(wanted, mask, vector));
    if result.is_ok() && mask & ibv::IBV_QP_STATE != 0 {
        // SAFETY: of the contract; libibverbs writes it here, too.
        unsafe { (*qp).state = wanted.qp_state };
    }
    number(result)
}

pub(super) unsafe extern "C" fn query_qp(
    qp: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: of the contract.
    let KnownPair { pair, cap, .. } = unsafe { known_pair(qp) };
    if let Err(errno) = pair.device.check().and_then(|()| pair.device.faults.check(Call::QueryQp)) {
        return errno.raw_os_error();
    }
    let (state, told) = pair.attributes();
    // SAFETY: all of its fields are numbers, and a union of such.
    let mut answer: ibv_qp_attr = unsafe { std::mem::zeroed() };
    (answer.qp_state, answer.cur_qp_state) = (state.number(), state.number());
    (answer.path_mtu, answer.qkey) = (told.path_mtu, told.key);
    (answer.rq_psn, answer.sq_psn, answer.dest_qp_num) = (told.rq_psn, told.sq_psn, told.peer.0);
    (answer.qp_access_flags, answer.cap, answer.port_num) = (told.access.0, *cap, told.port);
    (answer.max_rd_atomic, answer.max_dest_rd_atomic) = (told.reads, told.peer_reads);
    (answer.min_rnr_timer, answer.timeout) = (told.min_rnr_timer, told.timeout);
    (answer.retry_cnt, answer.rnr_retry) = (told.retries, told.rnr_retries);
    if let Some(vector) = told.vector {
        (answer.ah_attr.dlid, answer.ah_attr.port_num) = (vector.lid, vector.port);
        if let Some((raw, index)) = vector.global {
            (answer.ah_attr.is_global, answer.ah_attr.grh.sgid_index) = (1, index);
            answer.ah_attr.grh.dgid = ibv::ibv_gid { raw };
        }
    }
    // SAFETY: of the contract: places for the answers, and a queue pair.
    unsafe {
        attr.write(answer);
        init.write(ibv_qp_init_attr {
            qp_context: (*qp).qp_context,
            send_cq: (*qp).send_cq,
            recv_cq: (*qp).recv_cq,
            srq: (*qp).srq,
            cap: *cap,
            qp_type: (*qp).qp_type,
            sq_sig_all: c_int::from(pair.parts.signal_all),
        });
        // As libibverbs does.
        (*qp).state = state.number();
    }
    0
}

pub(super) unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: of the contract; a domain outlives the objects made in it, and a context its
    // domains.
    let (pair, domain, context) = unsafe {
        let pd = (*qp).pd;
        (&known_pair(qp).pair, known_domain(pd), known_context((*pd).context))
    };
    pair.destroy();
    context
        .events
        .forget(|event| matches!(&event.source, Source::Queue(of) if Arc::ptr_eq(of, pair)));
    pair.given.wait();
    domain.users.fetch_sub(1, Ordering::SeqCst);
    // SAFETY: of the contract: it is not used any more.
    drop(unsafe { free::<ibv_qp, KnownPair>(qp) });
    0
}
