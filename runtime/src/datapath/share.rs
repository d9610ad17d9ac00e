//! Copying a message by both sides at once: the receiver's kernel reads from the front, the
//! sender's writes from the back.
//!
//! One core copies at the speed of one core. While a large message is on its way, its sender often
//! only waits for it, so the receiver asks the sender to help. Each side copies the pieces that it
//! takes. A sender without progress takes none, and costs nothing. The
//! division is in [`shares`](crate::peer::shares).

use super::Transfers;
use super::in_flight::{InFlight, Run};
use crate::names::Rank;
use crate::op::Flow;
use crate::peer::shares::{Division, Share};
use crate::protocol::wire::{Control, HelpWanted};
use carrack_transports::contract::{PeerId, PeerMemory, Splits};
use carrack_transports::mem::MemRef;
use std::sync::Arc;

/// Bytes from which the receiver asks for help. The first value is for a message that is waited
/// for. The second is for one of many, where two cores that copy at the same time slow each other
/// down (docs/adr/0011-thresholds.md).
const WORTH_IT: (usize, usize) = (48 << 10, 192 << 10);
/// Messages behind the current one whose senders are asked for help in advance.
pub(super) const ASK_AHEAD: usize = 3;

/// Returns `true` if the receiver should ask for help with a message of `size` bytes. `is_alone`:
/// no other message waits to be copied.
pub(super) fn is_worth_it(size: usize, is_alone: bool) -> bool {
    size >= if is_alone { WORTH_IT.0 } else { WORTH_IT.1 }
}

/// Messages that a peer is helped with at a time.
const HELPS: usize = 16;

impl Run<'_> {
    /// Asks the sender of a message that is about to be copied to `to` for help, if a split is
    /// free.
    pub(super) fn share_with(
        &self,
        from: Rank,
        tx: u64,
        (to, size): (*const u8, usize),
    ) -> Option<Share> {
        let share = self.device.known_route(from)?.linked()?.shares()?.take(size)?;
        let wanted = HelpWanted { addr: to as usize as u64, split: share.number, turn: share.turn };
        self.device.control(self.carrier, from, Control::Help { tx, wanted });
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
    /// Notes that the receiver asks for help with an offer. Without help the receiver copies all.
    fn help(&self, help: Help) {
        let mut helps = self.helps.lock();
        // A receiver that asks too often gets no help with further messages.
        if helps.iter().filter(|one| one.by == help.by).count() < HELPS
            && !helps.iter().any(|one| one.by == help.by && one.tx == help.tx)
        {
            helps.push_back(help);
        }
        self.helps.set_count(helps.len());
    }
}

impl Run<'_> {
    /// Handles a receiver's request for help with an offer.
    pub(crate) fn asked_to_help(&self, by: Rank, tx: u64, wanted: HelpWanted) {
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
        while let Some(help) = helps.front_mut() {
            let (at, before) = ((help.by, help.tx), help.written);
            // The bytes stay in place while the message is out of the table: an event that ends it
            // is handled when it comes back. A message whose events another thread handles gets no
            // help now.
            let mut goes_on = false;
            if let Some(transfer) = transfers.take_out(at) {
                if let InFlight::Tx(tx) = &*transfer
                    && let Some(bytes) = tx.offered_bytes()
                {
                    goes_on = help.step(bytes);
                }
                let has_written = help.written > before;
                self.give_back(at, transfer, Flow::Stays);
                self.moved |= has_written;
            }
            if !goes_on {
                helps.pop_front();
            }
            if self.moved {
                break;
            }
        }
        transfers.helps.set_count(helps.len());
    }
}
