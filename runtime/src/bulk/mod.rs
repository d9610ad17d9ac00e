//! Messages that are too long for one piece.
//!
//! ```text
//! sender                               receiver
//!   offer (size, token, address) ────►  meets its receive, or its completion object
//!                                       the kernel copies across, if it may:
//!   ◄──────────────────── finish (token)
//!                                       or else:
//!   ◄─────────── clear (token, landing)
//!   part (landing, offset) ──────────►  until all are there
//! ```
//!
//! Where a NIC reaches the receiver's memory by itself:
//!
//! ```text
//!   ◄── clear (token, landing, where to)
//!   the NIC writes all of it
//!   written (landing) ───────────────►  on the same link, and so behind the bytes
//!                                       bytes in GPU memory are flushed, if the GPU needs that
//!                                       or, where this NIC does not reach the sender's bytes:
//!   unwritten (landing) ─────────────►  grants the parts that it has room for
//! ```
//!
//! A message that is longer than a chunk, and not in GPU memory, goes chunk by chunk (see
//! `showing` and `writing`):
//!
//! ```text
//!   ◄── clear (token, landing, chunk, where to)     two at a time
//!   the NIC writes the chunk
//!   written (landing, chunk) ────────►  shows the next
//!                                       or, from where this NIC does not reach the sender's bytes:
//!   unwritten (landing, from where) ─►  has the rest sent as parts
//!                                       or, from where the receiver's NIC takes no more:
//!   ◄───────── grant (landing, all of it)
//! ```
//!
//! Into GPU memory that cannot be mapped (see `inflow`, and `ahead` for the way out of such
//! memory):
//!
//! ```text
//!   ◄─── clear (token, landing, limit)
//!   part (landing, offset) ──────────►  fills a block; the GPU's engine copies it meanwhile
//!   ◄───────── grant (landing, limit)   when there is a block for more
//! ```
//!
//! With both sides' kernels at it (see `share`):
//!
//! ```text
//!   ◄──────────────────────── help (token, where to, who copies what)
//!   writes pieces from the back         reads pieces from the front
//! ```
//!
//! Pieces of a batch whose memory only its owner reaches go many together: see `packed`.
//!
//! An offer travels in the place of its message: it is matched, delivered and held back in the
//! same order. Its bytes may take another way. Names of transfers are numbers that are never used
//! again, and are looked up together with the peer's rank. A late, repeated or forged name finds
//! nothing.

mod ahead;
pub(crate) mod answers;
mod asked;
mod flush;
mod granting;
mod incoming;
mod inflow;
mod mapped;
mod outgoing;
pub(crate) mod packed;
mod pending;
mod pull;
mod share;
mod showing;
mod staging;
mod through;
mod words;
mod writing;
mod written;

pub(crate) use flush::Flush;
pub(crate) use incoming::{Arriving, Target};
pub(crate) use mapped::{Exposures, Unmapped};
pub(crate) use outgoing::{Offered, Stream};
pub(crate) use packed::Carried;
use packed::Packed;
pub(crate) use pull::Pull;
pub(crate) use share::Shares;
pub(crate) use staging::{BLOCK, Block, Staging, Way};
pub(crate) use through::Moving;
pub(crate) use words::Words;
use writing::Writing;
pub(crate) use written::WRITTEN;

use crate::chores::{Chore, Chores, Waiting};
use crate::device::DeviceInner;
use crate::error::OpError;
use crate::names::Rank;
use crate::op::Ended;
use crate::protocol::header::Message;
use crate::runtime::Inner;
use carrack_transports::contract::Header;
use mapped::Introduced;
use share::Help;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The large messages of a device. Lock order: `writings`, `streams` or `helps`, `offered`, and
/// last `ready` or `packed`.
pub(crate) struct Bulk {
    /// Offered, and not requested yet.
    offered: Waiting<ByName<Offered>>,
    /// Requested: they go out part by part.
    streams: Waiting<Vec<Stream>>,
    /// Requested: the NIC writes them chunk by chunk.
    writings: Waiting<ByName<Writing>>,
    /// Names of the writings that need a look.
    ready: Arc<Waiting<Vec<u64>>>,
    /// On their way here part by part.
    arriving: Waiting<ByName<Arriving>>,
    /// Names of the arriving messages that an engine copies.
    inflows: Waiting<Vec<u64>>,
    /// Messages that the kernel copies here.
    pulls: Waiting<VecDeque<Box<Pull>>>,
    /// Pulls of peers that this rank helps with.
    helps: Waiting<VecDeque<Help>>,
    /// Regions of peers in which messages lie.
    pub(crate) introduced: Introduced,
    /// Flushes that wait for operations on a peer's memory.
    flushes: Waiting<Vec<Flush>>,
    /// Pieces that go together.
    packed: Packed,
    next: AtomicU64,
    /// Transfers that may be in flight at a time.
    limit: u32,
}

/// Transfers by their names.
type ByName<T> = HashMap<u64, T, BuildHasherDefault<NameHasher>>;

/// This process gives the names, one after the other, so that no peer can choose colliding ones.
#[derive(Default)]
pub(crate) struct NameHasher(u64);

impl Hasher for NameHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(self.0 << 8 | u64::from(byte));
        }
    }

    fn write_u64(&mut self, name: u64) {
        // The table looks at the upper bits, too.
        self.0 = name.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Bulk {
    pub(crate) fn new(limit: usize, chores: &Chores) -> Self {
        Self {
            offered: Waiting::new(),
            streams: Waiting::for_progress(chores, Chore::Streams),
            writings: Waiting::new(),
            ready: Arc::new(Waiting::for_progress(chores, Chore::Writings)),
            arriving: Waiting::new(),
            inflows: Waiting::for_progress(chores, Chore::Inflows),
            pulls: Waiting::for_progress(chores, Chore::Pulls),
            introduced: Introduced::default(),
            helps: Waiting::for_progress(chores, Chore::Helps),
            flushes: Waiting::for_progress(chores, Chore::Flushes),
            packed: Packed::default(),
            next: AtomicU64::new(1),
            limit: u32::try_from(limit).unwrap_or(u32::MAX),
        }
    }

    /// Returns a fresh name.
    fn name(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    fn under_way(&self) -> u32 {
        self.offered.count() + self.streams.count() + self.writings.count() + self.arriving.count()
    }

    /// Returns `true` if the limit of transfers in flight is reached.
    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.under_way() >= self.limit
    }

    /// Returns `true` if a message may be offered. Messages that are offered only because their
    /// receiver keeps too many (`is_held`) leave an eighth of the places to large ones and to
    /// other peers. A collective's messages need no place: members wait for them before they take
    /// others.
    pub(crate) fn may_offer(&self, header: Header, is_held: bool) -> bool {
        let limit = if is_held { self.limit - self.limit / 8 } else { self.limit };
        self.under_way() < limit || Message::decode(header).is_ok_and(Message::is_collective)
    }

    /// Ends the transfers to and from a rank, or all ranks. Transfers with an engine at work end
    /// when it is done; for all ranks this call waits for it. `is_used` returns `true` if a rank
    /// may be copying from or to buffers of this one.
    fn fail(
        &self,
        rank: Option<Rank>,
        error: &dyn Fn(Rank) -> OpError,
        is_used: &dyn Fn(Rank) -> bool,
    ) -> Vec<Ended> {
        let concerns = |other: Rank| rank.is_none_or(|rank| rank == other);
        // Everything is taken out first, and ended without the locks: the drops may run any code.
        let mut streams = self.streams.lock();
        let gone =
            |one: &mut Stream| concerns(one.rank()) && (rank.is_none() || !one.must_wait(error));
        let ended_streams: Vec<_> = streams.extract_if(.., gone).collect();
        self.streams.set_count(streams.len());
        let mut offered = self.offered.lock();
        let ended_offers: Vec<_> = offered.extract_if(|_, one| concerns(one.rank())).collect();
        self.offered.set_count(offered.len());
        drop((streams, offered));
        let mut ended: Vec<_> = ended_streams.into_iter().map(|one| one.end(Some(error))).collect();
        ended.extend(ended_offers.into_iter().map(|(_, one)| match is_used(one.rank()) {
            true => one.leave(error),
            false => one.end(Some(error)),
        }));
        ended.extend(self.fail_writings(rank, error));
        let mut arriving = self.arriving.lock();
        let gone = |one: &mut Arriving| {
            let is_meant = concerns(one.from);
            if is_meant {
                // Nothing comes any more.
                one.until = 0;
            }
            is_meant && (rank.is_none() || !one.must_wait(error))
        };
        let gone: Vec<_> = arriving.extract_if(|_, one| gone(one)).collect();
        self.arriving.set_count(arriving.len());
        drop(arriving);
        ended.extend(gone.into_iter().filter_map(|(_, mut one)| {
            let error = error(one.from);
            one.give_up(error)
        }));
        let mut pulls = self.pulls.lock();
        let (gone, others) =
            std::mem::take(&mut *pulls).into_iter().partition(|one| concerns(one.from));
        *pulls = others;
        self.pulls.set_count(pulls.len());
        drop(pulls);
        ended.extend(VecDeque::<Box<Pull>>::into_iter(gone).filter_map(|one| {
            let error = error(one.from);
            let is_used = is_used(one.from);
            one.fail(error, is_used)
        }));
        let mut flushes = self.flushes.lock();
        let gone: Vec<_> = flushes.extract_if(.., |one| concerns(one.rank())).collect();
        self.flushes.set_count(flushes.len());
        drop(flushes);
        ended.extend(gone.into_iter().map(|one| {
            let error = error(one.rank());
            one.end(Some(error))
        }));
        ended
    }

    /// Returns the address ranges of GPU memory in which messages to a rank lie.
    fn offered_by_gpus(&self, rank: Rank) -> Vec<Range<usize>> {
        let offered = self.offered.lock();
        let on_gpus =
            offered.values().filter(|one| one.rank() == rank && !one.view().place().is_host());
        let ranges = on_gpus.map(|one| {
            let begin = one.view().as_ptr().addr();
            begin..begin.saturating_add(one.view().len())
        });
        ranges.collect()
    }
}

impl DeviceInner {
    /// Ends the transfers to and from a rank, or all ranks. First it makes sure that the rank does
    /// not use the buffers any more that are given back. A rank that is stopped in the middle of a
    /// copy keeps them.
    pub(crate) fn fail_bulk(
        &self,
        runtime: &Inner,
        rank: Option<Rank>,
        error: &dyn Fn(Rank) -> OpError,
    ) -> Vec<Ended> {
        if let Some(rank) = rank {
            // Its engines may be fetching. The fetched bytes do not count then; the rank would
            // have to ask for the parts.
            self.bulk
                .offered_by_gpus(rank)
                .iter()
                .for_each(|range| runtime.exposures.withdraw(range));
        }
        self.bulk.fail(rank, error, &|rank| !self.is_revoked(rank))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{Tag, UserContext};
    use crate::op::OpContext;
    use carrack_transports::contract::DownCause;

    #[test]
    fn an_operation_ends_without_its_buffer_if_a_peer_may_be_copying_from_it() {
        let bulk = Bulk::new(10, &Chores::default());
        for rank in [Rank(1), Rank(2)] {
            let operation = OpContext {
                user_context: UserContext(8),
                ..OpContext::of_runtime(rank, Tag(7), 100, None)
            };
            bulk.offered
                .lock()
                .insert(bulk.name(), Offered::message(operation, vec![9; 100].into()));
        }
        let error = |rank| OpError::PeerDown { rank, cause: DownCause::Closed };
        let fail = |rank| bulk.fail(rank, &error, &|rank| rank == Rank(1));
        assert!(fail(Some(Rank(3))).is_empty());
        for (rank, left) in [(Rank(2), 100), (Rank(1), 0)] {
            let mut ended = fail(Some(rank));
            assert_eq!(ended.len(), 1);
            let (_, status) = ended.remove(0);
            assert_eq!((status.rank, status.size, status.buffer.len()), (rank, 100, left));
            assert_eq!((status.tag, status.user_context), (Tag(7), UserContext(8)));
            assert!(matches!(status.error.as_deref(), Some(OpError::PeerDown { .. })));
        }
        assert!(fail(None).is_empty(), "each ends once");
    }
}
