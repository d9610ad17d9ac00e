//! Everybody is here.

use super::{Collective, ring};
use crate::comp::Synchronizer;
use crate::error::CollectiveError;
use crate::runtime::Runtime;

impl Runtime {
    /// Returns once every rank has called it. Makes progress meanwhile, and does not burn a core.
    ///
    /// Dissemination (Hensgen, Finkel and Manber, 1988): in round k each rank tells the one 2^k places on, so
    /// ⌈log₂ n⌉ messages a rank. It says nothing of messages sent before: they may still be on their way.
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        let collective = Collective::begin(self, "barrier")?;
        let (rank, size) = (self.rank(), self.size());
        let arrived = Synchronizer::new(1);
        let (mut round, mut distance) = (0, 1_u64);
        while distance < u64::from(size) {
            let from = ring(rank, u64::from(size) - distance, size);
            collective.receive(from, 0, round, &arrived)?;
            collective.send(ring(rank, distance, size), &[], round)?;
            collective.arrived(&arrived)?;
            round += 1;
            distance *= 2;
        }
        Ok(())
    }
}
