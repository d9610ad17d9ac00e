//! Operations that wait for an event before they begin, and copies on streams of the user's.
//!
//! The operations of one stream stand in one line, since a stream works in order: only the first
//! is polled. Each operation outside of streams is polled, from the newest on. Where one event
//! comes before another, and the later is found fired, the earlier is found fired after that. So
//! receives that wait for events of one stream are posted in their order.

use super::atomic::{Atomic, Operation};
use super::batch::{Batch, Owned, Rest, Started};
use super::desc::OpDesc;
use super::options::{Match, Outcome, Post, RetryReason};
use super::recv::Recv;
use super::rma::{Get, Place, Put};
use super::submit::Kind;
use crate::buffer::{Buffer, SendBuffer};
use crate::device::Device;
use crate::error::OpError;
use crate::matching::{MatchingEngine, Ticket};
use crate::names::{Matching, Rank, RemoteComp};
use crate::op::{Ended, OpContext};
use crate::progress::Landing;
use crate::region::RemoteKey;
use crate::runtime::{Inner, Runtime};
use carrack_transports::gpu::{Event, Stream};
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

/// An operation that has not begun.
pub(crate) struct Later {
    pub(super) ready: Event,
    pub(super) runtime: Weak<Inner>,
    pub(super) said: Said,
    pub(super) what: What,
}

/// The parameters that all operations have.
pub(super) struct Said {
    /// Its size is 0 for a receive.
    pub(super) op: OpContext,
    pub(super) required: Option<&'static str>,
}

/// An operation whose turn has come, by its number.
pub(super) type Due = (u64, Box<Later>);

/// The kind of an operation, with its own parameters.
pub(super) enum What {
    Put(Buffer, Remote),
    Get(Buffer, Remote),
    Atomic(Operation, Remote),
    Flush,
    Recv(Buffer, Matching, MatchingEngine),
    Batch(Box<Owned>),
    /// Pieces of a batch that had no room yet.
    Rest(Box<Rest>),
}

/// A `Place`, with a handle of its own.
pub(super) struct Remote {
    rmr: RemoteKey,
    offset: u64,
    signal: Option<RemoteComp>,
}

impl Remote {
    pub(super) fn of(place: &Place<'_>) -> Self {
        Self { rmr: place.rmr.clone(), offset: place.offset, signal: place.signal }
    }

    /// Returns `true` if a NIC does the atomic operations there.
    pub(super) fn is_nics(&self) -> bool {
        self.rmr.nic().is_some()
    }

    fn place(&self) -> Place<'_> {
        Place { rmr: &self.rmr, offset: self.offset, signal: self.signal }
    }
}

impl What {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Put(..) => "put",
            Self::Get(..) => "get",
            Self::Atomic(..) => "atomic operation",
            Self::Flush => "flush",
            Self::Recv(..) => "receive",
            Self::Batch(batch) if batch.is_put() => "put of a batch",
            Self::Rest(rest) if rest.is_put() => "put of a batch",
            Self::Batch(_) | Self::Rest(_) => "get of a batch",
        }
    }

    pub(super) fn size(&self) -> usize {
        match self {
            Self::Put(buffer, _) | Self::Get(buffer, _) | Self::Recv(buffer, ..) => buffer.len(),
            Self::Atomic(..) => 8,
            Self::Flush => 0,
            Self::Batch(batch) => batch.size,
            Self::Rest(rest) => rest.size(),
        }
    }

    pub(super) fn sort(&self) -> Sort {
        match self {
            Self::Put(..) | Self::Get(..) | Self::Atomic(..) | Self::Batch(_) | Self::Rest(_) => {
                Sort::Memory
            }
            Self::Flush => Sort::Flush,
            Self::Recv(..) => Sort::Receive,
        }
    }

    pub(super) fn into_buffer(self) -> Buffer {
        match self {
            Self::Put(buffer, _) | Self::Get(buffer, _) | Self::Recv(buffer, ..) => buffer,
            Self::Atomic(..) | Self::Flush | Self::Batch(_) | Self::Rest(_) => Buffer::Empty,
        }
    }
}

/// The condition that an entry waits for.
pub(super) enum Waits {
    /// An operation that waits for its event; `None` while it begins.
    Later(Option<Box<Later>>),
    /// A copy of a stream.
    Copy(Box<Landing>),
}

pub(super) struct Entry {
    /// Grows in the order of posting.
    pub(super) number: u64,
    pub(super) rank: Rank,
    pub(super) sort: Sort,
    pub(super) waits: Waits,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sort {
    Memory,
    Flush,
    Receive,
}

/// The entries of one stream.
struct Line {
    stream: Arc<dyn Stream>,
    entries: VecDeque<Entry>,
}

/// Everything of a device that waits for events and streams of the user's.
#[derive(Default)]
pub(crate) struct Ordered {
    lines: Vec<Line>,
    others: VecDeque<Entry>,
}

impl Ordered {
    pub(super) fn len(&self) -> usize {
        self.others.len() + self.lines.iter().map(|line| line.entries.len()).sum::<usize>()
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.lines.iter().flat_map(|line| &line.entries).chain(&self.others)
    }

    pub(super) fn entry(&mut self, number: u64) -> Option<&mut Entry> {
        let lines = self.lines.iter_mut().flat_map(|line| &mut line.entries);
        lines.chain(&mut self.others).find(|entry| entry.number == number)
    }

    pub(super) fn push(&mut self, stream: Option<&Arc<dyn Stream>>, entry: Entry) {
        let Some(stream) = stream else { return self.others.push_back(entry) };
        match self.lines.iter_mut().find(|line| Arc::ptr_eq(&line.stream, stream)) {
            Some(line) => line.entries.push_back(entry),
            None => {
                self.lines.push(Line { stream: stream.clone(), entries: VecDeque::from([entry]) })
            }
        }
    }

    /// Takes out the selected operations, in the order of posting.
    pub(super) fn remove(&mut self, mut is_meant: impl FnMut(&Entry) -> bool) -> Vec<Entry> {
        let mut removed = Vec::new();
        let lines = self.lines.iter_mut().map(|line| &mut line.entries);
        for entries in lines.chain([&mut self.others]) {
            // The remaining ones go round once.
            for _ in 0..entries.len() {
                match entries.pop_front() {
                    Some(entry) if is_meant(&entry) => removed.push(entry),
                    kept => entries.extend(kept),
                }
            }
        }
        self.lines.retain(|line| !line.entries.is_empty());
        removed.sort_by_key(|entry| entry.number);
        removed
    }

    /// Returns `true` if operations on a rank's memory wait that were posted before `before`.
    pub(super) fn has_memory(&self, rank: Rank, before: u64) -> bool {
        let is_one = |entry: &Entry| {
            entry.sort == Sort::Memory && entry.rank == rank && entry.number < before
        };
        self.entries().any(is_one)
    }

    /// Takes out copies that are done, and the operations whose turn has come; both in the order of
    /// posting.
    #[allow(clippy::vec_box, reason = "handed on in the boxes in which they have waited")]
    pub(super) fn ready(&mut self) -> (Vec<Box<Landing>>, Vec<Due>) {
        let (mut copied, mut fired) = (Vec::new(), Vec::new());
        for line in &mut self.lines {
            while let Some(Entry { waits: Waits::Copy(landing), .. }) = line.entries.front_mut()
                && landing.transfer.poll(false).is_some()
            {
                if let Some(Entry { waits: Waits::Copy(landing), .. }) = line.entries.pop_front() {
                    copied.push(landing);
                }
            }
            fired.extend(line.entries.front().filter(|entry| entry.has_fired()).map(Entry::name));
        }
        self.lines.retain(|line| !line.entries.is_empty());
        let others = self.others.iter().rev();
        fired.extend(others.filter(|entry| entry.has_fired()).map(Entry::name));
        // A flush begins when every operation that it waits for has begun.
        fired.retain(|(number, rank, sort)| {
            *sort != Sort::Flush || !self.has_memory(*rank, *number)
        });
        fired.sort_unstable_by_key(|(number, ..)| *number);
        let begin =
            fired.into_iter().filter_map(|(number, ..)| match &mut self.entry(number)?.waits {
                Waits::Later(later) => later.take().map(|later| (number, later)),
                Waits::Copy(_) => None,
            });
        let begin = begin.collect();
        (copied, begin)
    }
}

impl Entry {
    /// Returns `true` if it can begin; a failed event counts.
    fn has_fired(&self) -> bool {
        match &self.waits {
            Waits::Later(Some(later)) => later.ready.query() != Ok(false),
            Waits::Later(None) | Waits::Copy(_) => false,
        }
    }

    fn name(&self) -> (u64, Rank, Sort) {
        (self.number, self.rank, self.sort)
    }
}

/// The result of beginning an operation.
#[allow(clippy::large_enum_variant, reason = "it is taken apart at once")]
pub(super) enum Start {
    UnderWay(Option<Ticket>),
    Over(Ended),
    /// The operation cannot begin now.
    Again(Later),
}

impl Said {
    fn post<'a, K>(&'a self, runtime: &'a Runtime, device: &'a Device, kind: K) -> Post<'a, K> {
        let OpContext { rank, tag, user_context, deadline, ref comp, .. } = self.op;
        let desc = OpDesc {
            device: Some(device),
            comp: comp.as_ref(),
            user_context,
            required: self.required,
            deadline,
            ..OpDesc::new(rank, tag)
        };
        Post { runtime, desc, order: None, kind }
    }
}

impl Later {
    pub(super) fn end(self, error: OpError) -> Ended {
        self.said.op.end(self.what.into_buffer(), Some(error))
    }

    /// Begins the operation: its event has fired, or failed.
    pub(super) fn begin(self, device: &Device) -> Start {
        if let Err(error) = self.ready.query() {
            return Start::Over(self.end(OpError::Event(error)));
        }
        let Some(inner) = self.runtime.upgrade() else {
            return Start::Over(self.end(OpError::Closed));
        };
        let runtime = Runtime::of(inner);
        let Self { ready, runtime: weak, mut said, what } = self;
        let mut ticket = None;
        let (outcome, what) = match what {
            What::Put(buffer, remote) => {
                let kind = Put { buffer: Some(SendBuffer::Owned(buffer)), place: remote.place() };
                let mut post = said.post(&runtime, device, kind);
                let outcome = Put::post(&mut post);
                let left = match post.kind.buffer {
                    Some(SendBuffer::Owned(buffer)) => buffer,
                    _ => Buffer::Empty,
                };
                (outcome, What::Put(left, remote))
            }
            What::Get(buffer, remote) => {
                let mut post = said.post(
                    &runtime,
                    device,
                    Get { buffer: Some(buffer), place: remote.place() },
                );
                let outcome = Get::post(&mut post);
                let left = post.kind.buffer.unwrap_or_default();
                (outcome, What::Get(left, remote))
            }
            What::Atomic(operation, remote) => {
                let mut post = said.post(
                    &runtime,
                    device,
                    Atomic { place: remote.place(), operation, has_waited: true },
                );
                (Atomic::post(&mut post), What::Atomic(operation, remote))
            }
            What::Flush => {
                let post = said.post(&runtime, device, super::atomic::ToFlush::new());
                let begun = post.begin_flush(said.op.comp.as_ref());
                (Ok(begun), What::Flush)
            }
            What::Recv(buffer, policy, engine) => {
                let matching = Match { policy, is_named: false, engine: Some(&engine) };
                let mut post = said.post(&runtime, device, Recv::new(buffer, matching));
                let outcome = Recv::post(&mut post);
                ticket = post.kind.ticket;
                (outcome, What::Recv(post.kind.buffer, policy, engine))
            }
            What::Batch(batch) => {
                let comp = said.op.comp.as_ref();
                let begun =
                    batch.with(|kind| said.post(&runtime, device, kind).begin_now(comp, true));
                match begun {
                    Ok(Started::Over(status)) => (Ok(Outcome::Done(status)), What::Batch(batch)),
                    Ok(Started::UnderWay) => (Ok(Outcome::Posted), What::Batch(batch)),
                    Ok(Started::Full(reason)) => (Ok(Outcome::Retry(reason)), What::Batch(batch)),
                    Ok(Started::Partly(rest)) => {
                        // From now on its parts share its end.
                        said.op.comp = Some(rest.join().clone());
                        (Ok(Outcome::Retry(RetryReason::Unanswered)), What::Rest(Box::new(rest)))
                    }
                    Err(error) => (Err(error), What::Batch(batch)),
                }
            }
            What::Rest(mut rest) => {
                let post = said.post(&runtime, device, Batch::nothing());
                let outcome = match post.go_on(&mut rest) {
                    // The share of the thread that has begun it.
                    true => Outcome::Done(post.nothing_left()),
                    false => Outcome::Retry(RetryReason::Unanswered),
                };
                (Ok(outcome), What::Rest(rest))
            }
        };
        match outcome {
            Ok(Outcome::Done(status)) => Start::Over((said.op.comp, status)),
            Ok(Outcome::Posted) => Start::UnderWay(ticket),
            Ok(Outcome::Retry(_)) => Start::Again(Self { ready, runtime: weak, said, what }),
            Err(error) => {
                let rank = said.op.rank;
                let later = Self { ready, runtime: weak, said, what };
                Start::Over(later.end(OpError::of_post(error, rank)))
            }
        }
    }
}
