//! The completion object of a call that waits.

use crate::api::Runtime;
use crate::comp::{AsCompletion, CompQueue, Completion, Status};
use crate::datapath::Port;
use crate::error::{PostError, ProgressError, WaitError};
use std::cell::Cell;
use std::sync::Arc;

thread_local! {
    /// One that is not in use: a call that waits then allocates none.
    static SPARE: Cell<Option<CompQueue>> = const { Cell::new(None) };
}

/// Completion object of a call that waits for one operation. A queue, since a receive that meets
/// its message tells a queue at once.
pub(super) struct Waiter(CompQueue);

impl Waiter {
    /// Takes the thread's spare one, or creates one.
    #[inline]
    pub(super) fn new() -> Self {
        let spare = SPARE.try_with(Cell::take).ok().flatten();
        Self(spare.unwrap_or_else(|| CompQueue::new(1)))
    }

    pub(super) fn as_completion(&self) -> &Arc<dyn Completion> {
        self.0.as_completion()
    }

    /// Makes progress until the operation has ended, and returns its status.
    ///
    /// # Errors
    /// The process is a fork, or may not wait. The operation goes on.
    pub(super) fn status(self, runtime: &Runtime) -> Result<Status, PostError> {
        loop {
            // Errors of progress are kept: they may be of other operations.
            match runtime.0.wait_keeping(&|| !self.0.is_empty(), None) {
                Ok(()) => {}
                Err(WaitError::Progress(ProgressError::Forked)) => return Err(PostError::Forked),
                Err(WaitError::Progress(_) | WaitError::TimedOut(_)) => {
                    return Err(PostError::WouldBlock);
                }
            }
            if let Some(status) = self.0.pop() {
                self.spare();
                return Ok(status);
            }
        }
    }

    /// Keeps it for the thread's next call that waits: no operation tells it any more.
    #[inline]
    pub(super) fn spare(self) {
        let _ = SPARE.try_with(|spare| spare.set(Some(self.0)));
    }
}

/// Makes progress once for a call that waits.
pub(super) fn step(runtime: &Runtime, device: &Port) {
    // A forked process has nothing to wait for: the next try fails with that error.
    let _ = runtime.0.progress_keeping(device);
    std::thread::yield_now();
}
