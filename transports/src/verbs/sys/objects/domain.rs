//! Protection domains, which group queue pairs and memory.

use super::super::bindings::{ibv_parent_domain_init_attr, ibv_pd, ibv_td, ibv_td_init_attr};
use super::super::error::VerbsError;
use super::super::table::{Answer, set_errno};
use super::context::Context;
use super::extended::extended;
use super::handle::VerbsPointer;
use std::fmt;
use std::sync::Arc;

/// A protection domain: its queue pairs use the memory that is registered in it.
pub struct ProtectionDomain {
    raw: VerbsPointer<ibv_pd>,
    origin: DomainOrigin,
    context: Arc<Context>,
}

/// Origin of a protection domain.
enum DomainOrigin {
    /// Allocated here.
    Ours,
    /// The program's.
    Adopted,
    /// A domain for a single thread, around another one.
    OneThread { thread: VerbsPointer<ibv_td>, base: Arc<ProtectionDomain> },
}

impl ProtectionDomain {
    /// Allocates a protection domain.
    ///
    /// # Errors
    /// The device has no more, or does not answer.
    pub fn alloc(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the context is open.
        let raw = unsafe { context.verbs().alloc_pd(context.as_raw()) };
        // SAFETY: a successful answer is not null.
        let raw = unsafe { VerbsPointer::new(raw.map_err(|error| context.name_in(error))?) };
        Ok(Arc::new(Self { raw, origin: DomainOrigin::Ours, context: Arc::clone(context) }))
    }

    /// Adopts a protection domain of the program's, maybe from another library. Dropping this does
    /// not deallocate it.
    ///
    /// # Safety
    /// It is of this context, and is not deallocated before this and all that is made in it are
    /// gone.
    pub unsafe fn from_raw(context: &Arc<Context>, raw: *mut ibv_pd) -> Arc<Self> {
        // SAFETY: the caller's promise.
        let raw = unsafe { VerbsPointer::new(raw) };
        Arc::new(Self { raw, origin: DomainOrigin::Adopted, context: Arc::clone(context) })
    }

    /// Makes a domain whose queue pairs and shared receive queues are used by one thread at a
    /// time. The device's library then takes no locks for them. Posting is
    /// [`unsafe`](super::QueuePair::post_send), and its caller makes that promise. Memory that is
    /// registered in either domain is valid in both.
    ///
    /// # Errors
    /// The library or the device has no thread domains ([`VerbsError::is_unsupported`]), or no
    /// more of them.
    pub fn for_one_thread(self: &Arc<Self>) -> Result<Arc<Self>, VerbsError> {
        let context = &self.context;
        let lacks = |call| context.name_in(VerbsError::new(call, libc::EOPNOTSUPP));
        // SAFETY: the context is open.
        let alloc_td = unsafe { extended!(context.as_raw(), alloc_td) }
            .ok_or_else(|| lacks("ibv_alloc_td"))?;
        // SAFETY: the context is open.
        let alloc_parent = unsafe { extended!(context.as_raw(), alloc_parent_domain) }
            .ok_or_else(|| lacks("ibv_alloc_parent_domain"))?;
        let mut attr = ibv_td_init_attr::default();
        set_errno(0);
        // SAFETY: the context is open.
        let thread = unsafe { alloc_td(context.as_raw(), &raw mut attr) }
            .good()
            .map_err(|errno| context.name_in(VerbsError::new("ibv_alloc_td", errno)))?;
        let mut attr = ibv_parent_domain_init_attr {
            pd: self.base().as_raw(),
            td: thread,
            ..Default::default()
        };
        set_errno(0);
        // SAFETY: the context is open, and both parts are there.
        let raw =
            unsafe { alloc_parent(context.as_raw(), &raw mut attr) }.good().map_err(|errno| {
                // SAFETY: made above, and not in use yet.
                unsafe { dealloc_td(context, thread) };
                context.name_in(VerbsError::new("ibv_alloc_parent_domain", errno))
            })?;
        // SAFETY: a successful answer is not null.
        let (raw, thread) = unsafe { (VerbsPointer::new(raw), VerbsPointer::new(thread)) };
        let origin = DomainOrigin::OneThread { thread, base: Arc::clone(self.base()) };
        Ok(Arc::new(Self { raw, origin, context: Arc::clone(context) }))
    }

    /// Returns its context.
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the library's own structure, which exists as long as this.
    pub fn as_raw(&self) -> *mut ibv_pd {
        self.raw.raw()
    }

    /// Returns the domain that memory is registered in: this, or the one that this is around.
    pub(super) fn base(self: &Arc<Self>) -> &Arc<Self> {
        if let DomainOrigin::OneThread { base, .. } = &self.origin { base } else { self }
    }
}

/// Deallocates a thread domain.
///
/// # Safety
/// It is of that context, and nothing is made in it.
unsafe fn dealloc_td(context: &Context, thread: *mut ibv_td) {
    context.release("thread domain", |_| {
        // SAFETY: the context is open.
        let call = unsafe { extended!(context.as_raw(), dealloc_td) };
        // SAFETY: the caller's promise.
        let answer = call.map_or(libc::EOPNOTSUPP, |call| unsafe { call(thread) });
        answer.good().map_err(|errno| VerbsError::new("ibv_dealloc_td", errno))
    });
}

impl Drop for ProtectionDomain {
    fn drop(&mut self) {
        if matches!(self.origin, DomainOrigin::Adopted) {
            return;
        }
        // SAFETY: made here, and all objects made in it held it.
        self.context
            .release("protection domain", |verbs| unsafe { verbs.dealloc_pd(self.as_raw()) });
        if let DomainOrigin::OneThread { thread, .. } = &self.origin {
            // SAFETY: made here, and the only domain that used it is gone.
            unsafe { dealloc_td(&self.context, thread.raw()) };
        }
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.origin {
            DomainOrigin::Ours => "",
            DomainOrigin::Adopted => ", the program's",
            DomainOrigin::OneThread { .. } => ", for one thread",
        };
        write!(f, "ProtectionDomain({}{kind})", self.context.name())
    }
}
