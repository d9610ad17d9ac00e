//! Credits: what this rank owes its peers, and peers that return none.

#![forbid(unsafe_code)]

use super::device::RdmaPolling;
use super::entries::Phase;
use crate::clock::{TICKS_PER_MICROSECOND, ticks};

/// About the time in ticks between two requests to peers that return no credits. It is long for a
/// peer that computes, and short for a user who waits.
const ASK_EVERY: u64 = 1_000_000 * TICKS_PER_MICROSECOND;

impl RdmaPolling {
    /// Counts a message of a connection that was taken in, and whose receive is available again.
    pub(super) fn credit(&mut self, index: u32) {
        if let Some(entry) = self.entries.get(index) {
            entry.take_in(&mut self.owing);
        }
    }

    /// Tells peers how many of their messages were taken in.
    #[cold]
    pub(super) fn pay(&mut self) {
        let entries = &mut self.entries;
        self.owing.retain(|&index| {
            let Some(entry) = entries.get(index) else { return false };
            let paid = entry.phase == Phase::Failing || entry.connection.credit(entry.taken);
            if paid {
                (entry.credited, entry.owes) = (entry.taken, false);
            }
            !paid
        });
    }

    /// Tells peers that return no credits, now and then, what was taken in of theirs. A sender
    /// without credits has nothing in flight, and only a request in flight tells its NIC that the
    /// peer is gone.
    pub(super) fn ask_silent(&mut self) {
        let now = ticks();
        if now.wrapping_sub(self.asked_at) < ASK_EVERY {
            return;
        }
        self.asked_at = now;
        for index in self.entries.numbers() {
            if let Some(entry) = self.entries.get(index)
                && entry.phase == Phase::Up
                && entry.connection.lacks_credits()
            {
                // Where the queue has no room, requests are in flight.
                if entry.connection.credit(entry.taken) {
                    entry.credited = entry.taken;
                }
            }
        }
    }
}
