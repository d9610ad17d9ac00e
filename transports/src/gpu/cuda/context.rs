//! Contexts: whose they are, and making one current for a moment.

use super::calls::Calls;
use super::capture::Relaxed;
use super::error::{CONTEXT_IS_DESTROYED, error, is_gone, released};
use super::sys::{self, ContextHandle, Device, DevicePtr, pointer};
use crate::fork::Owner;
use crate::gpu::GpuError;

/// A context that the library works in: the device's primary one, which it holds a count of, or one
/// of the user's.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) calls: &'static Calls,
    pub(super) raw: ContextHandle,
    pub(super) device: Device,
    hold: Hold,
    owner: Owner,
    /// Whether synchronous calls on this context's memory wait until it is really written (gpu.md,
    /// streams rule 4). Where the driver is too old for that, memory is told one by one when it is
    /// exported.
    pub(super) sync_memops: bool,
}

/// What keeps a context, or tells that it has gone.
#[derive(Debug, Clone, Copy)]
enum Hold {
    /// A count of the primary context, which keeps it.
    Count,
    /// An allocation in a context of the user's, with its buffer id: they go together.
    Anchor(DevicePtr, u64),
    /// The caller knows that it is there.
    Nothing,
}

impl Context {
    /// Whether it is still there, asked without its handle: the driver takes a handle to a
    /// destroyed context at its word, and crashes (seen on driver 580). Buffer ids are never given
    /// out twice.
    #[inline]
    pub(super) fn check(&self) -> Result<(), GpuError> {
        match self.hold {
            Hold::Anchor(anchor, id) => self.check_anchor(anchor, id),
            Hold::Count | Hold::Nothing => Ok(()),
        }
    }

    fn check_anchor(&self, anchor: DevicePtr, id: u64) -> Result<(), GpuError> {
        let mut now = 0_u64;
        // SAFETY: the place for the answer is ours, and has its 8 bytes; any address may be asked
        // about.
        let asked = unsafe {
            self.calls.pointer_get_attribute((&raw mut now).cast(), pointer::BUFFER_ID, anchor)
        };
        match asked {
            Ok(()) if now == id => Ok(()),
            _ => Err(error("cuCtxPushCurrent", CONTEXT_IS_DESTROYED)),
        }
    }

    /// Whether it is the device's primary one.
    pub(super) fn is_primary(&self) -> bool {
        matches!(self.hold, Hold::Count)
    }

    /// The device's primary context, made if nobody has made it.
    pub(super) fn primary(calls: &'static Calls, device: Device) -> Result<Self, GpuError> {
        let (mut raw, _relaxed) = (ContextHandle::NULL, Relaxed::enter(calls));
        // SAFETY: the place for the answer is ours; the count taken is given back by `Drop`.
        unsafe { calls.device_primary_ctx_retain(&raw mut raw, device) }?;
        Ok(Self::holding(Hold::Count, calls, raw, device).with_sync_memops())
    }

    /// A context of the user's, who may destroy it: work in it then fails, and nothing else. It is
    /// there now.
    pub(super) fn adopted(
        calls: &'static Calls,
        raw: ContextHandle,
        device: Device,
    ) -> Result<Self, GpuError> {
        let mut context = Self::holding(Hold::Nothing, calls, raw, device);
        let (mut anchor, mut id) = (0, 0_u64);
        let current = context.enter()?;
        // SAFETY: the places for the answers are ours, and as long as they have to be.
        unsafe {
            calls.mem_alloc(&raw mut anchor, 1)?;
            calls.pointer_get_attribute((&raw mut id).cast(), pointer::BUFFER_ID, anchor)?;
        }
        drop(current);
        context.hold = Hold::Anchor(anchor, id);
        Ok(context.with_sync_memops())
    }

    /// A context of somebody's, to be made current for a question and left as it is.
    pub(super) fn unowned(calls: &'static Calls, raw: ContextHandle) -> Self {
        Self::holding(Hold::Nothing, calls, raw, 0)
    }

    fn holding(hold: Hold, calls: &'static Calls, raw: ContextHandle, device: Device) -> Self {
        Self { calls, raw, device, hold, owner: Owner::this_process(), sync_memops: false }
    }

    /// Whether this process may call the driver about it. A fork may not: what CUDA does there is
    /// undefined, and what a destructor would give back is its parent's.
    #[inline]
    pub(super) fn is_here(&self) -> bool {
        self.owner.is_here()
    }

    fn with_sync_memops(mut self) -> Self {
        let set = || {
            let _current = self.enter()?;
            let mut flags = 0;
            // SAFETY: the place for the answer is ours; setting a flag of the current context
            // touches no memory.
            unsafe {
                self.calls.ctx_get_flags(&raw mut flags)?;
                self.calls.ctx_set_flags(flags | sys::CTX_SYNC_MEMOPS)
            }
        };
        let outcome: Result<(), GpuError> = set();
        if let Err(why) = &outcome {
            tracing::debug!(%why, "SYNC_MEMOPS is set when memory is exported");
        }
        self.sync_memops = outcome.is_ok();
        self
    }

    /// Makes it current in this thread, and what is done in it no matter of graphs that are
    /// captured, until the guard is dropped. Costs three quick calls where it already is.
    #[inline]
    pub(super) fn enter(&self) -> Result<Current<'_>, GpuError> {
        self.check()?;
        let relaxed = Relaxed::enter(self.calls);
        let mut current = ContextHandle::NULL;
        // SAFETY: the place for the answer is ours.
        let known = unsafe { self.calls.ctx_get_current(&raw mut current) };
        if known.is_ok() && current == self.raw {
            return Ok(Current { pushed: None, _relaxed: relaxed });
        }
        // SAFETY: a context that is retained here, or one of the user's that was there just now.
        unsafe { self.calls.ctx_push_current(self.raw) }?;
        Ok(Current { pushed: Some(self), _relaxed: relaxed })
    }

    /// Makes it current in this thread, in the place of the one that is.
    pub(super) fn stay(&self) -> Result<(), GpuError> {
        self.check()?;
        // SAFETY: as in `enter`.
        unsafe { self.calls.ctx_set_current(self.raw) }
    }

    /// The number by which the driver tells contexts apart for good: a handle may come back. 0
    /// where it has none.
    pub(super) fn number(calls: &Calls, raw: ContextHandle) -> u64 {
        let mut number = 0;
        // SAFETY: the place for the answer is ours; the callers have the handle from the driver,
        // just now.
        let told = unsafe { calls.ctx_get_id(raw, &raw mut number) };
        told.map_or(0, |()| number)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if !self.is_here() {
            return;
        }
        match self.hold {
            Hold::Count => {
                let _relaxed = Relaxed::enter(self.calls);
                // SAFETY: gives back the count that `primary` took.
                let given_back = unsafe { self.calls.device_primary_ctx_release(self.device) };
                released("primary context", given_back);
            }
            Hold::Anchor(anchor, _) => {
                if let Ok(_current) = self.enter() {
                    // SAFETY: allocated by `adopted`, in this context, which is still there.
                    released("anchor", unsafe { self.calls.mem_free(anchor) });
                }
            }
            Hold::Nothing => {}
        }
    }
}

/// While this lives its context is current in this thread; then the caller's is again, also when a
/// panic passes.
#[derive(Debug)]
pub(super) struct Current<'a> {
    pushed: Option<&'a Context>,
    /// Goes after the context. It keeps this in its thread, to which the context belongs.
    _relaxed: Relaxed<'a>,
}

impl Current<'_> {
    /// Whether this thread had the context already.
    #[inline]
    pub(super) fn was_there(&self) -> bool {
        self.pushed.is_none()
    }
}

impl Drop for Current<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(context) = self.pushed else { return };
        let mut popped = ContextHandle::NULL;
        // SAFETY: the place for the answer is ours; what is taken off is what `enter` put on, since
        // whatever was put on after it had a guard of its own.
        let outcome = unsafe { context.calls.ctx_pop_current(&raw mut popped) };
        debug_assert!(outcome.as_ref().err().is_none_or(is_gone), "{outcome:?}");
    }
}
