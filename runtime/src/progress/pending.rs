//! The operations that a rank waits for, for diagnostics of a program that hangs.

use super::Core;
use crate::chores::Chore;
use crate::names::Rank;
use crate::op::PendingOp;
use carrack_transports::stderr;
use std::fmt;

/// Operations that are listed one by one; the others are counted.
const LISTED: usize = 64;

/// Messages that are listed one by one.
const MESSAGES: usize = 8;

/// The operations that a rank waits for. A rank prints its `Display` on SIGUSR1.
#[derive(Clone, Debug)]
pub struct Pending {
    /// This rank.
    pub rank: Rank,
    /// Ranks of the job.
    pub size: u32,
    /// Operations in flight.
    pub operations: Vec<PendingOp>,
    /// Messages that have come before their receives.
    pub unexpected: usize,
    /// Bytes that these take up.
    pub unexpected_bytes: usize,
    /// Some of these messages, at most eight.
    pub messages: Vec<PendingOp>,
    /// Deliveries that a full completion object, or a want of packets, holds up.
    pub deferred: usize,
    /// Bytes that these take up.
    pub deferred_bytes: usize,
    /// Resources of this process that connections wait for.
    pub shortages: Vec<String>,
    /// Ranks known to be gone.
    pub down: Vec<Rank>,
}

impl fmt::Display for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, size, operations, unexpected, unexpected_bytes, messages, .. } = self;
        let Self { deferred, deferred_bytes, shortages, down, .. } = self;
        writeln!(
            f,
            "{rank} of {size}: {} operations pending, {unexpected} messages ({unexpected_bytes} B) \
            without a receive, {deferred} deliveries ({deferred_bytes} B) held up",
            operations.len()
        )?;
        for shortage in shortages {
            writeln!(f, "  connections wait: {shortage}")?;
        }
        for operation in operations.iter().take(LISTED).chain(messages) {
            writeln!(f, "  {operation}")?;
        }
        let all = operations.len() + unexpected;
        let more = all.saturating_sub(operations.len().min(LISTED) + messages.len());
        if more > 0 {
            writeln!(f, "  and {more} more")?;
        }
        for rank in down {
            writeln!(f, "  {rank} is gone")?;
        }
        Ok(())
    }
}

impl Core {
    pub(crate) fn pending(&self) -> Pending {
        let mut operations = Vec::new();
        self.each_holder(&mut |holder| holder.list(&mut |operation| operations.push(operation)));
        let unexpected = self.engines.each().map(|engine| engine.waiting().0).sum();
        let mut messages = Vec::new();
        for engine in self.engines.each() {
            let room = MESSAGES - messages.len();
            engine.list_messages(room, &mut |message| messages.push(message));
        }
        let mut shortages = Vec::new();
        for lane in self.devices().iter().flat_map(|device| &device.0.lanes) {
            let why = lane.device.shortage().map(|why| format!("{}: {why}", lane.transport));
            shortages.extend(why.filter(|why| !shortages.contains(why)));
        }
        let deferred_bytes = self.unexpected.undelivered_bytes();
        let deferred = self.devices().iter().map(|device| device.0.undelivered.len()).sum();
        let down =
            (0..self.size).map(Rank).filter(|&rank| self.told_down(rank).is_some()).collect();
        Pending {
            rank: self.rank,
            size: self.size,
            operations,
            unexpected,
            unexpected_bytes: self.unexpected.bytes().saturating_sub(deferred_bytes),
            messages,
            deferred,
            deferred_bytes,
            shortages,
            down,
        }
    }

    /// Prints the pending operations, as SIGUSR1 requests.
    #[cold]
    pub(crate) fn dump(&self) {
        // Another thread may have seen the same signal. One that comes from now on asks for the
        // next dump.
        if self.chores.take(Chore::Dump) {
            stderr::print(self.pending());
        }
    }
}
