//! A peer's memory, reached through the kernel.

use super::DownCause;
use crate::mem::{MemMut, MemRef};
use crate::sync::Split;

/// The memory of a peer's process. The kernel copies, and checks the addresses: one that is not
/// mapped in the peer is an error. The peer can revoke the access
/// ([`Device::revoke`](super::Device::revoke)). It keeps the buffers that it has named until no
/// copy is in progress.
pub trait PeerMemory: Send + Sync {
    /// Fills `to`, host memory, from `addr` in the peer's process.
    ///
    /// # Errors
    /// See [`PeerMemoryError`]. What `to` holds is then undefined.
    fn read(&self, addr: u64, to: MemMut<'_>) -> Result<(), PeerMemoryError>;

    /// Returns `true` once the peer has answered, or its link has ended. Before that the peer
    /// could not revoke the access, so nothing is copied.
    fn is_ready(&self) -> bool;

    /// Returns `true` if the process is known to be dead: then it writes nothing here any more.
    fn is_gone(&self) -> bool;

    /// Does as `read` for several pieces, with one system call. Returns the number of pieces, from
    /// the first on, that were filled; a `read` of the next one tells its error.
    ///
    /// # Errors
    /// The errors of `read`, for the first piece.
    fn read_many(&self, many: &[(u64, MemMut<'_>)]) -> Result<usize, PeerMemoryError>;

    /// Copies `from`, host memory, to `addr` in the peer's process.
    ///
    /// The peer chose the address, and the kernel sees only that it is mapped. So a peer that is
    /// this very process is refused: this call never writes to the caller's own memory.
    ///
    /// # Errors
    /// See [`PeerMemoryError`]. A part may have been written.
    fn write(&self, addr: u64, from: MemRef<'_>) -> Result<(), PeerMemoryError>;
}

/// Words that this rank and a peer both see, by which they share the copying of messages.
pub trait Splits: Send + Sync {
    /// Returns the number of words.
    fn count(&self) -> u32;

    /// Returns the word of that number, if there is one. `None` in a fork: the words are its
    /// parent's.
    fn get(&self, number: u32) -> Option<&Split>;
}

/// Reason why a peer's memory was not read or written.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PeerMemoryError {
    /// The kernel does not allow such copies, or does not know them. Nothing was copied, and later
    /// copies fail, too.
    #[error(
        "the kernel refuses cross-memory copies: {0}; permit them, or set CARRACK_KERNEL_COPY=off"
    )]
    Refused(String),
    /// The peer's process has ended, or it has revoked the access, as it does when it closes its
    /// device: none of the bytes count.
    #[error(
        "the peer has ended or revoked access to its memory: {0}; {remedy}",
        remedy = .0.remedy()
    )]
    Gone(DownCause),
    /// A single failure: an address that is not mapped.
    #[error(
        "a cross-memory copy failed: {0}; keep the buffers of both sides until the operation ends"
    )]
    Failed(String),
}
