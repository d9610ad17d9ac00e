//! Operations that a transport can do, the memory they work on, and their largest sizes.

use crate::mem::MemKind;

/// Abilities of a domain's links.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caps {
    /// Largest active message that needs no packet at either end, in bytes.
    pub am_inline: usize,
    /// Largest active message whose bytes are copied within the call
    /// ([`Op::AmCopied`](super::Op::AmCopied)), in bytes.
    pub am_copied: usize,
    /// Largest active message from an owned buffer ([`Op::AmOwned`](super::Op::AmOwned)), in
    /// bytes; 0 when it takes none.
    pub am_owned: usize,
    /// `true` if `AmOwned` takes buffers on a GPU. The runtime stages others through a host
    /// packet.
    pub am_from_device: bool,
    /// `true` if links write to and read from peers' memory by themselves
    /// ([`Op::Put`](super::Op::Put), [`Op::Get`](super::Op::Get)).
    pub remote_memory: bool,
    /// `true` if a peer's puts reach buffers that this rank has exposed to it
    /// ([`Link::expose`](super::Link::expose)), also those of
    /// [`Link::put_chunk`](super::Link::put_chunk). They may need this rank's polls. So a large
    /// message needs no copy of the transport's.
    pub windows: bool,
    /// `true` if a poll that finds nothing may take a system call. While nothing comes, the runtime
    /// polls such a device at intervals.
    pub polls_kernel: bool,
    /// Bytes of a large message that links write at a time ([`Link::put_chunk`](super::Link)), at
    /// least 1; `usize::MAX` where they write none.
    pub chunk: usize,
    /// The farthest peers that links lead to.
    pub locality: Locality,
}

/// The distance that a transport bridges. A peer that a transport of a shorter distance reaches is
/// that near, whatever path its messages take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Locality {
    /// Ranks of the same process.
    Process,
    /// Processes of the same node.
    Node,
    /// Ranks on other nodes.
    Network,
}

impl Caps {
    /// Returns `true` if an active message of `len` bytes in memory of `kind` can be submitted as
    /// it is.
    pub fn takes_am(&self, kind: MemKind, len: usize) -> bool {
        if kind.is_host() {
            len <= self.am_copied.max(self.am_owned)
        } else {
            self.am_from_device && len <= self.am_owned
        }
    }
}
