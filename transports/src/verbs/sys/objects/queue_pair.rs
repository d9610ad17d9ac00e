//! Queue pairs.

use super::super::bindings::{
    IBV_QP_PORT, IBV_QP_STATE, IBV_QPT_RC, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr,
    ibv_recv_wr, ibv_send_wr,
};
use super::super::error::VerbsError;
use super::completion::CompletionQueue;
use super::domain::ProtectionDomain;
use super::handle::VerbsPointer;
use super::receive::{PostFailure, SharedReceiveQueue};
use std::fmt;
use std::ptr;
use std::sync::Arc;

/// Specification of a queue pair. It is reliable and connected (`IBV_QPT_RC`): everything arrives
/// at one peer, once and in order.
#[derive(Clone, Debug)]
pub struct QueuePairSpec<'a> {
    /// Completion queue of sends, writes, reads and atomics.
    pub send_cq: &'a Arc<CompletionQueue>,
    /// Completion queue of receives.
    pub recv_cq: &'a Arc<CompletionQueue>,
    /// Shared receive queue; without one it has a queue of its own.
    pub srq: Option<&'a Arc<SharedReceiveQueue>>,
    /// Minimum number of work requests of its send queue.
    pub send_depth: u32,
    /// Minimum number of receives; 0 if `srq` is used.
    pub recv_depth: u32,
    /// Maximum pieces of a send.
    pub send_sge: u32,
    /// Maximum pieces of a receive.
    pub recv_sge: u32,
    /// Bytes that may be sent inline, so that their memory is neither registered nor kept.
    pub inline: u32,
}

/// A queue pair.
pub struct QueuePair {
    raw: VerbsPointer<ibv_qp>,
    number: u32,
    granted: ibv_qp_cap,
    send_cq: Arc<CompletionQueue>,
    recv_cq: Arc<CompletionQueue>,
    srq: Option<Arc<SharedReceiveQueue>>,
    domain: Arc<ProtectionDomain>,
}

impl QueuePair {
    /// Creates a queue pair, in the state `RESET`.
    ///
    /// # Errors
    /// That is more than the device grants, its parts are of several contexts, or the device does
    /// not answer.
    pub fn create(
        domain: &Arc<ProtectionDomain>,
        spec: &QueuePairSpec<'_>,
    ) -> Result<Arc<Self>, VerbsError> {
        const CALL: &str = "ibv_create_qp";
        let context = domain.context();
        context.check_same(spec.send_cq.context(), CALL, "send completion queue")?;
        context.check_same(spec.recv_cq.context(), CALL, "receive completion queue")?;
        if let Some(srq) = spec.srq {
            context.check_same(srq.domain().context(), CALL, "shared receive queue")?;
        }
        let mut init = ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: spec.send_cq.as_raw(),
            recv_cq: spec.recv_cq.as_raw(),
            srq: spec.srq.map_or(ptr::null_mut(), |srq| srq.as_raw()),
            cap: ibv_qp_cap {
                max_send_wr: spec.send_depth,
                max_recv_wr: spec.recv_depth,
                max_send_sge: spec.send_sge,
                max_recv_sge: spec.recv_sge,
                max_inline_data: spec.inline,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: the domain and its queues exist, and are of one context.
        let raw = unsafe { context.verbs().create_qp(domain.as_raw(), &raw mut init) };
        let raw = raw.map_err(|error| context.name_in(error))?;
        // SAFETY: what is not a failure is not null, and has its number, which does not change.
        let (raw, number) = unsafe { (VerbsPointer::new(raw), (*raw).qp_num) };
        Ok(Arc::new(Self {
            raw,
            number,
            granted: init.cap,
            send_cq: Arc::clone(spec.send_cq),
            recv_cq: Arc::clone(spec.recv_cq),
            srq: spec.srq.map(Arc::clone),
            domain: Arc::clone(domain),
        }))
    }

    /// Returns the number by which peers and completions name it.
    #[inline]
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the bytes that the device lets be sent inline.
    #[inline]
    pub fn inline(&self) -> usize {
        self.granted.max_inline_data as usize
    }

    /// Returns the number of work requests of its send queue.
    pub fn send_depth(&self) -> u32 {
        self.granted.max_send_wr
    }

    /// Returns the number of receives of a queue of its own.
    pub fn recv_depth(&self) -> u32 {
        self.granted.max_recv_wr
    }

    /// Returns the maximum number of pieces of a send.
    pub fn send_sge(&self) -> u32 {
        self.granted.max_send_sge
    }

    /// Returns the maximum number of pieces of a receive.
    pub fn recv_sge(&self) -> u32 {
        self.granted.max_recv_sge
    }

    /// Changes the attributes in `mask` (`IBV_QP_*`) to those of `attr`.
    ///
    /// # Errors
    /// The transition is not allowed from its present state, an attribute is missing or out of
    /// range, or the peer's network address is not found.
    pub fn modify(&self, attr: &mut ibv_qp_attr, mask: u32) -> Result<(), VerbsError> {
        let context = self.domain.context();
        // SAFETY: the queue pair is there.
        let answer = unsafe { context.verbs().modify_qp(self.as_raw(), attr, mask.cast_signed()) };
        answer.map_err(|error| {
            let error = context.name_in(error);
            if mask & IBV_QP_PORT != 0 { error.at_port(attr.port_num) } else { error }
        })
    }

    /// Returns its present attributes; at least those of `mask` (`IBV_QP_*`).
    ///
    /// # Errors
    /// The device does not answer.
    pub fn query(&self, mask: u32) -> Result<ibv_qp_attr, VerbsError> {
        let context = self.domain.context();
        let (mut attr, mut init) = (ibv_qp_attr::default(), ibv_qp_init_attr::default());
        // SAFETY: the queue pair is there, and the places for the answers are ours.
        unsafe {
            context.verbs().query_qp(
                self.as_raw(),
                &raw mut attr,
                mask.cast_signed(),
                &raw mut init,
            )
        }
        .map_err(|error| context.name_in(error))?;
        Ok(attr)
    }

    /// Returns its present state (`IBV_QPS_*`).
    ///
    /// # Errors
    /// The device does not answer.
    pub fn state(&self) -> Result<u32, VerbsError> {
        self.query(IBV_QP_STATE).map(|attr| attr.qp_state)
    }

    /// Posts a list of sends, writes, reads and atomics.
    ///
    /// # Errors
    /// The queue is full or in no state to send, or an entry is invalid. Those before that one are
    /// posted.
    ///
    /// # Safety
    /// The list is valid. Each piece, except inline ones, lies in registered memory of the same
    /// domain, with its key. It stays there until the work has completed, or the queue pair is
    /// gone. Unsignalled work has completed when later work of the same queue has. No Rust
    /// reference exists meanwhile to memory that is written to. In a domain [for one
    /// thread](ProtectionDomain::for_one_thread), no other thread posts to this queue pair
    /// meanwhile. In any domain, no other thread resets it (state `RESET`) meanwhile.
    #[inline]
    pub unsafe fn post_send(
        &self,
        first: *mut ibv_send_wr,
    ) -> Result<(), PostFailure<ibv_send_wr>> {
        let mut bad = first;
        // SAFETY: the queue pair is there, and so is its context.
        let call = unsafe { (*(*self.as_raw()).context).ops.post_send };
        let Some(call) = call else { return Err(PostFailure::new(libc::ENOSYS, first)) };
        // SAFETY: passed on from the caller.
        match unsafe { call(self.as_raw(), first, &raw mut bad) } {
            0 => Ok(()),
            answer => Err(PostFailure::new(answer, bad)),
        }
    }

    /// Posts a list of receives to its own queue.
    ///
    /// # Errors
    /// The queue is full or in no state to receive, or a receive is invalid. Those before that one
    /// are posted.
    ///
    /// # Safety
    /// As [`SharedReceiveQueue::post`], until the receive completes or the queue pair is gone. It
    /// has no shared queue, and no other thread resets it (state `RESET`) meanwhile.
    #[inline]
    pub unsafe fn post_recv(
        &self,
        first: *mut ibv_recv_wr,
    ) -> Result<(), PostFailure<ibv_recv_wr>> {
        let mut bad = first;
        // SAFETY: the queue pair is there, and so is its context.
        let call = unsafe { (*(*self.as_raw()).context).ops.post_recv };
        let Some(call) = call else { return Err(PostFailure::new(libc::ENOSYS, first)) };
        // SAFETY: passed on from the caller.
        match unsafe { call(self.as_raw(), first, &raw mut bad) } {
            0 => Ok(()),
            answer => Err(PostFailure::new(answer, bad)),
        }
    }

    /// Returns the completion queue of sends.
    pub fn send_cq(&self) -> &Arc<CompletionQueue> {
        &self.send_cq
    }

    /// Returns the completion queue of receives.
    pub fn recv_cq(&self) -> &Arc<CompletionQueue> {
        &self.recv_cq
    }

    /// Returns its shared receive queue, if it has no queue of its own.
    pub fn srq(&self) -> Option<&Arc<SharedReceiveQueue>> {
        self.srq.as_ref()
    }

    /// Returns the protection domain that the queue pair is of.
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// Returns the library's own structure, which exists as long as this.
    #[inline]
    pub fn as_raw(&self) -> *mut ibv_qp {
        self.raw.raw()
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // SAFETY: made here, and nothing is made in it.
        self.domain
            .context()
            .release("queue pair", |verbs| unsafe { verbs.destroy_qp(self.as_raw()) });
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePair({:#x} of {})", self.number, self.domain.context().name())
    }
}
