//! Atomic operations on words of other ranks' memory, and the flush of all operations there.
//!
//! A word has one agent, since operations of two agents are not atomic with each other. The CPUs of
//! the owner's machine change host memory: a rank that has the memory mapped does the operation
//! itself, any other asks the owner. The owner's copy engine serves memory of a GPU: every rank
//! asks the owner, mapped or not, the owner itself included. A registration may make its owner's
//! NIC the agent: then every rank uses that NIC (`words`).

use super::options::{Outcome, Post};
use super::place::RmaPlace;
use super::submit::Kind;
use super::{PostAtomic, PostFlush};
use crate::api::Runtime;
use crate::api::buffer::Buffer;
use crate::comp::Completion;
use crate::datapath::Flush;
use crate::error::PostError;
use crate::names::{Rank, Tag};
use crate::protocol::rma::{Agent, agent};
use crate::protocol::wire::word;
use crate::region::{AtomicError, Region, RemoteKey};
use carrack_transports::mem::MemKind;
use std::sync::Arc;

/// The parameters of an atomic operation.
pub struct Atomic<'a> {
    pub(super) place: RmaPlace<'a>,
    pub(super) operation: AtomicOp,
    /// Set if it is among those that wait already.
    pub(super) has_waited: bool,
}

impl<'a> Atomic<'a> {
    fn new(rmr: &'a RemoteKey, offset: u64, operation: AtomicOp) -> Self {
        Self { place: RmaPlace { rmr, offset, notify: None }, operation, has_waited: false }
    }
}

#[derive(Clone, Copy)]
pub(super) enum AtomicOp {
    FetchAdd(u64),
    CompareSwap { expected: u64, new: u64 },
}

/// The parameters of a flush: only its rank.
pub struct ToFlush(());

impl ToFlush {
    pub(super) fn new() -> Self {
        Self(())
    }
}

impl Runtime {
    /// Adds to a word of `rank`'s memory, at `offset` in the region or part that `rmr` names. The
    /// previous value is the status's [`value`](crate::Status::value).
    pub fn post_fetch_add<'a>(
        &'a self,
        rank: Rank,
        rmr: &'a RemoteKey,
        offset: u64,
        value: u64,
    ) -> PostAtomic<'a> {
        Post::new(self, rank, Tag::default(), Atomic::new(rmr, offset, AtomicOp::FetchAdd(value)))
    }

    /// Puts `new` into a word of `rank`'s memory if it holds `expected`. The previous value is the
    /// status's [`value`](crate::Status::value): the operation had an effect if that is
    /// `expected`.
    pub fn post_compare_swap<'a>(
        &'a self,
        rank: Rank,
        rmr: &'a RemoteKey,
        offset: u64,
        expected: u64,
        new: u64,
    ) -> PostAtomic<'a> {
        let operation = AtomicOp::CompareSwap { expected, new };
        Post::new(self, rank, Tag::default(), Atomic::new(rmr, offset, operation))
    }

    /// Ends when all puts, gets and atomic operations that this rank has posted to `rank` on the
    /// device before have ended and are visible there. If one of them was ever lost because `rank`
    /// or its link has gone, the flush is [`PeerDown`](PostError::PeerDown), or its status is
    /// [`PeerDown`](crate::OpError::PeerDown). That holds also if the lost one had [timed
    /// out](crate::OpError::TimedOut) before. One that was posted after the flush, and was lost
    /// before the flush ended, counts too. Other failures are told by the operations themselves.
    ///
    /// Once `rank` has gone, a flush waits for no [event](Post::after) any more.
    pub fn post_flush(&self, rank: Rank) -> PostFlush<'_> {
        Post::new(self, rank, Tag::default(), ToFlush::new())
    }
}

impl Kind for Atomic<'_> {
    const NAME: &'static str = "an atomic operation";

    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError> {
        post.once(|post| post.call_atomic())
    }
}

impl Post<'_, Atomic<'_>> {
    fn call_atomic(&mut self) -> Result<Outcome, PostError> {
        let at_once = |this: &Self| {
            let place = &this.kind.place;
            let is_nics = place.rmr.nic().is_some();
            this.order.is_none() && !is_nics && this.ends_at_once(place, MemKind::Host)
        };
        self.begin_or_wait(at_once, |this, comp| {
            this.in_order(|this| this.begin(comp), |this, order| this.begin_later(order, comp))
        })
    }

    pub(super) fn begin(&self, comp: Option<&Arc<dyn Completion>>) -> Result<Outcome, PostError> {
        let Atomic { place, operation, .. } = &self.kind;
        if let Some(transport) = place.rmr.nic() {
            return self.begin_by_nic(transport, comp);
        }
        let mapped = self.remote(place, 8, None)?;
        let by_cpu = |(region, _): &(&Region, _)| agent(false, Some(region.kind())) == Agent::Cpu;
        let Some((region, offset)) = mapped.filter(by_cpu) else {
            if let Some((region, offset)) = mapped {
                self.check_device_word(region.addr(), offset)?;
            }
            return Ok(match *operation {
                AtomicOp::FetchAdd(value) => self.ask_to_change(place, false, (value, 0), comp),
                AtomicOp::CompareSwap { expected, new } => {
                    self.ask_to_change(place, true, (expected, new), comp)
                }
            });
        };
        let held = match *operation {
            AtomicOp::FetchAdd(value) => region.fetch_add(offset, value),
            AtomicOp::CompareSwap { expected, new } => region.compare_swap(offset, expected, new),
        };
        Ok(self.done(8, Buffer::Small(word(held.map_err(PostError::Atomic)?))))
    }
}

impl Post<'_, Atomic<'_>> {
    /// Checks a GPU's word as far as possible before its owner is asked.
    fn check_device_word(&self, base: usize, offset: usize) -> Result<(), PostError> {
        if !(base + offset).is_multiple_of(8) {
            return Err(PostError::Atomic(AtomicError::Unaligned { offset }));
        }
        if let Some(required) = self.desc.required
            && !self.device_inner().carries(required)
        {
            let linked =
                self.device_inner().known_route(self.desc.rank).and_then(|route| route.linked());
            let chosen = linked.map_or("none so far", |linked| linked.transport);
            let why = "atomic operations on memory of a GPU are done by its owner".into();
            return Err(PostError::Path { rank: self.desc.rank, chosen, required, why });
        }
        Ok(())
    }
}

impl Kind for ToFlush {
    const NAME: &'static str = "a flush";

    fn post(post: &mut Post<'_, Self>) -> Result<Outcome, PostError> {
        post.once(|post| post.call_flush())
    }
}

impl Post<'_, ToFlush> {
    fn call_flush(&mut self) -> Result<Outcome, PostError> {
        self.check_rank()?;
        self.check_deadline()?;
        if self.desc.required.is_some() {
            self.check_required()?;
        }
        if self.runtime.0.is_forked() {
            return Err(PostError::Forked);
        }
        // Operations that wait for an event have to end first as well.
        let is_ordered = |this: &Self| {
            this.order.is_some() || this.device_inner().ordered.has_memory(this.desc.rank)
        };
        let at_once = |this: &Self| {
            let device = this.device_inner();
            !is_ordered(this)
                && !device.has_memory_operations(this.desc.rank, device.transfers.now())
        };
        self.begin_or_wait(at_once, |this, comp| match is_ordered(this) {
            true => this.begin_in_order(this.order.as_deref(), comp),
            false => this.begin_flush(comp),
        })
    }

    pub(super) fn begin_flush(
        &self,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<Outcome, PostError> {
        let (device, rank) = (self.device_inner(), self.desc.rank);
        let before = device.transfers.now();
        if !device.has_memory_operations(rank, before) {
            return match device.losses.cause(rank) {
                Some(cause) => Err(PostError::PeerDown { rank, cause }),
                None => Ok(self.done(0, Buffer::Empty)),
            };
        }
        let operation = self.desc.context(0, comp.cloned());
        Flush { before, operation, releases: None }.begin(&self.runtime.0, device);
        Ok(Outcome::Posted)
    }
}
