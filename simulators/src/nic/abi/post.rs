//! Posting: lists of work requests, taken one by one up to the first that is refused.

use super::super::faults::Call;
use super::super::queue_pair::{Data, Operation, QueuePair, Work};
use super::super::receives::{Piece, Receive};
use super::super::wire::{Notice, Remote};
use super::device::known_context;
use super::queue_pair::{KnownPair, known_pair, known_srq};
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{MemMut, MemRef, Place};
use carrack_transports::verbs::sys::bindings::{
    self as ibv, ibv_qp, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_srq,
};
use rustix::io::Errno;
use std::ffi::c_int;

/// Returns the pieces of a work request.
///
/// # Safety
/// `first` is the first of `count`.
unsafe fn pieces(first: *const ibv_sge, count: c_int) -> Result<Vec<Piece>, Errno> {
    let count = usize::try_from(count).map_err(|_| Errno::INVAL)?;
    let piece = |at| {
        // SAFETY: of the contract.
        let ibv_sge { addr, length, lkey } = unsafe { first.add(at).read() };
        Piece { at: Remote { addr, key: lkey }, len: length }
    };
    Ok((0..count).map(piece).collect())
}

/// Copies the bytes of a work request that is posted inline.
///
/// # Safety
/// The pieces are memory that the CPU can read: they have no keys to check.
unsafe fn inline(pieces: &[Piece], most: u32) -> Result<Vec<u8>, Errno> {
    let total: u64 = pieces.iter().map(|piece| u64::from(piece.len)).sum();
    let total =
        usize::try_from(total).ok().filter(|total| *total <= most as usize).ok_or(Errno::INVAL)?;
    let mut bytes = vec![0; total];
    let mut rest = bytes.as_mut_slice();
    for piece in pieces {
        let addr = usize::try_from(piece.at.addr).map_err(|_| Errno::INVAL)?;
        let (now, later) = rest.split_at_mut(piece.len as usize);
        // SAFETY: of the contract.
        let from = unsafe {
            MemRef::from_raw(std::ptr::with_exposed_provenance(addr), now.len(), Place::Host)
        };
        copy_now(MemMut::host(now), from).map_err(|_| Errno::FAULT)?;
        rest = later;
    }
    Ok(bytes)
}

/// Returns the operation of a work request.
///
/// # Safety
/// `wr` is a valid work request.
unsafe fn operation(wr: &ibv_send_wr) -> Result<Operation, Errno> {
    let solicited = wr.send_flags & ibv::IBV_SEND_SOLICITED != 0;
    // SAFETY: a number for every member of the union.
    let immediate = unsafe { wr.anon_1.imm_data };
    let bare = Notice { immediate: None, solicited };
    let with_immediate = Notice { immediate: Some(immediate), solicited };
    // SAFETY: numbers for every member of the union.
    let (rdma, atomic) = unsafe { (wr.wr.rdma, wr.wr.atomic) };
    let remote = Remote { addr: rdma.remote_addr, key: rdma.rkey };
    let word = Remote { addr: atomic.remote_addr, key: atomic.rkey };
    match wr.opcode {
        ibv::IBV_WR_SEND => Ok(Operation::Send(bare)),
        ibv::IBV_WR_SEND_WITH_IMM => Ok(Operation::Send(with_immediate)),
        ibv::IBV_WR_RDMA_WRITE => Ok(Operation::Write(remote, Notice::default())),
        ibv::IBV_WR_RDMA_WRITE_WITH_IMM => Ok(Operation::Write(remote, with_immediate)),
        ibv::IBV_WR_RDMA_READ => Ok(Operation::Read(remote)),
        ibv::IBV_WR_ATOMIC_FETCH_AND_ADD => {
            Ok(Operation::FetchAdd { word, add: atomic.compare_add })
        }
        ibv::IBV_WR_ATOMIC_CMP_AND_SWP => {
            Ok(Operation::CompareSwap { word, compare: atomic.compare_add, swap: atomic.swap })
        }
        _ => Err(Errno::INVAL),
    }
}

/// Reads a work request, with its inline data.
///
/// # Safety
/// As [`operation`].
unsafe fn work(pair: &QueuePair, wr: &ibv_send_wr) -> Result<Work, Errno> {
    // SAFETY: of the contract.
    let (operation, pieces) = unsafe { (operation(wr)?, pieces(wr.sg_list, wr.num_sge)?) };
    let has = |flag| wr.send_flags & flag != 0;
    let data = if has(ibv::IBV_SEND_INLINE) {
        if pieces.len() > pair.parts.max_send_pieces as usize {
            return Err(Errno::INVAL);
        }
        // SAFETY: of the contract.
        Data::Inline(unsafe { inline(&pieces, pair.parts.max_inline) }?)
    } else {
        Data::Pieces(pieces)
    };
    Ok(Work::new(
        wr.wr_id,
        operation,
        data,
        (has(ibv::IBV_SEND_SIGNALED), has(ibv::IBV_SEND_FENCE)),
    ))
}

pub(super) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    first: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: of the contract.
    let KnownPair { pair, thread, .. } = unsafe { known_pair(qp) };
    let post = || {
        let mut next = first;
        let mut posted = Ok(());
        // SAFETY: of the contract: a list that ends with null.
        while let (Ok(()), Some(wr)) = (posted, unsafe { next.as_ref() }) {
            // SAFETY: of the contract.
            posted = unsafe { work(pair, wr) }.and_then(|work| pair.post_send(work));
            if posted.is_ok() {
                next = wr.next;
            }
        }
        pair.ring();
        (posted, next)
    };
    let (posted, next) = match thread {
        Some(thread) => thread.alone(post).unwrap_or_else(|errno| (Err(errno), first)),
        None => post(),
    };
    answer(posted, next, bad)
}

pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: of the contract.
    let pair = unsafe { &known_pair(qp).pair };
    // SAFETY: passed on.
    unsafe { post_receives(first, bad, |receive| pair.post_receive(receive)) }
}

pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: of the contract.
    let (queue, context) = unsafe { (known_srq(srq), known_context((*srq).context)) };
    let post = |receive| {
        context.device.faults.check(Call::PostSrqRecv)?;
        queue.post(receive)
    };
    // SAFETY: passed on.
    unsafe { post_receives(first, bad, post) }
}

/// Posts a list of receives, up to the first that fails.
///
/// # Safety
/// As `ibv_post_recv`.
unsafe fn post_receives(
    first: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl Fn(Receive) -> Result<(), Errno>,
) -> c_int {
    let mut next = first;
    let mut posted = Ok(());
    // SAFETY: of the contract: a list that ends with null.
    while let (Ok(()), Some(wr)) = (posted, unsafe { next.as_ref() }) {
        // SAFETY: of the contract.
        let pieces = unsafe { pieces(wr.sg_list, wr.num_sge) };
        posted = pieces.and_then(|pieces| post(Receive { id: wr.wr_id, pieces }));
        if posted.is_ok() {
            next = wr.next;
        }
    }
    answer(posted, next, bad)
}

/// Reports the work request that was refused, and the error.
fn answer<W>(posted: Result<(), Errno>, refused: *mut W, bad: *mut *mut W) -> c_int {
    let Err(errno) = posted else { return 0 };
    if !bad.is_null() {
        // SAFETY: of the contract: a place for a pointer.
        unsafe { *bad = refused };
    }
    errno.raw_os_error()
}
