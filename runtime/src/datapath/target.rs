//! The destinations of transfers to this rank.

use super::packed::PiecesRequest;
use crate::comp::Completion;
use crate::deadline::Deadline;
use crate::error::OpError;
use crate::names::{Rank, Tag};
use crate::op::{Ended, OpContext, OpKind};
use carrack_transports::mem::Buffer;
use std::sync::Arc;

/// The destination of a transfer.
pub(crate) enum Target {
    /// A receive that was posted.
    Receive { buffer: Buffer, op: OpContext },
    /// The buffer of a get.
    Get { buffer: Buffer, op: OpContext },
    /// A completion object, with the memory that it named or fresh memory.
    Am { tag: Tag, buffer: Buffer, comp: Arc<dyn Completion> },
    /// The place of a put in a region of this rank. The sender is told at the end, and the
    /// completion object if there is one.
    Put { tag: Tag, buffer: Buffer, comp: Option<Arc<dyn Completion>>, tx: u64 },
    /// A list of places in a region of this rank's, and the bytes of a put behind it.
    Pieces { buffer: Buffer, asked: Box<PiecesRequest> },
    /// None: the operation has ended.
    Nowhere,
}

impl Target {
    /// Returns the buffer for its bytes, if any.
    pub(super) fn buffer(&mut self) -> Option<&mut Buffer> {
        match self {
            Self::Receive { buffer, .. }
            | Self::Get { buffer, .. }
            | Self::Am { buffer, .. }
            | Self::Put { buffer, .. }
            | Self::Pieces { buffer, .. } => Some(buffer),
            Self::Nowhere => None,
        }
    }

    pub(super) fn kind(&self) -> OpKind {
        match self {
            Self::Get { .. } => OpKind::Memory,
            Self::Receive { .. }
            | Self::Nowhere
            | Self::Am { .. }
            | Self::Put { .. }
            | Self::Pieces { .. } => OpKind::Message,
        }
    }

    pub(super) fn tag(&self) -> Tag {
        match self {
            Self::Receive { op, .. } | Self::Get { op, .. } => op.tag,
            Self::Am { tag, .. } | Self::Put { tag, .. } => *tag,
            Self::Pieces { .. } | Self::Nowhere => Tag::default(),
        }
    }

    /// Returns `true` if it is for memory of this rank. Its sender is told only after the bytes
    /// are in place.
    pub(super) fn is_memory(&self) -> bool {
        matches!(self, Self::Put { .. } | Self::Pieces { .. })
    }

    pub(super) fn deadline(&self) -> Deadline {
        match self {
            Self::Receive { op, .. } | Self::Get { op, .. } => op.deadline,
            _ => Deadline::NEVER,
        }
    }

    pub(super) fn end(self, from: Rank, size: usize, error: Option<OpError>) -> Ended {
        let (op, buffer) = self.apart(from, size);
        op.end(buffer, error)
    }

    /// Returns the context of the operation whose bytes come from `from`, and its buffer.
    pub(super) fn apart(self, from: Rank, size: usize) -> (OpContext, Buffer) {
        let (tag, buffer, comp) = match self {
            Self::Receive { buffer, op } | Self::Get { buffer, op } => {
                return (OpContext { rank: from, size, ..op }, buffer);
            }
            Self::Am { tag, buffer, comp } => (tag, buffer, Some(comp)),
            // The buffer is part of the region, and stays there.
            Self::Put { tag, comp, .. } => (tag, Buffer::Empty, comp),
            Self::Pieces { .. } | Self::Nowhere => (Tag::default(), Buffer::Empty, None),
        };
        (OpContext::of_runtime(from, tag, size, comp), buffer)
    }

    /// Ends it without its bytes. `None`: this rank has no operation for it, since the active
    /// message never arrived.
    pub(super) fn fail(self, from: Rank, size: usize, error: OpError) -> Option<Ended> {
        match self {
            Self::Receive { .. } | Self::Get { .. } => Some(self.end(from, size, Some(error))),
            Self::Am { .. } | Self::Put { .. } | Self::Pieces { .. } | Self::Nowhere => None,
        }
    }
}
