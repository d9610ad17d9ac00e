//! One completion for all parts of a batch.

use crate::api::post::rma::tell;
use crate::comp::{Completion, Status};
use crate::error::OpError;
use crate::names::RemoteComp;
use crate::op::OpContext;
use crate::progress::Core;
use carrack_transports::mem::Buffer;
use parking_lot::{Mutex, MutexGuard};
use std::sync::Weak;

/// The completion object of a batch's parts. After the last part it notifies the other rank, if no
/// part has failed, and signals the batch's own object. The thread that begins the parts has a
/// share, too, so that the batch cannot complete before all have begun.
pub(in crate::api::post) struct Join {
    pub(super) op: OpContext,
    pub(super) runtime: Weak<Core>,
    /// The number of the device.
    pub(super) device: u32,
    pub(super) notify: Option<RemoteComp>,
    pub(super) state: Mutex<JoinState>,
}

/// The parts in flight, and the share of the thread that begins them.
pub(super) struct JoinState {
    left: usize,
    /// The first of them.
    error: Option<OpError>,
}

impl Default for JoinState {
    /// Returns one share, of the thread that begins the parts.
    fn default() -> Self {
        Self { left: 1, error: None }
    }
}

impl Join {
    fn state(&self) -> MutexGuard<'_, JoinState> {
        self.state.lock()
    }

    /// Adds a part before it begins, as it may end at once.
    pub(super) fn add(&self) {
        self.state().left += 1;
    }

    /// Takes a share back: a part did not begin, or has ended at once. The beginning thread still
    /// has its own.
    pub(super) fn take_back(&self, error: Option<OpError>) {
        let mut state = self.state();
        state.left -= 1;
        state.error = state.error.take().or(error);
    }

    /// Returns `true` if a part has failed, so that the others need not begin.
    pub(super) fn has_failed(&self) -> bool {
        self.state().error.is_some()
    }

    /// Removes a share. After the last one it notifies the other rank, if no part has failed.
    /// Returns the status for the batch's completion object.
    pub(super) fn release(&self, error: Option<OpError>) -> Option<Status> {
        let error = {
            let mut state = self.state();
            state.error = state.error.take().or(error);
            state.left = state.left.saturating_sub(1);
            if state.left > 0 {
                return None;
            }
            state.error.take()
        };
        let OpContext { rank, tag, size, .. } = self.op;
        if let (None, Some(comp), Some(runtime)) = (&error, self.notify, self.runtime.upgrade())
            && let Some(device) = runtime.devices().get(self.device as usize).cloned()
        {
            tell(&runtime, &device.0, rank, (comp, tag), size);
        }
        Some(self.op.status(Buffer::Empty, error))
    }
}

impl Completion for Join {
    fn signal(&self, status: Status) -> Result<(), Status> {
        // Signaled once more, since the inner object had no room: all parts have ended already.
        let last = if self.state().left == 0 {
            Some(status)
        } else {
            self.release(status.error.map(|error| *error))
        };
        match (last, &self.op.comp) {
            (Some(status), Some(inner)) => inner.signal(status),
            (Some(Status { error: Some(error), .. }), None) => {
                tracing::warn!(%error, "a batch without a completion object failed");
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn runs_user_code(&self) -> bool {
        self.op.comp.as_ref().is_some_and(|inner| inner.runs_user_code())
    }

    fn describe(&self) -> String {
        self.op.comp.as_ref().map_or_else(|| "nothing".into(), |inner| inner.describe())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comp::{AsCompletion, CompQueue};
    use crate::names::{Rank, Tag, UserContext};
    use std::sync::Arc;

    fn join(comp: Option<Arc<dyn Completion>>) -> Join {
        Join {
            op: OpContext {
                user_context: UserContext(4),
                ..OpContext::of_runtime(Rank(1), Tag(2), 300, comp)
            },
            runtime: Weak::new(),
            device: 0,
            notify: None,
            state: Mutex::default(),
        }
    }

    fn status(error: Option<OpError>) -> Status {
        OpContext::of_runtime(Rank(1), Tag(9), 9, None).status(Buffer::Empty, error)
    }

    #[test]
    fn it_tells_once_after_the_last_share_and_of_the_first_error() {
        let ended = CompQueue::new(16);
        let join = join(Some(ended.as_completion().clone()));
        join.add();
        join.add();
        assert!(join.signal(status(Some(OpError::Closed))).is_ok() && join.has_failed());
        assert!(join.release(None).is_none() && ended.pop().is_none());
        assert!(join.signal(status(Some(OpError::Cancelled))).is_ok());
        let told = ended.pop().unwrap();
        assert!(matches!(told.error.as_deref(), Some(OpError::Closed)), "{told:?}");
        assert_eq!(
            (told.rank, told.tag, told.size, told.user_context),
            (Rank(1), Tag(2), 300, UserContext(4))
        );
        assert!(ended.pop().is_none());
    }

    #[test]
    fn an_object_without_room_is_told_later() {
        let ended = CompQueue::new(1);
        let object = ended.as_completion().clone();
        while object.signal(status(None)).is_ok() {}
        let join = join(Some(object));
        let refused = join.signal(status(None)).unwrap_err();
        while ended.pop().is_some() {}
        assert!(join.signal(refused).is_ok());
        assert_eq!(ended.pop().unwrap().size, 300);
    }
}
