//! Contexts: their owners, and making one current for a moment.

use super::calls::Calls;
use super::capture::Relaxed;
use super::error::{CONTEXT_IS_DESTROYED, error, is_gone, released};
use super::sys::{self, ContextHandle, CuDevice, DevicePtr, pointer};
use crate::fork::Owner;
use crate::gpu::GpuError;

/// A context that the library works in: the device's primary one, of which it holds a count, or
/// one of the user's.
#[derive(Debug)]
pub(super) struct CudaContext {
    pub(super) calls: &'static Calls,
    pub(super) raw: ContextHandle,
    pub(super) device: CuDevice,
    hold: Hold,
    owner: Owner,
    /// Set if synchronous calls on this context's memory wait until the bytes are written (gpu.md,
    /// streams rule 4). With a driver too old for that, the attribute is set on each allocation
    /// when it is exported.
    pub(super) sync_memops: bool,
}

/// The reason why a context is alive, or the means to tell that it has gone.
#[derive(Debug, Clone, Copy)]
enum Hold {
    /// A count of the primary context, which keeps it alive.
    Count,
    /// An allocation in a context of the user's, with its buffer id. The context's end frees it.
    Anchor(DevicePtr, u64),
    /// Nothing: the caller knows that the context is there.
    Nothing,
}

impl CudaContext {
    /// Checks that the context still exists, without using its handle. The driver does not check
    /// the handle of a destroyed context, and crashes (seen on driver 580). Buffer ids are never
    /// reused.
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

    /// Returns `true` if it is the device's primary context.
    pub(super) fn is_primary(&self) -> bool {
        matches!(self.hold, Hold::Count)
    }

    /// Returns the device's primary context, which is created if it does not exist.
    pub(super) fn primary(calls: &'static Calls, device: CuDevice) -> Result<Self, GpuError> {
        let (mut raw, _relaxed) = (ContextHandle::NULL, Relaxed::enter(calls));
        // SAFETY: the place for the answer is ours; the count taken is given back by `Drop`.
        unsafe { calls.device_primary_ctx_retain(&raw mut raw, device) }?;
        Ok(Self::holding(Hold::Count, calls, raw, device).with_sync_memops())
    }

    /// Adopts a context of the user's, which exists now. The user may destroy it: work in it then
    /// fails, without other effects.
    pub(super) fn adopted(
        calls: &'static Calls,
        raw: ContextHandle,
        device: CuDevice,
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

    /// Wraps a user's context that is made current for one question and left as it is.
    pub(super) fn unowned(calls: &'static Calls, raw: ContextHandle) -> Self {
        Self::holding(Hold::Nothing, calls, raw, 0)
    }

    fn holding(hold: Hold, calls: &'static Calls, raw: ContextHandle, device: CuDevice) -> Self {
        Self { calls, raw, device, hold, owner: Owner::this_process(), sync_memops: false }
    }

    /// Returns `true` if this process may call the driver for the context. A forked child may not:
    /// CUDA's behaviour there is undefined, and a destructor would give back what belongs to the
    /// parent.
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

    /// Makes the context current in this thread until the guard is dropped, and keeps the calls
    /// out of graphs that are being captured. Costs three quick calls if the context is current
    /// already.
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

    /// Makes the context current in this thread, in place of the previous one.
    pub(super) fn stay(&self) -> Result<(), GpuError> {
        self.check()?;
        // SAFETY: as in `enter`.
        unsafe { self.calls.ctx_set_current(self.raw) }
    }

    /// Returns the driver's unique number of a context (handles may be reused), or 0 if the driver
    /// has none.
    pub(super) fn number(calls: &Calls, raw: ContextHandle) -> u64 {
        let mut number = 0;
        // SAFETY: the place for the answer is ours; the callers have the handle from the driver,
        // just now.
        let told = unsafe { calls.ctx_get_id(raw, &raw mut number) };
        told.map_or(0, |()| number)
    }
}

impl Drop for CudaContext {
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

/// Guard: its context is current in this thread while it lives. Then the caller's is again, also
/// after a panic.
#[derive(Debug)]
pub(super) struct Current<'a> {
    pushed: Option<&'a CudaContext>,
    /// Guard, dropped after the context is popped. It stays in its thread, to which the context
    /// belongs.
    _relaxed: Relaxed<'a>,
}

impl Current<'_> {
    /// Returns `true` if the context was current in this thread already.
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
        // SAFETY: the place for the answer is ours. The call pops what `enter` pushed, since every
        // later push had a guard of its own.
        let outcome = unsafe { context.calls.ctx_pop_current(&raw mut popped) };
        debug_assert!(outcome.as_ref().err().is_none_or(is_gone), "{outcome:?}");
    }
}
