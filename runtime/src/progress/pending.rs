//! The operations that a rank waits for, for diagnostics of a program that hangs.

use super::Core;
use crate::chores::Chore;
use crate::datapath::Port;
use crate::names::{Rank, Tag};
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
        let mut unexpected = 0;
        for engine in self.engines.each() {
            unexpected += engine.waiting().0;
            engine.each_receive(|receive| {
                operations.push(PendingOp {
                    what: "receive",
                    rank: receive.op.rank,
                    tag: receive.op.tag,
                    size: receive.buffer.len() as u64,
                    waits_for: "its message".into(),
                });
            });
        }
        for (group, active) in self.boards.active() {
            let waits_for = match active.awaits {
                Some(rank) => format!("{rank} to come"),
                None => "its messages".into(),
            };
            operations.push(PendingOp {
                what: active.name(),
                rank: Rank::ANY,
                tag: Tag(active.number),
                size: 0,
                waits_for: format!("{waits_for}, in group {group}"),
            });
        }
        let devices = self.devices().clone();
        let mut deferred = 0;
        for device in &devices {
            list_pending(&device.0, &mut |operation| operations.push(operation));
            deferred += device.0.undelivered.len();
        }
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

fn list_pending(device: &Port, list: &mut dyn FnMut(PendingOp)) {
    for rank in device.busy_ranks() {
        let Some(route) = device.known_route(rank) else { continue };
        let is_linked = route.linked().is_some();
        for parked in route.backlog().iter() {
            let waits_for = if is_linked { parked.waits_for() } else { "the peer to start" };
            list(PendingOp {
                what: "message in the backlog",
                rank,
                tag: parked.op.tag,
                size: parked.op.size as u64,
                waits_for: waits_for.into(),
            });
        }
    }
    device.ordered.list(list);
    device.list_transfers(list);
    device.landings.list(list);
    device.line.list(list);
    for _ in 0..device.outstanding.len() {
        list(PendingOp {
            what: "message that a link holds",
            rank: Rank::ANY,
            tag: Tag::ANY,
            size: 0,
            waits_for: "the link".into(),
        });
    }
}
