//! Bytes on their way from a GPU: its engine copies the next block while the link sends the last.

use crate::staging::{BLOCK, Direction, Staging, StagingBlock};
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::{Buffer, CopyError, MemRef, Transfer};
use std::collections::VecDeque;
use std::sync::Arc;

/// The progress of an engine that copies ahead of the link.
pub(super) struct Ahead {
    gpu: Arc<dyn Gpu>,
    /// Bytes that an engine was told to copy.
    begun: usize,
    /// The copy in progress. Declared before its block: the drop of a transfer waits.
    copying: Option<(Transfer, StagingBlock, usize)>,
    /// Copied blocks, with the bytes in each.
    ready: VecDeque<(StagingBlock, usize)>,
    /// Bytes of the first block that are sent.
    sent: usize,
}

impl Ahead {
    /// Returns the state for bytes that no CPU may touch, from `first` on. `None`: a CPU may touch
    /// them, or no engine reaches them.
    pub(super) fn of(bytes: &Buffer, first: usize) -> Option<Box<Self>> {
        let gpu = bytes.view().place().gpu()?.clone();
        Some(Box::new(Self { gpu, begun: first, copying: None, ready: VecDeque::new(), sent: 0 }))
    }

    /// Polls the engine, and gives it the next block of the first `limit` bytes. The engine has
    /// the buffer while it works. Returns `true` if anything moved.
    pub(super) fn step(
        &mut self,
        bytes: &mut Buffer,
        limit: usize,
        staging: &Staging,
    ) -> Result<bool, CopyError> {
        let mut moved = false;
        if let Some((transfer, ..)) = &mut self.copying {
            let Some(outcome) = transfer.poll() else { return Ok(false) };
            if let Some((block, len)) = self.settle(bytes) {
                outcome?;
                self.ready.push_back((block, len));
                moved = true;
            }
        }
        let len = limit.saturating_sub(self.begun).min(BLOCK);
        if len == 0 {
            return Ok(moved);
        }
        let Some(block) = staging.take(&self.gpu, Direction::Out, self.ready.is_empty()) else {
            return Ok(moved);
        };
        let source = (std::mem::take(bytes), self.begun);
        match Transfer::start_part((block.first(len), 0), source, len) {
            Ok(transfer) => {
                self.copying = Some((transfer, block, len));
                self.begun += len;
                Ok(true)
            }
            Err(refused) => {
                *bytes = refused.src;
                Err(refused.cause)
            }
        }
    }

    /// Returns the bytes to send next, up to the end of a block.
    pub(super) fn front(&self) -> Option<MemRef<'_>> {
        let (block, len) = self.ready.front()?;
        block.memory().part(self.sent, len - self.sent)
    }

    /// Notes that `len` bytes are sent.
    pub(super) fn sent(&mut self, len: usize) {
        self.sent += len;
        if self.ready.front().is_some_and(|(_, all)| self.sent == *all) {
            self.ready.pop_front();
            self.sent = 0;
        }
    }

    /// Returns `true` if an engine is copying now.
    pub(super) fn is_busy(&mut self) -> bool {
        self.copying.as_mut().is_some_and(|(transfer, ..)| transfer.poll().is_none())
    }

    /// Takes the buffer back; waits for the engine if it is copying.
    pub(super) fn settle(&mut self, bytes: &mut Buffer) -> Option<(StagingBlock, usize)> {
        let (transfer, block, len) = self.copying.take()?;
        *bytes = transfer.into_buffers().1;
        Some((block, len))
    }
}
