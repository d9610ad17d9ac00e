//! Bytes on their way onto a GPU: parts fill blocks of host memory, and its engine copies those
//! that are full.
//!
//! The receiver grants as many bytes as it has blocks for. So its memory is bounded, a message
//! whose GPU is slow delays no other, and every byte that arrives has its block.

use crate::staging::{BLOCK, BLOCKS, Direction, Staging, StagingBlock};
use carrack_transports::contract::Payload;
use carrack_transports::gpu::Gpu;
use carrack_transports::mem::copy::copy_now;
use carrack_transports::mem::{Buffer, CopyError, Transfer};
use std::collections::VecDeque;
use std::sync::Arc;

/// The progress of one message.
pub(super) struct Inflow {
    gpu: Arc<dyn Gpu>,
    size: usize,
    /// Blocks that are being filled, in the order of the message.
    filling: VecDeque<Filling>,
    /// The beginning of the first of them in the message.
    begin: usize,
    /// The copy in progress. Declared before its block: the drop of a transfer waits.
    copying: Option<(Transfer, StagingBlock)>,
    /// Bytes that have had a block.
    granted: usize,
}

struct Filling {
    block: StagingBlock,
    got: usize,
    len: usize,
}

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Stepped {
    pub(super) moved: bool,
    /// All bytes are on the GPU.
    pub(super) is_complete: bool,
}

impl Inflow {
    /// Returns the state of a message of `size` bytes into memory that no CPU may touch. `None`: a
    /// CPU may touch it, or no engine reaches it.
    pub(super) fn into(buffer: &Buffer, size: usize) -> Option<Box<Self>> {
        let gpu = buffer.view().place().gpu()?.clone();
        let (filling, copying) = (VecDeque::new(), None);
        Some(Box::new(Self { gpu, size, filling, begin: 0, copying, granted: 0 }))
    }

    /// Takes a part in.
    ///
    /// # Errors
    /// The part was not granted, or arrived before.
    pub(super) fn take(&mut self, offset: usize, part: &Payload) -> Result<(), &'static str> {
        if offset.checked_add(part.len()).is_none_or(|end| end > self.granted) {
            return Err("it sent a fragment that may not come yet");
        }
        let mut done = 0;
        while done < part.len() {
            let at = offset + done;
            let block = at.checked_sub(self.begin).and_then(|at| self.filling.get_mut(at / BLOCK));
            let filling = block.ok_or("it sent a fragment that has come")?;
            let within = at % BLOCK;
            let len = (filling.len.saturating_sub(within)).min(part.len() - done);
            if len == 0 || filling.got + len > filling.len {
                return Err("it sent a fragment that has come");
            }
            let room = filling.block.memory().part_mut(within, len).ok_or("a block ends there")?;
            copy_now(room, part.view().part(done, len))
                .map_err(|_| "it sent a fragment that cannot be copied")?;
            filling.got += len;
            done += len;
        }
        Ok(())
    }

    /// Polls the engine, gives it the next full block, and takes blocks for further bytes: at
    /// least one with `must`. The engine has the buffer while it works.
    ///
    /// # Errors
    /// The engine failed, or refused the copy.
    pub(super) fn step(
        &mut self,
        buffer: &mut Buffer,
        staging: &Staging,
        must: bool,
    ) -> Result<Stepped, CopyError> {
        let mut moved = false;
        if let Some((transfer, _)) = &mut self.copying
            && let Some(outcome) = transfer.poll()
        {
            self.settle(buffer);
            outcome?;
            moved = true;
        }
        if self.copying.is_none()
            && self.filling.front().is_some_and(|first| first.got == first.len)
            && let Some(Filling { block, len, .. }) = self.filling.pop_front()
        {
            let target = (std::mem::take(buffer), self.begin);
            match Transfer::start_part(target, (block.first(len), 0), len) {
                Ok(transfer) => self.copying = Some((transfer, block)),
                Err(refused) => {
                    *buffer = refused.dst;
                    return Err(refused.cause);
                }
            }
            self.begin += len;
            moved = true;
        }
        while self.granted < self.size && self.blocks() < BLOCKS {
            let must = must && self.blocks() == 0;
            let Some(block) = staging.take(&self.gpu, Direction::In, must) else { break };
            let len = (self.size - self.granted).min(BLOCK);
            self.filling.push_back(Filling { block, got: 0, len });
            self.granted += len;
        }
        let is_complete = self.begin == self.size && self.copying.is_none();
        Ok(Stepped { moved, is_complete })
    }

    fn blocks(&self) -> usize {
        self.filling.len() + usize::from(self.copying.is_some())
    }

    /// Returns the bytes that may come.
    pub(super) fn granted(&self) -> usize {
        self.granted
    }

    /// Returns `true` if an engine is copying now.
    pub(super) fn is_busy(&mut self) -> bool {
        self.copying.as_mut().is_some_and(|(transfer, _)| transfer.poll().is_none())
    }

    /// Takes the buffer back; waits for the engine if it is copying.
    pub(super) fn settle(&mut self, buffer: &mut Buffer) {
        if let Some((transfer, _block)) = self.copying.take() {
            *buffer = transfer.into_buffers().0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use carrack_simulators::gpu::{FakeConfig, FakeDriver};
    use carrack_transports::gpu::Flavour;

    fn part(bytes: &[u8]) -> Payload {
        Payload::Aside(bytes.to_vec())
    }

    /// Steps until nothing moves any more, and the engine is done. Returns `true` if all bytes are
    /// in place.
    fn settled(inflow: &mut Inflow, buffer: &mut Buffer, staging: &Staging) -> bool {
        loop {
            let stepped = inflow.step(buffer, staging, true).unwrap();
            if !stepped.moved && !inflow.is_busy() && inflow.copying.is_none() {
                return stepped.is_complete;
            }
        }
    }

    #[test]
    fn parts_of_any_length_and_in_any_order_arrive_and_what_was_not_asked_for_is_refused() {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let size = 6 * BLOCK + 12_345;
        let region = driver.gpu(0).unwrap().allocate(size, Flavour::Plain).unwrap();
        let message: Vec<u8> = (0..size).map(|at| (at / 3) as u8).collect();
        let (staging, mut buffer) = (Staging::default(), Buffer::Region(region.whole()));
        let mut inflow = Inflow::into(&buffer, size).unwrap();
        assert!(inflow.take(0, &part(&[1])).is_err(), "nothing was asked for");
        let (mut at, mut is_complete) = (0, false);
        while !is_complete {
            is_complete = settled(&mut inflow, &mut buffer, &staging);
            let granted = inflow.granted();
            assert!(granted <= size && granted - at <= BLOCKS * BLOCK);
            assert!(inflow.take(granted, &part(&[1])).is_err(), "beyond what may come");
            if granted > 0 {
                assert!(inflow.take(granted - 1, &part(&[1; 2])).is_err(), "the same");
            }
            // From the back to the front, in parts that end where no block does.
            let places: Vec<_> = (at..granted).step_by(9973).collect();
            for place in places.into_iter().rev() {
                let end = (place + 9973).min(granted);
                inflow.take(place, &part(&message[place..end])).unwrap();
            }
            at = granted;
            if granted > 0 && !is_complete {
                assert!(inflow.take(granted - 1, &part(&[1])).is_err(), "it has come");
            }
        }
        assert!(inflow.take(0, &part(&[1])).is_err(), "all have come");
        assert!(region.whole().to_vec().unwrap() == message);
    }

    #[test]
    fn memory_that_the_cpu_reaches_needs_no_blocks() {
        assert!(Inflow::into(&Buffer::Vec(vec![0; 10]), 10).is_none());
    }
}
