//! The beginning of operations that have waited for an event.

use super::atomic::{Atomic, AtomicOp};
use super::batch::{Batch, Owned, Rest, Started};
use super::desc::OpDesc;
use super::options::{Match, Outcome, Post, RetryReason};
use super::place::RmaPlace;
use super::recv::Recv;
use super::rma::{Get, Put};
use super::submit::Kind;
use crate::api::Runtime;
use crate::api::buffer::{Buffer, SendBuffer};
use crate::datapath::{Deferred, Device, Sort, Start};
use crate::error::OpError;
use crate::matching::MatchingEngine;
use crate::names::{Matching, RemoteComp};
use crate::op::{Ended, OpContext, PendingOp};
use crate::progress::Core;
use crate::region::RemoteKey;
use carrack_transports::gpu::{GpuError, GpuEvent};
use std::sync::Weak;

/// An operation that has not begun.
pub(super) struct Later {
    pub(super) ready: GpuEvent,
    pub(super) runtime: Weak<Core>,
    pub(super) said: Said,
    pub(super) ordered: OrderedOp,
}

/// The parameters that all operations have.
pub(super) struct Said {
    /// Context of the operation. The size is 0 for a receive.
    pub(super) op: OpContext,
    pub(super) required: Option<&'static str>,
}

/// Operation that begins after an event, with its own parameters.
pub(super) enum OrderedOp {
    Put(Buffer, OwnedPlace),
    Get(Buffer, OwnedPlace),
    Atomic(AtomicOp, OwnedPlace),
    Flush,
    Recv(Buffer, Matching, MatchingEngine),
    Batch(Box<Owned>),
    /// Pieces of a batch that had no room yet.
    Rest(Box<Rest>),
}

/// An `RmaPlace`, with a handle of its own.
pub(super) struct OwnedPlace {
    rmr: RemoteKey,
    offset: u64,
    notify: Option<RemoteComp>,
}

impl OwnedPlace {
    pub(super) fn of(place: &RmaPlace<'_>) -> Self {
        Self { rmr: place.rmr.clone(), offset: place.offset, notify: place.notify }
    }

    /// Returns `true` if a NIC does the atomic operations there.
    pub(super) fn is_nics(&self) -> bool {
        self.rmr.nic().is_some()
    }

    fn place(&self) -> RmaPlace<'_> {
        RmaPlace { rmr: &self.rmr, offset: self.offset, notify: self.notify }
    }
}

impl OrderedOp {
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

impl Deferred for Later {
    fn op(&self) -> &OpContext {
        &self.said.op
    }

    fn is_ready(&self) -> Result<bool, GpuError> {
        self.ready.query()
    }

    fn end(self: Box<Self>, error: OpError) -> Ended {
        (*self).end(error)
    }

    fn begin(self: Box<Self>, device: &Device) -> Start {
        (*self).begin(device)
    }

    fn pending(&self) -> PendingOp {
        let waits_for = match &self.ordered {
            OrderedOp::Flush => "what was posted before it, and was to begin after an event",
            OrderedOp::Atomic(_, remote) if remote.is_nics() => {
                "the way to the NIC that is its word's agent, or the event that it was ordered \
                after"
            }
            OrderedOp::Rest(_) => "room among what waits for the rank's answer",
            _ => "the event that it was ordered after",
        };
        let size = self.ordered.size() as u64;
        PendingOp { size, ..self.said.op.pending(self.ordered.name(), waits_for) }
    }
}

impl Later {
    fn end(self, error: OpError) -> Ended {
        self.said.op.end(self.ordered.into_buffer(), Some(error))
    }

    /// Begins the operation: its event has fired, or failed.
    fn begin(self, device: &Device) -> Start {
        if let Err(error) = self.ready.query() {
            return Start::Done(self.end(OpError::Event(error)));
        }
        let Some(inner) = self.runtime.upgrade() else {
            return Start::Done(self.end(OpError::Closed));
        };
        let runtime = Runtime::of(inner);
        let Self { ready, runtime: weak, mut said, ordered } = self;
        let mut name = None;
        let (outcome, ordered) = match ordered {
            OrderedOp::Put(buffer, remote) => {
                let kind = Put { buffer: Some(SendBuffer::Owned(buffer)), place: remote.place() };
                let mut post = said.post(&runtime, device, kind);
                let outcome = Put::post(&mut post);
                let left = match post.kind.buffer {
                    Some(SendBuffer::Owned(buffer)) => buffer,
                    _ => Buffer::Empty,
                };
                (outcome, OrderedOp::Put(left, remote))
            }
            OrderedOp::Get(buffer, remote) => {
                let mut post = said.post(
                    &runtime,
                    device,
                    Get { buffer: Some(buffer), place: remote.place() },
                );
                let outcome = Get::post(&mut post);
                let left = post.kind.buffer.unwrap_or_default();
                (outcome, OrderedOp::Get(left, remote))
            }
            OrderedOp::Atomic(operation, remote) => {
                let mut post = said.post(
                    &runtime,
                    device,
                    Atomic { place: remote.place(), operation, has_waited: true },
                );
                (Atomic::post(&mut post), OrderedOp::Atomic(operation, remote))
            }
            OrderedOp::Flush => {
                let post = said.post(&runtime, device, super::atomic::ToFlush::new());
                (post.begin_flush(said.op.comp.as_ref()), OrderedOp::Flush)
            }
            OrderedOp::Recv(buffer, policy, engine) => {
                let matching = Match { policy, is_named: false, engine: Some(&engine) };
                let mut post = said.post(&runtime, device, Recv::new(buffer, matching));
                let outcome = Recv::post(&mut post);
                name = post.kind.name;
                (outcome, OrderedOp::Recv(post.kind.buffer, policy, engine))
            }
            OrderedOp::Batch(batch) => {
                let comp = said.op.comp.as_ref();
                let begun =
                    batch.with(|kind| said.post(&runtime, device, kind).begin_now(comp, true));
                match begun {
                    Ok(Started::Done(status)) => {
                        (Ok(Outcome::Done(status)), OrderedOp::Batch(batch))
                    }
                    Ok(Started::InFlight) => (Ok(Outcome::Posted), OrderedOp::Batch(batch)),
                    Ok(Started::Full(reason)) => {
                        (Ok(Outcome::Retry(reason)), OrderedOp::Batch(batch))
                    }
                    Ok(Started::Partly(rest)) => {
                        // From now on its parts share its end.
                        said.op.comp = Some(rest.join().clone());
                        (
                            Ok(Outcome::Retry(RetryReason::Unanswered)),
                            OrderedOp::Rest(Box::new(rest)),
                        )
                    }
                    Err(error) => (Err(error), OrderedOp::Batch(batch)),
                }
            }
            OrderedOp::Rest(mut rest) => {
                let post = said.post(&runtime, device, Batch::nothing());
                let outcome = match post.go_on(&mut rest) {
                    // The share of the thread that has begun it.
                    true => Outcome::Done(post.nothing_left()),
                    false => Outcome::Retry(RetryReason::Unanswered),
                };
                (Ok(outcome), OrderedOp::Rest(rest))
            }
        };
        match outcome {
            Ok(Outcome::Done(status)) => Start::Done((said.op.comp, status)),
            Ok(Outcome::Posted) => Start::InFlight(name),
            Ok(Outcome::Retry(_)) => {
                Start::Again(Box::new(Self { ready, runtime: weak, said, ordered }))
            }
            Err(error) => {
                let rank = said.op.rank;
                let later = Self { ready, runtime: weak, said, ordered };
                Start::Done(later.end(OpError::of_post(error, rank)))
            }
        }
    }
}
