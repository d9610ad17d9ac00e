//! The description of an operation in flight, for diagnostics.

use crate::names::{Rank, Tag};
use std::fmt;

/// An operation in flight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingOp {
    /// The kind of operation.
    pub what: &'static str,
    /// The other side; [`Rank::ANY`] for a receive from any sender.
    pub rank: Rank,
    /// The tag of the operation.
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
