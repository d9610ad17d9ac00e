//! Calls that make progress, and that wait meanwhile.

use super::Runtime;
use crate::comp::{CompQueue, Status, Synchronizer};
use crate::datapath::Device;
use crate::error::{ProgressError, WaitError};
use std::time::Duration;

impl Runtime {
    /// Makes progress on the default device: takes in messages, moves on waiting operations,
    /// signals completion objects. Never blocks. Any number of threads may call it at once, but
    /// not a completion handler.
    ///
    /// Returns `true` if anything moved.
    ///
    /// # Errors
    /// A problem needs attention; everything else was done, and the next call continues.
    #[inline]
    pub fn progress(&self) -> Result<bool, ProgressError> {
        self.0.note_driven();
        self.0.progress(&self.0.default_device().0)
    }

    /// Makes progress on one device. Returns `true` if anything moved.
    ///
    /// # Errors
    /// See [`progress`](Self::progress); and the device is another runtime's.
    #[inline]
    pub fn progress_device(&self, device: &Device) -> Result<bool, ProgressError> {
        self.check_own(device)?;
        self.0.note_driven();
        self.0.progress(&device.0)
    }

    /// Refuses a device of another runtime.
    #[inline(always)]
    pub(super) fn check_own(&self, device: &Device) -> Result<(), ProgressError> {
        if device.0.runtime == self.0.id { Ok(()) } else { Err(ProgressError::Foreign) }
    }

    /// Makes progress on all devices. Returns `true` if anything moved.
    pub fn progress_all(&self) -> Result<bool, ProgressError> {
        self.0.note_driven();
        self.0.progress_everything()
    }

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
