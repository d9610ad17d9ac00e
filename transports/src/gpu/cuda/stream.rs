//! Streams of the user's own.

use super::capture::Relaxed;
use super::course::{Course, Past, Wait};
use super::device::CudaGpu;
use super::driver::CudaDriver;
use super::error::{
    INVALID_HANDLE, NOT_SUPPORTED, STREAM_CAPTURE_UNSUPPORTED, because, error, released,
};
use super::event::with_raw;
use super::home::Home;
use super::sys::{self, ContextHandle, DevicePtr, StreamHandle};
use crate::gpu::{EventState, Gpu, GpuError, GpuEvent, Grid, Pieces, Stream};
use crate::mem::MemKind;
use std::any::Any;
use std::sync::{Arc, OnceLock};

/// A stream: made here, or one that the program already has.
#[derive(Debug)]
pub struct CudaStream {
    gpu: Arc<CudaGpu>,
    home: Arc<Home>,
    raw: StreamHandle,
    /// Set if the stream was made here, so that it is destroyed here.
    owned: bool,
    /// Progress through the stream's waits, from the first one on. `None`: there was no pinned
    /// memory for it.
    course: OnceLock<Option<Arc<Course>>>,
}

impl CudaStream {
    /// Creates a stream in the device's context.
    pub(super) fn new(gpu: Arc<CudaGpu>) -> Result<Self, GpuError> {
        let home = Arc::clone(gpu.home()?);
        let current = home.context.enter()?;
        let raw = home.new_stream()?;
        drop(current);
        Ok(Self { gpu, home, raw, owned: true, course: OnceLock::new() })
    }

    /// Wraps a stream that the program has: a `CUstream` or `cudaStream_t`, as a number. 0, 1 and
    /// 2 are CUDA's names for the default streams of the calling thread's current context.
    /// Dropping the result does not destroy the stream.
    ///
    /// # Safety
    /// It is a stream, and stays one until the result and all work done with it are gone.
    ///
    /// # Errors
    /// There is no such stream, or, for a default stream, no current context.
    pub unsafe fn from_raw(driver: &CudaDriver, raw: usize) -> Result<Self, GpuError> {
        let shared = driver.ready("cuStreamGetCtx")?;
        let (calls, raw) = (shared.calls, StreamHandle(raw));
        let mut context = ContextHandle::NULL;
        let relaxed = Relaxed::enter(calls);
        // SAFETY: the caller's promise; the place for the answer is ours.
        unsafe { calls.stream_get_ctx(raw, &raw mut context) }?;
        drop(relaxed);
        let gpu = shared.gpu_in(context)?;
        Ok(Self { home: Arc::clone(gpu.home()?), gpu, raw, owned: false, course: OnceLock::new() })
    }

    /// Returns the stream as the driver's own calls take it.
    pub fn as_raw(&self) -> usize {
        self.raw.0
    }

    /// Returns the device's address of a word of registered or pinned host memory, or of device
    /// memory.
    fn word(&self, call: &'static str, word: *mut u64) -> Result<DevicePtr, GpuError> {
        if word.is_null() || !word.is_aligned() {
            let hint = format!("the word at {word:p} is not aligned to 8 bytes, or is none");
            return Err(because(call, super::error::INVALID_VALUE, hint));
        }
        let mut at: DevicePtr = word as usize;
        if !self.home.has_same_addresses() {
            let _relaxed = Relaxed::enter(self.home.calls());
            // SAFETY: the place for the answer is ours. The call refuses other memory, which is
            // then taken for device memory.
            let _ = unsafe {
                self.home.calls().mem_host_get_device_pointer(&raw mut at, word.cast(), 0)
            };
        }
        Ok(at)
    }

    /// Checks that the stream is not being captured. No work of the library belongs to a graph: a
    /// graph may run it again or never, and it would have no end.
    fn check_not_captured(&self) -> Result<(), GpuError> {
        let mut status = 0;
        // SAFETY: the stream is alive; the place for the answer is ours.
        let asked = unsafe { self.home.calls().stream_is_capturing(self.raw, &raw mut status) };
        // A driver without the call cannot capture streams.
        if asked.is_ok() && status != 0 {
            Err(error("cuStreamIsCapturing", STREAM_CAPTURE_UNSUPPORTED))
        } else {
            Ok(())
        }
    }

    /// Prepares copies and waits: claims the GPU for them, if copiers were asked for.
    fn begin_work(&self) -> Result<(), GpuError> {
        self.check_not_captured()?;
        self.gpu.claim_for_copier(&self.home);
        Ok(())
    }

    /// Has the stream wait. The returned event fires when the stream is past the wait. The caller
    /// may have the stream wait for this word.
    fn hold(&self, wait: Wait) -> Result<GpuEvent, GpuError> {
        self.begin_work()?;
        let _current = self.home.context.enter()?;
        self.home.waits.arm(self.raw.0, || {
            let course = self.course.get_or_init(|| Course::new(&self.home).ok());
            let past = course.as_ref().and_then(|course| {
                // SAFETY: the promise of `wait_value64`'s caller, or a word of another stream's
                // course. `arm` sees to it that waits are given one after the other.
                unsafe { course.wait(self.raw, wait) }
            });
            if let Some(past) = past {
                return Ok(past);
            }
            // Taken before the wait. A waiting stream without an event would count as one that
            // does not wait, and its word would be used for another purpose.
            let past = self.home.spare_event()?;
            let (calls, Wait { at, value }) = (self.home.calls(), wait);
            // SAFETY: as above.
            let whole =
                unsafe { calls.stream_wait_value64(self.raw, at, value, sys::WAIT_REACHED) };
            fall_back(whole, value, |low| {
                // SAFETY: as in `write_value64`.
                unsafe { calls.stream_wait_value32(self.raw, at, low, sys::WAIT_REACHED) }
            })?;
            // This fails only in a context in which work has failed. There the stream waits no
            // longer.
            past.record(self.raw)
        })
    }
}

// SAFETY: as for `CudaGpu`. A stream is given a wait only if an event tells of its end. One call
// gives both, or the event is recorded behind the wait.
unsafe impl Stream for CudaStream {
    fn gpu(&self) -> Result<Arc<dyn Gpu>, GpuError> {
        Ok(Arc::clone(&self.gpu) as Arc<dyn Gpu>)
    }

    unsafe fn copy(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<GpuEvent, GpuError> {
        self.begin_work()?;
        // SAFETY: passed on from the caller; the stream is of this device's context.
        unsafe { self.gpu.copy_on(Some(self.raw), dst, src, len) }
    }

    unsafe fn copy_pieces(&self, pieces: &Pieces) -> Result<GpuEvent, GpuError> {
        self.begin_work()?;
        // SAFETY: as in `copy`.
        unsafe { self.gpu.copy_pieces_on(Some(self.raw), pieces) }
    }

    unsafe fn copy_grid(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<GpuEvent, GpuError> {
        self.begin_work()?;
        // SAFETY: as in `copy`.
        unsafe { self.gpu.copy_grid_on(Some(self.raw), dst, src, grid) }
    }

    fn record(&self) -> Result<GpuEvent, GpuError> {
        self.check_not_captured()?;
        let _current = self.home.context.enter()?;
        self.home.record(self.raw)
    }

    fn wait(&self, event: &GpuEvent) -> Result<(), GpuError> {
        let state = event.state().map(|state| -> &dyn Any { state });
        if let Some(past) = state.and_then(|state| state.downcast_ref::<Past>()) {
            return if past.query()? { Ok(()) } else { self.hold(past.as_wait()).map(drop) };
        }
        self.check_not_captured()?;
        with_raw(event, |event| {
            let _current = self.home.context.enter()?;
            // SAFETY: both are held, so they are alive. The driver notes the event's present
            // record, so that the event may be reused at once.
            unsafe { self.home.calls().stream_wait_event(self.raw, event, 0) }
        })
    }

    fn synchronize(&self) -> Result<(), GpuError> {
        let _current = self.home.context.enter()?;
        // SAFETY: the stream is alive.
        unsafe { self.home.calls().stream_synchronize(self.raw) }
    }

    unsafe fn write_value64(&self, word: *mut u64, value: u64) -> Result<(), GpuError> {
        self.check_not_captured()?;
        let (calls, at) = (self.home.calls(), self.word("cuStreamWriteValue64", word)?);
        let _current = self.home.context.enter()?;
        // SAFETY: the caller's promise.
        let whole = unsafe { calls.stream_write_value64(self.raw, at, value, 0) };
        fall_back(whole, value, |low| {
            // SAFETY: the lower half of the word, which is the first on machines that have these
            // GPUs.
            unsafe { calls.stream_write_value32(self.raw, at, low, 0) }
        })
    }

    unsafe fn wait_value64(&self, word: *const u64, value: u64) -> Result<GpuEvent, GpuError> {
        let at = self.word("cuStreamWaitValue64", word.cast_mut())?;
        self.hold(Wait { at, value })
    }
}

/// Falls back to 32 bits on a device without 64-bit operations, for values that fit. The upper
/// half of a counter that stays small is 0, and stays so.
fn fall_back(
    whole: Result<(), GpuError>,
    value: u64,
    half: impl FnOnce(u32) -> Result<(), GpuError>,
) -> Result<(), GpuError> {
    match (whole, u32::try_from(value)) {
        (Err(error), Ok(low))
            if matches!(error.code, NOT_SUPPORTED | super::error::MISSING_CALL) =>
        {
            half(low)
        }
        (whole, _) => whole,
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.owned
            && self.home.context.is_here()
            && let Ok(_current) = self.home.context.enter()
        {
            // SAFETY: made here; the driver lets the stream's work end first.
            released("stream", unsafe { self.home.calls().stream_destroy(self.raw) });
        }
    }
}

/// Returns the driver's stream behind one of ours.
pub(super) fn stream_of(stream: &dyn Stream) -> Result<StreamHandle, GpuError> {
    let any: &dyn Any = stream;
    let own = any.downcast_ref::<CudaStream>();
    let own = own.ok_or_else(|| {
        because("cuEventRecord", INVALID_HANDLE, "the stream is another driver's")
    })?;
    own.home.context.check().map(|()| own.raw)
}
