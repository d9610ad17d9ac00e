//! The list of unfinished large messages and operations on memory, for diagnostics.

use super::Bulk;
use super::outgoing::Matter;
use crate::names::Tag;
use crate::pending::PendingOp;

impl Bulk {
    /// Returns `true` if nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.offered.is_empty()
            && self.streams.is_empty()
            && self.writings.is_empty()
            && self.arriving.is_empty()
            && self.pulls.is_empty()
            && self.flushes.is_empty()
            && self.packed.is_empty()
    }

    /// Lists the transfers in flight.
    pub(crate) fn list_pending(&self, list: &mut dyn FnMut(PendingOp)) {
        for one in self.offered.lock().values() {
            let (what, waits_for) = match one.matter() {
                Matter::Message => ("message that was offered", "its receive"),
                Matter::Memory(_) | Matter::Answer => ("operation on a peer's memory", "its owner"),
            };
            let (rank, tag, size) = one.about();
            list(PendingOp { what, rank, tag, size, waits_for: waits_for.into() });
        }
        for stream in self.streams.lock().iter() {
            let (rank, tag, size) = stream.about();
            let waits_for = format!("room at the peer, {} B are sent", stream.sent());
            list(PendingOp { what: "message on its way out", rank, tag, size, waits_for });
        }
        for one in self.writings.lock().values() {
            let (rank, tag, size) = one.offered.about();
            let waits_for = format!("the NIC or its receiver's, {} B are given to it", one.sent());
            list(PendingOp { what: "message on its way out", rank, tag, size, waits_for });
        }
        for one in self.arriving.lock().values() {
            let waits_for = format!("its parts, {} B have come", one.got());
            let (rank, size) = (one.from, one.size as u64);
            list(PendingOp {
                what: "message or get on its way here",
                rank,
                tag: one.target.tag(),
                size,
                waits_for,
            });
        }
        for pull in self.pulls.lock().iter() {
            let (rank, size, waits_for) = (pull.from, pull.size as u64, pull.waits_for().into());
            list(PendingOp {
                what: "message on its way here",
                rank,
                tag: pull.target.tag(),
                size,
                waits_for,
            });
        }
        for flush in self.flushes.lock().iter() {
            let waits_for = "earlier operations on its memory".into();
            list(PendingOp {
                what: "flush",
                rank: flush.rank(),
                tag: Tag::default(),
                size: 0,
                waits_for,
            });
        }
    }
}
