//! Rendezvous: messages that are too long for one piece, or that their receiver has no room for.
//!
//! ```text
//! sender (tx)                            receiver (rx)
//!   RTS (size, tx, address) ──────────►  meets its receive, or its completion object
//!                                        the kernel copies the bytes across, if it may:
//!   ◄──────────────────────── FIN (tx)
//!                                        or else, in fragments:
//!   ◄─────────────── CTS (tx, rx, limit)
//!   fragment (rx, offset) ────────────►  until all are there
//!   ◄────────────────── grant (tx, limit)   into GPU memory, when there is a block for more
//! ```
//!
//! Where a NIC reaches the receiver's memory by itself:
//!
//! ```text
//!   ◄────────────── CTS-write (tx, rx, place)
//!   the NIC writes all of it
//!   FIN-write (rx) ───────────────────►  on the same link, and so behind the bytes
//!                                        or, where this NIC does not reach the sender's bytes:
//!   unwritten (rx) ───────────────────►  grants the fragments that it has room for
//! ```
//!
//! A message that is longer than a chunk, and not in GPU memory, goes chunk by chunk:
//!
//! ```text
//!   ◄────────────── CTS-chunk (tx, rx, window)     two at a time on each NIC
//!   the NIC writes the window
//!   FIN-write (rx, at) ───────────────►  shows the next
//!                                        or, from where this NIC does not reach the bytes:
//!   unwritten (rx, from) ─────────────►  has the rest sent in fragments
//!                                        or, from where the receiver's NIC takes no more:
//!   ◄────────────────── grant (tx, all of it)
//! ```
//!
//! An RTS travels in the place of its message: it is matched, delivered and held back in the same
//! order. Its bytes may take another way.
//!
//! Both sides are state machines without input or output: [`RndvSender`] and [`RndvReceiver`] get
//! events, and answer with actions. `datapath` carries the actions out, in order, and reports the
//! end of each as an event.

mod chunks;
mod rx;
#[cfg(test)]
mod tests;
mod tx;

pub(crate) use rx::{Ask, RndvReceiver, RxAction, RxEvent, Scheme};
pub(crate) use tx::{Duty, RndvSender, TxAction, TxEvent};

use crate::op::Few;

/// Actions to carry out, in order.
pub(crate) type Actions<A> = Few<A>;

/// Facts of the link and the settings that bound a transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Bytes of a chunk, at most.
    pub(crate) chunk: usize,
    /// NICs that chunks are distributed over.
    pub(crate) nics: usize,
}

/// Chunks of a message that are shown, or being written, at a time on each NIC: one that is
/// written, and one that is prepared. So only these are pinned on either side, however long the
/// message is.
const AT_ONCE: usize = 2;

/// An event that the peer should not have caused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Violation {
    /// The event answers what was not sent to the peer: reported, and otherwise without effect.
    Stray,
    /// The event breaks the protocol, for this reason.
    Broken(&'static str),
}

/// Returns the name of a get at its owner, for messages about it: the owner gives it none.
pub(crate) fn name_of_answer(rx: u64) -> u64 {
    rx | 1 << 63
}
