//! Everybody's bytes, to everybody.

use super::{Collective, ring};
use crate::comp::Synchronizer;
use crate::error::CollectiveError;
use crate::names::Rank;
use crate::runtime::Runtime;

/// Bytes in front of a piece: how long each rank's contribution is, so that unequal ones are noticed.
const LENGTH: usize = 8;

impl Runtime {
    /// Each rank's bytes, in the order of ranks. All ranks must contribute the same number of bytes.
    ///
    /// Bruck's algorithm (1997): in round k each rank passes on all it has, up to 2^k contributions, to the
    /// one 2^k places back; ⌈log₂ n⌉ rounds. Long rounds go in pieces of a packet.
    pub fn allgather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let collective = Collective::begin(self, "allgather")?;
        let mut step = 0;
        // The lengths first, which are of one length: so all ranks learn of a wrong one, and none waits for
        // a rank that has left with the error.
        let ours = mine.len() as u64;
        let lengths = self.gather(&collective, &ours.to_le_bytes(), &mut step)?;
        for (rank, length) in (0..).map(Rank).zip(lengths) {
            let theirs = length.try_into().map_or(u64::MAX, u64::from_le_bytes);
            if theirs != ours {
                let theirs = usize::try_from(theirs).unwrap_or(usize::MAX);
                return Err(CollectiveError::Uneven { rank, theirs, ours: mine.len() });
            }
        }
        self.gather(&collective, mine, &mut step)
    }

    fn gather(
        &self,
        collective: &Collective<'_>,
        mine: &[u8],
        step: &mut u32,
    ) -> Result<Vec<Vec<u8>>, CollectiveError> {
        let (rank, size) = (self.rank(), self.size());
        let total = size as usize;
        // Contributions from this rank on, round the ring: `have[i]` is that of rank + i.
        let mut have: Vec<u8> = Vec::with_capacity(mine.len() * total);
        have.extend(mine);
        let mut count = 1_usize;
        while count < total {
            let passed = count.min(total - count);
            let distance = count as u64;
            let from = ring(rank, distance, size);
            let to = ring(rank, u64::from(size) - distance, size);
            let bytes = mine.len() * passed;
            let got = pass(collective, (from, to), &have[..bytes], mine.len(), step)?;
            have.extend(got);
            count += passed;
        }
        Ok((0..total)
            .map(|of| {
                let place = (of + total - rank.0 as usize) % total;
                have[place * mine.len()..(place + 1) * mine.len()].to_vec()
            })
            .collect())
    }
}

/// One round: sends bytes to one rank, and receives as many from another.
fn pass(
    collective: &Collective<'_>,
    (from, to): (Rank, Rank),
    bytes: &[u8],
    each: usize,
    step: &mut u32,
) -> Result<Vec<u8>, CollectiveError> {
    let piece = collective.runtime.max_eager() - LENGTH;
    let mut got = Vec::with_capacity(bytes.len());
    let arrived = Synchronizer::new(1);
    // One piece at least: it tells the length, also when that is zero.
    let mut pieces = bytes.chunks(piece);
    loop {
        let mine = pieces.next().unwrap_or_default();
        // Room for more than is expected, so that another length is a message and not a truncation.
        collective.receive(from, piece + LENGTH, *step, &arrived)?;
        let message: Vec<u8> = (each as u64).to_le_bytes().into_iter().chain(mine.iter().copied()).collect();
        collective.send(to, &message, *step)?;
        *step += 1;
        for status in collective.arrived(&arrived)? {
            let (length, theirs) =
                status.bytes().and_then(|bytes| bytes.split_first_chunk()).unwrap_or((&[0; 8], &[]));
            let length = u64::from_le_bytes(*length);
            if length != each as u64 {
                let theirs = usize::try_from(length).unwrap_or(usize::MAX);
                return Err(CollectiveError::Uneven { rank: status.rank, theirs, ours: each });
            }
            got.extend_from_slice(theirs);
        }
        if got.len() >= bytes.len() {
            return Ok(got);
        }
    }
}
