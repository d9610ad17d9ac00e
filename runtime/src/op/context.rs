//! The parameters of an operation that outlive its call.

use super::PendingOp;
use crate::comp::{Completion, Status};
use crate::deadline::Deadline;
use crate::error::OpError;
use crate::names::{Rank, Tag, UserContext};
use carrack_transports::mem::Buffer;
use std::sync::Arc;

/// The status of an operation, and the object to signal.
pub(crate) type Ended = (Option<Arc<dyn Completion>>, Status);

/// The parameters that an operation has wherever it waits: what its status repeats, the object that
/// gets the status, and the deadline.
pub(crate) struct OpContext {
    pub(crate) rank: Rank,
    pub(crate) tag: Tag,
    /// Bytes.
    pub(crate) size: usize,
    pub(crate) user_context: UserContext,
    pub(crate) comp: Option<Arc<dyn Completion>>,
    pub(crate) deadline: Deadline,
}

impl OpContext {
    /// Returns the context of one of the runtime's own operations.
    pub(crate) fn of_runtime(
        rank: Rank,
        tag: Tag,
        size: usize,
        comp: Option<Arc<dyn Completion>>,
    ) -> Self {
        let (user_context, deadline) = (UserContext::default(), Deadline::NEVER);
        Self { rank, tag, size, user_context, comp, deadline }
    }

    /// Takes the context, its completion object included; the rest stays readable.
    #[inline(always)]
    pub(crate) fn take(&mut self) -> Self {
        Self { comp: self.comp.take(), ..*self }
    }

    /// Returns the status of the operation's end.
    #[inline(always)]
    pub(crate) fn status(&self, buffer: Buffer, error: Option<OpError>) -> Status {
        let Self { rank, tag, size, user_context, .. } = *self;
        Status { rank, tag, size, user_context, buffer, error: error.map(Box::new) }
    }

    /// Describes it, for diagnostics.
    pub(crate) fn pending(&self, what: &'static str, waits_for: impl Into<String>) -> PendingOp {
        let Self { rank, tag, size, .. } = *self;
        PendingOp { what, rank, tag, size: size as u64, waits_for: waits_for.into() }
    }

    /// Ends it.
    #[inline(always)]
    pub(crate) fn end(self, buffer: Buffer, error: Option<OpError>) -> Ended {
        let status = self.status(buffer, error);
        (self.comp, status)
    }
}
