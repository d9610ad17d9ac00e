//! Everybody is here.

use super::{Collective, ring};
use crate::comp::Synchronizer;
use crate::error::{CollectiveError, OpError, PostError};
use crate::names::Rank;
use crate::runtime::Runtime;
use carrack_transports::contract::DownCause;

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
        let mut trouble = None;
        while distance < u64::from(size) {
            let from = ring(rank, u64::from(size) - distance, size);
            // A rank that knows the barrier to have failed goes on telling its partners of the later rounds, so
            // that none waits for a rank which has left with the error.
            let word = trouble.as_ref().map(|error| gone(error, rank).0.to_le_bytes());
            let word = word.as_ref().map_or(&[][..], |word| word);
            let told = collective.send(ring(rank, distance, size), word, round);
            let heard = match trouble {
                Some(_) => Ok(()),
                None => told.and_then(|()| hear(&collective, from, round, &arrived)),
            };
            trouble = trouble.or(heard.err());
            round += 1;
            distance *= 2;
        }
        match trouble {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }
}

/// The rank whose going made the barrier fail: what is sent in place of nothing from then on.
fn gone(error: &CollectiveError, me: Rank) -> Rank {
    match error {
        CollectiveError::Op { cause: OpError::PeerDown { rank, .. }, .. }
        | CollectiveError::Post { cause: PostError::PeerDown { rank, .. }, .. } => *rank,
        // Not a rank that is gone, but this one's own trouble.
        _ => me,
    }
}

/// One round's message.
fn hear(
    collective: &Collective<'_>,
    from: Rank,
    round: u32,
    arrived: &Synchronizer,
) -> Result<(), CollectiveError> {
    collective.receive(from, size_of::<u32>(), round, arrived)?;
    for status in collective.arrived(arrived)? {
        if let Some((rank, _)) = status.bytes().and_then(|bytes| bytes.split_first_chunk()) {
            let rank = Rank(u32::from_le_bytes(*rank));
            let cause = DownCause::Gone(format!("the barrier failed there, says {from}"));
            return Err(CollectiveError::Op { what: "barrier", cause: OpError::PeerDown { rank, cause } });
        }
    }
    Ok(())
}
