//! Split copying of one message by two processes: one takes pieces from the front, the other from
//! the back.
//!
//! The *reader* wants the message and owns the word; the *writer* has the message, and may help. A
//! writer that never looks here costs the reader nothing. Each piece is taken by one of them. The
//! reader may release the memory only when all pieces that the writer took are written, which
//! [`state`](Split::state) tells.
//!
//! Each use of the word has a turn of its own, so a late writer finds that the word is not meant
//! for it.

use super::primitives::{AtomicU32, AtomicU64, Ordering};

/// A cache line in memory that both sides see. Zero, as in fresh memory, means closed.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Split {
    /// `turn 32 | units taken from the front 16 | units taken from the back 16`.
    claims: AtomicU64,
    /// Units that the writer has written, and [`FAILED`].
    written: AtomicU32,
}

/// Largest number of units of a message. Both sides must agree on a message's number.
pub const MAX_UNITS: u32 = u16::MAX as u32;

/// Some consecutive units of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Number of the first unit.
    pub first: u32,
    /// Number of units.
    pub count: u32,
}

const FAILED: u32 = 1 << 31;

/// The reader's knowledge of the units that the writer took.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SplitState {
    /// Some are still being written.
    Waiting,
    /// All are written.
    Settled,
    /// A unit could not be written, and the writer writes no more. The reader has to copy this
    /// number of units.
    Failed(u32),
}

/// The word, taken apart.
#[derive(Clone, Copy)]
struct Claims {
    turn: u32,
    front: u32,
    back: u32,
}

impl Claims {
    #[allow(clippy::cast_possible_truncation, reason = "each part is cut to its bits")]
    fn of(word: u64) -> Self {
        Self {
            turn: (word >> 32) as u32,
            front: (word >> 16) as u32 & 0xffff,
            back: word as u32 & 0xffff,
        }
    }

    fn word(self) -> u64 {
        u64::from(self.turn) << 32 | u64::from(self.front) << 16 | u64::from(self.back)
    }
}

impl Split {
    /// Makes a closed word.
    #[allow(
        clippy::new_without_default,
        reason = "words are found in zeroed memory; only tests make one"
    )]
    pub fn new() -> Self {
        Self { claims: AtomicU64::new(0), written: AtomicU32::new(0) }
    }

    /// Opens a settled word, for the reader, and returns the turn of this use. The writer takes no
    /// piece before the reader has told it the turn.
    pub fn open(&self) -> u32 {
        let turn = Claims::of(self.claims.load(Ordering::Relaxed)).turn.wrapping_add(1);
        self.written.store(0, Ordering::Relaxed);
        self.claims.store(Claims { turn, front: 0, back: 0 }.word(), Ordering::Release);
        turn
    }

    /// Takes the next piece from the front of `total` units, for the reader. `None`: all are
    /// taken.
    pub fn take_front(&self, turn: u32, total: u32, most: u32) -> Option<Piece> {
        let (claims, count) = self.claim(
            turn,
            total,
            |left| half(left, most),
            |claims, count| Claims { front: claims.front + count, ..claims },
        )?;
        Some(Piece { first: claims.front, count })
    }

    /// Takes the last free piece of `total` units, for the writer. `None`: all are taken, or the
    /// word is in another use by now.
    pub fn take_back(&self, turn: u32, total: u32, most: u32) -> Option<Piece> {
        let (claims, count) = self.claim(
            turn,
            total,
            |left| half(left, most),
            |claims, count| Claims { back: claims.back + count, ..claims },
        )?;
        Some(Piece { first: total - claims.back - count, count })
    }

    /// Takes all units that are left, for the reader, so that the writer takes no more.
    pub fn close(&self, turn: u32, total: u32) {
        self.claim(
            turn,
            total,
            |left| left,
            |claims, count| Claims { front: claims.front + count, ..claims },
        );
    }

    /// Takes some of the units that are left. Returns the claims before, and the number taken.
    fn claim(
        &self,
        turn: u32,
        total: u32,
        many: impl Fn(u32) -> u32,
        next: impl Fn(Claims, u32) -> Claims,
    ) -> Option<(Claims, u32)> {
        debug_assert!(total <= MAX_UNITS);
        let mut word = self.claims.load(Ordering::Relaxed);
        loop {
            let claims = Claims::of(word);
            let left = total.checked_sub(claims.front + claims.back).filter(|&left| left > 0)?;
            if claims.turn != turn {
                return None;
            }
            let count = many(left);
            // Acquire for the writer: the memory is the one that the reader named in this turn.
            match self.claims.compare_exchange_weak(
                word,
                next(claims, count).word(),
                Ordering::AcqRel,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Some((claims, count)),
                Err(now) => word = now,
            }
        }
    }

    /// Notes, for the writer, that a piece that it took is written.
    pub fn note_written(&self, piece: Piece) {
        // Release: its bytes are there.
        self.written.fetch_add(piece.count, Ordering::Release);
    }

    /// Notes, for the writer, that a piece that it took could not be written. It takes no more.
    pub fn note_failed(&self) {
        self.written.fetch_or(FAILED, Ordering::Release);
    }

    /// Returns the state for the reader, once no units are left.
    pub fn state(&self) -> SplitState {
        let back = Claims::of(self.claims.load(Ordering::Acquire)).back;
        match self.written.load(Ordering::Acquire) {
            written if written & FAILED != 0 => SplitState::Failed(back),
            written if written >= back => SplitState::Settled,
            _ => SplitState::Waiting,
        }
    }
}

/// Returns half of the units that are left. So both sides end at about the same time, whenever the
/// second one begins, with few pieces (guided self-scheduling, as OpenMP calls it).
fn half(left: u32, most: u32) -> u32 {
    left.div_ceil(2).min(most).max(1)
}

#[cfg(all(test, loom))]
#[expect(unsafe_code, reason = "plain words are shared between threads")]
mod models {
    use super::*;
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::thread;

    const TOTAL: u32 = 3;

    struct SplitMessage {
        split: Split,
        units: [UnsafeCell<u32>; TOTAL as usize],
    }

    // SAFETY: a piece is touched by the thread that took it, and by the reader once the writer is
    // done.
    unsafe impl Sync for SplitMessage {}
    // SAFETY: as above.
    unsafe impl Send for SplitMessage {}

    impl SplitMessage {
        fn add(&self, piece: Piece) {
            for at in piece.first..piece.first + piece.count {
                // SAFETY: loom finds out if another thread accesses it.
                self.units[at as usize].with_mut(|cell| unsafe { *cell += 1 });
            }
        }
    }

    /// Each piece is copied once, by one side; when the reader finds the state settled, all are
    /// copied.
    #[test]
    fn loom_every_piece_is_copied_once_and_complete_when_it_is_said_to_be() {
        loom::model(|| {
            let message = Arc::new(SplitMessage {
                split: Split::new(),
                units: [0; TOTAL as usize].map(UnsafeCell::new),
            });
            let turn = message.split.open();
            let writer = {
                let message = message.clone();
                thread::spawn(move || {
                    while let Some(piece) = message.split.take_back(turn, TOTAL, 1) {
                        message.add(piece);
                        message.split.note_written(piece);
                    }
                })
            };
            while let Some(piece) = message.split.take_front(turn, TOTAL, TOTAL) {
                message.add(piece);
            }
            while message.split.state() == SplitState::Waiting {
                thread::yield_now();
            }
            for cell in &message.units {
                // SAFETY: loom finds out if the writer still accesses it.
                cell.with_mut(|cell| unsafe { assert_eq!(std::mem::take(&mut *cell), 1) });
            }
            // A late writer finds another turn.
            let next = message.split.open();
            assert_ne!(turn, next);
            message.split.close(next, TOTAL);
            assert_eq!(message.split.take_back(next, TOTAL, 1), None);
            writer.join().unwrap();
        });
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn units(split: &Split, turn: u32) -> (Option<Piece>, Option<Piece>) {
        (split.take_front(turn, 7, 2), split.take_back(turn, 7, 9))
    }

    #[test]
    fn pieces_are_taken_from_both_ends_until_they_meet() {
        let piece = |first, count| Some(Piece { first, count });
        let split = Split::new();
        assert_eq!(split.take_back(0, 0, 1), None, "a fresh word is closed");
        let turn = split.open();
        assert_eq!(units(&split, turn), (piece(0, 2), piece(4, 3)));
        assert_eq!(split.state(), SplitState::Waiting);
        split.note_written(Piece { first: 4, count: 3 });
        assert_eq!(split.state(), SplitState::Settled);
        assert_eq!(units(&split, turn), (piece(2, 1), piece(3, 1)));
        assert_eq!(units(&split, turn), (None, None));
        split.note_failed();
        assert_eq!(split.state(), SplitState::Failed(4));
        assert_eq!(split.take_back(turn.wrapping_sub(1), 7, 1), None);
        let turn = split.open();
        split.close(turn, 7);
        assert_eq!((units(&split, turn), split.state()), ((None, None), SplitState::Settled));
    }

    #[test]
    fn a_word_full_of_nonsense_gives_no_piece_that_is_not_there() {
        let split = Split { claims: AtomicU64::new(u64::MAX), written: AtomicU32::new(u32::MAX) };
        assert_eq!(split.take_front(u32::MAX, MAX_UNITS, 1), None);
        assert_eq!(split.take_back(u32::MAX, MAX_UNITS, 1), None);
        assert_eq!(split.open(), 0);
        let last = Piece { first: MAX_UNITS - 1, count: 1 };
        assert_eq!(split.take_back(0, MAX_UNITS, 1), Some(last));
    }
}
