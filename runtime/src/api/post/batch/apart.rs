//! The test that no two pieces of a batch write the same byte.
//!
//! The targets of most batches are in order, which [`OverlapCheck`] finds during other checks of
//! the pieces. Otherwise a mark is set for each unit of memory that is written. Only if there would
//! be too many marks, or one is set twice, are the pieces sorted.

use super::Piece;
use crate::error::PostError;
use std::ops::Range;

/// Returns the range that a piece writes: the memory, the start and the end.
#[inline]
fn target(piece: &Piece<'_>, is_put: bool, len: usize) -> (u64, u64, u64) {
    let (memory, start) = if is_put {
        (piece.rmr.number(), piece.rmr.offset() + piece.offset)
    } else {
        (0, (piece.local.addr() + piece.range.start) as u64)
    };
    (memory, start, start + len as u64)
}

/// Check of pieces in the order of their targets, which shows that none overlap.
pub(super) struct OverlapCheck {
    pub(super) is_known: bool,
    /// The memory of the last target, and its base.
    memory: Option<(u64, u64)>,
    /// The end of the last target.
    pub(super) end: u64,
}

impl OverlapCheck {
    pub(super) fn new() -> Self {
        Self { is_known: true, memory: None, end: 0 }
    }

    /// Announces that the next pieces write to this memory: its number, and the base of their
    /// places.
    pub(super) fn enter(&mut self, memory: (u64, u64)) {
        if self.memory != Some(memory) {
            // Registered parts of one memory may contain each other.
            self.is_known &= self.memory.is_none_or(|(last, _)| last < memory.0);
            (self.memory, self.end) = (Some(memory), 0);
        }
    }

    #[inline]
    pub(super) fn note(&mut self, start: u64, len: usize) {
        if len > 0 {
            self.is_known &= start >= self.end;
            self.end = start + len as u64;
        }
    }
}

/// Finds two pieces that write the same byte: of pieces in the order of their targets, two
/// neighbours do if any do.
#[cold]
pub(super) fn overlap(pieces: &[Piece<'_>], is_put: bool) -> Result<(), PostError> {
    if are_apart_by_marks(pieces, is_put) {
        return Ok(());
    }
    let ends = pieces.iter().enumerate().filter(|(_, piece)| piece.len() > 0);
    let mut targets: Vec<_> =
        ends.map(|(at, piece)| (target(piece, is_put, piece.len()), at)).collect();
    targets.sort_unstable();
    for pair in targets.windows(2) {
        if let [((memory, _, end), one), ((same, start, _), other)] = pair
            && memory == same
            && start < end
        {
            let (first, second) = (*one.min(other), *one.max(other));
            return Err(PostError::Overlap { first, second });
        }
    }
    Ok(())
}

/// Words of marks for each piece: fewer take less time than to sort the pieces does.
const WORDS: usize = 4;

/// Returns `true` if no two pieces write the same byte, tested with a mark for each unit of the
/// memory. The unit is the largest power of two that divides all places and lengths. The test
/// applies if all pieces write to one memory and the marks are not too many for their number. It
/// checks each piece once, in any order.
fn are_apart_by_marks(pieces: &[Piece<'_>], is_put: bool) -> bool {
    let targets = || {
        let with_bytes = pieces.iter().filter(|piece| piece.len() > 0);
        with_bytes.map(|piece| target(piece, is_put, piece.len()))
    };
    let Some((memory, first, _)) = targets().next() else { return true };
    let (mut bits, mut low, mut high, mut is_one) = (0, first, 0, true);
    for (its, start, end) in targets() {
        is_one &= its == memory;
        // Marks are counted from the first target, so the beginning of the memory does not matter.
        bits |= start.wrapping_sub(first) | end.wrapping_sub(first);
        (low, high) = (low.min(start), high.max(end));
    }
    let unit = bits.trailing_zeros();
    let units = usize::try_from((high - low) >> unit).unwrap_or(usize::MAX);
    if !is_one || units / 64 >= pieces.len() * WORDS {
        return false;
    }
    let mut marks = vec![0_u64; units / 64 + 1];
    targets().all(|(_, start, end)| mark(&mut marks, (start - low) >> unit..(end - low) >> unit))
}

/// Marks units, which are bits of the words. Returns `true` if none was marked before; otherwise
/// some stay unmarked.
#[inline]
fn mark(marks: &mut [u64], units: Range<u64>) -> bool {
    let mut at = units.start;
    while at < units.end {
        let (word, bit) = (usize::try_from(at / 64).unwrap_or(usize::MAX), at % 64);
        let count = (64 - bit).min(units.end - at);
        let wanted = u64::MAX >> (64 - count) << bit;
        match marks.get_mut(word) {
            Some(marked) if *marked & wanted == 0 => *marked |= wanted,
            _ => return false,
        }
        at += count;
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::Rank;
    use crate::protocol::rkey::{RegionKey, RegionPart};
    use crate::region::{Region, RemoteKey};
    use proptest::prelude::*;

    /// Returns a remote key of `len` bytes.
    fn rmr(len: u64) -> RemoteKey {
        let key = RegionKey { job: None, owner: Rank(1), number: 7, keys: vec![], nic: None };
        RemoteKey::from_bytes(&key.encode(RegionPart { offset: 0, len })).unwrap()
    }

    proptest! {
        #[test]
        fn two_pieces_that_write_the_same_byte_are_found_and_none_else(
            places in proptest::collection::vec((0_u64..200, 0_usize..8), 0..24), is_put: bool,
        ) {
            let local = Region::host(256);
            let rmr = rmr(256);
            let piece = |&(at, len): &(u64, usize)| {
                let start = if is_put { 0 } else { at as usize };
                Piece { local: &local, range: start..start + len, rmr: &rmr, offset: at }
            };
            let pieces: Vec<_> = places.iter().map(piece).collect();
            let share = |a: &(u64, usize), b: &(u64, usize)| {
                a.0.max(b.0) < (a.0 + a.1 as u64).min(b.0 + b.1 as u64)
            };
            let any = (0..places.len())
                .any(|at| places[at + 1..].iter().any(|other| share(&places[at], other)));
            let found = overlap(&pieces, is_put);
            match &found {
                Ok(()) => prop_assert!(!any),
                Err(PostError::Overlap { first, second }) => {
                    prop_assert!(first < second && share(&places[*first], &places[*second]));
                }
                Err(other) => panic!("{other}"),
            }
            // The short test never accepts pieces that overlap.
            let mut check = OverlapCheck::new();
            for piece in &pieces {
                check.enter((0, 0));
                check.note(target(piece, is_put, 0).1, piece.len());
            }
            prop_assert!(!(any && check.is_known));
        }

        #[test]
        fn pieces_in_any_order_are_marked_and_one_that_meets_another_is_found(
            order in Just((0_u64..300).collect::<Vec<_>>()).prop_shuffle(),
            is_put: bool, len in 1_usize..=700,
        ) {
            let (slot, room) = (704, 704 * 301);
            let local = Region::host(room as usize);
            let rmr = rmr(room);
            let piece = |at: u64, len: usize| {
                let start = if is_put { 0 } else { at as usize };
                Piece { local: &local, range: start..start + len, rmr: &rmr, offset: at }
            };
            // Of units of 1 and 2 bytes they would be thousands of words, which are too many for so
            // few pieces.
            let unit = (slot | len as u64) & (slot | len as u64).wrapping_neg();
            let is_marked = room / unit / 64 < 300 * 4;
            let mut pieces: Vec<_> = order.iter().map(|at| piece(at * slot, len)).collect();
            prop_assert_eq!(are_apart_by_marks(&pieces, is_put), is_marked);
            prop_assert!(overlap(&pieces, is_put).is_ok());
            let last = pieces.len();
            pieces.push(piece(order[7] * slot + len as u64 - unit, unit as usize));
            prop_assert!(!are_apart_by_marks(&pieces, is_put));
            let found = overlap(&pieces, is_put);
            let is_found =
                matches!(found, Err(PostError::Overlap { first: 7, second }) if second == last);
            prop_assert!(is_found, "{found:?}");
        }
    }

    #[test]
    fn marks_are_set_over_the_ends_of_words_and_never_beyond() {
        let mut marks = [0; 3];
        assert!(mark(&mut marks, 60..130) && mark(&mut marks, 0..60) && mark(&mut marks, 130..192));
        assert_eq!(marks, [u64::MAX; 3]);
        assert!(
            !mark(&mut marks, 191..192) && !mark(&mut marks, 192..193) && mark(&mut marks, 5..5)
        );
    }

    #[test]
    fn pieces_in_the_order_of_their_targets_need_no_sorting() {
        let mut check = OverlapCheck::new();
        let mut look = |memory, start| {
            check.enter(memory);
            check.note(start, 10);
            check.is_known
        };
        assert!((0..10).all(|at| look((7, 0), at * 10)));
        assert!(look((8, 50), 0), "another memory, of a higher number");
        assert!(!look((8, 50), 9));
        for memory in [(8, 40), (7, 0)] {
            let mut check = OverlapCheck::new();
            check.enter((8, 50));
            check.enter(memory);
            assert!(!check.is_known, "{memory:?} may be the same bytes");
        }
    }
}
