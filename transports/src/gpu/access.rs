//! Who may do what with memory at chosen addresses.

use crate::mem::GpuUuid;

/// What a device may do with memory.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Rights {
    /// Its kernels, and the program's copies in its context, read. What they write is refused, or costs the context: see
    /// [`Gpu::keeps_from_writing`](super::Gpu::keeps_from_writing). Copies of the library's name the owner's context where their own
    /// may not write, and are carried out.
    Read,
    /// They read and write.
    ReadWrite,
}

/// A device, and what it may do.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Access {
    /// Which device.
    pub gpu: GpuUuid,
    /// What it may do.
    pub rights: Rights,
}

impl Access {
    /// A device that reads and writes.
    pub fn read_write(gpu: GpuUuid) -> Self {
        Self { gpu, rights: Rights::ReadWrite }
    }

    /// A device that reads.
    pub fn read(gpu: GpuUuid) -> Self {
        Self { gpu, rights: Rights::Read }
    }
}
