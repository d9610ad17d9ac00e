//! Copying a message by both sides at once: the receiver's kernel reads from the front, the
//! sender's writes from the back.
//!
//! One core copies at the speed of one core. While a large message is on its way, its sender often
//! only waits for it, so the receiver asks the sender to help. Each side copies the pieces that it
//! takes. A sender without progress takes none, and costs nothing. A [`Split`] in memory that both
//! sides see says which side has which piece.

use super::Transfers;
use super::in_flight::{InFlight, Run};
use crate::device::DeviceInner;
use crate::names::Rank;
use crate::op::Flow;
use crate::progress::Pass;
use crate::protocol::wire::{Control, HelpWanted};
use crate::runtime::Inner;
use carrack_transports::contract::{PeerId, PeerMemory, Splits};
use carrack_transports::mem::MemRef;
use carrack_transports::sync::Split;
use carrack_transports::sync::split::{MAX_UNITS, Piece, State};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes from which the receiver asks for help. The first value is for a message that is waited
/// for. The second is for one of many, where two cores that copy at the same time slow each other
/// down (docs/adr/0011-thresholds.md).
const WORTH_IT: (usize, usize) = (48 << 10, 192 << 10);
/// Bytes that are taken at least: each piece is a system call, which costs as much as copying some
/// 20 KiB (docs/adr/0011-thresholds.md).
const UNIT: usize = 32 << 10;
/// Bytes that are taken at most: 50 to 100 µs, before others have their turn.
pub(super) const MOST: usize = 1 << 20;

/// Messages behind the one that is being copied whose senders are asked for help already.
pub(super) const ASK_AHEAD: usize = 3;

/// Returns `true` if the receiver should ask for help with a message of `size` bytes. `is_alone`:
/// no other message waits to be copied.
pub(super) fn is_worth_it(size: usize, is_alone: bool) -> bool {
    size >= if is_alone { WORTH_IT.0 } else { WORTH_IT.1 }
}

/// Messages that a peer is helped with at a time.
const HELPS: usize = 16;

/// The division of a message into units. Both sides compute the same.
#[derive(Clone, Copy)]
struct Division {
    size: usize,
    unit: usize,
}

impl Division {
    fn of(size: usize) -> Self {
        Self { size, unit: UNIT.max(size.div_ceil(MAX_UNITS as usize).next_multiple_of(UNIT)) }
    }

    /// Returns the number of units, at most `MAX_UNITS`.
    fn units(self) -> u32 {
        u32::try_from(self.size.div_ceil(self.unit)).unwrap_or(u32::MAX)
    }

    /// Units of the largest piece.
    fn most(self) -> u32 {
        u32::try_from(MOST / self.unit).unwrap_or(1)
    }

    /// Returns the beginning and the length of a piece.
    fn range(self, piece: Piece) -> (usize, usize) {
        let begin = (piece.first as usize * self.unit).min(self.size);
        (begin, (piece.count as usize * self.unit).min(self.size - begin))
    }
}

/// The splits of a link, and a bit for each one in use.
pub(crate) struct Shares {
    splits: Arc<dyn Splits>,
    used: AtomicU64,
}

impl Shares {
    pub(crate) fn new(splits: Arc<dyn Splits>) -> Self {
        Self { splits, used: AtomicU64::new(0) }
    }

    fn take(self: &Arc<Self>, size: usize) -> Option<Share> {
        let count = self.splits.count().min(u64::BITS);
        let mut used = self.used.load(Ordering::Relaxed);
        loop {
            let number = used.trailing_ones();
            if number >= count {
                return None;
            }
            // Acquire: pairs with the release by the split's last user.
            match self.used.compare_exchange_weak(
                used,
                used | 1 << number,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    let turn = self.splits.get(number)?.open();
                    return Some(Share {
                        shares: self.clone(),
                        number,
                        turn,
                        division: Division::of(size),
                    });
                }
                Err(now) => used = now,
            }
        }
    }
}

/// A split in use for one message. Its drop frees it for another one.
pub(crate) struct Share {
    shares: Arc<Shares>,
    number: u32,
    turn: u32,
    division: Division,
}

impl Share {
    fn split(&self) -> Option<&Split> {
        self.shares.splits.get(self.number)
    }

    /// Takes the next piece for this side: its beginning and its length.
    pub(super) fn take(&self) -> Option<(usize, usize)> {
        let Self { turn, division, .. } = *self;
        Some(division.range(self.split()?.take_front(turn, division.units(), division.most())?))
    }

    /// Returns the state of the pieces that the sender took, after all are taken.
    pub(super) fn others(&self) -> Others {
        match self.split().map_or(State::Settled, Split::state) {
            State::Waiting => Others::Waiting,
            State::Settled => Others::Settled,
            State::Failed(back) => {
                let first = self.division.units().saturating_sub(back);
                Others::Failed(self.division.range(Piece { first, count: back }).0)
            }
        }
    }

    /// Lets the sender take no more. Returns `true` if the sender is done with the pieces that it
    /// has.
    pub(super) fn close(&self) -> bool {
        let Some(split) = self.split() else { return true };
        split.close(self.turn, self.division.units());
        split.state() != State::Waiting
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        if self.close() {
            self.shares.used.fetch_and(!(1 << self.number), Ordering::Release);
        }
        // Else its sender is still writing a piece, and this split is lost.
    }
}

/// See [`Share::others`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Others {
    /// Some are still being written.
    Waiting,
    /// All are written.
    Settled,
    /// The sender failed: the bytes from this one on are still to be copied.
    Failed(usize),
}

impl DeviceInner {
    /// Asks the sender of a message that is about to be copied to `to` for help, if a split is
    /// free.
    pub(super) fn ask_for_help(
        &self,
        runtime: &Inner,
        from: Rank,
        tx: u64,
        (to, size): (*const u8, usize),
    ) -> Option<Share> {
        let share = self.known_route(from)?.linked()?.shares()?.take(size)?;
        let wanted = HelpWanted { addr: to as usize as u64, split: share.number, turn: share.turn };
        self.control(runtime, from, Control::Help { tx, wanted });
        Some(share)
    }
}

/// A message that the receiver copies, and that this rank helps with.
pub(super) struct Help {
    by: Rank,
    /// This rank's name for the message.
    tx: u64,
    wanted: HelpWanted,
    splits: Arc<dyn Splits>,
    memory: Arc<dyn PeerMemory>,
    /// Bytes written so far: at most the length of the message, whatever the receiver writes into
    /// the split.
    written: usize,
}

impl Help {
    /// Writes a piece. Returns `true` if there may be more to do.
    fn step(&mut self, bytes: MemRef<'_>) -> bool {
        let division = Division::of(bytes.len());
        let HelpWanted { addr, split, turn } = self.wanted;
        let Some(split) = self.splits.get(split) else { return false };
        let Some(piece) = split.take_back(turn, division.units(), division.most()) else {
            return false;
        };
        let (begin, len) = division.range(piece);
        self.written += len;
        match self.memory.write(addr.wrapping_add(begin as u64), bytes.part(begin, len)) {
            Ok(()) => {
                split.note_written(piece);
                self.written < bytes.len()
            }
            Err(why) => {
                tracing::debug!(%why, rank = self.by.0, "no help with a large message");
                split.note_failed();
                false
            }
        }
    }
}

impl Transfers {
    /// Notes the receiver's wish for help with an offer. Without help the receiver copies all.
    fn help(&self, help: Help) {
        let mut helps = self.helps.lock();
        // A receiver with too many wishes gets no help with the rest.
        if helps.iter().filter(|one| one.by == help.by).count() < HELPS
            && !helps.iter().any(|one| one.by == help.by && one.tx == help.tx)
        {
            helps.push_back(help);
        }
        self.helps.set_count(helps.len());
    }
}

impl Pass<'_> {
    /// Handles a receiver's wish for help with an offer.
    pub(super) fn asked_to_help(&self, by: Rank, tx: u64, wanted: HelpWanted) {
        if !self.inner.settings.kernel_copy().is_allowed() {
            return;
        }
        let memory = self.device.known_route(by).and_then(|route| route.linked()?.peer_memory());
        let splits = self.device.lanes.iter().find_map(|lane| lane.device.splits_of(PeerId(by.0)));
        if let (Some(memory), Some(splits)) = (memory, splits) {
            self.device.transfers.help(Help { by, tx, wanted, splits, memory, written: 0 });
        }
    }

    /// Helps the receiver that asked first, by one piece.
    #[cold]
    pub(crate) fn move_helps(&mut self) {
        let transfers = &self.device.transfers;
        let Some(mut helps) = transfers.helps.try_lock() else { return };
        let mut run = Run::new(self.inner, self.device);
        while let Some(help) = helps.front_mut() {
            let (at, before) = ((help.by, help.tx), help.written);
            // The bytes stay in place while the message is out of the table: an event that ends it
            // is handled when it comes back. One that another thread carries on gets no help now.
            let mut goes_on = false;
            if let Some(transfer) = transfers.take_out(at) {
                if let InFlight::Tx(tx) = &*transfer
                    && let Some(bytes) = tx.offered_bytes()
                {
                    goes_on = help.step(bytes);
                }
                let has_written = help.written > before;
                run.give_back(at, transfer, Flow::Stays);
                run.moved |= has_written;
            }
            if !goes_on {
                helps.pop_front();
            }
            if run.moved {
                break;
            }
        }
        transfers.helps.set_count(helps.len());
        drop(helps);
        self.report(run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn units_cover_a_message_once(size in 1..usize::MAX >> 12, at: u32) {
            for size in [size, size % (1 << 22) + 1] {
                let division = Division::of(size);
                let units = division.units();
                prop_assert!(units <= MAX_UNITS && division.unit.is_multiple_of(UNIT));
                prop_assert_eq!(division.range(Piece { first: 0, count: units }), (0, size));
                let first = at % units;
                let (begin, len) = division.range(Piece { first, count: 1 });
                prop_assert!(len > 0);
                prop_assert_eq!(begin + len, division.range(Piece { first: first + 1, count: 1 }).0);
            }
        }
    }
}
