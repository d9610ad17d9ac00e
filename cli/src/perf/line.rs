//! The interface between the measured loops and an operation.

use super::error::PerfError;

/// One direction there and one back between two seats, for messages of one size. The loops are
/// compiled for each kind of line.
pub(super) trait Line {
    /// Sends a message.
    fn send(&mut self) -> Result<(), PerfError>;

    /// Sends a message behind which others follow at once.
    #[inline]
    fn send_with_more(&mut self) -> Result<(), PerfError> {
        self.send()
    }

    /// Waits for `count` more messages.
    fn receive(&mut self, count: u64) -> Result<(), PerfError>;

    /// Waits until at most `most` of the sent messages are in flight as far as this side knows.
    /// The default waits for nothing: such a message has arrived once the receiver has taken it.
    #[inline]
    fn settle(&mut self, most: u64) -> Result<(), PerfError> {
        let _ = most;
        Ok(())
    }
}

/// The traffic of a line, known in advance so that the line can prepare.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traffic {
    /// Bytes of a message.
    pub(super) size: usize,
    /// Messages that will come in, in all.
    pub(super) incoming: u64,
    /// Messages that the sender may be ahead of the receiver.
    pub(super) depth: u64,
}
