//! Lists of pieces, for commands of many copies.
//!
//! They lie behind the page, in the same memory. There is one for each line: a command's list is
//! free when its line is.

use super::page::{Command, LINES, Page};
use std::sync::atomic::{AtomicU64, Ordering};

/// Pieces of the longest list.
pub const PIECES: usize = 1024;

/// Flag in a command's length: the rest is the number of pieces, and the source is their list.
const MANY: u32 = 1 << 31;

/// Target, source and length of a copy.
pub type CopyPiece = (usize, usize, usize);

/// Position of a piece's length in the word of its target. All pieces are shorter than 2 KiB, and
/// no device has memory beyond 8 PiB. Two words a piece instead of three save a third of the
/// writes and reads.
const LEN_AT: u32 = 53;

/// Returns `true` if a list has room for targets with these bits, and for pieces of this length.
pub(super) fn is_listed(targets: usize, longest: usize) -> bool {
    (targets as u64) >> LEN_AT == 0 && (longest as u64) < 1 << (64 - LEN_AT)
}

#[repr(C)]
#[derive(Debug)]
struct PieceList([[AtomicU64; 2]; PIECES]);

/// The memory that host and kernel share.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Board {
    /// Commands and answers.
    pub page: Page,
    /// One list for each of [`LINES`].
    lists: [PieceList; 4],
}

#[cfg(not(loom))]
const _: () = {
    // `cuda/copier.ptx` fetches two pieces a thread.
    assert!(PIECES == 2 * 512);
    assert!(std::mem::offset_of!(Board, lists) == 4096);
    assert!(size_of::<Board>() == 17 * 4096);
};

impl Default for Board {
    fn default() -> Self {
        Self::new()
    }
}

impl Board {
    /// Makes an empty board.
    pub fn new() -> Self {
        let list =
            |_| PieceList(std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))));
        Self { page: Page::new(), lists: std::array::from_fn(list) }
    }

    /// Writes the list of the command of that number, and returns the command. The previous one of
    /// that line has been answered. `board`: the kernel's address of this. Callers give at most
    /// [`PIECES`] pieces, each of which `is_listed`.
    #[inline]
    pub fn write(
        &self,
        board: u64,
        number: u64,
        pieces: impl Iterator<Item = CopyPiece>,
    ) -> Command {
        let line = number % LINES;
        let mut count = 0;
        for (words, (dst, src, len)) in self.list(line).0.iter().zip(pieces) {
            // Relaxed: the command, which is written afterwards, has release order.
            let [to, from] = words;
            to.store(dst as u64 | (len as u64) << LEN_AT, Ordering::Relaxed);
            from.store(src as u64, Ordering::Relaxed);
            count += 1;
        }
        let lists = board + std::mem::offset_of!(Self, lists) as u64;
        Command { dst: 0, src: lists + line * size_of::<PieceList>() as u64, len: MANY | count }
    }

    /// Returns the copies that a command names, as a kernel finds them.
    pub fn pieces(&self, board: u64, command: Command) -> Vec<CopyPiece> {
        let Command { dst, src, len } = command;
        if len & MANY == 0 {
            return vec![(place(dst), place(src), len as usize)];
        }
        let lists = board + std::mem::offset_of!(Self, lists) as u64;
        let line = src.wrapping_sub(lists) / size_of::<PieceList>() as u64;
        let read = |words: &[AtomicU64; 2]| {
            let [to, from] = words.each_ref().map(|word| word.load(Ordering::Relaxed));
            (place(to & ((1 << LEN_AT) - 1)), place(from), place(to >> LEN_AT))
        };
        self.list(line).0.iter().take((len & !MANY) as usize).map(read).collect()
    }

    fn list(&self, line: u64) -> &PieceList {
        let [first, second, third, fourth] = &self.lists;
        match line {
            0 => first,
            1 => second,
            2 => third,
            _ => fourth,
        }
    }
}

/// Converts an address or a length back, which was written here.
fn place(word: u64) -> usize {
    usize::try_from(word).unwrap_or(usize::MAX)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn what_has_no_room_in_a_list_is_known_before() {
        let bits = (1 << LEN_AT) - 1;
        assert!(is_listed(bits, 2047) && !is_listed(bits + 1, 1) && !is_listed(0, 2048));
        let (board, at) = (Board::new(), 0x7f00_0000_1000);
        let pieces = [(bits, usize::MAX, 2047), (0, 0, 0)];
        let command = board.write(at, 1, pieces.into_iter());
        assert_eq!(board.pieces(at, command), pieces);
    }

    #[test]
    fn a_list_is_found_by_its_command_and_lists_of_four_commands_do_not_meet() {
        let (board, at) = (Board::new(), 0x7f00_0000_1000);
        let pieces = |number: usize| {
            (0..PIECES - number).map(move |piece| (number << 20 | piece, piece << 7, number))
        };
        let commands =
            [5_u8, 6, 7, 8].map(|number| board.write(at, number.into(), pieces(number.into())));
        for (command, number) in commands.iter().zip(5..) {
            assert_eq!(board.pieces(at, *command), pieces(number).collect::<Vec<_>>(), "{number}");
        }
        assert_eq!(
            board.write(at, 9, pieces(9)).src,
            commands[0].src,
            "the fifth has the line of the first"
        );
        assert_eq!(board.pieces(at, Command { dst: 3, src: 4, len: 5 }), [(3, 4, 5)]);
    }
}
