//! Work in order.

#![expect(unsafe_code, reason = "implementations vouch for memory")]

use super::pieces::{self, Grid, Pieces};
use super::{Gpu, GpuError, GpuEvent};
use crate::mem::MemKind;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Work in order.
///
/// # Safety
/// Events of copies keep the promise of [`Gpu`]. The event of [`wait_value64`](Self::wait_value64)
/// fires, or fails, only when the stream will not read the word for that wait any more. A wait or
/// a write that is refused was not given to the stream.
///
/// ```compile_fail,E0200
/// # use carrack_transports::gpu::{Gpu, GpuError, GpuEvent, Stream};
/// # use std::sync::Arc;
/// #[derive(Debug)]
/// struct Early;
/// impl Stream for Early {
///     fn gpu(&self) -> Result<Arc<dyn Gpu>, GpuError> {
///         unimplemented!()
///     }
///     fn record(&self) -> Result<GpuEvent, GpuError> {
///         unimplemented!()
///     }
///     fn wait(&self, _: &GpuEvent) -> Result<(), GpuError> {
///         Ok(())
///     }
///     fn synchronize(&self) -> Result<(), GpuError> {
///         Ok(())
///     }
/// }
/// ```
pub unsafe trait Stream: Any + Send + Sync + fmt::Debug {
    /// Returns the device that works on the stream.
    ///
    /// # Errors
    /// The device is being dropped.
    fn gpu(&self) -> Result<Arc<dyn Gpu>, GpuError>;

    /// Starts a copy as [`Gpu::copy`] does, on this stream. The copy begins when all earlier work
    /// of the stream has ended, and later work begins after the copy. Host memory has to be pinned
    /// or registered, else the call itself may wait for the stream.
    ///
    /// # Safety
    /// As [`Gpu::copy`].
    unsafe fn copy(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        len: usize,
    ) -> Result<GpuEvent, GpuError> {
        let hint = format!("no copy of {len} bytes from {} to {} by a stream", src.1, dst.1);
        Err(GpuError::unsupported("copy", hint))
    }

    /// Starts many copies as [`Gpu::copy_pieces`] does, on this stream.
    ///
    /// # Errors
    /// As for [`Gpu::copy_pieces`].
    ///
    /// # Safety
    /// As for [`Gpu::copy_pieces`].
    unsafe fn copy_pieces(&self, pieces: &Pieces) -> Result<GpuEvent, GpuError> {
        Err(pieces::none_of("copy_pieces", format_args!("{pieces:?}, by a stream")))
    }

    /// Starts the copy of rows as [`Gpu::copy_grid`] does, on this stream.
    ///
    /// # Errors
    /// As for [`Gpu::copy_grid`].
    ///
    /// # Safety
    /// As for [`Gpu::copy_grid`].
    unsafe fn copy_grid(
        &self,
        dst: (*mut u8, MemKind),
        src: (*const u8, MemKind),
        grid: &Grid,
    ) -> Result<GpuEvent, GpuError> {
        Err(pieces::none_of(
            "copy_grid",
            format_args!("{grid:?} from {} to {}, by a stream", src.1, dst.1),
        ))
    }

    /// Returns an event that fires when all work given to the stream so far has ended.
    fn record(&self) -> Result<GpuEvent, GpuError>;

    /// Lets later work on this stream begin only after `event` has fired.
    fn wait(&self, event: &GpuEvent) -> Result<(), GpuError>;

    /// Blocks until all work given so far has ended.
    fn synchronize(&self) -> Result<(), GpuError>;

    /// Writes `value` to a word, when all work given so far has ended and is visible.
    ///
    /// # Safety
    /// `word` is 8 bytes, aligned, of registered or pinned host memory, or of the stream's device,
    /// and stays so until the stream has written it. The host uses it by atomic loads and stores
    /// only.
    unsafe fn write_value64(&self, word: *mut u64, value: u64) -> Result<(), GpuError> {
        Err(GpuError::unsupported(
            "write_value64",
            format!("no write of {value} to {word:p} by a stream"),
        ))
    }

    /// Lets later work on this stream begin only when a word has reached the value: the difference,
    /// taken as a signed number, is not negative, so that a counter may wrap around. The event
    /// fires when the stream is past the wait. The writer of the word may die: the library must
    /// then release the stream, with a value that says so (gpu.md, streams rule 7).
    ///
    /// While a stream waits, calls of the driver that wait for the whole context block. The
    /// library puts off its own ([`look_after`](super::Driver::look_after)). The thread that will
    /// release the stream must make none (`cudaFree`, `cudaDeviceSynchronize`, loading a module).
    ///
    /// # Errors
    /// The driver's; and `TOO_MANY_WAITING`, if one more waiting stream of the context would block
    /// all others.
    ///
    /// # Safety
    /// As [`write_value64`](Self::write_value64).
    unsafe fn wait_value64(&self, word: *const u64, value: u64) -> Result<GpuEvent, GpuError> {
        let hint = format!("no wait for {value} at {word:p} by a stream");
        Err(GpuError::unsupported("wait_value64", hint))
    }
}
