//! Receives that many queue pairs share.

use super::super::bindings::{
    IBV_SRQ_LIMIT, ibv_recv_wr, ibv_srq, ibv_srq_attr, ibv_srq_attr_mask, ibv_srq_init_attr,
};
use super::super::error::VerbsError;
use super::super::table::errno;
use super::domain::ProtectionDomain;
use super::handle::VerbsPointer;
use std::ffi::c_int;
use std::fmt;
use std::ptr;
use std::sync::Arc;

/// A list of work requests that was taken only in part. Those before `bad_wr` were taken, and will
/// complete.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PostFailure<W> {
    /// The system's error number: `ENOMEM` if the queue is full.
    pub errno: i32,
    /// The first request that was not taken.
    pub bad_wr: *mut W,
}

impl<W> PostFailure<W> {
    /// Converts the answer of a device's library, which is an errno, or -1 with the code in
    /// `errno`.
    #[cold]
    pub(super) fn new(answer: c_int, bad_wr: *mut W) -> Self {
        let errno = if answer == -1 { errno() } else { answer.saturating_abs() };
        Self { errno, bad_wr }
    }

    /// Converts it to an error; `call` is the C name of the function.
    pub fn error(&self, call: &'static str, device: &str) -> VerbsError {
        VerbsError::new(call, self.errno).of(device)
    }
}

impl<W> fmt::Debug for PostFailure<W> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PostFailure({} at {:p})", self.errno, self.bad_wr)
    }
}

/// Receives for all queue pairs that were made with it.
pub struct SharedReceiveQueue {
    raw: VerbsPointer<ibv_srq>,
    depth: u32,
    sge: u32,
    domain: Arc<ProtectionDomain>,
}

impl SharedReceiveQueue {
    /// Creates a queue for at least `max_wr` receives, of `max_sge` pieces each.
    ///
    /// # Errors
    /// That is more than the device has, or it has none, or does not answer.
    pub fn create(
        domain: &Arc<ProtectionDomain>,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<Arc<Self>, VerbsError> {
        let mut init = ibv_srq_init_attr {
            srq_context: ptr::null_mut(),
            attr: ibv_srq_attr { max_wr, max_sge, srq_limit: 0 },
        };
        let context = domain.context();
        // SAFETY: the context is open.
        if unsafe { (*context.as_raw()).ops.post_srq_recv }.is_none() {
            return Err(context.name_in(VerbsError::new("ibv_post_srq_recv", libc::ENOSYS)));
        }
        // SAFETY: the domain is there.
        let raw = unsafe { context.verbs().create_srq(domain.as_raw(), &raw mut init) };
        // SAFETY: a successful answer is not null.
        let raw = unsafe { VerbsPointer::new(raw.map_err(|error| context.name_in(error))?) };
        Ok(Arc::new(Self {
            raw,
            depth: init.attr.max_wr,
            sge: init.attr.max_sge,
            domain: Arc::clone(domain),
        }))
    }

    /// Returns the number of receives that it has room for.
    pub fn depth(&self) -> u32 {
        self.depth
    }

    /// Returns the maximum number of pieces of a receive.
    pub fn max_sge(&self) -> u32 {
        self.sge
    }

    /// Has the device send an event (`IBV_EVENT_SRQ_LIMIT_REACHED`), once, when fewer than `limit`
    /// receives are left.
    ///
    /// # Errors
    /// The device cannot do it.
    pub fn set_limit(&self, limit: u32) -> Result<(), VerbsError> {
        const MASK: ibv_srq_attr_mask = IBV_SRQ_LIMIT;
        let context = self.domain.context();
        let mut attr = ibv_srq_attr { max_wr: 0, max_sge: 0, srq_limit: limit };
        // SAFETY: the queue is there.
        unsafe { context.verbs().modify_srq(self.as_raw(), &raw mut attr, MASK.cast_signed()) }
            .map_err(|error| context.name_in(error))
    }

    /// Posts a list of receives.
    ///
    /// # Errors
    /// The queue is full, or a receive is invalid. Those before that one are posted.
    ///
    /// # Safety
    /// The list is valid, and each piece lies in registered memory of the same domain, with its
    /// key. That memory stays, and no Rust reference to it exists, until the receive completes or
    /// all queue pairs of this queue are gone. In a domain [for one
    /// thread](ProtectionDomain::for_one_thread), no other thread posts to this queue meanwhile.
    #[inline]
    pub unsafe fn post(&self, first: *mut ibv_recv_wr) -> Result<(), PostFailure<ibv_recv_wr>> {
        let mut bad = first;
        // SAFETY: the queue is there, and so is its context.
        let call = unsafe { (*(*self.as_raw()).context).ops.post_srq_recv };
        let Some(call) = call else { return Err(PostFailure::new(libc::ENOSYS, first)) };
        // SAFETY: passed on from the caller.
        match unsafe { call(self.as_raw(), first, &raw mut bad) } {
            0 => Ok(()),
            answer => Err(PostFailure::new(answer, bad)),
        }
    }

    /// Returns its domain.
    pub fn domain(&self) -> &Arc<ProtectionDomain> {
        &self.domain
    }

    /// Returns the library's own structure, which exists as long as this.
    #[inline]
    pub fn as_raw(&self) -> *mut ibv_srq {
        self.raw.raw()
    }
}

impl Drop for SharedReceiveQueue {
    fn drop(&mut self) {
        // SAFETY: made here, and its queue pairs held it.
        self.domain
            .context()
            .release("shared receive queue", |verbs| unsafe { verbs.destroy_srq(self.as_raw()) });
    }
}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedReceiveQueue({}, {} deep)", self.domain.context().name(), self.depth)
    }
}
