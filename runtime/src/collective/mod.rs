//! Collective operations over all ranks: barrier and allgather.
//!
//! They are made of sends and receives on a matching engine of their own, so they never meet the user's
//! messages. The n-th collective of one rank meets the n-th of each other: all ranks must call them in the
//! same order, one at a time.

mod allgather;
mod barrier;

use crate::comp::{Status, Synchronizer};
use crate::error::{CollectiveError, OpError, WaitError};
use crate::matching::Engines;
use crate::names::{Rank, Tag};
use crate::post::Outcome;
use crate::runtime::Runtime;
use std::sync::{MutexGuard, TryLockError};

/// One collective in progress: its name, and the number that all its messages carry.
struct Collective<'a> {
    runtime: &'a Runtime,
    what: &'static str,
    number: MutexGuard<'a, u64>,
}

impl<'a> Collective<'a> {
    fn begin(runtime: &'a Runtime, what: &'static str) -> Result<Self, CollectiveError> {
        let mut number = match runtime.0.collective.try_lock() {
            Ok(number) => number,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Err(CollectiveError::Overlap(what)),
        };
        *number += 1;
        Ok(Self { runtime, what, number })
    }

    /// The tag of a message: the collective's number, and the message's place in it.
    fn tag(&self, step: u32) -> Tag {
        Tag(*self.number << 32 | u64::from(step))
    }

    fn engine(&self) -> &'a crate::matching::MatchingEngine {
        self.runtime.0.engine(Engines::COLLECTIVE)
    }

    /// Posts a receive that `arrived` is signalled for.
    fn receive(
        &self,
        from: Rank,
        room: usize,
        step: u32,
        arrived: &Synchronizer,
    ) -> Result<(), CollectiveError> {
        let mut recv = self
            .runtime
            .post_recv(from, vec![0; room], self.tag(step))
            .matching_engine(self.engine())
            .comp(arrived)
            .allow_done(false);
        match recv.call() {
            Ok(_) => Ok(()),
            Err(cause) => Err(CollectiveError::Post { what: self.what, cause }),
        }
    }

    /// Sends, making progress for as long as it takes.
    fn send(&self, to: Rank, bytes: &[u8], step: u32) -> Result<(), CollectiveError> {
        let mut send = self.runtime.post_send(to, bytes, self.tag(step)).matching_engine(self.engine());
        loop {
            match send.call() {
                Ok(Outcome::Done(_) | Outcome::Posted) => return Ok(()),
                Ok(Outcome::Retry(_)) => {
                    let once = std::cell::Cell::new(false);
                    // A wait whose condition is met at the second look: one round of progress, or a short sleep.
                    let waited =
                        self.runtime.wait_for(std::time::Duration::from_millis(1), || once.replace(true));
                    match waited {
                        Ok(()) | Err(WaitError::TimedOut(_)) => {}
                        Err(cause) => return Err(CollectiveError::Wait { what: self.what, cause }),
                    }
                }
                Err(cause) => return Err(CollectiveError::Post { what: self.what, cause }),
            }
        }
    }

    /// Waits for what was received.
    fn arrived(&self, arrived: &Synchronizer) -> Result<Vec<Status>, CollectiveError> {
        let statuses =
            arrived.wait(self.runtime).map_err(|cause| CollectiveError::Wait { what: self.what, cause })?;
        let failed = |cause: OpError| CollectiveError::Op { what: self.what, cause };
        statuses.into_iter().map(|status| status.ok().map_err(failed)).collect()
    }
}

/// The rank `distance` places on, round the ring.
fn ring(rank: Rank, distance: u64, size: u32) -> Rank {
    let at = (u64::from(rank.0) + distance) % u64::from(size);
    Rank(u32::try_from(at).unwrap_or(0))
}
