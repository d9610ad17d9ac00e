//! Probes of messages that wait, and the cancelling of receives.

use super::Runtime;
use crate::error::{OpError, PostError, ProgressError};
use crate::matching::{Envelope, MatchingEngine, ReceiveName};
use crate::names::{Matching, Rank, Tag};
use crate::op::Ended;
use crate::progress::Core;

/// A probe for a message that waits. Made by [`Runtime::probe`].
#[must_use = "nothing is looked at until `look`"]
pub struct Probe<'a> {
    runtime: &'a Runtime,
    rank: Rank,
    tag: Tag,
    policy: Matching,
    /// The program named the policy.
    is_named: bool,
    engine: Option<&'a MatchingEngine>,
}

/// Name of a receive that waits, by which [`Runtime::cancel`] takes it back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ticket {
    /// The number of its runtime.
    runtime: u64,
    receive: ReceiveName,
}

impl Runtime {
    /// Looks for a message that a receive of this rank and tag would take, and returns its length.
    /// The message stays: with several threads, another thread's receive may take it first.
    ///
    /// [`Rank::ANY`] and [`Tag::ANY`] have the meaning that they have in a receive. Messages come
    /// in by progress, which this does not call.
    pub fn probe(&self, rank: Rank, tag: Tag) -> Probe<'_> {
        Probe {
            runtime: self,
            rank,
            tag,
            policy: Matching::default(),
            is_named: false,
            engine: None,
        }
    }

    /// Takes a receive back that has not met its message. Returns `true` if it did: the completion
    /// object then gets a status with [`OpError::Cancelled`] and the buffer, and no other.
    /// Otherwise the receive has met its message or has ended, and the completion object gets or
    /// has that status. A receive that waits for an event is taken back as well, except at the
    /// moment when it begins. A ticket of another runtime takes nothing back.
    ///
    /// # Errors
    /// The completion object has panicked, or this process is a fork of the runtime's.
    pub fn cancel(&self, ticket: &Ticket) -> Result<bool, ProgressError> {
        if self.0.is_forked() {
            return Err(ProgressError::Forked);
        }
        if ticket.runtime != self.0.id {
            return Ok(false);
        }
        let Some((comp, status)) = self.0.take_back(ticket.receive) else { return Ok(false) };
        let told = self.0.try_tell(&self.0.default_device().0, comp.as_ref(), status);
        self.0.sleepers.wake();
        told.map(|()| true)
    }

    /// Returns the ticket of a receive of this runtime.
    pub(super) fn ticket(&self, receive: ReceiveName) -> Ticket {
        Ticket { runtime: self.0.id, receive }
    }
}

impl Core {
    /// Takes a receive out, wherever it waits.
    fn take_back(&self, mut name: ReceiveName) -> Option<Ended> {
        if let Some(number) = name.parked() {
            let devices = self.devices().clone();
            let parked = devices.iter().find_map(|device| device.0.ordered.cancel(number));
            if parked.is_some() {
                return parked;
            }
            // The receive has been posted meanwhile.
            name = self.streams.renamed(number)?;
        }
        let receive = self.engines.get(name.engine)?.withdraw(&name)?;
        Some(receive.into_status(OpError::Cancelled))
    }
}

impl<'a> Probe<'a> {
    /// Sets the matching policy of message and receive.
    pub fn matching(mut self, policy: Matching) -> Self {
        (self.policy, self.is_named) = (policy, true);
        self
    }

    /// Sets the matching engine.
    pub fn matching_engine(mut self, engine: &'a MatchingEngine) -> Self {
        self.engine = Some(engine);
        self
    }

    /// Looks for the message, and returns its envelope. `None`: no such message waits.
    ///
    /// # Errors
    /// There is no such rank, or the call has a policy and a wildcard for a property that it
    /// compares. Or the matching engine is another runtime's.
    pub fn look(&self) -> Result<Option<Envelope>, PostError> {
        if self.runtime.0.is_forked() {
            return Err(PostError::Forked);
        }
        if self.engine.is_some_and(|engine| !self.runtime.0.engines.has(engine)) {
            return Err(PostError::Foreign);
        }
        let policy = self.policy.of_receive(self.is_named, self.rank, self.tag)?;
        if policy.looks_at_rank() && self.rank.0 >= self.runtime.size() {
            return Err(PostError::NoSuchRank { rank: self.rank, last: self.runtime.size() - 1 });
        }
        let engine = self.engine.unwrap_or_else(|| self.runtime.0.engines.default_engine());
        Ok(engine.probe(policy, self.rank, self.tag))
    }
}
