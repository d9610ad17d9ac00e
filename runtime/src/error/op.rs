//! The error of an operation.

use super::PostError;
use crate::names::Rank;
use carrack_transports::contract::{DownCause, OpFailure, SubmitError};
use carrack_transports::gpu::GpuError;
use carrack_transports::mem::CopyError;

/// An operation failed. The status of its completion object has this error.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// The peer went first.
    #[error("{rank} is gone: {cause}; {}", .cause.remedy())]
    PeerDown {
        /// The peer.
        rank: Rank,
        /// The reason of its end.
        cause: DownCause,
    },
    /// The message was longer than the buffer; the buffer was not written. The receive has this
    /// error, and so has the send if the message was too long to leave before its receive was
    /// known.
    #[error(
        "a message of {message} bytes came for a receive of {buffer}, and nothing was written: \
        give the receive a buffer of {message} bytes or more"
    )]
    Truncated {
        /// Bytes of the message.
        message: usize,
        /// Bytes of the buffer.
        buffer: usize,
    },
    /// A copy failed.
    #[error(transparent)]
    Copy(CopyError),
    /// The event that the operation waited for failed.
    #[error(
        "the event that the operation was ordered after failed: {0}; look for the first error on \
        its stream"
    )]
    Event(GpuError),
    /// The operation was deferred, and refused at its begin.
    #[error("the operation could not begin at its turn: {0}")]
    Begin(Box<PostError>),
    /// The peer could not do its part: it had no memory for the message, or copying failed there.
    #[error("{0} could not do its part of the operation: look for the reason in that rank's log")]
    Refused(Rank),
    /// Memory for a large message is short.
    #[error(
        "there is no host memory for the {0} bytes of a message: free some, or send it in parts"
    )]
    Memory(usize),
    /// Copying from the peer failed.
    #[error(
        "copying from {rank} failed: {why}; keep the memory of an operation mapped at both ranks \
        until it ends"
    )]
    Transfer {
        /// The peer.
        rank: Rank,
        /// The system's error.
        why: String,
    },
    /// The link refused the operation after it had been accepted.
    #[error(
        "the link to {rank} refused the operation: {why}; unless a limit of this machine is the \
        reason, please report this"
    )]
    Link {
        /// The peer.
        rank: Rank,
        /// The link's error.
        why: String,
    },
    /// The remote region is not registered any more, or never was.
    #[error(
        "the remote region of {0} is not registered any more, or never was: get a new remote key \
        from its owner"
    )]
    Stale(Rank),
    /// The operation reaches beyond the remote region.
    #[error(
        "the operation reaches beyond the region that {0} has registered: check offset and length \
        against the remote key"
    )]
    Outside(Rank),
    /// The owner of the remote region does no atomic operation there.
    #[error("{0} does no atomic operation on that word: give an offset that is a multiple of 8")]
    Word(Rank),
    /// The operation had not completed by its deadline.
    #[error(
        "the operation with {0} did not complete by its deadline: give it a later one, or look at \
        Runtime::pending of that rank"
    )]
    TimedOut(Rank),
    /// The receive was cancelled, before its message came.
    #[error("the receive was cancelled, and took no message: post another one for its message")]
    Cancelled,
    /// The device or the runtime was closed first. A message may have arrived all the same.
    #[error(
        "the runtime was closed before the operation completed: wait for the operation, or cancel \
        it, before the runtime is dropped"
    )]
    Closed,
}

impl OpError {
    pub(crate) fn of_submit(error: &SubmitError, rank: Rank) -> Self {
        match error {
            SubmitError::Down { cause, .. } => Self::PeerDown { rank, cause: cause.clone() },
            other => {
                tracing::error!(error = %other, rank = rank.0, "a link refused what the plan had \
                    found possible");
                Self::Link { rank, why: other.to_string() }
            }
        }
    }

    /// Returns the error of an operation that is posted later than its call.
    pub(crate) fn of_post(error: PostError, rank: Rank) -> Self {
        match error {
            PostError::PeerDown { rank, cause } => Self::PeerDown { rank, cause },
            PostError::Stale(rank) => Self::Stale(rank),
            PostError::TimedOut(_) => Self::TimedOut(rank),
            PostError::Closed => Self::Closed,
            PostError::Memory(error) => Self::Copy(error),
            other => Self::Begin(Box::new(other)),
        }
    }

    pub(crate) fn of(failure: OpFailure, rank: Rank) -> Self {
        match failure {
            OpFailure::Down(cause) => Self::PeerDown { rank, cause },
            OpFailure::Copy(error) => Self::Copy(error),
            OpFailure::Closed => Self::Closed,
            other => Self::Link { rank, why: other.to_string() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_that_refuses_what_was_planned_is_named_and_not_the_end_of_the_runtime() {
        let refused = SubmitError::TooLong { len: 9, max: 8 };
        let error = OpError::of_submit(&refused, Rank(3));
        assert!(matches!(&error, OpError::Link { rank: Rank(3), .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains("rank 3") && text.contains(&refused.to_string()), "{text}");
    }
}
