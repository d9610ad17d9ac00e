//! Calls that wait, making progress.

use crate::comp::{CompQueue, Status, Synchronizer};
use crate::error::WaitError;
use crate::runtime::Runtime;
use std::time::Duration;

impl Runtime {
    /// Makes progress on all devices until `done` returns `true`, and sleeps when there is nothing
    /// to do.
    ///
    /// # Errors
    /// Progress needs attention. `done` is asked once more before an error is returned.
    pub fn wait(&self, done: impl Fn() -> bool) -> Result<(), WaitError> {
        self.0.wait(&done, None)
    }

    /// Waits as [`wait`](Self::wait), for a limited time.
    pub fn wait_for(&self, limit: Duration, done: impl Fn() -> bool) -> Result<(), WaitError> {
        self.0.wait(&done, Some(limit))
    }
}

impl CompQueue {
    /// Takes the oldest status, and makes progress on all devices until there is one.
    ///
    /// # Errors
    /// Progress needs attention.
    pub fn wait_pop(&self, runtime: &Runtime) -> Result<Status, WaitError> {
        loop {
            if let Some(status) = self.pop() {
                return Ok(status);
            }
            runtime.wait(|| !self.is_empty())?;
        }
    }
}

impl Synchronizer {
    /// Makes progress until all operations have ended, and takes their statuses. Does not burn a
    /// core.
    pub fn wait(&self, runtime: &Runtime) -> Result<Vec<Status>, WaitError> {
        loop {
            runtime.wait(|| self.test())?;
            if let Some(statuses) = self.take() {
                return Ok(statuses);
            }
        }
    }
}
