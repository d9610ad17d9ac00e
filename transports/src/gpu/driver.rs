//! A driver, and its knowledge of addresses.

#![expect(unsafe_code, reason = "implementations vouch for memory")]

use super::{Forms, Gpu, GpuError};
use crate::mem::{AllocId, MemKind};
use std::fmt;
use std::sync::Arc;

/// A driver: the devices that this process can see, and the classification of addresses.
///
/// Any thread may call any method.
///
/// # Safety
/// Its answers about an address are true: the kind of memory there, its extent and its owner. The
/// CPU can access memory that the driver calls host memory, or does not know. The kind, the extent
/// and the id of an allocation stay the same while the allocation exists.
///
/// Its devices keep the promise of [`Gpu`].
pub unsafe trait Driver: Send + Sync + fmt::Debug {
    /// Returns a word for reports: `none`, `fake (simulated)`, `cuda`.
    fn name(&self) -> &'static str;

    /// Returns the driver's version, if it has one.
    fn version(&self) -> Option<String> {
        None
    }

    /// Returns the devices that this process can see, in this process's order. The call is a
    /// request for GPUs: it initialises a driver that the program has not initialised.
    ///
    /// # Errors
    /// The reason why there are none, in words for a person.
    fn devices(&self) -> Result<Vec<Arc<dyn Gpu>>, GpuError>;

    /// Returns the devices as [`devices`](Self::devices) does, but initialises nothing.
    ///
    /// # Errors
    /// The errors of `devices`, or `NOT_INITIALIZED`.
    fn devices_in_use(&self) -> Result<Vec<Arc<dyn Gpu>>, GpuError> {
        self.devices()
    }

    /// Runs work that was put off, because it would have blocked while a stream waited for a word
    /// (see [`Stream::wait_value64`]). The caller calls it now and then.
    ///
    /// [`Stream::wait_value64`]: super::Stream::wait_value64
    fn look_after(&self) {}

    /// Forgets what is known of the program's memory in this range, which is about to be freed,
    /// unmapped, or given other access rights. For a change of rights, either no operation starts
    /// there until the change is made, or the caller calls this again afterwards.
    fn forget(&self, _addr: usize, _len: usize) {}

    /// Sends small copies between memory of this driver's devices to resident kernels, if
    /// possible, to the end of the process: see [`copier`]. [`Gpu::copier`] returns the state of a
    /// device's copier.
    ///
    /// [`copier`]: super::copier
    fn use_copiers(&self) {}

    /// Returns the memory at `addr`, or `None` for an address that this driver does not know,
    /// which is host memory. Never initialises the driver (gpu.md, streams rule 6): an
    /// uninitialised driver knows no memory.
    fn classify(&self, addr: usize) -> Result<Option<Extent>, GpuError>;

    /// Returns the id of the allocation at `addr`. The call is cheap. It tells whether an older
    /// answer of [`classify`](Self::classify) is still true or stale (gpu.md, legacy IPC rule 6).
    fn buffer_id(&self, addr: usize) -> Result<Option<AllocId>, GpuError> {
        Ok(self.classify(addr)?.map(|extent| extent.id))
    }

    /// Returns the extents of `len` bytes at `addr`, in order. As a rule that is one extent. A VMM
    /// mapping of several handles has several (gpu.md, VMM rule 2), and host memory has none.
    ///
    /// # Errors
    /// The driver's own; and `INVALID_VALUE` if the range begins or ends in the driver's memory,
    /// but does not lie in it altogether.
    fn extents(&self, addr: usize, len: usize) -> Result<Vec<Extent>, GpuError> {
        let outside = |at: usize| GpuError {
            call: "extents",
            code: 1,
            name: "INVALID_VALUE",
            hint: format!("{addr:#x}+{len} leaves the driver's memory at {at:#x}"),
        };
        let end = addr.checked_add(len).ok_or_else(|| outside(usize::MAX))?;
        let Some(first) = self.classify(addr)? else {
            return match len > 0 && self.classify(end - 1)?.is_some() {
                true => Err(outside(addr)),
                false => Ok(Vec::new()),
            };
        };
        let mut at = first.end();
        let mut extents = vec![first];
        while at < end {
            let next =
                self.classify(at)?.filter(|next| next.end() > at).ok_or_else(|| outside(at))?;
            at = next.end();
            extents.push(next);
        }
        Ok(extents)
    }
}

/// A driver's knowledge of an address.
#[derive(Clone, Debug)]
pub struct Extent {
    /// First address of the allocation.
    pub base: usize,
    /// Length of the allocation in bytes.
    pub len: usize,
    /// Kind of the memory.
    pub kind: MemKind,
    /// Id of the allocation. The same address has another id when it is allocated again.
    pub id: AllocId,
    /// The device that owns the memory, or whose engine works in its context. `None` for pinned
    /// memory of no single device.
    pub gpu: Option<Arc<dyn Gpu>>,
    /// The context of the allocation. `None` for VMM and pool memory (gpu.md, VMM rule 1), which
    /// is no error.
    pub context: Option<u64>,
    /// Forms in which it can be exported.
    pub forms: Forms,
}

impl Extent {
    /// Returns the first address behind it.
    pub fn end(&self) -> usize {
        self.base.saturating_add(self.len)
    }
}
