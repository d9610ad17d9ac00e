//! The operations that a rank waits for, for diagnostics of a program that hangs.

use crate::chores::Chore;
use crate::device::{Device, DeviceInner};
use crate::error::WaitError;
use crate::names::{Rank, Tag};
use crate::progress::InLine;
use crate::runtime::{Inner, Runtime};
use std::fmt;
use std::time::Duration;

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

/// An operation in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingOp {
    /// The kind of operation.
    pub what: &'static str,
    /// The other side; [`Rank::ANY`] for a receive from any sender.
    pub rank: Rank,
    /// Its tag.
    pub tag: Tag,
    /// Bytes.
    pub size: u64,
    /// The condition that it waits for.
    pub waits_for: String,
}

impl fmt::Display for PendingOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, rank, tag, size, waits_for } = self;
        match *rank {
            Rank::ANY => write!(f, "{what}, any rank")?,
            rank => write!(f, "{what}, {rank}")?,
        }
        match *tag {
            Tag::ANY => write!(f, ", any tag")?,
            Tag(tag) => write!(f, ", tag {tag}")?,
        }
        write!(f, ", {size} B: waits for {waits_for}")
    }
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

impl Runtime {
    /// Returns the operations that this rank waits for at this moment. For diagnostics only, since
    /// each list is read at a time of its own.
    pub fn pending(&self) -> Pending {
        self.0.pending()
    }

    /// Returns `true` if all messages, puts, gets and atomic operations of a device have
    /// completed. Receives that wait for their messages do not count. Another thread that makes
    /// progress may be about to signal a completion object.
    pub fn test_drained(&self, device: &Device) -> bool {
        device.0.is_drained()
    }

    /// Makes progress until [`test_drained`](Self::test_drained), for a limited time.
    ///
    /// # Errors
    /// The time was up, or progress needs attention.
    pub fn wait_drained(&self, device: &Device, limit: Duration) -> Result<(), WaitError> {
        self.wait_for(limit, || device.0.is_drained())
    }
}

impl Inner {
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
            device.0.list_pending(&mut |operation| operations.push(operation));
            deferred += device.0.undelivered.lock().len();
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

impl DeviceInner {
    fn list_pending(&self, list: &mut dyn FnMut(PendingOp)) {
        for rank in self.busy_ranks() {
            let Some(route) = self.known_route(rank) else { continue };
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
        self.list_ordered(list);
        self.list_transfers(list);
        let in_line = self.line.lock();
        for landing in self.landing.lock().iter().chain(in_line.iter().filter_map(InLine::landing))
        {
            list(PendingOp {
                what: "copy",
                rank: landing.op.rank,
                tag: landing.op.tag,
                size: landing.op.size as u64,
                waits_for: "an engine of a GPU".into(),
            });
        }
        for _ in 0..self.outstanding.len() {
            list(PendingOp {
                what: "message that a link holds",
                rank: Rank::ANY,
                tag: Tag::ANY,
                size: 0,
                waits_for: "the link".into(),
            });
        }
    }

    fn is_drained(&self) -> bool {
        !self.has_backlogs()
            && self.transfers.is_idle()
            && self.landing.is_empty()
            && self.line.is_empty()
            && self.undelivered.is_empty()
            && !self.orders_sent()
            && self.outstanding.is_empty()
    }
}
