//! Events that several processes share.

use super::{GpuError, GpuEvent, Stream};
use std::fmt;

/// An event that several processes share: one records it, the others wait for the record.
pub trait SharedEvent: Send + Sync + fmt::Debug {
    /// Returns the bytes by which another process opens it.
    fn handle(&self) -> Result<[u8; 64], GpuError>;

    /// Records it: it fires when all work given to `stream` so far has ended.
    fn record(&self, stream: &dyn Stream) -> Result<(), GpuError>;

    /// Returns its last record, as an event for [`Stream::wait`] and for polling. Without a record
    /// it has fired.
    fn event(&self) -> GpuEvent;
}
