//! The making of counters that streams wait for.

use super::Runtime;
use crate::comp::{StreamCounter, StreamCounterState};
use crate::progress::Core;
use carrack_transports::gpu::{Gpu, GpuError};
use std::sync::{Arc, Weak};

impl StreamCounter {
    /// Returns a counter at zero, for streams of `gpu`, and of other GPUs of its driver.
    ///
    /// # Errors
    /// The driver has no pinned memory.
    pub fn new(runtime: &Runtime, gpu: &Arc<dyn Gpu>) -> Result<Self, GpuError> {
        let streams = &runtime.0.streams;
        let ranks: Weak<Core> = Arc::downgrade(&runtime.0);
        let counted = Arc::new(StreamCounterState::new(streams.words(gpu).word()?, ranks));
        streams.add(&counted);
        Ok(counted.into())
    }
}
