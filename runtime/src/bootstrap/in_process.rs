//! A job of one rank, or several ranks in one process.

#![forbid(unsafe_code)]

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::Bootstrap;
use super::error::{BootstrapError, Departure};
use super::job::JobId;
use super::protocol::{check_key, check_value};

/// One of the ranks that share a process and a table: a job of one, or several for tests and for
/// loopback.
///
/// Its drop leaves the job: fences of other ranks fail from then on.
#[derive(Debug)]
pub struct InProcess {
    rank: u32,
    fence_turn: Mutex<()>,
    shared: Arc<SharedJob>,
}

#[derive(Debug)]
struct SharedJob {
    job: JobId,
    size: u32,
    state: Mutex<JobState>,
    fence_moved: Condvar,
}

#[derive(Debug, Default)]
struct JobState {
    table: HashMap<String, Vec<u8>>,
    fence_arrived: u32,
    fences_done: u64,
    gone: Vec<(u32, Departure)>,
}

impl SharedJob {
    fn new(size: u32) -> Result<Self, BootstrapError> {
        let (job, state, fence_moved) = (JobId::random()?, Mutex::default(), Condvar::new());
        Ok(Self { job, size, state, fence_moved })
    }
}

impl InProcess {
    /// Returns the ranks of a new job of `size`, in order.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::Os`] when the kernel has no random bytes for the job's identity.
    pub fn job(size: u32) -> Result<Vec<Self>, BootstrapError> {
        let shared = Arc::new(SharedJob::new(size)?);
        let rank = |rank| Self { rank, fence_turn: Mutex::default(), shared: Arc::clone(&shared) };
        Ok((0..size).map(rank).collect())
    }

    /// Returns rank 0 of a job of one: what a program started without a launcher gets.
    ///
    /// # Errors
    ///
    /// The errors of [`job`](Self::job).
    pub fn alone() -> Result<Self, BootstrapError> {
        let shared = Arc::new(SharedJob::new(1)?);
        Ok(Self { rank: 0, fence_turn: Mutex::default(), shared })
    }

    fn state(&self) -> MutexGuard<'_, JobState> {
        self.shared.state.lock()
    }

    fn leave(&self, how: Departure) {
        let mut state = self.state();
        if !state.gone.iter().any(|(rank, _)| *rank == self.rank) {
            state.gone.push((self.rank, how));
        }
        drop(state);
        self.shared.fence_moved.notify_all();
    }
}

impl Bootstrap for InProcess {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.shared.size
    }

    fn job(&self) -> &JobId {
        &self.shared.job
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
        check_key(key)?;
        check_value(value)?;
        match self.state().table.entry(key.to_owned()) {
            Entry::Vacant(entry) => {
                entry.insert(value.to_vec());
            }
            Entry::Occupied(entry) if entry.get() == value => {}
            Entry::Occupied(_) => return Err(BootstrapError::AlreadyPut { key: key.to_owned() }),
        }
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
        check_key(key)?;
        let state = self.state();
        if let Some(value) = state.table.get(key) {
            return Ok(Some(value.clone()));
        }
        match state.gone.iter().find(|(_, how)| !how.is_orderly()) {
            Some(&(rank, how)) => Err(BootstrapError::RankGone { rank, how }),
            None => Ok(None),
        }
    }

    fn check(&self, rank: u32) -> Result<(), BootstrapError> {
        let lost = |&&(gone, how): &&(u32, Departure)| gone == rank && !how.is_orderly();
        let gone = |&(rank, how)| Err(BootstrapError::RankGone { rank, how });
        self.state().gone.iter().find(lost).map_or(Ok(()), gone)
    }

    fn never_comes(&self, key: &str, rank: u32) -> bool {
        let state = self.state();
        let has_ended = |&(gone, how): &(u32, Departure)| gone == rank && how.is_orderly();
        !state.table.contains_key(key) && state.gone.iter().any(has_ended)
    }

    fn fence(&self) -> Result<(), BootstrapError> {
        let _turn = self.fence_turn.lock();
        let mut state = self.state();
        let this = state.fences_done + 1;
        state.fence_arrived += 1;
        if state.fence_arrived == self.shared.size {
            state.fence_arrived = 0;
            state.fences_done = this;
            self.shared.fence_moved.notify_all();
            return Ok(());
        }
        loop {
            // The order matters: a rank may leave right after the fence that it completed.
            if state.fences_done >= this {
                return Ok(());
            }
            if let Some(&(rank, how)) = state.gone.first() {
                return Err(BootstrapError::RankGone { rank, how });
            }
            self.shared.fence_moved.wait(&mut state);
        }
    }

    fn finish(&self) -> Result<(), BootstrapError> {
        self.leave(Departure::Finished);
        Ok(())
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        self.leave(Departure::Disconnected);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn a_rank_alone_reads_what_it_wrote_and_never_waits() {
        let alone = InProcess::alone().unwrap();
        assert_eq!((alone.rank(), alone.size()), (0, 1));
        assert_eq!(alone.get("a").unwrap(), None);
        alone.put("a", b"1").unwrap();
        alone.put("a", b"1").unwrap();
        assert_eq!(alone.get("a").unwrap().unwrap(), b"1");
        assert!(matches!(alone.put("a", b"2"), Err(BootstrapError::AlreadyPut { .. })));
        alone.fence().unwrap();
        alone.finish().unwrap();
    }

    #[test]
    fn keys_and_values_have_bounds() {
        let alone = InProcess::alone().unwrap();
        let too_large = |result| matches!(result, Err(BootstrapError::TooLarge { .. }));
        assert!(too_large(alone.put(&"k".repeat(257), b"")));
        assert!(too_large(alone.put("k", &[0; 65537])));
        alone.put(&"k".repeat(256), &[0; 65536]).unwrap();
    }

    #[test]
    fn all_ranks_see_one_job_and_one_table() {
        let ranks = InProcess::job(3).unwrap();
        assert_eq!(ranks.iter().map(Bootstrap::rank).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(ranks[0].job(), ranks[2].job());
        assert_eq!(ranks[1].get("a").unwrap(), None);
        ranks[0].put("a", b"1").unwrap();
        assert_eq!(ranks[1].get("a").unwrap().unwrap(), b"1");
        assert!(matches!(ranks[2].put("a", b"2"), Err(BootstrapError::AlreadyPut { .. })));
    }

    #[test]
    fn no_rank_passes_a_fence_before_all_have_reached_it() {
        const ROUNDS: u32 = 50;
        let ranks = InProcess::job(4).unwrap();
        let arrived = AtomicU32::new(0);
        thread::scope(|scope| {
            for rank in &ranks {
                scope.spawn(|| {
                    for round in 1..=ROUNDS {
                        arrived.fetch_add(1, Ordering::SeqCst);
                        rank.fence().unwrap();
                        assert!(arrived.load(Ordering::SeqCst) >= 4 * round);
                    }
                });
            }
        });
    }

    #[test]
    fn a_fence_fails_and_names_the_rank_that_was_dropped() {
        let mut ranks = InProcess::job(2).unwrap();
        let leaving = ranks.pop().unwrap();
        thread::scope(|scope| {
            let waiting = scope.spawn(|| ranks[0].fence());
            drop(leaving);
            let error = waiting.join().unwrap().unwrap_err();
            assert!(
                matches!(error, BootstrapError::RankGone { rank: 1, how: Departure::Disconnected }),
                "{error}"
            );
        });
        assert!(ranks[0].get("never").is_err(), "it may have been the one to put it");
    }

    #[test]
    fn a_rank_that_finished_in_order_does_not_disturb_gets() {
        let ranks = InProcess::job(2).unwrap();
        ranks[1].put("a", b"1").unwrap();
        ranks[1].finish().unwrap();
        assert_eq!(ranks[0].get("a").unwrap().unwrap(), b"1");
        assert_eq!(ranks[0].get("b").unwrap(), None);
        assert!(ranks[0].fence().is_err());
    }
}
