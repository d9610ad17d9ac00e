//! The division of a copy between its two sides: the receiver takes pieces from the front, the
//! sender from the back.
//!
//! A [`Split`] in memory that both sides see says which side has which piece.

use carrack_transports::contract::Splits;
use carrack_transports::sync::Split;
use carrack_transports::sync::split::{MAX_UNITS, Piece, SplitState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that are taken at least: each piece is a system call, which costs as much as copying some
/// 20 KiB (docs/adr/0011-thresholds.md).
const UNIT: usize = 32 << 10;
/// Bytes of one turn at most: 50 to 100 µs. A batch of messages has two turns.
pub(crate) const MOST: usize = 1 << 20;

/// The division of a message into units. Both sides compute the same.
#[derive(Clone, Copy)]
pub(crate) struct Division {
    size: usize,
    unit: usize,
}

impl Division {
    pub(crate) fn of(size: usize) -> Self {
        Self { size, unit: UNIT.max(size.div_ceil(MAX_UNITS as usize).next_multiple_of(UNIT)) }
    }

    /// Returns the number of units, at most `MAX_UNITS`.
    pub(crate) fn units(self) -> u32 {
        u32::try_from(self.size.div_ceil(self.unit)).unwrap_or(u32::MAX)
    }

    /// Returns the units of the largest piece.
    pub(crate) fn most(self) -> u32 {
        u32::try_from(MOST / self.unit).unwrap_or(1)
    }

    /// Returns the beginning and the length of a piece.
    pub(crate) fn range(self, piece: Piece) -> (usize, usize) {
        let begin = (piece.first as usize * self.unit).min(self.size);
        (begin, (piece.count as usize * self.unit).min(self.size - begin))
    }
}

/// The splits of a link, and a bit for each one in use.
pub(crate) struct Shares {
    splits: Arc<dyn Splits>,
    used: AtomicU64,
}

impl Shares {
    pub(crate) fn new(splits: Arc<dyn Splits>) -> Self {
        Self { splits, used: AtomicU64::new(0) }
    }

    pub(crate) fn take(self: &Arc<Self>, size: usize) -> Option<Share> {
        let count = self.splits.count().min(u64::BITS);
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let number = used.trailing_ones();
            if number >= count {
                return None;
            }
            // Acquire: pairs with the release by the split's last user.
            match self.used.compare_exchange_weak(
                used,
                used | 1 << number,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    let turn = self.splits.get(number)?.open();
                    return Some(Share {
                        shares: self.clone(),
                        number,
                        turn,
                        division: Division::of(size),
                    });
                }
                Err(now) => used = now,
            }
        }
    }
}

/// A split in use for one message. Its drop frees it for another one.
pub(crate) struct Share {
    shares: Arc<Shares>,
    pub(crate) number: u32,
    pub(crate) turn: u32,
    division: Division,
}

impl Share {
    fn split(&self) -> Option<&Split> {
        self.shares.splits.get(self.number)
    }

    /// Takes the next piece for this side: its beginning and its length.
    pub(crate) fn take(&self) -> Option<(usize, usize)> {
        let Self { turn, division, .. } = *self;
        Some(division.range(self.split()?.take_front(turn, division.units(), division.most())?))
    }

    /// Returns the state of the pieces that the sender took, after all are taken.
    pub(crate) fn others(&self) -> OtherPieces {
        match self.split().map_or(SplitState::Settled, Split::state) {
            SplitState::Waiting => OtherPieces::Waiting,
            SplitState::Settled => OtherPieces::Settled,
            SplitState::Failed(back) => {
                let first = self.division.units().saturating_sub(back);
                OtherPieces::Failed(self.division.range(Piece { first, count: back }).0)
            }
        }
    }

    /// Keeps the sender from taking further pieces. Returns `true` if it has finished those that it
    /// took.
    pub(crate) fn close(&self) -> bool {
        let Some(split) = self.split() else { return true };
        split.close(self.turn, self.division.units());
        split.state() != SplitState::Waiting
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.close() {
            self.shares.used.fetch_and(!(1 << self.number), Ordering::Release);
        }
        // Otherwise the sender is still writing a piece, and the split is not used again.
    }
}

/// State of the pieces that the sender took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum OtherPieces {
    /// Some are still being written.
    Waiting,
    /// All are written.
    Settled,
    /// The sender failed: the bytes from this one on are still to be copied.
    Failed(usize),
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn units_cover_a_message_once(size in 1..usize::MAX >> 12, at: u32) {
            for size in [size, size % (1 << 22) + 1] {
                let division = Division::of(size);
                let units = division.units();
                prop_assert!(units <= MAX_UNITS && division.unit.is_multiple_of(UNIT));
                prop_assert_eq!(division.range(Piece { first: 0, count: units }), (0, size));
                let first = at % units;
                let (begin, len) = division.range(Piece { first, count: 1 });
                prop_assert!(len > 0);
                let (next, _) = division.range(Piece { first: first + 1, count: 1 });
                prop_assert_eq!(begin + len, next);
            }
        }
    }
}
