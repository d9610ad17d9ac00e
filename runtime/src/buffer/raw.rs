//! Raw memory: the one door of this crate that is `unsafe`.
//!
//! What an address is, is found out once for each allocation of a GPU, for the whole process, and
//! believed as long as the driver gives the allocation the same number. Regions in one allocation
//! share their [root](Region::root): it is exported, and introduced to peers, once. Whoever frees
//! memory that was given here tells [`invalidate_memory`](crate::Runtime::invalidate_memory)
//! before.
//!
//! | said | in a known extent | elsewhere |
//! |---|---|---|
//! | [`MR_UNKNOWN`](crate::MR_UNKNOWN) | one short question, 0.10 µs on an H200 | everything is asked of each driver, about 1 µs; host memory each time |
//! | [`MR_DEVICE`](crate::MR_DEVICE) | nothing | the same, once |
//! | [`MR_HOST`](crate::MR_HOST) | one short question, and an error if it is still there | nothing |
//!
//! ```
//! use carrack::buffer::raw;
//! use carrack::transports::gpu::{Flavour, Gpu, fake};
//! use carrack::{MR_UNKNOWN, Runtime};
//! use std::sync::Arc;
//!
//! let driver = FakeDriver::new(FakeConfig::devices(1))?;
//! let runtime = Runtime::builder().gpu_driver(Arc::new(driver.clone())).start()?;
//! // Stands for memory of the program's.
//! let memory = driver.gpu(0)?.allocate(4096, Flavour::Plain)?;
//! let pointer = memory.addr() as *mut u8;
//!
//! // SAFETY: the memory stays until the region is gone, and nobody has references to it.
//! let region = unsafe { raw::region(pointer, 100, MR_UNKNOWN, runtime.gpu_drivers()) }?;
//! assert_eq!(region.kind(), memory.kind());
//! // Too early, and it says why; then nobody has it any more.
//! assert!(runtime.invalidate_memory(memory.addr(), 4096).is_err());
//! drop(region);
//! runtime.invalidate_memory(memory.addr(), 4096)?;
//! drop(memory);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![allow(unsafe_code)]

use crate::error::RegisterError;
use crate::region::Mr;
use crate::runtime::Runtime;
use carrack_transports::gpu::Driver;
pub use carrack_transports::mem::{Freed, RawError};
use carrack_transports::mem::{KnownMemory, MemHint, Region};
use std::sync::Arc;

/// Memory that the caller answers for, as a region. `drivers` are the runtime's
/// [`gpu_drivers`](crate::Runtime::gpu_drivers).
///
/// # Errors
/// It is not what it was said to be, it was freed, it is managed memory or a device's that this
/// process cannot see, or it is shorter than was said: see [`RawError`].
///
/// # Safety
/// `len` bytes at `addr` stay allocated, and are not used through Rust references, until the last
/// clone of the region, of its slices and of its root is gone. Memory said to be
/// [`MR_HOST`](crate::MR_HOST) is host memory. Memory said to be [`MR_DEVICE`](crate::MR_DEVICE) is
/// a GPU's, and `invalidate_memory` was told before what lay at its address earlier was freed.
pub unsafe fn region(
    addr: *mut u8,
    len: usize,
    hint: impl Into<MemHint>,
    drivers: &[Arc<dyn Driver>],
) -> Result<Region, RawError> {
    // SAFETY: the caller's promise.
    unsafe { KnownMemory::of_the_process().region(addr, len, hint.into(), drivers) }
}

/// Registers memory that the caller answers for, as [`Runtime::register_memory`] does a region. A
/// registration is no matter of nanoseconds: what is said of the memory is looked into whatever it
/// is, so that memory of a GPU that is said to be the host's is always refused.
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
    // SAFETY: the caller's promise; nothing is believed unasked.
    let region = match unsafe { region(addr, len, MemHint::Unknown, drivers) } {
        // No driver knows it: that it is the host's now is for the caller to say.
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
    // What was asked just now was asked for this: peers come later, and the memory is looked at
    // each time they ask for it.
    mr.region().recheck().map_err(RawError::Freed)?;
    Ok(mr)
}
