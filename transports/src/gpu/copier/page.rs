//! The page between a host and its copier: commands one way, answers the other.
//!
//! It lies in host memory that a GPU reads and writes. `cuda/copier.ptx` has the same offsets.

use crate::sync::primitives::{AtomicU64, Ordering, fence};

/// Commands that can be under way at a time.
pub(crate) const LINES: u64 = 4;

/// A copy, by addresses that the kernel can use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Command {
    pub(crate) dst: u64,
    pub(crate) src: u64,
    pub(crate) len: u32,
}

/// Words of a command. Each is `number, cut to 32 bits | a piece of 32 bits`, so each tells by itself whether it belongs to a
/// command: a reader that finds all five with one number has the command whole, in whatever order words are written and read.
/// Nothing is relied on but that 8 bytes are written and read at once.
const WORDS: usize = 5;

/// Where the generation stands that is to leave: in the line that is looked at anyway.
const STOP: usize = 7;

#[repr(C, align(64))]
#[derive(Debug)]
struct Line([AtomicU64; 8]);

/// What the kernel says. Written by nobody else, but for `answered` while there is no kernel.
#[repr(C, align(64))]
#[derive(Debug)]
struct Told {
    /// The number of the last command that is done.
    answered: AtomicU64,
    /// The last generation that has begun.
    begun: AtomicU64,
    /// The last one that is leaving.
    leaving: AtomicU64,
    /// The last one that takes nothing any more.
    gone: AtomicU64,
}

/// The page. Commands are numbered from 1 on, generations of kernels too.
#[repr(C, align(4096))]
#[derive(Debug)]
pub(crate) struct Page {
    /// As many as [`LINES`].
    lines: [Line; 4],
    told: Told,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Page>() == 4096);
    assert!(std::mem::offset_of!(Page, told) == 256);
};

impl Page {
    pub(crate) fn new() -> Self {
        let word = || AtomicU64::new(0);
        Self {
            lines: std::array::from_fn(|_| Line(std::array::from_fn(|_| word()))),
            told: Told { answered: word(), begun: word(), leaving: word(), gone: word() },
        }
    }

    fn line(&self, number: u64) -> &[AtomicU64; 8] {
        let [first, second, third, fourth] = &self.lines;
        match number % LINES {
            0 => &first.0,
            1 => &second.0,
            2 => &third.0,
            _ => &fourth.0,
        }
    }

    // ---- the host ------------------------------------------------------------------------------------

    /// Writes a command. The one that had the line before is answered.
    pub(crate) fn write(&self, number: u64, command: Command) {
        for (word, piece) in self.line(number).iter().zip(pieces(command)) {
            // Release: what the command is to copy, if the CPU has written it.
            word.store(tagged(number, piece), Ordering::Release);
        }
    }

    /// Asks a generation to leave.
    pub(crate) fn stop(&self, generation: u64) {
        self.line(0)[STOP].store(generation, Ordering::Release);
    }

    /// The last command that is done, with all that came before it. Its bytes are there.
    #[inline]
    pub(crate) fn answered(&self) -> u64 {
        self.told.answered.load(Ordering::Acquire)
    }

    /// Notes that a command is nobody's any more. There is no kernel.
    pub(crate) fn take_back(&self, number: u64) {
        self.told.answered.store(number, Ordering::Release);
    }

    #[inline]
    pub(crate) fn begun(&self) -> u64 {
        self.told.begun.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn leaving(&self) -> u64 {
        self.told.leaving.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn gone(&self) -> u64 {
        self.told.gone.load(Ordering::Acquire)
    }

    // ---- the kernel ----------------------------------------------------------------------------------

    /// A command, if it is there whole.
    pub(super) fn read(&self, number: u64) -> Option<Command> {
        let mut pieces = [0; WORDS];
        for (piece, word) in pieces.iter_mut().zip(self.line(number)) {
            *piece = piece_of(word.load(Ordering::Relaxed), number)?;
        }
        fence(Ordering::Acquire);
        let [dst_low, dst_high, src_low, src_high, len] = pieces;
        let joined = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        Some(Command { dst: joined(dst_low, dst_high), src: joined(src_low, src_high), len })
    }

    pub(super) fn is_stopped(&self, generation: u64) -> bool {
        self.line(0)[STOP].load(Ordering::Acquire) == generation
    }

    pub(super) fn answer(&self, number: u64) {
        self.told.answered.store(number, Ordering::Release);
    }

    pub(super) fn begin(&self, generation: u64) {
        self.told.begun.store(generation, Ordering::Release);
    }

    pub(super) fn leave(&self, generation: u64) {
        self.told.leaving.store(generation, Ordering::Release);
    }

    pub(super) fn go(&self, generation: u64) {
        self.told.gone.store(generation, Ordering::Release);
    }
}

#[allow(clippy::cast_possible_truncation, reason = "halves are cut to their bits")]
fn pieces(Command { dst, src, len }: Command) -> [u32; WORDS] {
    [dst as u32, (dst >> 32) as u32, src as u32, (src >> 32) as u32, len]
}

fn tagged(number: u64, piece: u32) -> u64 {
    number << 32 | u64::from(piece)
}

/// The piece in a word, if it belongs to the command of that number.
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
    fn a_command_is_read_as_it_was_written_and_by_its_number_only() {
        let page = Page::new();
        for number in [1, 2, 3, 4, 5, 1 << 32, (1 << 32) + 1] {
            assert_eq!(page.read(number), None, "{number}");
            page.write(number, COMMAND);
            assert_eq!(page.read(number), Some(COMMAND), "{number}");
            assert_eq!(page.read(number + LINES), None, "{number}: the next command of that line");
        }
    }

    #[test]
    fn a_line_that_is_half_written_is_no_command_whichever_words_have_come() {
        for come in 0_u32..(1 << WORDS) - 1 {
            let page = Page::new();
            page.write(1, Command { dst: 1, src: 2, len: 3 });
            let words = page.line(5).iter().zip(pieces(COMMAND));
            for (at, (word, piece)) in words.enumerate() {
                if come >> at & 1 == 1 {
                    word.store(tagged(5, piece), Ordering::Relaxed);
                }
            }
            assert_eq!(page.read(5), None, "{come:#b}");
        }
    }

    #[test]
    fn asking_a_generation_to_leave_touches_no_command() {
        let page = Page::new();
        page.write(4, COMMAND);
        page.stop(7);
        assert!(page.is_stopped(7) && !page.is_stopped(6) && !page.is_stopped(8));
        assert_eq!(page.read(4), Some(COMMAND));
    }
}
