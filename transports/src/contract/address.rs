//! Identity of a rank, addresses of devices, and the answer to "can they be reached?".

use std::fmt;

/// Number by which the runtime names a peer. A transport repeats it and does not interpret it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct PeerId(pub u32);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}", self.0)
    }
}

/// Identity of this rank.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Name that peers use for this rank.
    pub me: PeerId,
    /// Ranks of the job: a peer that claims a number beyond them is refused.
    pub ranks: u32,
    /// Secret that only the ranks of the job know; a peer that cannot show it is refused.
    pub secret: [u8; 16],
}

/// Address of a device, in its transport's own format. It travels through the bootstrap.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct AddressBlob(pub Vec<u8>);

/// Something that a transport can open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceInfo {
    /// Name on this machine.
    pub name: String,
    /// Description for the user.
    pub note: String,
}

/// Reason why a transport, or a device of it, cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{transport} is not available: {reason}")]
pub struct Unavailable {
    /// The transport.
    pub transport: &'static str,
    /// The reason, with the system's own error and the change that would help.
    pub reason: String,
}

impl Unavailable {
    /// Joins a transport's name and the reason.
    pub fn new(transport: &'static str, reason: impl Into<String>) -> Self {
        Self { transport, reason: reason.into() }
    }
}

/// Answer to "can this peer be reached?", with the cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// The peer can be reached.
    Yes(Cost),
    /// The peer cannot be reached, for this reason.
    No(String),
}

/// Cost of a path, for choosing among several: an order, not a forecast.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cost {
    /// Nanoseconds for a small message.
    pub latency_ns: u32,
}
