//! Lists of pieces: what a command names that is many copies.
//!
//! They lie behind the page, in the same memory. There is one for each line: a command's list is free when its line is.

use super::page::{Command, LINES, Page};
use std::sync::atomic::{AtomicU64, Ordering};

/// Pieces of the longest list.
pub(crate) const PIECES: usize = 1024;

/// In a command's length: it is the number of pieces, and the source is their list.
const MANY: u32 = 1 << 31;

/// Target, source and length of a copy.
pub(crate) type Place = (u64, u64, u64);

#[repr(C)]
#[derive(Debug)]
struct List([[AtomicU64; 3]; PIECES]);

/// All that lies in the memory that host and kernel share.
#[repr(C, align(4096))]
#[derive(Debug)]
pub(crate) struct Board {
    pub(crate) page: Page,
    lists: [List; LINES as usize],
}

const _: () = {
    // Six words a thread are what `cuda/copier.ptx` fetches.
    assert!(3 * PIECES == 6 * 512);
    assert!(std::mem::offset_of!(Board, lists) == 4096);
    assert!(size_of::<Board>() == 25 * 4096);
};

impl Board {
    pub(crate) fn new() -> Self {
        let list = |_| List(std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0))));
        Self { page: Page::new(), lists: std::array::from_fn(list) }
    }

    /// Writes the list of the command of that number, and makes the command. The one that had the line before is answered.
    /// `board`: where the kernel finds this. Pieces beyond [`PIECES`] have no place: nobody gives them.
    pub(crate) fn write(
        &self,
        board: u64,
        number: u64,
        places: impl Iterator<Item = (u64, u64, u64)>,
    ) -> Command {
        let line = (number % LINES) as usize;
        let mut count = 0;
        for (words, (dst, src, len)) in self.lists[line].0.iter().zip(places) {
            // The command, which is written behind them, has release order.
            for (word, value) in words.iter().zip([dst, src, len]) {
                word.store(value, Ordering::Relaxed);
            }
            count += 1;
        }
        let lists = board + std::mem::offset_of!(Self, lists) as u64;
        Command { dst: 0, src: lists + (line * size_of::<List>()) as u64, len: MANY | count }
    }

    /// The copies that a command names, as a kernel finds them.
    pub(crate) fn places(&self, board: u64, command: Command) -> Vec<Place> {
        let Command { dst, src, len } = command;
        if len & MANY == 0 {
            return vec![(dst, src, u64::from(len))];
        }
        let lists = board + std::mem::offset_of!(Self, lists) as u64;
        let line = usize::try_from(src.wrapping_sub(lists)).map_or(usize::MAX, |at| at / size_of::<List>());
        let count = (len & !MANY) as usize;
        let read = |words: &[AtomicU64; 3]| {
            let [dst, src, len] = words.each_ref().map(|word| word.load(Ordering::Relaxed));
            (dst, src, len)
        };
        self.lists.get(line).map_or_else(Vec::new, |list| list.0.iter().take(count).map(read).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_found_by_its_command_and_lists_of_four_commands_do_not_meet() {
        let (board, at) = (Board::new(), 0x7f00_0000_1000);
        let places = |number: u64| {
            (0..PIECES as u64 - number).map(move |piece| (number << 20 | piece, piece << 7, number))
        };
        let commands: Vec<_> = (5..9).map(|number| board.write(at, number, places(number))).collect();
        for (command, number) in commands.iter().zip(5..) {
            assert_eq!(board.places(at, *command), places(number).collect::<Vec<_>>(), "{number}");
            assert_eq!(command.src % 4096, 0x1000 % 4096);
        }
        assert_eq!(board.write(at, 9, places(9)).src, commands[0].src, "the fifth has the line of the first");
        let one = Command { dst: 3, src: 4, len: 5 };
        assert_eq!(board.places(at, one), [(3, 4, 5)]);
    }
}
