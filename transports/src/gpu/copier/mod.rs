//! A resident copier: a kernel of one block that waits for small copies, carries them out and
//! answers, without a call of the driver for each.
//!
//! | module | one idea |
//! |---|---|
//! | `page` | what host and kernel write for each other |
//! | `lease` | when a kernel ends, and that no command is lost or done twice thereby: model-checked |
//! | `list` | what a command names that is many copies |
//! | `host` | giving copies, and launching kernels: `Resident` |
//! | `claim` | whether another process of this machine has a copier on the same GPU |
//!
//! A resident kernel holds up whatever waits for the whole context (`cuCtxSynchronize`,
//! `cuMemFree`, loading a module) and a launch that needs all of the GPU. So it ends by itself when
//! there has been nothing to do for [`LEASE`], after [`LIFE`] whatever there is to do, and at once
//! when the library is about to make such a call.
//!
//! A copy is never given to a kernel that is not known to run: while there is none, or it waits
//! behind a kernel of the program's that fills the GPU, the copy engine has the copy. Between the
//! two the order of copies stays: the copier gets one only when no engine of the device is at one
//! of the library's, and an engine gets one when the copier has answered all.

mod claim;
mod host;
mod lease;
mod list;
mod page;

pub use claim::{Claim, shared};
pub use host::{Launcher, NoKernel, Resident};
pub use lease::Kernel;
pub use list::{Board, PIECES, Place};
pub use page::{Command, Page, SHEETS, WORDS};

use std::time::Duration;

/// A kernel ends when there has been no copy for so long.
pub const LEASE: Duration = Duration::from_millis(1);

/// A kernel ends after so long in any case: what it holds up goes on although copies never cease.
/// Launching it anew costs about as much as one copy of the engine.
pub const LIFE: Duration = Duration::from_millis(3);

/// Bytes of the longest copy that goes to a copier.
pub const MOST: usize = 8 << 10;

/// Bytes of the longest one where the two ends lie to each other at a multiple of 4, and not of 16;
/// and of the longest where they lie anyhow: the warp takes so many bytes at a time, and beyond
/// that the copy engine is as quick.
const MOST_BY_4: usize = 2 << 10;
const MOST_BY_1: usize = 512;

/// Whether a copy goes to a copier, if there is one.
pub fn fits(dst: usize, src: usize, len: usize) -> bool {
    let apart = dst ^ src;
    let most = match apart {
        apart if apart % 16 == 0 => MOST,
        apart if apart % 4 == 0 => MOST_BY_4,
        _ => MOST_BY_1,
    };
    (1..=most).contains(&len)
}

/// Whether a copy is one of those that go to a copier together, if there is one. Four lanes have it
/// there, and pay the latency of memory for 256, 64 or 16 bytes at a time.
pub fn fits_among_others(dst: usize, src: usize, len: usize) -> bool {
    let most = match dst | src | len {
        all if all % 16 == 0 => 1024,
        all if all % 4 == 0 => 256,
        _ => 64,
    };
    len <= most && list::is_listed(dst, len)
}

/// What there is of a device's copier.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CopierState {
    /// Nobody has asked for it.
    Off,
    /// It was asked for; whether it can be had shows when the device makes its first copy.
    Wanted,
    /// It takes copies. So many kernels were launched, and so many copies given to them.
    On {
        /// Kernels.
        launches: u64,
        /// Copies.
        copies: u64,
    },
    /// It was asked for, and cannot be had: why.
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
