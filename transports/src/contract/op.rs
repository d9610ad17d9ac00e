//! Operations as data.

use super::{DownCause, PeerId};
use crate::mem::{Buffer, MemKind, MemRef};

/// Sixteen bytes that travel before each payload. The runtime's own; a transport carries them
/// unread.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Header(pub [u64; 2]);

/// What the runtime calls an operation that is not over yet.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct OpToken(pub u64);

/// Where bytes lie in a peer's memory, as the peer's NIC knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemotePlace {
    /// The address of the first byte, in the peer's terms.
    pub addr: u64,
    /// What lets others reach it.
    pub key: u64,
}

/// What becomes of a word of eight bytes, in one step that no other such operation comes between.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WordChange {
    /// So much is added to it, and what goes beyond 64 bits is lost.
    Add(u64),
    /// If it holds what is expected, it holds the new value afterwards.
    Swap {
        /// What it has to hold.
        expected: u64,
        /// What it is to hold.
        new: u64,
    },
}

/// What a link is asked to do. What it can do of it is in [`Caps`](super::Caps).
#[derive(Debug)]
#[non_exhaustive]
pub enum Op<'a> {
    /// An active message whose bytes, host memory, are copied within the call: `Done` or `Busy`,
    /// never `Posted`. Inline in a ring or a work request when short, through a packet when not;
    /// the link's choice.
    AmCopied {
        /// The runtime's header.
        header: Header,
        /// The payload.
        bytes: MemRef<'a>,
    },
    /// An active message from an owned buffer of any kind of memory that the caps name. On `Posted`
    /// the link has taken the buffer and left an empty one; it comes back with the completion. On
    /// `Done` and `Busy` it was left where it was.
    AmOwned {
        /// The runtime's header.
        header: Header,
        /// The payload.
        buffer: &'a mut Buffer,
        /// What the completion will be called.
        token: OpToken,
    },
    /// Writes a buffer into memory that the peer has [exposed](super::Link::expose): `Posted` or
    /// `Busy`. On `Posted` the link has taken the buffer; it comes back with the completion, and
    /// then the bytes are there. A message that is submitted afterwards arrives after them.
    Put {
        /// Where to.
        to: RemotePlace,
        /// The bytes.
        buffer: &'a mut Buffer,
        /// What the completion will be called.
        token: OpToken,
    },
    /// Fills a buffer from memory that the peer has exposed: `Posted` or `Busy`, as a put.
    Get {
        /// Where from.
        from: RemotePlace,
        /// What is filled, all of it.
        buffer: &'a mut Buffer,
        /// What the completion will be called.
        token: OpToken,
    },
    /// Changes a word of memory whose words the peer has [exposed](super::Domain::expose_words):
    /// `Posted` or `Busy`. The completion's buffer is what the word held before, eight bytes in the
    /// order of the wire, the lowest first.
    Atomic {
        /// The word: eight bytes, aligned to as many.
        word: RemotePlace,
        /// What becomes of it.
        change: WordChange,
        /// What the completion will be called.
        token: OpToken,
    },
}

/// What became of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Submit {
    /// Over: the bytes may be reused, and there will be no completion.
    Done,
    /// There will be a completion.
    Posted,
    /// Nothing happened; try again later.
    Busy(Busy),
}

/// What became of a short active message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Short {
    /// Over.
    Done,
    /// Nothing happened; try again later.
    Busy(Busy),
    /// Nothing happened; submit it as an operation to learn why.
    Ask,
}

/// Why not now.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Busy {
    /// Another thread is at it.
    Lock,
    /// The ring or queue to the peer is full: it has to go on first.
    Full,
    /// No packet for the payload: some have to come back first.
    NoPacket,
    /// The peer has not answered yet.
    Connecting,
}

/// What a caller did wrong, or a peer that is gone.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SubmitError {
    /// The message is longer than the link can carry in one piece.
    #[error("{len} bytes are more than the {max} that fit into one message here")]
    TooLong {
        /// Bytes of the message.
        len: usize,
        /// Bytes that fit.
        max: usize,
    },
    /// The link cannot read memory of that kind.
    #[error("this link cannot send from {0} memory by itself")]
    Kind(MemKind),
    /// The memory cannot be made known to the NIC, or not that much of it. The buffer is the
    /// caller's.
    #[error("the NIC cannot be told of the memory: {0}")]
    Unregistered(String),
    /// The peer is gone.
    #[error("{peer} is gone: {cause}")]
    Down {
        /// The peer.
        peer: PeerId,
        /// How it went.
        cause: DownCause,
    },
    /// The address is not one of this transport's.
    #[error(
        "an address of {0} bytes is not one of this transport's: the peer runs another version, or \
        its address was damaged"
    )]
    Address(usize),
    /// This process lacks what a link takes. It may be tried again.
    #[error("this process lacks what a link takes: {0}")]
    Lacking(String),
}

impl SubmitError {
    /// Of a transport whose links carry messages and nothing else.
    #[cold]
    pub(crate) fn no_remote_memory() -> Self {
        Self::Unregistered("this transport reaches no memory by itself".into())
    }
}
