//! The engines: threads that move bytes, each in the order of its stream.
//!
//! One thread per stream, the library's two internal streams of each device included; streams run
//! concurrently, a stream's own work one after the other. This is the only file of the simulated
//! driver that reads or writes memory.

#![expect(clippy::disallowed_methods, reason = "the copy engine of a simulated GPU")]

use super::copier::EngineCopy;
use super::error::{LAUNCH_FAILED, OPERATING_SYSTEM, error};
use super::event::Promise;
use super::faults::GpuFaults;
use super::memory::Alias;
use super::standstill::Standstill;
use carrack_transports::gpu::{GpuError, GpuEvent};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

/// One end of a copy.
pub(super) enum End {
    /// Host memory; the caller of `Gpu::copy` promised that it stays.
    Host(NonNull<u8>),
    /// An allocation, held until the copy ends, and an offset in it.
    Device(Arc<Alias>, usize),
}

// SAFETY: one engine uses the host address, on any thread. The promise of `Gpu::copy` keeps it
// valid until the event has fired.
unsafe impl Send for End {}

impl End {
    pub(super) fn address(&self) -> NonNull<u8> {
        match self {
            Self::Host(ptr) => *ptr,
            Self::Device(alias, offset) => alias.at(*offset),
        }
    }
}

/// An aligned word of host memory that a stream and the host share.
pub(super) struct Word(pub(super) NonNull<u64>);

// SAFETY: the word is used by atomic loads and stores only. By the promise of
// `Stream::write_value64` it stays until the stream has used it.
unsafe impl Send for Word {}

impl Word {
    pub(super) fn load(&self) -> u64 {
        self.atomic().load(Ordering::Acquire)
    }

    pub(super) fn store(&self, value: u64) {
        self.atomic().store(value, Ordering::Release);
    }

    fn atomic(&self) -> &AtomicU64 {
        // SAFETY: aligned, allocated, and used by atomics only, as the stream was promised.
        unsafe { AtomicU64::from_ptr(self.0.as_ptr()) }
    }
}

/// One of several grouped copies: target, source, bytes.
pub(super) type CopyPart = (End, End, usize);

/// A copy whose ends have been checked, or several grouped ones.
pub(super) struct Copy {
    pub(super) parts: Vec<CopyPart>,
    pub(super) delay: Duration,
    /// The fault that was ordered for it.
    pub(super) fail: Option<GpuError>,
    pub(super) done: Promise,
    /// Count of the library's own copies, released before the event fires.
    pub(super) in_flight: Option<EngineCopy>,
}

/// Body of a kernel.
pub(super) type KernelBody = Box<dyn FnOnce() -> Result<(), GpuError> + Send>;

/// Work for a stream.
pub(super) enum StreamJob {
    Copy(Copy),
    Launch { body: KernelBody, delay: Duration },
    Record(Promise),
    Wait(GpuEvent),
    Hold(Word, u64),
}

/// Sender of work to a stream's thread, which ends when this is dropped and all work is done.
#[derive(Debug)]
pub(super) struct Queue(Sender<StreamJob>);

impl Queue {
    /// Starts a stream's thread.
    pub(super) fn start(
        name: String,
        faults: Arc<GpuFaults>,
        device: Arc<Standstill>,
    ) -> Result<Self, GpuError> {
        let (give, take) = channel();
        std::thread::Builder::new()
            .name(name)
            .spawn(move || run(&take, &faults, &device))
            .map_err(|why| {
                error("stream", OPERATING_SYSTEM, format!("no thread for the stream: {why}"))
            })?;
        Ok(Self(give))
    }

    /// Gives a job to the stream.
    pub(super) fn give(&self, job: StreamJob) -> Result<(), GpuError> {
        self.0
            .send(job)
            .map_err(|_| error("stream", LAUNCH_FAILED, "the stream's thread has ended"))
    }
}

fn run(jobs: &Receiver<StreamJob>, faults: &GpuFaults, device: &Standstill) {
    // As a CUDA context after a fault of a kernel: no work runs any more, and every event reports
    // the fault.
    let mut sticky: Option<GpuError> = None;
    for job in jobs {
        device.pass();
        match job {
            StreamJob::Copy(copy) => perform(copy, sticky.clone(), faults),
            StreamJob::Record(done) => done.fire(sticky.clone().map_or(Ok(()), Err)),
            _ if sticky.is_some() => {}
            StreamJob::Wait(event) => sticky = event.wait().err(),
            StreamJob::Hold(word, value) => {
                device.hold(|| word.load().wrapping_sub(value).cast_signed() >= 0);
            }
            StreamJob::Launch { body, delay } => {
                pause(delay);
                sticky = match catch_unwind(AssertUnwindSafe(body)) {
                    Ok(outcome) => outcome.err(),
                    Err(_) => Some(error("launch", LAUNCH_FAILED, "the kernel panicked")),
                };
            }
        }
    }
}

fn perform(copy: Copy, sticky: Option<GpuError>, faults: &GpuFaults) {
    let Copy { parts, delay, fail, done, in_flight } = copy;
    pause(delay);
    faults.wait_while_held();
    let outcome = match sticky.or(fail) {
        Some(why) => Err(why),
        None => {
            for (dst, src, len) in &parts {
                // SAFETY: device ends were checked when the copy was submitted, and their aliases
                // are held. Host ends are valid by the contract of `Gpu::copy` until the event has
                // fired.
                unsafe { move_bytes(dst.address().as_ptr(), src.address().as_ptr(), *len) };
            }
            Ok(())
        }
    };
    // The memory is released before the end of the copy is visible.
    drop(parts);
    drop(in_flight);
    done.fire(outcome);
}

/// Makes a copy between two devices' memory in a resident kernel.
pub(super) fn carry_out((dst, src, len): CopyPart) {
    // SAFETY: device ends were checked when the copy was begun, and their aliases are held until
    // it ends.
    unsafe { move_bytes(dst.address().as_ptr(), src.address().as_ptr(), len) };
    drop((dst, src));
}

fn pause(delay: Duration) {
    if !delay.is_zero() {
        std::thread::sleep(delay);
    }
}

/// Moves bytes; the ranges may overlap.
///
/// # Safety
/// `len` bytes are readable at `src` and writable at `dst`, and no references to them are alive.
/// Another engine or process may write them at the same time: the bytes are then arbitrary.
unsafe fn move_bytes(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: passed on from the caller.
    unsafe { std::ptr::copy(src, dst, len) };
}

/// Reads `len` bytes at `from`.
///
/// # Safety
/// As [`move_bytes`], for reading.
pub(super) unsafe fn load(from: *const u8, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // SAFETY: passed on from the caller; the vector has `len` bytes.
    unsafe { move_bytes(bytes.as_mut_ptr(), from, len) };
    bytes
}

/// Writes `bytes` at `to`.
///
/// # Safety
/// As [`move_bytes`], for writing.
pub(super) unsafe fn store(to: *mut u8, bytes: &[u8]) {
    // SAFETY: passed on from the caller.
    unsafe { move_bytes(to, bytes.as_ptr(), bytes.len()) };
}
