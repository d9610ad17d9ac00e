//! What a program says of memory that it gives by its address.

use super::MemKind;
use std::fmt;

/// What a program says of raw memory: LCI's `MR_HOST`, `MR_DEVICE` and `MR_UNKNOWN`, or exactly
/// which memory it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum MemHint {
    /// Nothing: [`MR_UNKNOWN`].
    Unknown,
    /// It is host memory: [`MR_HOST`].
    Host,
    /// It is memory of some GPU: [`MR_DEVICE`].
    Device,
    /// It is this, and refused if it is not. A driver is asked each time.
    Is(MemKind),
}

/// Whoever knows the memory is asked what it is. For an address in a known extent that is one
/// question to one driver, whether the extent is still what it was (0.10 µs on an H200). For any
/// other, host memory above all, each driver is asked all that there is to know (about 1 µs), each
/// time: host memory is not remembered, because it can become other memory without anybody's being
/// told.
pub const MR_UNKNOWN: MemHint = MemHint::Unknown;

/// The memory is the host's: no driver is asked, unless the address lies where memory of a GPU is
/// known to have been. If it still is, that is an error. A registration, which is no matter of
/// nanoseconds, asks in any case.
pub const MR_HOST: MemHint = MemHint::Host;

/// The memory is a GPU's. In a known extent nobody is asked anything, neither when the region is
/// made nor when it is used: so whoever frees such memory tells `invalidate_memory` first.
/// Elsewhere it is found out once which device's it is.
pub const MR_DEVICE: MemHint = MemHint::Device;

impl MemHint {
    /// Whether memory may be what was found.
    pub fn allows(self, found: MemKind) -> bool {
        match self {
            Self::Unknown | Self::Is(MemKind::Unknown) => true,
            // Pinned memory is the host's: the CPU may touch it.
            Self::Host => found.is_host(),
            Self::Device => matches!(found, MemKind::Device(_)),
            Self::Is(kind) => kind == found,
        }
    }

    /// Whether a known extent is believed to be what it was.
    pub(super) fn trusts(self) -> bool {
        self == Self::Device
    }
}

impl From<MemKind> for MemHint {
    fn from(kind: MemKind) -> Self {
        match kind {
            MemKind::Unknown => Self::Unknown,
            MemKind::Host => Self::Host,
            kind => Self::Is(kind),
        }
    }
}

impl fmt::Display for MemHint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("unknown"),
            Self::Host => f.write_str("host"),
            Self::Device => f.write_str("device"),
            Self::Is(kind) => kind.fmt(f),
        }
    }
}
