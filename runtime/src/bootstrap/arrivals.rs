//! Answers from the launcher, and the wake-up of the threads that wait for them.
//!
//! Any thread may empty the socket, so the thread that finds an answer need not be the one that
//! sleeps for it. Two eventfds wake sleepers. One is readable while an answer waits here that no
//! `get` has returned. The other is readable after each event that a fence waits for.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use super::error::{BootstrapError, Departure};
use super::protocol::Frame;

#[derive(Debug)]
pub(super) struct Arrivals {
    /// This rank.
    rank: u32,
    answers: HashMap<String, StoreAnswer>,
    untaken: usize,
    fences_done: u64,
    gone: Vec<(u32, Departure)>,
    end: Option<EndCause>,
    for_gets: Flag,
    for_fences: Flag,
}

#[derive(Debug)]
enum StoreAnswer {
    Asked,
    /// The store had no value then.
    Missing,
    Arrived(Vec<u8>),
    /// A value that was taken, and is kept, since a key never changes: the next `get` is answered
    /// from here.
    Taken(Vec<u8>),
}

/// The reason why no further answer comes.
#[derive(Clone, Debug)]
enum EndCause {
    LauncherGone,
    StoreGone { rank: u32, address: String },
    Refused(String),
}

impl Arrivals {
    pub(super) fn new(rank: u32) -> Result<Self, BootstrapError> {
        Ok(Self {
            rank,
            answers: HashMap::new(),
            untaken: 0,
            fences_done: 0,
            gone: Vec::new(),
            end: None,
            for_gets: Flag::new()?,
            for_fences: Flag::new()?,
        })
    }

    /// Returns the eventfd that is readable while a sleeping `get` should look again.
    pub(super) fn for_gets(&self) -> BorrowedFd<'_> {
        self.for_gets.0.as_fd()
    }

    /// Returns a handle of the eventfd that a sleeping fence waits for.
    pub(super) fn for_fences(&self) -> Result<OwnedFd, BootstrapError> {
        self.for_fences
            .0
            .try_clone()
            .map_err(|source| BootstrapError::Os { doing: "duplicating an eventfd", source })
    }

    /// Handles one frame of the launcher.
    pub(super) fn take_in(&mut self, frame: Frame) {
        match frame {
            Frame::Value { key, value } => {
                // An unexpected answer, or a second one, does not fail the rank.
                if let Some(answer @ (StoreAnswer::Asked | StoreAnswer::Missing)) =
                    self.answers.get_mut(&key)
                {
                    *answer = StoreAnswer::Arrived(value);
                    self.untaken += 1;
                    self.for_gets.raise();
                }
            }
            Frame::Missing { key } => {
                if let Some(answer @ StoreAnswer::Asked) = self.answers.get_mut(&key) {
                    *answer = StoreAnswer::Missing;
                }
            }
            Frame::FenceDone { number } => {
                self.fences_done = self.fences_done.max(number);
                self.for_fences.raise();
            }
            Frame::Gone { rank, how } => {
                self.gone.push((rank, how));
                if rank == self.rank {
                    // The store reads no frame of this rank any more.
                    return self.end(EndCause::LauncherGone);
                }
                self.for_fences.raise();
                if !how.is_orderly() {
                    // From now on a missing key is an error, so all sleepers have to check.
                    self.for_gets.raise();
                }
            }
            Frame::Lost { ranks, how } => {
                self.gone.extend(ranks.iter().map(|rank| (*rank, how)));
                self.for_fences.raise();
                self.for_gets.raise();
            }
            Frame::Refused { why } => self.end(EndCause::Refused(why)),
            // Only ranks send these frames, or the launcher sends them once, before all others.
            Frame::Hello { .. }
            | Frame::Put { .. }
            | Frame::Get { .. }
            | Frame::Fence { .. }
            | Frame::Finished => {}
        }
    }

    /// Notes that the launcher has hung up.
    pub(super) fn launcher_gone(&mut self) {
        self.end(EndCause::LauncherGone);
    }

    /// Notes that rank 0, which has the store, has hung up.
    pub(super) fn store_gone(&mut self, rank: u32, address: String) {
        self.end(EndCause::StoreGone { rank, address });
    }

    /// Notes an event that wakes a fence.
    pub(super) fn take_fence_news(&self) {
        self.for_fences.lower();
    }

    fn end(&mut self, end: EndCause) {
        // A refusal explains the hang-up that may follow it.
        self.end.get_or_insert(end);
        self.for_gets.raise();
        self.for_fences.raise();
    }

    /// Returns the key's value, if it has come.
    pub(super) fn answer(&mut self, key: &str) -> Option<Vec<u8>> {
        let answer = self.answers.get_mut(key)?;
        match answer {
            StoreAnswer::Asked | StoreAnswer::Missing => None,
            StoreAnswer::Taken(value) => Some(value.clone()),
            StoreAnswer::Arrived(value) => {
                let value = std::mem::take(value);
                *answer = StoreAnswer::Taken(value.clone());
                self.untaken -= 1;
                if self.untaken == 0 && self.end.is_none() && self.lost(|_| true).is_none() {
                    self.for_gets.lower();
                }
                Some(value)
            }
        }
    }

    /// Notes that the key was requested. Returns `false` if it was requested before.
    pub(super) fn ask(&mut self, key: &str) -> bool {
        if self.answers.contains_key(key) {
            return false;
        }
        self.answers.insert(key.to_owned(), StoreAnswer::Asked);
        true
    }

    /// Fails once the launcher reads no more frames.
    pub(super) fn check_end(&self) -> Result<(), BootstrapError> {
        let forbids_start = |(_, how): &&(u32, Departure)| how.forbids_start();
        match (&self.end, self.gone.iter().find(forbids_start)) {
            (None, _) => Ok(()),
            // It explains the store's end.
            (Some(_), Some(&(rank, how))) => Err(BootstrapError::RankGone { rank, how }),
            (Some(EndCause::LauncherGone), _) => Err(BootstrapError::LauncherGone),
            (Some(EndCause::StoreGone { rank, address }), _) => {
                Err(BootstrapError::StoreGone { rank: *rank, address: address.clone() })
            }
            (Some(EndCause::Refused(why)), _) => Err(BootstrapError::Refused { why: why.clone() }),
        }
    }

    /// Fails when a key may never come: it is missing, and not only its answer.
    pub(super) fn check_get(&self, key: &str) -> Result<(), BootstrapError> {
        if matches!(self.answers.get(key), Some(StoreAnswer::Asked)) && self.end.is_none() {
            return Ok(());
        }
        self.check(|_| true)
    }

    /// Fails when a missing key of some ranks may never come.
    pub(super) fn check(&self, of: impl Fn(u32) -> bool) -> Result<(), BootstrapError> {
        match self.lost(of) {
            // This comes first: a rank's death explains more than the launcher's end after it.
            Some((rank, how)) => Err(BootstrapError::RankGone { rank, how }),
            None => self.check_end(),
        }
    }

    /// Returns `true` if a rank has ended in order without having put a key. The store tells of
    /// values before it tells of the end.
    pub(super) fn never_comes(&self, key: &str, rank: u32) -> bool {
        let has_ended = |&(gone, how): &(u32, Departure)| gone == rank && how.is_orderly();
        matches!(self.answers.get(key), Some(StoreAnswer::Missing))
            && self.gone.iter().any(has_ended)
    }

    /// Returns `true` if the fence of this number is complete; fails if it cannot complete.
    ///
    /// After `false` the caller may sleep on [`for_fences`](Self::for_fences).
    pub(super) fn fence_is_done(&mut self, number: u64) -> Result<bool, BootstrapError> {
        // The flag is lowered before the check, under the caller's lock, so that no event is lost.
        self.for_fences.lower();
        // Success is checked first: a rank may leave right after the fence that it completed.
        if self.fences_done >= number {
            return Ok(true);
        }
        self.check_fence().map(|()| false)
    }

    /// Fails when no further fence can complete.
    pub(super) fn check_fence(&self) -> Result<(), BootstrapError> {
        self.check(|_| true)?;
        match self.gone.first() {
            Some(&(rank, how)) => Err(BootstrapError::RankGone { rank, how }),
            None => Ok(()),
        }
    }

    /// Returns the first of some ranks that left without having announced its end.
    fn lost(&self, of: impl Fn(u32) -> bool) -> Option<(u32, Departure)> {
        self.gone.iter().copied().find(|&(rank, how)| of(rank) && !how.is_orderly())
    }
}

/// An eventfd used as a flag, for threads to sleep on.
#[derive(Debug)]
struct Flag(OwnedFd);

impl Flag {
    fn new() -> Result<Self, BootstrapError> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|errno| BootstrapError::os("making an eventfd", errno))
    }

    fn raise(&self) {
        // The write can only fail when the counter is full: the flag is raised already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn lower(&self) {
        // The read can only fail when the counter is zero: the flag is lowered already.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}
