//! The operations that a rank waits for, for a program that asks.

use super::Runtime;
use crate::datapath::Device;
use crate::error::{ProgressError, WaitError};
use crate::progress::Pending;
use std::time::Duration;

impl Runtime {
    /// Returns the operations that this rank waits for at this moment. For diagnostics only, since
    /// the lists are read one after the other.
    pub fn pending(&self) -> Pending {
        self.0.pending()
    }

    /// Returns `true` if all messages, puts, gets and atomic operations of a device have ended,
    /// with or without an error. Receives that wait for their messages do not count. Another thread
    /// that makes progress may be about to signal a completion object.
    ///
    /// # Errors
    /// [`ProgressError::Foreign`]: the device is another runtime's.
    pub fn test_drained(&self, device: &Device) -> Result<bool, ProgressError> {
        self.check_own(device)?;
        Ok(device.0.is_drained(&self.0))
    }

    /// Makes progress until [`test_drained`](Self::test_drained), for a limited time.
    ///
    /// # Errors
    /// The time was up, or progress needs attention. Or the device is another runtime's.
    pub fn wait_drained(&self, device: &Device, limit: Duration) -> Result<(), WaitError> {
        self.check_own(device)?;
        self.wait_for(limit, || device.0.is_drained(&self.0))
    }
}
