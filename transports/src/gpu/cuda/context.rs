//! Contexts: whose they are, and making one current for a moment.

use super::calls::Calls;
use super::error::{is_gone, released};
use super::sys::{self, ContextHandle, Device};
use crate::gpu::GpuError;
use std::marker::PhantomData;

/// A context that the library works in: the device's primary one, which it holds a count of, or one of the user's.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) calls: &'static Calls,
    pub(super) raw: ContextHandle,
    pub(super) device: Device,
    retained: bool,
    /// Whether synchronous calls on this context's memory wait until it is really written (gpu.md, streams rule 4).
    /// Where the driver is too old for that, memory is told one by one when it is exported.
    pub(super) sync_memops: bool,
}

impl Context {
    /// The device's primary context, made if nobody has made it.
    pub(super) fn primary(calls: &'static Calls, device: Device) -> Result<Self, GpuError> {
        let mut raw = ContextHandle::NULL;
        // SAFETY: the place for the answer is ours; the count taken is given back by `Drop`.
        unsafe { calls.device_primary_ctx_retain(&raw mut raw, device) }?;
        Ok(Self { calls, raw, device, retained: true, sync_memops: false }.with_sync_memops())
    }

    /// A context of the user's, who may destroy it: work in it then fails, and nothing else.
    pub(super) fn adopted(calls: &'static Calls, raw: ContextHandle, device: Device) -> Self {
        Self { calls, raw, device, retained: false, sync_memops: false }.with_sync_memops()
    }

    /// A context of somebody's, to be made current for a question and left as it is.
    pub(super) fn unowned(calls: &'static Calls, raw: ContextHandle) -> Self {
        Self { calls, raw, device: 0, retained: false, sync_memops: false }
    }

    fn with_sync_memops(mut self) -> Self {
        let set = || {
            let _current = self.enter()?;
            let mut flags = 0;
            // SAFETY: the place for the answer is ours; setting a flag of the current context touches no memory.
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

    /// Makes it current in this thread, until the guard is dropped. Costs one query where it already is.
    #[inline]
    pub(super) fn enter(&self) -> Result<Current<'_>, GpuError> {
        let mut current = ContextHandle::NULL;
        // SAFETY: the place for the answer is ours.
        let known = unsafe { self.calls.ctx_get_current(&raw mut current) };
        if known.is_ok() && current == self.raw {
            return Ok(Current { pushed: None, _thread: PhantomData });
        }
        // SAFETY: a context that is retained here, or one of the user's; the driver refuses one that is destroyed.
        unsafe { self.calls.ctx_push_current(self.raw) }?;
        Ok(Current { pushed: Some(self), _thread: PhantomData })
    }

    /// The number by which the driver tells contexts apart for good: a handle may come back. 0 where it has none.
    pub(super) fn number(calls: &Calls, raw: ContextHandle) -> u64 {
        let mut number = 0;
        // SAFETY: the place for the answer is ours; the driver refuses what is no context.
        let told = unsafe { calls.ctx_get_id(raw, &raw mut number) };
        told.map_or(0, |()| number)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.retained {
            // SAFETY: gives back the count that `primary` took.
            released("primary context", unsafe { self.calls.device_primary_ctx_release(self.device) });
        }
    }
}

/// While this lives its context is current in this thread; then the caller's is again, also when a panic passes.
#[derive(Debug)]
pub(super) struct Current<'a> {
    pushed: Option<&'a Context>,
    /// A thread's context is restored in that thread.
    _thread: PhantomData<*const ()>,
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let Some(context) = self.pushed else { return };
        let mut popped = ContextHandle::NULL;
        // SAFETY: the place for the answer is ours; what is taken off is what `enter` put on, since whatever was put on
        // after it had a guard of its own.
        let outcome = unsafe { context.calls.ctx_pop_current(&raw mut popped) };
        debug_assert!(outcome.as_ref().err().is_none_or(is_gone), "{outcome:?}");
    }
}
