//! Counts of operations in flight that peers have asked for.

use super::outgoing::Matter;
use super::{Bulk, Target};
use crate::names::Rank;

impl Target {
    /// Returns `true` if the peer began it; else it is a receive or a get of this rank. Lists of
    /// pieces have a count of their own, with a lower limit.
    fn is_asked_for(&self) -> bool {
        matches!(self, Self::Am { .. } | Self::Put { .. })
    }
}

impl Bulk {
    /// Returns an upper bound of the operations that all peers have asked for.
    pub(crate) fn asked_for_by_all(&self) -> usize {
        (self.streams.count() + self.arriving.count() + self.pulls.count()) as usize
    }

    /// Returns the operations that a peer has asked for: its gets, its puts, and its messages to
    /// completion objects.
    pub(crate) fn asked_for_by(&self, peer: Rank) -> usize {
        let streams = self.streams.lock();
        let gets = streams
            .iter()
            .filter(|one| one.rank() == peer && one.matter() == Matter::Answer)
            .count();
        drop(streams);
        let arriving = self.arriving.lock();
        let parts =
            arriving.values().filter(|one| one.from == peer && one.target.is_asked_for()).count();
        drop(arriving);
        let pulls = self.pulls.lock();
        gets + parts
            + pulls.iter().filter(|one| one.from == peer && one.target.is_asked_for()).count()
    }
}
