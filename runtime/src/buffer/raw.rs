//! Raw memory: the one door of this crate that is `unsafe`.

#![allow(unsafe_code)]

use carrack_transports::gpu::{Driver, GpuError};
use carrack_transports::mem::{AllocId, MemKind, Region};
use std::ptr::NonNull;
use std::sync::Arc;

/// Why raw memory was not taken.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum RawError {
    /// The address is null.
    #[error("the address is null")]
    Null,
    /// A driver failed to say what the address is.
    #[error("what memory {addr:#x} is cannot be found out: {cause}")]
    Query {
        /// The address.
        addr: usize,
        /// The driver's error.
        cause: GpuError,
    },
    /// The memory is not what the caller said.
    #[error("the memory at {addr:#x} was said to be {said}, and the driver says it is {found}")]
    Kind {
        /// The address.
        addr: usize,
        /// What the caller said.
        said: MemKind,
        /// What it is.
        found: MemKind,
    },
    /// The range is longer than the allocation that it begins in.
    #[error("{len} bytes at {addr:#x} reach beyond the allocation, which ends after {left}")]
    Beyond {
        /// The address.
        addr: usize,
        /// Bytes asked for.
        len: usize,
        /// Bytes up to the end.
        left: usize,
    },
}

/// Memory that the caller answers for, as a region. With [`MemKind::Unknown`] (LCI's `MR_UNKNOWN`) the
/// drivers are asked what it is; said to be host memory, nobody is asked.
///
/// # Safety
/// `len` bytes at `addr` stay allocated, and are not used through Rust references, until the last clone of
/// the region and of its slices is gone. Memory said to be [`MemKind::Host`] is host memory.
pub unsafe fn region(
    addr: *mut u8,
    len: usize,
    kind: MemKind,
    drivers: &[Arc<dyn Driver>],
) -> Result<Region, RawError> {
    let base = NonNull::new(addr).ok_or(RawError::Null)?;
    let at = addr as usize;
    let mut found = (MemKind::Host, AllocId(0), None);
    if kind != MemKind::Host {
        for driver in drivers {
            let extent = driver.classify(at).map_err(|cause| RawError::Query { addr: at, cause })?;
            if let Some(extent) = extent {
                let left = extent.end().saturating_sub(at);
                if len > left && !lies_in(&**driver, at, len, extent.kind) {
                    return Err(RawError::Beyond { addr: at, len, left });
                }
                found = (extent.kind, extent.id, extent.gpu);
                break;
            }
        }
        if kind != MemKind::Unknown && kind != found.0 {
            return Err(RawError::Kind { addr: at, said: kind, found: found.0 });
        }
    }
    let (kind, id, gpu) = found;
    // SAFETY: the caller's promise; there is nothing to be freed.
    Ok(unsafe { Region::from_parts(base, len, kind, id, gpu, Box::new(())) })
}

/// Whether the range lies in several extents of one kind, as a VMM mapping made of several handles does (gpu.md, VMM
/// rule 2).
fn lies_in(driver: &dyn Driver, addr: usize, len: usize, kind: MemKind) -> bool {
    driver.extents(addr, len).is_ok_and(|extents| extents.iter().all(|extent| extent.kind == kind))
}
