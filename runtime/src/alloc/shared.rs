//! One allocation for each call.
//!
//! ```text
//! leader                                   others
//!   tell each other which call it is: all must mean the same
//!   free what all have released, and meet
//!   allocates, registers       ── name ──►  map it, for the engines of their own GPU
//!   tell each other the outcome: if one has failed, all give it back
//! ```
//!
//! The registration keeps the leader's memory beyond its own use: its ledger knows who has the
//! memory mapped (gpu.md, legacy IPC rule 5). Ranks agree on every failure. Only a rank that
//! cannot reach the others any more ends the allocator. It fails the group's next operation for
//! them, so that none waits for it.

use super::error::SharedAllocError;
use super::pool::SharedPool;
use super::region::SharedRegion;
use super::scope::{self, MemberDescription, Scope};
use super::stats::{AllocCounts, SharedStats};
use super::wire::{AllocCall, Asks, decode_verdict, encode_verdict};
use super::{BLOCK, MOST};
use crate::collective::Group;
use crate::error::{CollectiveError, OpError, PostError};
use crate::names::Rank;
use crate::progress::in_handler;
use carrack_transports::gpu::Gpu;
use parking_lot::{Mutex, MutexGuard};
use std::sync::{Arc, OnceLock};

/// Allocator of GPU memory that the ranks of a node, or of a socket, share. See [the
/// module](crate::alloc).
///
/// The memory lies on the GPU of the scope's leader, its lowest rank. The others map it, each for
/// the GPU that it has named, which may be the same one. Clones are handles to the same allocator.
#[derive(Clone)]
pub struct SharedDeviceAllocator(pub(super) Arc<SharedAllocator>);

pub(super) struct SharedAllocator {
    /// The ranks of the scope, in their order.
    pub(super) group: Group,
    pub(super) gpu: Arc<dyn Gpu>,
    scope: Scope,
    pub(super) leader: Rank,
    /// The name of the leader's GPU.
    pub(super) device: String,
    about: String,
    turns: Mutex<Turn>,
    /// The reason for which the allocator has ended.
    ended: OnceLock<SharedAllocError>,
    counts: AllocCounts,
}

/// Counters that are the same at all ranks: calls, and pools.
pub(super) struct Turn {
    calls: u64,
    pools: u32,
}

impl SharedDeviceAllocator {
    /// Makes an allocator: a collective call of all ranks of the group, with the same scope, each
    /// with its own GPU. Each scope within the group gets an allocator of its own.
    ///
    /// An allocator takes one of the 65536 groups of a rank for the life of the runtime. Make one,
    /// and keep it.
    ///
    /// Where ranks of a scope have named different GPUs, all of them try at once to map a block of
    /// the leader. Device masks differ between processes, so only a trial tells (gpu.md, legacy
    /// IPC rule 9).
    ///
    /// # Errors
    /// [`Unable`](SharedAllocError::Unable), [`Differ`](SharedAllocError::Differ): all ranks of
    /// the group get it. [`NotMapped`](SharedAllocError::NotMapped),
    /// [`Leader`](SharedAllocError::Leader): the trial has failed; all ranks of that scope get it.
    /// [`Ended`](SharedAllocError::Ended): a rank is gone, or is in another operation.
    pub fn new(group: &Group, gpu: &Arc<dyn Gpu>, scope: Scope) -> Result<Self, SharedAllocError> {
        if in_handler() {
            return Err(SharedAllocError::InHandler);
        }
        let runtime = group.runtime();
        let me = runtime.rank();
        let ticket = runtime.group_ticket();
        let (description, socket) = MemberDescription::of(&**gpu, scope, ticket);
        // Other ranks may have received all descriptions, and be in the next operation: they must
        // not wait there.
        let told = group.allgather(&description.encode()).inspect_err(|cause| group.abandon(cause));
        let told = told.map_err(|cause| SharedAllocError::Ended(cause.into()))?;
        let read = |(rank, bytes): (Rank, Vec<u8>)| match MemberDescription::decode(&bytes) {
            Some(description) => Ok((rank, description)),
            None => Err(SharedAllocError::Garbled { rank }),
        };
        let all = group.ranks().zip(told).map(read).collect::<Result<Vec<_>, _>>()?;
        scope::check(&all, me)?;
        let with = scope::of(&all, me);
        // It has at least this rank.
        let (leader, first) =
            with.first().map_or((me, &description), |(rank, description)| (*rank, description));
        let ranks: Vec<Rank> = with.iter().map(|(rank, _)| *rank).collect();
        let made = runtime.own_group(leader, first.ticket, &ranks);
        let verdict = encode_verdict(&made.as_ref().map_err(ToString::to_string));
        let verdicts = group.allgather(&verdict).map_err(|cause| {
            // Other ranks may have received every verdict, and wait for this rank in a call of
            // their allocator.
            if let Ok(of_scope) = &made {
                of_scope.leave(&cause);
            }
            SharedAllocError::Ended(cause.into())
        })?;
        let of_scope = made?;
        for (rank, verdict) in group.ranks().zip(verdicts) {
            match decode_verdict(&verdict) {
                Some(Ok(())) => {}
                Some(Err(why)) => return Err(SharedAllocError::Unable { rank, why }),
                None => return Err(SharedAllocError::Garbled { rank }),
            }
        }
        let allocator = Self(Arc::new(SharedAllocator {
            gpu: gpu.clone(),
            scope,
            leader,
            device: first.gpu.to_string(),
            about: about(&ranks, group, scope, socket),
            turns: Mutex::new(Turn { calls: 0, pools: 0 }),
            ended: OnceLock::new(),
            counts: AllocCounts::default(),
            group: of_scope,
        }));
        if with.iter().any(|(_, description)| description.gpu != first.gpu) {
            let mut turn = allocator.0.turn()?;
            allocator.0.meet(&mut turn, Asks::Own(1), (Vec::new(), false))?;
            drop(allocator.0.fresh(1, &AllocCounts::default())?);
        }
        Ok(allocator)
    }

    /// Allocates `len` bytes for all ranks of the scope, a collective call of the scope. They are
    /// whole blocks of 2 MiB of their own, so that no neighbouring memory is exposed. The call
    /// takes milliseconds; [`pool`](Self::pool) serves small or short-lived memory.
    ///
    /// Memory that all ranks had released before the call is freed first.
    ///
    /// # Errors
    /// See [`SharedAllocError`]: the same variant at all ranks of the scope.
    pub fn allocate(&self, len: usize) -> Result<SharedRegion, SharedAllocError> {
        let shared = &self.0;
        let mut turn = shared.turn()?;
        shared.meet(&mut turn, Asks::Own(len as u64), (Vec::new(), false))?;
        if len == 0 || len > MOST {
            return Err(SharedAllocError::Len { len });
        }
        let region = shared.fresh(len, &shared.counts)?;
        Ok(SharedRegion { region, leader: shared.leader, number: turn.calls })
    }

    /// Returns a pool that cuts blocks of `block` bytes, rounded up to a power of two of at least
    /// 2 MiB. Sends nothing, but the ranks of the scope must make their pools in the same order.
    ///
    /// # Errors
    /// [`SharedAllocError::Len`]: there is no such power of two. [`SharedAllocError::InHandler`]:
    /// called inside a completion handler.
    pub fn pool(&self, block: usize) -> Result<SharedPool, SharedAllocError> {
        if block > MOST {
            return Err(SharedAllocError::Len { len: block });
        }
        if in_handler() {
            return Err(SharedAllocError::InHandler);
        }
        let mut turn = self.0.lock();
        let number = turn.pools;
        turn.pools += 1;
        Ok(SharedPool::new(self.clone(), number, block.next_power_of_two().max(BLOCK)))
    }

    /// Returns the rank that allocates for the scope: its lowest.
    pub fn leader(&self) -> Rank {
        self.0.leader
    }

    /// Returns `true` if this rank is the leader.
    pub fn is_leader(&self) -> bool {
        self.0.leader == self.0.group.runtime().rank()
    }

    /// Returns the ranks of the scope, in their order.
    pub fn ranks(&self) -> impl Iterator<Item = Rank> {
        self.0.group.ranks()
    }

    /// Returns the scope.
    pub fn scope(&self) -> Scope {
        self.0.scope
    }

    /// Returns counts of this rank's memory. Blocks of pools count as allocations.
    pub fn stats(&self) -> SharedStats {
        self.0.counts.get()
    }

    /// Returns one line: the ranks that share memory, its place, and the evidence for both.
    pub fn describe(&self) -> String {
        format!("{}; memory lies on {}'s {}", self.0.about, self.0.leader, self.0.device)
    }
}

impl std::fmt::Debug for SharedDeviceAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SharedDeviceAllocator({})", self.describe())
    }
}

/// Describes the ranks that share memory.
fn about(ranks: &[Rank], group: &Group, scope: Scope, socket: Result<u32, String>) -> String {
    let names: Vec<_> = ranks.iter().map(|rank| rank.0.to_string()).collect();
    let (who, of) = (names.join(", "), group.size());
    let place = match (scope, socket) {
        (Scope::Node, _) => "on this node".to_owned(),
        (Scope::Socket, Ok(node)) => format!("with GPUs at NUMA node {node} of this node"),
        (Scope::Socket, Err(why)) => {
            format!("on this node with GPUs at no known NUMA node, taken for one socket ({why})")
        }
    };
    format!("ranks {who} of {of} are {place}")
}

impl SharedAllocator {
    fn lock(&self) -> MutexGuard<'_, Turn> {
        self.turns.lock()
    }

    /// Begins a call, one at a time. It fails inside a handler, which this very thread may run
    /// while it makes progress in another call.
    pub(super) fn turn(&self) -> Result<MutexGuard<'_, Turn>, SharedAllocError> {
        if in_handler() {
            return Err(SharedAllocError::InHandler);
        }
        let turn = self.lock();
        self.ended.get().map_or(Ok(turn), |why| Err(why.clone()))
    }

    /// Returns the number of ranks.
    pub(super) fn count(&self) -> usize {
        self.group.size() as usize
    }

    pub(super) fn counts(&self) -> &AllocCounts {
        &self.counts
    }

    /// Ends the allocator.
    pub(super) fn end(&self, cause: CollectiveError) -> SharedAllocError {
        // Another rank may have noticed the leader's end first, and left the group for it.
        let told = match &cause {
            CollectiveError::Op { cause: OpError::PeerDown { rank, cause }, .. }
            | CollectiveError::Post { cause: PostError::PeerDown { rank, cause }, .. }
                if *rank == self.leader =>
            {
                Some(cause.clone())
            }
            _ => None,
        };
        let why = match told.or_else(|| self.group.runtime().peer_down(self.leader)) {
            Some(cause) => SharedAllocError::LeaderGone { leader: self.leader, cause },
            None => SharedAllocError::Ended(cause.clone().into()),
        };
        if self.ended.set(why.clone()).is_ok() {
            self.group.leave(&cause);
        }
        why
    }

    pub(super) fn each_tells(
        &self,
        mine: &[u8],
    ) -> Result<impl Iterator<Item = (Rank, Vec<u8>)>, SharedAllocError> {
        let told = self.group.allgather(mine).map_err(|cause| self.end(cause))?;
        Ok(self.group.ranks().zip(told))
    }

    /// Exchanges the calls that the ranks are in, and the pieces that they have released. All must
    /// be in the same call, or all fail.
    pub(super) fn meet(
        &self,
        turn: &mut Turn,
        asks: Asks,
        (freed, more): (Vec<u64>, bool),
    ) -> Result<Vec<AllocCall>, SharedAllocError> {
        turn.calls += 1;
        let mine = AllocCall { number: turn.calls, asks, freed, more };
        let mut calls = Vec::with_capacity(self.count());
        let mut differs = None;
        for (rank, bytes) in self.each_tells(&mine.encode())? {
            let call = AllocCall::decode(&bytes).ok_or(SharedAllocError::Garbled { rank })?;
            // One call that differs fails all ranks, since each sees all calls.
            if (call.number, call.asks) != (mine.number, mine.asks) && differs.is_none() {
                differs = Some((rank, call.describe()));
            }
            calls.push(call);
        }
        match differs {
            Some((rank, theirs)) => {
                Err(SharedAllocError::Differ { rank, theirs, ours: mine.describe() })
            }
            None => Ok(calls),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::Runtime;
    use crate::settings::{GpuChoice, Settings};
    use std::sync::mpsc;
    use std::time::Duration;

    /// Rank 1 has every rank's message, and an allocator; rank 0 has neither.
    #[test]
    fn who_cannot_make_an_allocator_is_not_waited_for_by_those_who_have_one() {
        let settings = Settings::builder().gpu(GpuChoice::Fake).build().unwrap();
        let ranks = Runtime::in_process_with(2, &settings).unwrap();
        let gpu = ranks[0].gpu_drivers()[0].devices().unwrap().remove(0);
        let (end, ended) = mpsc::channel();
        let (zero, own) = (ranks[0].clone(), gpu.clone());
        let made = std::thread::spawn(move || {
            SharedDeviceAllocator::new(&zero.world(), &own, Scope::Node)
        });
        let one = ranks[1].clone();
        std::thread::spawn(move || {
            let world = one.world();
            let (mine, _) = MemberDescription::of(&*gpu, Scope::Node, one.group_ticket());
            let told = world.allgather(&mine.encode()).unwrap();
            let first = MemberDescription::decode(&told[0]).unwrap();
            let of_scope = one.own_group(Rank(0), first.ticket, &[Rank(0), Rank(1)]).unwrap();
            world.abandon(&CollectiveError::Failed { what: "allgather", rank: Rank(1) });
            end.send(of_scope.allgather(b"its first call")).unwrap();
        });
        assert!(matches!(made.join().unwrap(), Err(SharedAllocError::Ended(_))));
        let waits = ended.recv_timeout(Duration::from_secs(100)).expect("it does not wait");
        assert!(matches!(waits, Err(CollectiveError::Failed { .. })), "{waits:?}");
    }
}
