//! The operations that a rank waits for, for diagnostics of a program that hangs.

use super::Core;
use crate::chores::Chore;
use crate::names::Rank;
use crate::op::PendingOp;
use std::fmt;

/// Operations that are listed one by one; the others are counted.
const LISTED: usize = 64;

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
    /// Deliveries that a full completion object, or a want of packets, holds up.
    pub deferred: usize,
    /// Ranks known to be gone.
    pub down: Vec<Rank>,
}

impl fmt::Display for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, size, operations, unexpected, unexpected_bytes, deferred, down } = self;
        writeln!(
            f,
            "{rank} of {size}: {} operations pending, {unexpected} messages ({unexpected_bytes} B) \
            without a receive, {deferred} deliveries held up",
            operations.len()
        )?;
        for operation in operations.iter().take(LISTED) {
            writeln!(f, "  {operation}")?;
        }
        if let Some(more) = operations.len().checked_sub(LISTED).filter(|&more| more > 0) {
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
        let deferred = self.devices().iter().map(|device| device.0.undelivered.len()).sum();
        let down =
            (0..self.size).map(Rank).filter(|&rank| self.told_down(rank).is_some()).collect();
        Pending {
            rank: self.rank,
            size: self.size,
            operations,
            unexpected,
            unexpected_bytes: self.unexpected.bytes(),
            deferred,
            down,
        }
    }

    /// Prints the pending operations, as SIGUSR1 requests.
    #[cold]
    pub(crate) fn dump(&self) {
        // Another thread may have seen the same signal. One that comes from now on asks for the
        // next dump.
        if self.chores.take(Chore::Dump) {
            // One write, so that the dumps of several ranks do not mix.
            eprint!("{}", self.pending());
        }
    }
}
