//! How much is under way because peers have asked for it.

use super::outgoing::Matter;
use super::{Bulk, Target};
use crate::names::Rank;

impl Target {
    /// Whether it is the peer that has begun it; else a receive or a get of this rank. Lists of
    /// pieces are counted by themselves, and are fewer.
    fn is_asked_for(&self) -> bool {
        matches!(self, Self::Am { .. } | Self::Put { .. })
    }
}

impl Bulk {
    /// No less than what all peers have asked for.
    pub(crate) fn asked_for_by_all(&self) -> usize {
        (self.streams.count() + self.arriving.count() + self.pulls.count()) as usize
    }

    /// What a peer has asked for: bytes that it gets, and those that it puts or sends to completion
    /// objects.
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
