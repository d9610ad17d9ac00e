//! Raw memory: the `unsafe` interface of this crate.
//!
//! The kind of an address is found once in a process for each allocation of a GPU. It is valid as
//! long as the driver reports the same number for the allocation. Regions in one allocation share
//! their [root](Region::root), which is exported, and introduced to peers, once. Before the program
//! frees memory that it gave here, it calls
//! [`invalidate_memory`](crate::Runtime::invalidate_memory).
//!
//! | hint | in a known extent | elsewhere |
//! |---|---|---|
//! | [`MR_UNKNOWN`](crate::MR_UNKNOWN) | one short query (0.10 µs) | full queries (1 µs) |
//! | [`MR_DEVICE`](crate::MR_DEVICE) | no query | the same, once |
//! | [`MR_HOST`](crate::MR_HOST) | one short query, and an error if it is still there | no query |
//!
//! A full query asks each driver; times are of an H200. With [`MR_UNKNOWN`](crate::MR_UNKNOWN) host
//! memory is queried each time.
//!
//! ```
//! use carrack::buffer::raw;
//! use carrack::transports::gpu::{Flavour, Gpu};
//! use carrack::{MR_UNKNOWN, Runtime};
//! use carrack_simulators::gpu::{FakeConfig, FakeDriver};
//! use std::sync::Arc;
//!
//! let driver = FakeDriver::new(FakeConfig::devices(1))?;
//! let runtime = Runtime::builder().gpu_driver(Arc::new(driver.clone())).start()?;
//! // Stands for memory of the program's.
//! let memory = driver.gpu(0)?.allocate(4096, Flavour::Plain)?;
//! let pointer = memory.addr() as *mut u8;
//!
//! // SAFETY: the memory stays until the region is gone, and no reference to it exists.
//! let region = unsafe { raw::region(pointer, 100, MR_UNKNOWN, runtime.gpu_drivers()) }?;
//! assert_eq!(region.kind(), memory.kind());
//! // The region still exists: the call fails, and says so.
//! assert!(runtime.invalidate_memory(memory.addr(), 4096).is_err());
//! drop(region);
//! runtime.invalidate_memory(memory.addr(), 4096)?;
//! drop(memory);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![expect(unsafe_code, reason = "raw memory: the unsafe interface of this crate")]

use crate::api::Runtime;
use crate::error::RegisterError;
use crate::region::Mr;
use carrack_transports::gpu::Driver;
pub use carrack_transports::mem::{Freed, RawError};
use carrack_transports::mem::{KnownMemory, MemHint, Region};
use std::sync::Arc;

/// Returns memory as a region, under the caller's promises. `drivers` are the runtime's
/// [`gpu_drivers`](crate::Runtime::gpu_drivers).
///
/// # Errors
/// [`RawError`]: the memory is not of the hint's kind, was freed, is shorter than `len`, is
/// managed, or lies on a hidden device.
///
/// # Safety
/// `len` bytes at `addr` stay allocated until the last clone of the region, of its slices and of
/// its root is dropped. Until then they are not used through Rust references. Memory with the hint
/// [`MR_HOST`](crate::MR_HOST) is host memory. Memory with the hint [`MR_DEVICE`](crate::MR_DEVICE)
/// is a GPU's. Before memory that lay earlier at its address was freed, `invalidate_memory` was
/// called for it.
pub unsafe fn region(
    addr: *mut u8,
    len: usize,
    hint: impl Into<MemHint>,
    drivers: &[Arc<dyn Driver>],
) -> Result<Region, RawError> {
    // SAFETY: the caller's promise.
    unsafe { KnownMemory::of_the_process().region(addr, len, hint.into(), drivers) }
}

/// Registers memory under the caller's promises, as [`Runtime::register_memory`] registers a
/// region. The call asks the drivers whatever the hint is, since a registration takes longer than
/// these queries. So it always refuses GPU memory with a hint of host memory.
///
/// # Errors
/// As [`region`], and as [`Runtime::register_memory`].
///
/// # Safety
/// As [`region`]; the registration has a clone of the region.
pub unsafe fn register_memory(
    runtime: &Runtime,
    addr: *mut u8,
    len: usize,
    hint: impl Into<MemHint>,
) -> Result<Mr, RegisterError> {
    let (hint, drivers) = (hint.into(), runtime.gpu_drivers());
    // SAFETY: the caller's promise; the hint is not trusted.
    let region = match unsafe { region(addr, len, MemHint::Unknown, drivers) } {
        // No driver knows the memory: the caller's hint decides that it is host memory now.
        // SAFETY: the caller's promise.
        Err(RawError::Freed(_)) if hint == MemHint::Host => unsafe {
            region(addr, len, hint, drivers)
        },
        other => other,
    }?;
    let found = region.kind();
    if !hint.allows(found) {
        return Err(RawError::Kind { addr: addr as usize, said: hint, found }.into());
    }
    let mr = runtime.register_memory(&region)?;
    // The queries above belong to this call. Peers access the region later: it checks the memory at
    // each of their requests.
    mr.region().recheck().map_err(RawError::Freed)?;
    Ok(mr)
}
