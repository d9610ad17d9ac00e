//! A resident copier: a kernel of one block that waits for small copies, carries them out and
//! answers. So a copy needs no call of the driver.
//!
//! | module | one idea |
//! |---|---|
//! | `page` | the words that host and kernel write for each other |
//! | `lease` | the end of a kernel, where no command is lost or done twice: model-checked |
//! | `list` | the pieces of a command of many copies |
//! | `host` | giving copies, and launching kernels: `Resident` |
//! | `claim` | detection of another process with a copier on the same GPU |
//!
//! A resident kernel holds up all that waits for the whole context (`cuCtxSynchronize`,
//! `cuMemFree`, loading a module). It also holds up a launch that needs all of the GPU. So it ends
//! by itself after [`LEASE`] without work, and after [`LIFE`] in any case. It ends at once when the
//! library is about to make such a call.
//!
//! A copy is given only to a kernel that is known to run. While there is none, or it waits behind
//! a kernel of the program's that fills the GPU, the copy engine does the copy. The order of
//! copies is kept: the copier gets one only when no engine of the device works for the library. An
//! engine gets one only when the copier has answered all.

mod claim;
mod host;
mod lease;
mod list;
mod page;

pub use claim::{GpuClaim, shared};
pub use host::{Launcher, NoKernel, Resident};
pub use lease::Kernel;
pub use list::{Board, CopyPiece, PIECES};
pub use page::{Command, Page, SHEETS, WORDS};

use std::time::Duration;

/// Time without a copy after which a kernel ends.
pub const LEASE: Duration = Duration::from_millis(1);

/// Time after which a kernel ends in any case, so that work held up by it goes on under a constant
/// load. A new launch costs about one copy of the engine.
pub const LIFE: Duration = Duration::from_millis(3);

/// Bytes of the longest copy that goes to a copier.
pub const MOST: usize = 8 << 10;

/// Bytes of the longest copy if both ends have the same offset from a multiple of 4, but not of 16.
/// Below it, the same if their offsets differ. The warp moves that many bytes at a time, and beyond
/// that the copy engine is as quick.
const MOST_BY_4: usize = 2 << 10;
const MOST_BY_1: usize = 512;

/// Returns `true` if a copy goes to a copier, if there is one.
pub fn fits(dst: usize, src: usize, len: usize) -> bool {
    let apart = dst ^ src;
    let most = match apart {
        apart if apart % 16 == 0 => MOST,
        apart if apart % 4 == 0 => MOST_BY_4,
        _ => MOST_BY_1,
    };
    (1..=most).contains(&len)
}

/// Returns `true` if a copy may go to a copier in a group. There four lanes do each copy, and pay
/// the latency of memory for 256, 64 or 16 bytes at a time.
pub fn fits_among_others(dst: usize, src: usize, len: usize) -> bool {
    let most = match dst | src | len {
        all if all % 16 == 0 => 1024,
        all if all % 4 == 0 => 256,
        _ => 64,
    };
    len <= most && list::is_listed(dst, len)
}

/// State of a device's copier.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CopierState {
    /// No copier was asked for.
    Off,
    /// The program wants a copier. The device's first copy shows if it is available.
    Wanted,
    /// The copier takes copies. The counts began with its set-up.
    On {
        /// Kernels that were launched.
        launches: u64,
        /// Copies that were given to them.
        copies: u64,
    },
    /// The copier is wanted, and not available, for the reason given.
    Refused(String),
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_longest_copy_follows_from_how_the_ends_lie_to_each_other() {
        let longest = |dst, src| {
            (1..=MOST + 1).rev().find(|len| fits(dst, src, *len)).expect("a byte always fits")
        };
        assert_eq!(
            [(0, 16), (7, 7), (0x1008, 0x2008)].map(|(dst, src)| longest(dst, src)),
            [MOST; 3]
        );
        assert_eq!([(0, 8), (5, 1), (12, 0)].map(|(dst, src)| longest(dst, src)), [MOST_BY_4; 3]);
        assert_eq!([(0, 1), (2, 0), (15, 0)].map(|(dst, src)| longest(dst, src)), [MOST_BY_1; 3]);
        assert!(!fits(0, 0, 0), "nothing is nothing to copy");
    }
}
