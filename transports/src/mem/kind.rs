//! Kinds of memory.

use std::fmt;

/// A GPU's UUID, the same in every process and under every visible-devices mask (gpu.md, legacy
/// IPC rule 9: ordinals differ between ranks, UUIDs do not).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GpuUuid(pub [u8; 16]);

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU-")?;
        for (at, byte) in self.0.iter().enumerate() {
            if matches!(at, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Kind of memory of a range.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum MemKind {
    /// Ordinary memory of this process.
    Host,
    /// Host memory that a GPU driver has locked and mapped for its copy engines. The CPU may touch
    /// it.
    Pinned,
    /// Memory of one GPU. The CPU may not touch it.
    Device(GpuUuid),
    /// Memory that a driver migrates between host and GPU. The CPU may touch it only when the GPU
    /// does not, so the library never does.
    Managed(GpuUuid),
    /// Unknown memory: the runtime asks the drivers before it uses the memory (`MR_UNKNOWN`).
    Unknown,
}

impl MemKind {
    /// Returns `true` if loads and stores of the CPU are allowed.
    #[inline]
    pub fn is_host(self) -> bool {
        matches!(self, Self::Host | Self::Pinned)
    }

    /// Returns the GPU that the memory belongs to, if it belongs to one.
    pub fn gpu(self) -> Option<GpuUuid> {
        match self {
            Self::Device(gpu) | Self::Managed(gpu) => Some(gpu),
            Self::Host | Self::Pinned | Self::Unknown => None,
        }
    }

    /// Returns the kind without the GPU's UUID: `host`, `pinned`, `device`, `managed`, `unknown`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Pinned => "pinned",
            Self::Device(_) => "device",
            Self::Managed(_) => "managed",
            Self::Unknown => "unknown",
        }
    }
}

impl fmt::Display for MemKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())?;
        match self.gpu() {
            Some(gpu) => write!(f, ":{gpu}"),
            None => Ok(()),
        }
    }
}
