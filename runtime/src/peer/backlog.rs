//! Operations that wait for an event, a staging copy, or room.
//!
//! Each peer has a backlog of its own, so that a slow one delays no other (LCI has one for all).
//! It is first in, first out, and while it is not empty nothing overtakes it. So messages to a
//! peer keep their order, whatever they wait for.

use crate::error::OpError;
use crate::op::{Ended, OpContext, PendingOp};
use crate::protocol::header::Message;
use crate::protocol::wire::Control;
use crate::staging::StagingBlock;
use carrack_transports::contract::Header;
use carrack_transports::gpu::GpuEvent;
use carrack_transports::mem::{Buffer, Transfer};

/// An operation that waits.
pub(crate) struct Parked {
    pub(crate) header: Header,
    pub(crate) op: OpContext,
    /// The path that is demanded: which one it takes may turn out only now.
    pub(crate) required: Option<&'static str>,
    pub(crate) stage: Stage,
}

/// The state of a waiting operation.
pub(crate) enum Stage {
    /// An event of the user's.
    After(GpuEvent, Buffer),
    /// The operation's turn.
    Ready(Buffer),
    /// The copy into a block of host memory.
    Staging(Transfer, StagingBlock),
    /// Room for that copy; the user's buffer is kept to be given back.
    Staged(StagingBlock, Buffer),
    /// Nothing: it has ended.
    Ended(Buffer),
}

impl Stage {
    /// Returns the buffer of the operation.
    pub(crate) fn into_buffer(self) -> Buffer {
        match self {
            Self::After(_, buffer)
            | Self::Ready(buffer)
            | Self::Staged(_, buffer)
            | Self::Ended(buffer) => buffer,
            Self::Staging(transfer, _block) => transfer.into_buffers().1,
        }
    }
}

impl Parked {
    /// Returns the status with which it ends, its buffer included.
    pub(crate) fn into_status(self, error: Option<OpError>) -> Ended {
        self.op.end(self.stage.into_buffer(), error)
    }

    /// Describes it, for diagnostics. `link` is the event that the link waits for.
    pub(super) fn pending(&self, link: Option<&str>) -> PendingOp {
        let stage = match self.stage {
            Stage::After(..) => "the event that it was ordered after",
            Stage::Ready(_) | Stage::Staged(..) => "its turn, or room at the peer",
            Stage::Staging(..) => "an engine of a GPU",
            Stage::Ended(_) => "nothing",
        };
        self.op.pending("message in the backlog", link.unwrap_or(stage))
    }

    /// Returns `true` if it is one of the runtime's own messages, or part of a collective.
    pub(crate) fn is_of_runtime(&self) -> bool {
        Message::decode(self.header)
            .is_ok_and(|message| message.is_of_runtime() || message.is_collective())
    }

    /// Returns `true` if it overtakes everything that waits: a hold would come too late behind the
    /// replies that it is about. Its turn tells its order.
    pub(crate) fn goes_first(&self) -> bool {
        Control::is_hold(self.header)
    }

    /// Returns `true` if no engine copies it.
    pub(crate) fn is_idle(&self) -> bool {
        !matches!(self.stage, Stage::Staging(..))
    }
}
