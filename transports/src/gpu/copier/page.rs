//! The page between a host and its copier: commands one way, answers the other.
//!
//! It lies in host memory that a GPU reads and writes. `cuda/copier.ptx` has the same offsets.
//!
//! Commands stand on several identical sheets, one for each warp that watches. Reads of one line
//! by two warps are serialised, and each takes a round trip to the host; reads of two lines
//! overlap (docs/gpu.md, "Measured").

use crate::sync::primitives::{AtomicU64, Ordering, fence};
use std::ops::RangeTo;

/// Commands that can be in flight at a time.
pub(super) const LINES: u64 = 4;

/// Sheets, one for each warp that watches. A model has only those that it needs.
pub const SHEETS: usize = if cfg!(loom) { 2 } else { 4 };

/// A copy, by addresses that the kernel can use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Command {
    /// Target address.
    pub dst: u64,
    /// Source address, or that of a list of pieces.
    pub src: u64,
    /// Bytes, or the number of pieces with the highest bit set.
    pub len: u32,
}

/// Words of a command. Each is `number, cut to 32 bits | a piece of 32 bits`, so each word tells
/// its command. A reader that finds all five with one number has the whole command, in whatever
/// order words are written and read. The only assumption is that 8 bytes are written and read at
/// once.
pub const WORDS: usize = 5;

/// Position of the generation that has to leave: in the line that the kernel reads anyway.
const STOP: usize = 7;

#[repr(C, align(64))]
#[derive(Debug)]
struct SheetLine([AtomicU64; 8]);

/// One line for each of [`LINES`].
#[repr(C)]
#[derive(Debug)]
struct Sheet([SheetLine; 4]);

/// The kernel's answers. Only the kernel writes them, except `answered` while there is no kernel.
#[repr(C, align(64))]
#[derive(Debug)]
struct KernelAnswers {
    /// The number of the last command that is done.
    answered: AtomicU64,
    /// The last generation that has begun.
    begun: AtomicU64,
    /// The last generation that is leaving.
    leaving: AtomicU64,
    /// The last generation that takes no more commands.
    gone: AtomicU64,
}

/// The page. Commands are numbered from 1 on, generations of kernels too.
#[repr(C, align(4096))]
#[derive(Debug)]
pub struct Page {
    sheets: [Sheet; SHEETS],
    answers: KernelAnswers,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Page>() == 4096);
    assert!(size_of::<Sheet>() == 256);
    assert!(std::mem::offset_of!(Page, answers) == 1024);
};

impl Default for Page {
    fn default() -> Self {
        Self::new()
    }
}

impl Page {
    /// Makes a page without a command.
    pub fn new() -> Self {
        let word = || AtomicU64::new(0);
        let line = |_| SheetLine(std::array::from_fn(|_| word()));
        Self {
            sheets: std::array::from_fn(|_| Sheet(std::array::from_fn(line))),
            answers: KernelAnswers {
                answered: word(),
                begun: word(),
                leaving: word(),
                gone: word(),
            },
        }
    }

    // ---- the host -------------------------------------------------------------------------------

    /// Writes a command. The previous one of that line has been answered.
    pub fn write(&self, number: u64, command: Command) {
        for sheet in 0..SHEETS {
            (0..WORDS).for_each(|at| self.write_word((sheet, at), number, command));
        }
    }

    /// Writes one word of a command on one sheet. The kernel may see the words in any order.
    #[inline]
    pub fn write_word(&self, (sheet, at): (usize, usize), number: u64, command: Command) {
        let word = tagged(number, pieces(command)[at]);
        // Release: publishes the bytes that the command copies, if the CPU has written them.
        self.sheets[sheet].line(number)[at].store(word, Ordering::Release);
    }

    /// Asks a generation to leave.
    pub fn stop(&self, generation: u64) {
        self.sheets
            .iter()
            .for_each(|sheet| sheet.line(0)[STOP].store(generation, Ordering::Release));
    }

    /// Returns the number of the last command that is done, with all before it. Their bytes have
    /// arrived.
    #[inline]
    pub fn answered(&self) -> u64 {
        self.answers.answered.load(Ordering::Acquire)
    }

    /// Marks a command as answered that no kernel will do. There is no kernel.
    pub fn take_back(&self, number: u64) {
        self.answers.answered.store(number, Ordering::Release);
    }

    /// Returns the last generation that has begun.
    #[inline]
    pub fn begun(&self) -> u64 {
        self.answers.begun.load(Ordering::Acquire)
    }

    /// Returns the last generation that has begun to leave.
    #[inline]
    pub fn leaving(&self) -> u64 {
        self.answers.leaving.load(Ordering::Acquire)
    }

    /// Returns the last generation that has gone.
    #[inline]
    pub fn gone(&self) -> u64 {
        self.answers.gone.load(Ordering::Acquire)
    }

    // ---- the kernel -----------------------------------------------------------------------------

    /// Returns a command if it is complete: each of its words on any of these sheets.
    pub(super) fn read(&self, sheets: RangeTo<usize>, number: u64) -> Option<Command> {
        let sheets = self.sheets.get(sheets)?;
        let mut pieces = [0; WORDS];
        for (at, piece) in pieces.iter_mut().enumerate() {
            let on = |sheet: &Sheet| {
                piece_of(sheet.line(number).get(at)?.load(Ordering::Relaxed), number)
            };
            *piece = sheets.iter().find_map(on)?;
        }
        fence(Ordering::Acquire);
        let [dst_low, dst_high, src_low, src_high, len] = pieces;
        let joined = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        Some(Command { dst: joined(dst_low, dst_high), src: joined(src_low, src_high), len })
    }

    pub(super) fn is_stopped(&self, generation: u64) -> bool {
        self.sheets.iter().any(|sheet| sheet.line(0)[STOP].load(Ordering::Acquire) == generation)
    }

    pub(super) fn answer(&self, number: u64) {
        self.answers.answered.store(number, Ordering::Release);
    }

    pub(super) fn begin(&self, generation: u64) {
        self.answers.begun.store(generation, Ordering::Release);
    }

    pub(super) fn leave(&self, generation: u64) {
        self.answers.leaving.store(generation, Ordering::Release);
    }

    pub(super) fn go(&self, generation: u64) {
        self.answers.gone.store(generation, Ordering::Release);
    }
}

impl Sheet {
    fn line(&self, number: u64) -> &[AtomicU64; 8] {
        let [first, second, third, fourth] = &self.0;
        match number % LINES {
            0 => &first.0,
            1 => &second.0,
            2 => &third.0,
            _ => &fourth.0,
        }
    }
}

#[allow(clippy::cast_possible_truncation, reason = "halves are cut to their bits")]
fn pieces(Command { dst, src, len }: Command) -> [u32; WORDS] {
    [dst as u32, (dst >> 32) as u32, src as u32, (src >> 32) as u32, len]
}

fn tagged(number: u64, piece: u32) -> u64 {
    number << 32 | u64::from(piece)
}

/// Returns the piece in a word, if it belongs to the command of that number.
#[allow(clippy::cast_possible_truncation, reason = "halves are cut to their bits")]
fn piece_of(word: u64, number: u64) -> Option<u32> {
    ((word >> 32) as u32 == number as u32).then_some(word as u32)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const COMMAND: Command =
        Command { dst: 0x7fff_1234_5678_9abc, src: 0xffff_fffe_0000_0001, len: u32::MAX };

    #[test]
    fn a_command_is_read_as_it_was_written_on_every_sheet_and_by_its_number_only() {
        let page = Page::new();
        for number in [1, 2, 3, 4, 5, 1 << 32, (1 << 32) + 1] {
            assert_eq!(page.read(..SHEETS, number), None, "{number}");
            page.write(number, COMMAND);
            for sheets in 1..=SHEETS {
                assert_eq!(page.read(..sheets, number), Some(COMMAND), "{number}");
            }
            for sheet in &page.sheets {
                let words =
                    sheet.line(number)[..WORDS].iter().map(|word| word.load(Ordering::Relaxed));
                assert!(words.eq(pieces(COMMAND).map(|piece| tagged(number, piece))), "{number}");
            }
            assert_eq!(
                page.read(..SHEETS, number + LINES),
                None,
                "{number}: the next command of that line"
            );
        }
    }

    /// Arrival of words on two sheets, in every combination.
    #[test]
    fn a_command_is_there_when_each_of_its_words_has_come_to_some_sheet() {
        for come in 0_u32..1 << (2 * WORDS) {
            let page = Page::new();
            page.write(1, Command { dst: 1, src: 2, len: 3 });
            let has = |sheet: usize, at: usize| come >> (sheet * WORDS + at) & 1 == 1;
            for (at, piece) in pieces(COMMAND).into_iter().enumerate() {
                for sheet in [0, 1].into_iter().filter(|sheet| has(*sheet, at)) {
                    page.sheets[sheet].line(5)[at].store(tagged(5, piece), Ordering::Relaxed);
                }
            }
            let is_there =
                |sheets: usize| (0..WORDS).all(|at| (0..sheets).any(|sheet| has(sheet, at)));
            for sheets in [1, 2] {
                let wanted = is_there(sheets).then_some(COMMAND);
                assert_eq!(page.read(..sheets, 5), wanted, "{come:#b}, {sheets}");
            }
        }
    }

    #[test]
    fn asking_a_generation_to_leave_touches_no_command() {
        let page = Page::new();
        page.write(4, COMMAND);
        page.stop(7);
        assert!(page.is_stopped(7) && !page.is_stopped(6) && !page.is_stopped(8));
        assert!(page.sheets.iter().all(|sheet| sheet.line(0)[STOP].load(Ordering::Relaxed) == 7));
        assert_eq!(page.read(..1, 4), Some(COMMAND));
    }
}
