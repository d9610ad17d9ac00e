//! Beside threads that capture streams into graphs.
//!
//! While a thread captures in the global mode, which is the default, the driver refuses other
//! threads what it calls potentially unsafe, as to ask whether an event has fired, or to allocate;
//! and it spoils the capture of whom they never heard of. Nothing of the library's belongs to a
//! graph (streams that are being captured are refused: `CudaStream::check_not_captured`), so its
//! calls say that they may be made, as those of PyTorch's allocator do.

use super::calls::Calls;
use std::ffi::c_int;
use std::marker::PhantomData;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

/// While this lives, this thread's calls neither mind nor spoil a capture.
#[derive(Debug)]
pub(super) struct Relaxed<'a> {
    calls: &'a Calls,
    /// The thread's mode, where it was another.
    before: Option<c_int>,
    /// A thread's mode is restored in that thread.
    _thread: PhantomData<*const ()>,
}

impl<'a> Relaxed<'a> {
    /// Costs some 10 ns, and as much again where the mode is restored.
    #[inline]
    pub(super) fn enter(calls: &'a Calls) -> Self {
        let mut mode = RELAXED;
        // SAFETY: the place for the mode is ours.
        let asked = unsafe { calls.thread_exchange_stream_capture_mode(&raw mut mode) };
        // Who lacks the call is older than all that we know of.
        let before = (asked.is_ok() && mode != RELAXED).then_some(mode);
        Self { calls, before, _thread: PhantomData }
    }
}

impl Drop for Relaxed<'_> {
    #[inline]
    fn drop(&mut self) {
        let Some(mut mode) = self.before else { return };
        // SAFETY: as above.
        let _ = unsafe { self.calls.thread_exchange_stream_capture_mode(&raw mut mode) };
    }
}
