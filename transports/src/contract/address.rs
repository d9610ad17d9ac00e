//! Who a rank is, where its devices are, and whether they can be reached.

use std::fmt;

/// What the runtime calls a peer. A transport repeats it and reads nothing into it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PeerId(pub u32);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// Who this rank is.
#[derive(Clone, Debug)]
pub struct Identity {
    /// What peers are to call it.
    pub me: PeerId,
    /// How many ranks the job has: a peer that claims a higher number is refused.
    pub ranks: u32,
    /// Known to the ranks of the job and to nobody else; a peer that cannot show it is refused.
    pub secret: [u8; 16],
}

/// Where a device is, in its transport's own words. Travels through the bootstrap.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct AddressBlob(pub Vec<u8>);

/// Something that a transport can open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Its name on this machine.
    pub name: String,
    /// What a person would want to know of it.
    pub note: String,
}

/// Why a transport, or a device of it, is not to be had.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{transport} is not available: {reason}")]
pub struct Unavailable {
    /// The transport.
    pub transport: &'static str,
    /// Why, with the system's own error and what would change it.
    pub reason: String,
}

impl Unavailable {
    /// Puts the two together.
    pub fn new(transport: &'static str, reason: impl Into<String>) -> Self {
        Self { transport, reason: reason.into() }
    }
}

/// Whether a peer can be reached, and at what price.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// It can.
    Yes(Cost),
    /// It cannot, for this reason.
    No(String),
}

/// What a path costs, for choosing among several: an order, not a forecast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost {
    /// Nanoseconds for a small message.
    pub latency_ns: u32,
}
