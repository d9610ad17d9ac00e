//! Driver calls while other threads capture streams into graphs.
//!
//! In the default, global mode of a capture, the driver refuses potentially unsafe calls of other
//! threads, such as an event query or an allocation. Such a call also spoils the capture. No work
//! of the library belongs to a graph: streams that are being captured are refused
//! (`CudaStream::check_not_captured`). So its calls declare themselves safe, as those of PyTorch's
//! allocator do.

use super::calls::Calls;
use std::ffi::c_int;
use std::marker::PhantomData;

/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
const RELAXED: c_int = 2;

/// Guard: while it lives, this thread's calls neither fail during a capture nor spoil one.
#[derive(Debug)]
pub(super) struct Relaxed<'a> {
    calls: &'a Calls,
    /// The thread's mode, if it was another.
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
        // A driver without the call is older than every supported one.
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
