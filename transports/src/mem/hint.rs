//! A program's statement on memory that it gives by its address.

use super::MemKind;
use std::fmt;

/// A program's statement on raw memory: LCI's `MR_HOST`, `MR_DEVICE` and `MR_UNKNOWN`, or an exact
/// kind.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum MemHint {
    /// Nothing: [`MR_UNKNOWN`].
    Unknown,
    /// Host memory: [`MR_HOST`].
    Host,
    /// Memory of some GPU: [`MR_DEVICE`].
    Device,
    /// Memory of this kind, refused if it is not. A driver is asked each time.
    Is(MemKind),
}

/// The runtime finds out the kind. For an address in a known extent it asks one driver whether the
/// extent is unchanged (0.10 µs on an H200). For any other address, host memory above all, it asks
/// each driver for everything (about 1 µs), each time. Host memory is not remembered, because it
/// can become other memory without a notice to the runtime.
pub const MR_UNKNOWN: MemHint = MemHint::Unknown;

/// The memory is host memory. No driver is asked, unless the address lies where GPU memory is
/// known to have been. If GPU memory is still there, that is an error. A registration asks in any
/// case, since it takes much longer anyway.
pub const MR_HOST: MemHint = MemHint::Host;

/// The memory is a GPU's. In a known extent no driver is asked, neither when the region is made
/// nor when it is used. So the program calls `invalidate_memory` before it frees such memory.
/// Elsewhere a driver is asked once for the device.
pub const MR_DEVICE: MemHint = MemHint::Device;

impl MemHint {
    /// Returns `true` if the statement agrees with the kind that was found.
    pub fn allows(self, found: MemKind) -> bool {
        match self {
            Self::Unknown | Self::Is(MemKind::Unknown) => true,
            // Pinned memory is the host's: the CPU may touch it.
            Self::Host => found.is_host(),
            Self::Device => matches!(found, MemKind::Device(_)),
            Self::Is(kind) => kind == found,
        }
    }

    /// Returns `true` if a known extent is used without asking its driver.
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
