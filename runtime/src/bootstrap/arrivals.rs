//! Answers from the launcher, and the wake-up of the threads that wait for them.
//!
//! Any thread may empty the socket, so the thread that finds an answer need not be the one that
//! sleeps for it. Two eventfds pass the news on: one is readable while an answer lies here that no
//! `get` has returned, the other after anything that a fence waits for.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{EventfdFlags, eventfd};

use super::error::{BootstrapError, Departure};
use super::protocol::Frame;

#[derive(Debug)]
pub(super) struct Arrivals {
    answers: HashMap<String, Answer>,
    untaken: usize,
    fences_done: u64,
    gone: Vec<(u32, Departure)>,
    end: Option<End>,
    for_gets: Flag,
    for_fences: Flag,
}

#[derive(Debug)]
enum Answer {
    Asked,
    Arrived(Vec<u8>),
    /// Kept, since a key never changes: the next `get` is answered from here.
    Taken(Vec<u8>),
}

/// The reason why no answer will come any more.
#[derive(Clone, Debug)]
enum End {
    LauncherGone,
    StoreGone { rank: u32, address: String },
    Refused(String),
}

impl Arrivals {
    pub(super) fn new() -> Result<Self, BootstrapError> {
        Ok(Self {
            answers: HashMap::new(),
            untaken: 0,
            fences_done: 0,
            gone: Vec::new(),
            end: None,
            for_gets: Flag::new()?,
            for_fences: Flag::new()?,
        })
    }

    /// Readable while a sleeping `get` should look again.
    pub(super) fn for_gets(&self) -> BorrowedFd<'_> {
        self.for_gets.0.as_fd()
    }

    /// Another handle on what a sleeping fence waits for.
    pub(super) fn for_fences(&self) -> Result<OwnedFd, BootstrapError> {
        self.for_fences
            .0
            .try_clone()
            .map_err(|source| BootstrapError::Os { doing: "duplicating an eventfd", source })
    }

    /// Takes in one frame from the launcher.
    pub(super) fn take_in(&mut self, frame: Frame) {
        match frame {
            Frame::Value { key, value } => {
                // An answer without a question, or a second one, is no reason to fail a rank.
                if let Some(answer @ Answer::Asked) = self.answers.get_mut(&key) {
                    *answer = Answer::Arrived(value);
                    self.untaken += 1;
                    self.for_gets.raise();
                }
            }
            Frame::FenceDone { number } => {
                self.fences_done = self.fences_done.max(number);
                self.for_fences.raise();
            }
            Frame::Gone { rank, how } => {
                self.gone.push((rank, how));
                self.for_fences.raise();
                if !how.is_orderly() {
                    // From now on a key that is not there is an error: everybody should look.
                    self.for_gets.raise();
                }
            }
            Frame::Refused { why } => self.end(End::Refused(why)),
            // Only a rank sends these, or they come once, before all others.
            Frame::Hello { .. }
            | Frame::Put { .. }
            | Frame::Get { .. }
            | Frame::Fence { .. }
            | Frame::Finished => {}
        }
    }

    /// Takes in that the launcher has hung up.
    pub(super) fn launcher_gone(&mut self) {
        self.end(End::LauncherGone);
    }

    /// Takes in that rank 0, which has the store, has hung up.
    pub(super) fn store_gone(&mut self, rank: u32, address: String) {
        self.end(End::StoreGone { rank, address });
    }

    /// Takes note of what a fence would be woken for.
    pub(super) fn take_fence_news(&self) {
        self.for_fences.lower();
    }

    fn end(&mut self, end: End) {
        // A refusal explains the hang-up that may follow it.
        self.end.get_or_insert(end);
        self.for_gets.raise();
        self.for_fences.raise();
    }

    /// The key's value, if it has come.
    pub(super) fn answer(&mut self, key: &str) -> Option<Vec<u8>> {
        let answer = self.answers.get_mut(key)?;
        match answer {
            Answer::Asked => None,
            Answer::Taken(value) => Some(value.clone()),
            Answer::Arrived(value) => {
                let value = std::mem::take(value);
                *answer = Answer::Taken(value.clone());
                self.untaken -= 1;
                if self.untaken == 0 && self.end.is_none() && self.lost().is_none() {
                    self.for_gets.lower();
                }
                Some(value)
            }
        }
    }

    /// Notes that the key has been asked for; false if it had been before.
    pub(super) fn ask(&mut self, key: &str) -> bool {
        if self.answers.contains_key(key) {
            return false;
        }
        self.answers.insert(key.to_owned(), Answer::Asked);
        true
    }

    /// Fails once the launcher listens no more.
    pub(super) fn check_end(&self) -> Result<(), BootstrapError> {
        match &self.end {
            None => Ok(()),
            Some(End::LauncherGone) => Err(BootstrapError::LauncherGone),
            Some(End::StoreGone { rank, address }) => {
                Err(BootstrapError::StoreGone { rank: *rank, address: address.clone() })
            }
            Some(End::Refused(why)) => Err(BootstrapError::Refused { why: why.clone() }),
        }
    }

    /// Fails when a key that is not there may never come.
    pub(super) fn check_get(&self) -> Result<(), BootstrapError> {
        match self.lost() {
            // Before the end of all: that a rank died says more than that the launcher then ended.
            Some((rank, how)) => Err(BootstrapError::RankGone { rank, how }),
            None => self.check_end(),
        }
    }

    /// Returns `true` if the fence of this number is complete; fails if it never will be.
    ///
    /// The caller may sleep after a false, on [`for_fences`](Self::for_fences).
    pub(super) fn fence_is_done(&mut self, number: u64) -> Result<bool, BootstrapError> {
        // Lowered before looking, and under the caller's lock, so that no news is lost.
        self.for_fences.lower();
        // Success first: a rank may leave right after the fence that it opened.
        if self.fences_done >= number {
            return Ok(true);
        }
        self.check_fence().map(|()| false)
    }

    /// Fails when no fence can be passed any more.
    pub(super) fn check_fence(&self) -> Result<(), BootstrapError> {
        self.check_get()?;
        match self.gone.first() {
            Some(&(rank, how)) => Err(BootstrapError::RankGone { rank, how }),
            None => Ok(()),
        }
    }

    /// The first rank that left without saying that it had finished.
    fn lost(&self) -> Option<(u32, Departure)> {
        self.gone.iter().copied().find(|(_, how)| !how.is_orderly())
    }
}

/// An eventfd used as a flag that can be slept on.
#[derive(Debug)]
struct Flag(OwnedFd);

impl Flag {
    fn new() -> Result<Self, BootstrapError> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|errno| BootstrapError::os("making an eventfd", errno))
    }

    fn raise(&self) {
        // It can only fail when the counter is full: then it is raised already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn lower(&self) {
        // It can only fail when the counter is zero: then it is lowered already.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}
