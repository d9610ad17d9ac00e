//! One call of progress, on one device or on all.

use super::signal::{in_handler, set_runtime};
use super::{Core, Met, NOW_AND_THEN, Pass, Scratch, keep_scratch, take_scratch};
use crate::chores::Chore;
use crate::comp::Snapshot;
use crate::datapath::{Device, Port};
use crate::error::ProgressError;
use crate::protocol::header::Message;
use carrack_transports::contract::Batch;

/// Calls of progress between two looks at the clock while a rank is waited for that has no address:
/// the clock takes as long as a call without work. A prime, as [`NOW_AND_THEN`].
const SOME: u32 = 17;

/// Returns a batch for up to `limit` events.
fn batch(limit: usize) -> Batch {
    Batch::new(limit).with_matched(Message::SEND_KIND)
}

impl Core {
    /// Makes progress for a caller that returns its errors, and those that were kept before.
    /// Returns `true` if anything moved.
    #[inline]
    pub(crate) fn progress(&self, device: &Port) -> Result<bool, ProgressError> {
        self.pass::<true>(device)
    }

    /// Makes progress for a caller with another result: errors are kept for one that returns them.
    #[inline]
    pub(crate) fn progress_keeping(&self, device: &Port) -> Result<bool, ProgressError> {
        match self.pass::<false>(device) {
            Ok(moved) => Ok(moved),
            Err(error) => self.kept(error),
        }
    }

    /// Keeps an error, and returns `true`, unless the call itself is refused.
    #[cold]
    pub(crate) fn kept(&self, error: ProgressError) -> Result<bool, ProgressError> {
        if matches!(error, ProgressError::Forked | ProgressError::InHandler) {
            return Err(error);
        }
        self.complaints.keep(error);
        Ok(true)
    }

    /// Makes progress on all devices. Returns the first error; further ones are kept.
    #[inline]
    pub(crate) fn progress_everything(&self) -> Result<bool, ProgressError> {
        let first = self.progress(&self.default_device().0);
        if self.has_further_devices() { self.progress_others(first) } else { first }
    }

    /// Makes progress on all devices, as [`progress_keeping`](Self::progress_keeping).
    #[inline]
    pub(crate) fn progress_everything_keeping(&self) -> Result<bool, ProgressError> {
        let first = self.progress_keeping(&self.default_device().0);
        if self.has_further_devices() { self.progress_others(first) } else { first }
    }

    #[inline(never)]
    fn progress_others(
        &self,
        mut progress: Result<bool, ProgressError>,
    ) -> Result<bool, ProgressError> {
        if !matches!(progress, Err(ProgressError::Forked | ProgressError::InHandler)) {
            let others = self.devices()[1..].to_vec();
            for device in &others {
                let moved = self.progress_keeping(&device.0)?;
                progress = progress.map(|before| before | moved);
            }
        }
        progress
    }

    #[inline]
    fn pass<const TAKES_KEPT: bool>(&self, device: &Port) -> Result<bool, ProgressError> {
        if in_handler() {
            return Err(ProgressError::InHandler);
        }
        if self.is_forked() {
            return Err(ProgressError::Forked);
        }
        let mut scratch = take_scratch().unwrap_or_else(|| {
            let batch = batch(self.settings.poll_batch());
            let (met, comps, ended) = (Met::default(), Snapshot::default(), Vec::new());
            Box::new(Scratch { batch, met, runtime: 0, comps, ended, gathering: None, calls: 0 })
        });
        if scratch.runtime != self.id {
            scratch.runtime = self.id;
            set_runtime(self.id);
            scratch.comps = Snapshot::default();
            // The batch is empty between calls.
            let limit = self.settings.poll_batch();
            if scratch.batch.room() != limit {
                scratch.batch = batch(limit);
            }
        }
        if !scratch.met.told.is_empty() {
            scratch.met.told.clear();
        }
        scratch.calls = scratch.calls.wrapping_add(1);
        if scratch.calls.is_multiple_of(NOW_AND_THEN) {
            self.look_after_domains();
        }
        let mut pass = Pass::new(self, device);
        pass.run(&mut scratch);
        let calls = scratch.calls;
        keep_scratch(scratch);
        if pass.moved {
            self.sleepers.wake();
        }
        let chores = self.chores.there();
        if chores.any() {
            if chores.has(Chore::Dump) {
                self.dump();
            }
            if chores.has(Chore::Absent) && calls.is_multiple_of(SOME) {
                self.absent.look(|| self.look_for_absent());
            }
            if chores.has(Chore::Retries) {
                self.retries.wake();
            }
            if chores.has(Chore::Complaints) && TAKES_KEPT && pass.error.is_none() {
                let waits = |device: &Device| !device.0.undelivered.is_empty();
                pass.error = self.complaints.take(!self.devices().iter().any(waits));
            }
        }
        // Looked at where it is: to move it, the processor would wait for the store that wrote it.
        match pass.error {
            None => Ok(pass.moved),
            Some(error) => Err(error),
        }
    }
}
