//! The chunks of a link, as its sender counts them.

#![forbid(unsafe_code)]

use super::segment::{MAX_CHUNKS, Segment};
use crate::clock::{TICKS_PER_MICROSECOND, ticks};

/// The chunks that a sender may fill.
#[derive(Debug)]
pub(super) struct SenderChunks {
    /// Chunks known to be free: one bit each.
    free: u64,
    /// Time of the last look for chunks that have come back.
    looked: u64,
    /// Number of times that each chunk was sent.
    lent: [u32; MAX_CHUNKS as usize],
}

impl SenderChunks {
    /// Counts the chunks of a fresh segment.
    pub(super) fn new(count: u32) -> Self {
        Self { free: u64::MAX >> (64 - count), looked: 0, lent: [0; MAX_CHUNKS as usize] }
    }

    /// Returns the next free chunk, if any is known or found. The lowest one: its lines are
    /// likelier in a cache than those of the one used longest ago.
    #[inline(always)]
    pub(super) fn next(&mut self, segment: &Segment) -> Option<u32> {
        if self.free == 0 {
            self.look(segment);
        }
        (self.free != 0).then(|| self.free.trailing_zeros())
    }

    /// Looks for chunks that have come back. It does not look again before the receiver can have
    /// taken a sixteenth of all of them: each look takes the lines away in which the receiver
    /// counts.
    #[inline(never)]
    fn look(&mut self, segment: &Segment) {
        let rest = u64::from(segment.geometry().chunks / 16) * TICKS_PER_MICROSECOND;
        if ticks().wrapping_sub(self.looked) >= rest {
            self.free = segment.returned(&self.lent);
            self.looked = ticks();
        }
    }

    /// Notes that a chunk was sent, with `len` bytes: the next one gets as many soon.
    #[inline(always)]
    pub(super) fn sent(&mut self, chunk: u32, len: usize, segment: &Segment) {
        self.free &= !(1 << chunk);
        if let Some(lent) = self.lent.get_mut(chunk as usize) {
            *lent = lent.wrapping_add(1);
        }
        // Behind the message, and not in the way of the next one.
        segment.will_fill(self.free.trailing_zeros(), len);
    }
}
