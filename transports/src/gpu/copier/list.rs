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
pub(crate) type Place = (usize, usize, usize);

#[repr(C)]
#[derive(Debug)]
struct List([[AtomicU64; 3]; PIECES]);

/// All that lies in the memory that host and kernel share.
#[repr(C, align(4096))]
#[derive(Debug)]
pub(crate) struct Board {
    pub(crate) page: Page,
    /// As many as [`LINES`].
    lists: [List; 4],
}

#[cfg(not(loom))]
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
    #[inline]
    pub(crate) fn write(&self, board: u64, number: u64, places: impl Iterator<Item = Place>) -> Command {
        let line = number % LINES;
        let mut count = 0;
        for (words, (dst, src, len)) in self.list(line).0.iter().zip(places) {
            // The command, which is written behind them, has release order.
            let [to, from, bytes] = words;
            to.store(dst as u64, Ordering::Relaxed);
            from.store(src as u64, Ordering::Relaxed);
            bytes.store(len as u64, Ordering::Relaxed);
            count += 1;
        }
        let lists = board + std::mem::offset_of!(Self, lists) as u64;
        Command { dst: 0, src: lists + line * size_of::<List>() as u64, len: MANY | count }
    }

    /// The copies that a command names, as a kernel finds them.
    pub(crate) fn places(&self, board: u64, command: Command) -> Vec<Place> {
        let Command { dst, src, len } = command;
        if len & MANY == 0 {
            return vec![(place(dst), place(src), len as usize)];
        }
        let lists = board + std::mem::offset_of!(Self, lists) as u64;
        let line = src.wrapping_sub(lists) / size_of::<List>() as u64;
        let read = |words: &[AtomicU64; 3]| {
            let [dst, src, len] = words.each_ref().map(|word| place(word.load(Ordering::Relaxed)));
            (dst, src, len)
        };
        self.list(line).0.iter().take((len & !MANY) as usize).map(read).collect()
    }

    fn list(&self, line: u64) -> &List {
        let [first, second, third, fourth] = &self.lists;
        match line {
            0 => first,
            1 => second,
            2 => third,
            _ => fourth,
        }
    }
}

/// An address, or a length, that came from here as one.
fn place(word: u64) -> usize {
    usize::try_from(word).unwrap_or(usize::MAX)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_found_by_its_command_and_lists_of_four_commands_do_not_meet() {
        let (board, at) = (Board::new(), 0x7f00_0000_1000);
        let places =
            |number: usize| (0..PIECES - number).map(move |piece| (number << 20 | piece, piece << 7, number));
        let commands = [5_u8, 6, 7, 8].map(|number| board.write(at, number.into(), places(number.into())));
        for (command, number) in commands.iter().zip(5..) {
            assert_eq!(board.places(at, *command), places(number).collect::<Vec<_>>(), "{number}");
        }
        assert_eq!(board.write(at, 9, places(9)).src, commands[0].src, "the fifth has the line of the first");
        assert_eq!(board.places(at, Command { dst: 3, src: 4, len: 5 }), [(3, 4, 5)]);
    }
}
