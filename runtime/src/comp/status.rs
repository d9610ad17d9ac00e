//! The status of an operation.

use crate::error::OpError;
use crate::names::{Rank, Tag, UserContext};
use carrack_transports::mem::Buffer;

/// The outcome of an operation, and the buffer that it held.
#[derive(Debug)]
pub struct Status {
    /// The other side.
    pub rank: Rank,
    /// The message's tag.
    pub tag: Tag,
    /// Bytes of the message, or 0 for a receive that ended without one. A receive's buffer may be
    /// longer. If the operation failed, the bytes need not be in the buffer: a message that is too
    /// long for it has more.
    pub size: usize,
    /// The user context of the operation; 0 for an incoming active message.
    pub user_context: UserContext,
    /// The operation's buffer, or an active message's payload.
    pub buffer: Buffer,
    /// The error, if it failed.
    pub error: Option<Box<OpError>>,
}

impl Status {
    /// Returns the status itself if the operation succeeded, else the error.
    #[inline]
    pub fn ok(self) -> Result<Self, OpError> {
        match self.error {
            None => Ok(self),
            Some(error) => Err(*error),
        }
    }

    /// Returns the value that the word of an atomic operation had before it. `None` if it failed.
    #[inline]
    pub fn value(&self) -> Option<u64> {
        self.filled()?.as_slice()?.try_into().ok().map(u64::from_le_bytes)
    }

    /// Returns the message's bytes, if they are host memory that only this process writes. A
    /// receive's buffer may be longer than the message: the result has the message's bytes only.
    /// `None` if the operation failed: the buffer then has its old bytes, or a part of the
    /// message.
    #[inline]
    pub fn bytes(&self) -> Option<&[u8]> {
        self.filled()?.as_slice().map(|bytes| &bytes[..self.size.min(bytes.len())])
    }

    /// Returns the buffer if the operation has filled it.
    #[inline]
    fn filled(&self) -> Option<&Buffer> {
        self.error.is_none().then_some(&self.buffer)
    }
}
