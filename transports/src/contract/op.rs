//! Operations as data.

use super::{DownCause, PeerId};
use crate::mem::{Buffer, MemKind, MemRef};

/// Sixteen bytes that travel before each payload. They belong to the runtime; a transport carries
/// them unread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Header(pub [u64; 2]);

/// Name that the runtime gives to an operation until it ends.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OpToken(pub u64);

/// Place of bytes in a peer's memory, in the terms of the peer's NIC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemotePlace {
    /// The address of the first byte, in the peer's terms.
    pub addr: u64,
    /// The remote key.
    pub key: u64,
}

/// Change of a word of eight bytes, in one step that no other such operation interrupts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WordChange {
    /// Addition of the number; a carry beyond 64 bits is lost.
    Add(u64),
    /// Store of the new value if the word holds the expected one.
    Swap {
        /// The value that the word has to hold.
        expected: u64,
        /// The value that is stored.
        new: u64,
    },
}

/// Request to a link. [`Caps`](super::Caps) states the requests that a link can carry out.
#[derive(Debug)]
#[non_exhaustive]
pub enum Op<'a> {
    /// An active message whose bytes, host memory, are copied within the call: `Done` or `Busy`,
    /// never `Posted`. The link chooses: a short message travels inline in a ring or a work
    /// request, a longer one through a packet.
    AmCopied {
        /// The runtime's header.
        header: Header,
        /// The payload.
        bytes: MemRef<'a>,
    },
    /// An active message from an owned buffer of any kind of memory that the caps name. On
    /// `Posted` the link has taken the buffer and left an empty one; the completion returns it. On
    /// `Done` and `Busy` the buffer stays where it was.
    AmOwned {
        /// The runtime's header.
        header: Header,
        /// The payload.
        buffer: &'a mut Buffer,
        /// The name of the completion.
        token: OpToken,
    },
    /// Write of a buffer into memory that the peer has [exposed](super::Link::expose): `Posted` or
    /// `Busy`. On `Posted` the link has taken the buffer. The completion returns it, and the bytes
    /// are then in place. A message that is submitted afterwards arrives after them.
    Put {
        /// The destination.
        to: RemotePlace,
        /// The bytes.
        buffer: &'a mut Buffer,
        /// The name of the completion.
        token: OpToken,
    },
    /// Read of memory that the peer has exposed into a buffer: `Posted` or `Busy`, as a put.
    Get {
        /// The source.
        from: RemotePlace,
        /// The buffer, all of which is filled.
        buffer: &'a mut Buffer,
        /// The name of the completion.
        token: OpToken,
    },
    /// Change of a word of memory whose words the peer has [exposed](super::Domain::expose_words):
    /// `Posted` or `Busy`. The completion's buffer holds the word's earlier value: eight bytes,
    /// little endian.
    Atomic {
        /// The word: eight bytes, aligned to eight.
        word: RemotePlace,
        /// The change.
        change: WordChange,
        /// The name of the completion.
        token: OpToken,
    },
}

/// Outcome of submitting an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Submit {
    /// Done: the bytes may be reused, and no completion follows.
    Done,
    /// A completion follows.
    Posted,
    /// Nothing happened; try again later.
    Busy(Busy),
}

/// Outcome of submitting a short active message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Short {
    /// Done: the bytes may be reused.
    Done,
    /// Nothing happened; try again later.
    Busy(Busy),
    /// Nothing happened; submit it as an operation to learn why.
    Ask,
}

/// Reason why an operation has to wait.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Busy {
    /// Another thread holds the lock.
    Lock,
    /// The ring or queue to the peer is full, until the peer takes something from it.
    Full,
    /// No packet for the payload, until one comes back to the pool.
    NoPacket,
    /// The peer has not answered yet.
    Connecting,
}

/// Mistake of the caller, or a peer that is gone.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubmitError {
    /// The message is longer than the link can carry in one piece.
    #[error(
        "{len} bytes are more than the {max} that fit into one message here: send them in parts"
    )]
    TooLong {
        /// Bytes of the message.
        len: usize,
        /// Bytes that fit.
        max: usize,
    },
    /// The link cannot read memory of that kind.
    #[error("this link cannot send from {0} memory by itself: copy it to host memory first")]
    Kind(MemKind),
    /// The memory cannot be registered with the NIC, or not this much of it. The caller keeps the
    /// buffer.
    #[error(
        "the link cannot use the memory: {0}; send from host memory, or raise the limit on locked \
        memory (`ulimit -l`)"
    )]
    Unregistered(String),
    /// The peer is gone.
    #[error("{peer} is gone: {cause}; {}", .cause.remedy())]
    Down {
        /// The peer.
        peer: PeerId,
        /// The reason.
        cause: DownCause,
    },
    /// The address is not one of this transport's.
    #[error(
        "an address of {0} bytes is not one of this transport's: the peer runs another version, or \
        its address was damaged; run one version of Carrack on all ranks"
    )]
    Address(usize),
    /// This process lacks a resource that a link takes. The caller may try again.
    #[error("this process lacks a resource for a link: {0}; free some of it, then try again")]
    Lacking(String),
}

impl SubmitError {
    /// Returns the error of a transport whose links carry only messages.
    #[cold]
    pub(crate) fn no_remote_memory() -> Self {
        Self::Unregistered("this transport reaches no memory by itself".into())
    }
}
