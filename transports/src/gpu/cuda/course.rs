//! Progress of a stream through the waits that it was given.
//!
//! Recording an event is one call, and each query of it another; each takes as long as a small
//! copy. So a wait has a number in its stream. The call that gives the stream the wait also gives
//! it the write of that number to a word of pinned memory. A query reads the word. Only the stream
//! writes the word; the CPU only reads it.

use super::error::{MISSING_CALL, NOT_SUPPORTED};
use super::home::Home;
use super::lane::CopyDirection;
use super::sys::{self, DevicePtr, MemOp, StreamHandle};
use crate::gpu::{EventState, GpuError, GpuEvent};
use parking_lot::Mutex;
use std::any::Any;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes that words are cut from at a time.
const PAGE: usize = 4096;

/// Bytes from one word to the next, so that streams do not slow each other down.
const STRIDE: usize = 64;

/// Words for the streams of one context.
#[derive(Debug, Default)]
pub(super) struct CourseWords {
    /// Addresses of words that no stream will write any more.
    free: Mutex<Vec<usize>>,
    /// Set once the driver has refused two operations in one call.
    refused: AtomicBool,
}

/// A stream's word.
pub(super) struct Course {
    home: Arc<Home>,
    addr: usize,
    /// The number of the last wait that the stream was given.
    given: AtomicU64,
}

impl std::fmt::Debug for Course {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Course({} of {})", self.come(), self.given.load(Ordering::Relaxed))
    }
}

/// A wait until a word has reached a value.
#[derive(Clone, Copy)]
pub(super) struct Wait {
    pub(super) at: DevicePtr,
    pub(super) value: u64,
}

impl Course {
    /// Creates the course of a stream that has waited for nothing yet. The context is current.
    ///
    /// # Errors
    /// There is no pinned memory.
    pub(super) fn new(home: &Arc<Home>) -> Result<Arc<Self>, GpuError> {
        let kept = home.courses.free.lock().pop();
        let addr = match kept {
            Some(addr) => addr,
            None => more_words(home)?,
        };
        let course = Self { home: Arc::clone(home), addr, given: AtomicU64::new(0) };
        // A reused word goes on counting.
        course.given.store(course.come(), Ordering::Relaxed);
        Ok(Arc::new(course))
    }

    /// Returns the number of the last wait that the stream is past.
    fn come(&self) -> u64 {
        // SAFETY: an aligned word of pinned memory, which is never given back, and which only
        // atomics and the stream use. Callers that may come after the context's end have checked
        // that it exists.
        unsafe { AtomicU64::from_ptr(self.addr as *mut u64) }.load(Ordering::Acquire)
    }

    /// Gives the stream a wait, and behind it the write of the word. `None`: this driver does not
    /// do both in one call, and has done neither. The context is current, and no other thread
    /// gives this stream a wait meanwhile.
    ///
    /// # Safety
    /// As [`Stream::wait_value64`](crate::gpu::Stream::wait_value64); the stream is the one of
    /// this course.
    pub(super) unsafe fn wait(
        self: &Arc<Self>,
        stream: StreamHandle,
        wait: Wait,
    ) -> Option<GpuEvent> {
        let courses = &self.home.courses;
        if courses.refused.load(Ordering::Relaxed) {
            return None;
        }
        let number = self.given.load(Ordering::Relaxed) + 1;
        let Wait { at, value } = wait;
        let mut both = [
            MemOp::new(sys::MEM_OP_WAIT_64, at, value, sys::WAIT_REACHED),
            MemOp::new(sys::MEM_OP_WRITE_64, self.addr, number, sys::WRITE_WITHOUT_FENCE),
        ];
        // SAFETY: the caller's promise; the word is pinned memory, and `both` holds the stated
        // number of operations.
        let given =
            unsafe { self.home.calls().stream_batch_mem_op(stream, 2, both.as_mut_ptr(), 0) };
        match given {
            Ok(()) => {
                self.given.store(number, Ordering::Relaxed);
                Some(GpuEvent::new(Arc::new(Past { course: Arc::clone(self), number })))
            }
            Err(why) => {
                // Other errors are reported by the wait that is given by itself.
                if matches!(why.code, NOT_SUPPORTED | MISSING_CALL) {
                    courses.refused.store(true, Ordering::Relaxed);
                }
                tracing::debug!(%why, "a wait and what tells of it are two calls");
                None
            }
        }
    }
}

impl Drop for Course {
    fn drop(&mut self) {
        // A stream that has not reached its last wait will still write the word.
        let context = &self.home.context;
        if context.is_here()
            && context.check().is_ok()
            && self.come() == self.given.load(Ordering::Relaxed)
        {
            self.home.courses.free.lock().push(self.addr);
        }
    }
}

/// Cuts a page into words, and returns one of them. The page stays as long as the context: it
/// could be freed only when no stream waits.
fn more_words(home: &Home) -> Result<usize, GpuError> {
    let mut page = null_mut();
    // SAFETY: the place for the answer is ours.
    unsafe { home.calls().mem_host_alloc(&raw mut page, PAGE, sys::HOST_PORTABLE) }?;
    // SAFETY: the bytes that were just allocated.
    unsafe { page.cast::<u8>().write_bytes(0, PAGE) };
    let first = page as usize;
    home.courses.free.lock().extend((STRIDE..PAGE).step_by(STRIDE).map(|offset| first + offset));
    Ok(first)
}

/// Event that fires when a stream is past a wait.
pub(super) struct Past {
    course: Arc<Course>,
    number: u64,
}

impl Past {
    /// Returns the same condition as a wait for another stream.
    pub(super) fn as_wait(&self) -> Wait {
        Wait { at: self.course.addr, value: self.number }
    }
}

impl EventState for Past {
    fn query(&self) -> Result<bool, GpuError> {
        let home = &self.course.home;
        // Pinned memory goes with its context.
        home.context.check()?;
        if self.course.come() >= self.number {
            return Ok(true);
        }
        // In a context where work has failed, streams make no progress. Every query returns that
        // error.
        match home.lanes_stream(CopyDirection::Within) {
            Some(stream) => home.is_idle(stream).map(|_| false),
            None => Ok(false),
        }
    }

    fn wait(&self) -> Result<(), GpuError> {
        while !self.query()? {
            std::thread::yield_now();
        }
        Ok(())
    }

    fn is_behind(&self, earlier: &dyn EventState) -> bool {
        let earlier: &dyn Any = earlier;
        earlier.downcast_ref::<Self>().is_some_and(|earlier| {
            Arc::ptr_eq(&earlier.course, &self.course) && earlier.number <= self.number
        })
    }
}
