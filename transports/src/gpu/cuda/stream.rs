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
use crate::gpu::{Event, EventState, Gpu, GpuError, Grid, Pieces, Stream, Until};
use crate::mem::MemKind;
use std::any::Any;
use std::sync::{Arc, OnceLock};

/// A stream: made here, or one that the program already has.
#[derive(Debug)]
pub struct CudaStream {
    gpu: Arc<CudaGpu>,
    home: Arc<Home>,
    raw: StreamHandle,
    /// Made here, and so destroyed here.
    owned: bool,
    /// How far it has come with its waits, from the first one on. `None`: there was no pinned
    /// memory for it.
    course: OnceLock<Option<Arc<Course>>>,
}

impl CudaStream {
    /// A new stream in a context.
    pub(super) fn new(gpu: Arc<CudaGpu>) -> Result<Self, GpuError> {
        let home = Arc::clone(gpu.home()?);
        let current = home.context.enter()?;
        let raw = home.new_stream()?;
        drop(current);
        Ok(Self { gpu, home, raw, owned: true, course: OnceLock::new() })
    }

    /// A stream that the program has: a `CUstream` or `cudaStream_t`, as a number. 0, 1 and 2 are
    /// CUDA's names for the default streams of the calling thread's current context. It is not
    /// destroyed with this.
    ///
    /// # Safety
    /// It is a stream, and stays one until this and all that was done with it are gone.
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

    /// The stream as the driver's own calls take it.
    pub fn as_raw(&self) -> usize {
        self.raw.0
    }

    /// The device's address of a word of host memory that is registered or pinned, or of device
    /// memory.
    fn word(&self, call: &'static str, word: *mut u64) -> Result<DevicePtr, GpuError> {
        if word.is_null() || !word.is_aligned() {
            let hint = format!("the word at {word:p} is not aligned to 8 bytes, or is none");
            return Err(because(call, super::error::INVALID_VALUE, hint));
        }
        let mut at: DevicePtr = word as usize;
        if !self.home.has_same_addresses() {
            let _relaxed = Relaxed::enter(self.home.calls());
            // SAFETY: the place for the answer is ours; what is no registered memory is refused,
            // and then taken for device memory.
            let _ = unsafe {
                self.home.calls().mem_host_get_device_pointer(&raw mut at, word.cast(), 0)
            };
        }
        Ok(at)
    }

    /// None of the library's work belongs to a graph, where it would be done again, or never, and
    /// be over at no time.
    fn check_not_captured(&self) -> Result<(), GpuError> {
        let mut status = 0;
        // SAFETY: the stream is alive; the place for the answer is ours.
        let asked = unsafe { self.home.calls().stream_is_capturing(self.raw, &raw mut status) };
        // Who lacks the call has no such thing.
        if asked.is_ok() && status != 0 {
            Err(error("cuStreamIsCapturing", STREAM_CAPTURE_UNSUPPORTED))
        } else {
            Ok(())
        }
    }

    /// Before copies and waits: the GPU is claimed for them, where copiers were asked for.
    fn begin_work(&self) -> Result<(), GpuError> {
        self.check_not_captured()?;
        self.gpu.claim_for_copier(&self.home);
        Ok(())
    }

    /// Has the stream wait; the event fires when it is past it. The word is one that the caller may
    /// have it wait for.
    fn hold(&self, wait: Wait) -> Result<Event, GpuError> {
        self.begin_work()?;
        let _current = self.home.context.enter()?;
        self.home.waits.arm(self.raw.0, || {
            let course = self.course.get_or_init(|| Course::new(&self.home).ok());
            let past = course.as_ref().and_then(|course| {
                // SAFETY: the promise that `wait_value64` was given, or a word of another stream's
                // course; waits are given one after the other, as `arm` sees to.
                unsafe { course.wait(self.raw, wait) }
            });
            if let Some(past) = past {
                return Ok(past);
            }
            // Before the wait: a stream that waited with no event to tell of it would count as one
            // that does not wait, and the word that it waits for would be used for something else.
            let past = self.home.spare_event()?;
            let (calls, Wait { at, value, flags }) = (self.home.calls(), wait);
            // SAFETY: as above.
            let whole = unsafe { calls.stream_wait_value64(self.raw, at, value, flags) };
            fall_back(whole, value, |low| {
                // SAFETY: as in `write_value64`.
                unsafe { calls.stream_wait_value32(self.raw, at, low, flags) }
            })?;
            // This fails only in a context in which work has failed, and there the stream waits for
            // nothing any more.
            past.record(self.raw)
        })
    }
}

// SAFETY: as of `CudaGpu`. A wait is given to the stream when there is an event to tell of it, and
// by one call with what tells of it, or before that event is recorded.
unsafe impl Stream for CudaStream {
    fn gpu(&self) -> Result<Arc<dyn Gpu>, GpuError> {
        Ok(Arc::clone(&self.gpu) as Arc<dyn Gpu>)
    }

    unsafe fn copy(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<Event, GpuError> {
        self.begin_work()?;
        // SAFETY: passed on from the caller; the stream is of this device's context.
        unsafe { self.gpu.copy_on(Some(self.raw), dst, src, len) }
    }

    unsafe fn copy_pieces(&self, pieces: &Pieces) -> Result<Event, GpuError> {
        self.begin_work()?;
        // SAFETY: as in `copy`.
        unsafe { self.gpu.copy_pieces_on(Some(self.raw), pieces) }
    }

    unsafe fn copy_grid(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<Event, GpuError> {
        self.begin_work()?;
        // SAFETY: as in `copy`.
        unsafe { self.gpu.copy_grid_on(Some(self.raw), dst, src, grid) }
    }

    fn record(&self) -> Result<Event, GpuError> {
        self.check_not_captured()?;
        let _current = self.home.context.enter()?;
        self.home.record(self.raw)
    }

    fn wait(&self, event: &Event) -> Result<(), GpuError> {
        let state = event.state().map(|state| -> &dyn Any { state });
        if let Some(past) = state.and_then(|state| state.downcast_ref::<Past>()) {
            return if past.query()? { Ok(()) } else { self.hold(past.as_wait()).map(drop) };
        }
        self.check_not_captured()?;
        with_raw(event, |event| {
            let _current = self.home.context.enter()?;
            // SAFETY: both are alive, being held. The driver notes what the event stands for now,
            // so that it may be used again at once.
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

    unsafe fn wait_value64(
        &self,
        word: *const u64,
        value: u64,
        until: Until,
    ) -> Result<Event, GpuError> {
        let at = self.word("cuStreamWaitValue64", word.cast_mut())?;
        let flags = match until {
            Until::Equal => sys::WAIT_EQUAL,
            Until::Reached => sys::WAIT_REACHED,
        };
        self.hold(Wait { at, value, flags })
    }
}

/// A device without operations on 64 bits does those that fit into 32: the upper half of a counter
/// that stays small is 0, and stays so.
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
            // SAFETY: made here; the driver lets the work that it was given end first.
            released("stream", unsafe { self.home.calls().stream_destroy(self.raw) });
        }
    }
}

/// The driver's stream behind one of ours.
pub(super) fn stream_of(stream: &dyn Stream) -> Result<StreamHandle, GpuError> {
    let any: &dyn Any = stream;
    let own = any.downcast_ref::<CudaStream>();
    let own = own.ok_or_else(|| {
        because("cuEventRecord", INVALID_HANDLE, "the stream is another driver's")
    })?;
    own.home.context.check().map(|()| own.raw)
}
