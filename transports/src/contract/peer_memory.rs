//! A peer's memory, reached through the kernel.

use super::DownCause;
use crate::mem::{MemMut, MemRef};
use crate::sync::Split;

/// The memory of a peer's process. The kernel copies, and checks the addresses: one that is not
/// mapped over there is an error, whoever named it. The peer can revoke all of it
/// ([`Device::revoke`](super::Device::revoke)), and keeps what it has named until no copy is in
/// progress any more.
pub trait PeerMemory: Send + Sync {
    /// Fills `to`, host memory, from `addr` over there.
    ///
    /// # Errors
    /// See [`PeerMemoryError`]. What `to` holds is then undefined.
    fn read(&self, addr: u64, to: MemMut<'_>) -> Result<(), PeerMemoryError>;

    /// Returns `false` while the peer has not answered: it could not revoke this, so nothing is
    /// copied.
    fn is_ready(&self) -> bool;

    /// Whether the process is known to be dead: then nothing of its writes here any more.
    fn is_gone(&self) -> bool;

    /// As `read`, for several at once: the kernel is asked once for all of them. How many were
    /// filled, from the first on: of the next one `read` will tell what is wrong.
    ///
    /// # Errors
    /// As of `read`, of the first one.
    fn read_many(&self, many: &[(u64, MemMut<'_>)]) -> Result<usize, PeerMemoryError>;

    /// Copies `from`, host memory, to `addr` over there.
    ///
    /// The address is the peer's word, and the kernel sees only that something is mapped there. So
    /// a peer that is this very process is refused: this call never writes to the caller's own
    /// memory.
    ///
    /// # Errors
    /// See [`PeerMemoryError`]. A part may have been written.
    fn write(&self, addr: u64, from: MemRef<'_>) -> Result<(), PeerMemoryError>;
}

/// Words that this rank and a peer both see, by which they share the copying of messages.
pub trait Splits: Send + Sync {
    /// How many there are.
    fn count(&self) -> u32;

    /// One of them, if there is one of that number. None in a fork: they are its parent's.
    fn get(&self, number: u32) -> Option<&Split>;
}

/// Why a peer's memory was not read or written.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PeerMemoryError {
    /// It never will be: the kernel does not allow it, or does not know how. Nothing was copied.
    #[error("cross-memory copies are refused: {0}")]
    Refused(String),
    /// Its process has ended, or it has revoked this, as it does when it closes its device: none of
    /// the bytes count.
    #[error("there was nobody to copy from or to: {0}")]
    Gone(DownCause),
    /// This once: an address that is not mapped.
    #[error("a cross-memory copy failed: {0}")]
    Failed(String),
}
