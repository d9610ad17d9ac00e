//! Lock-free structures, each with a proof.
//!
//! | module | one idea | where it is used |
//! |---|---|---|
//! | [`ring`] | one producer, one consumer, 64-byte slots that carry their own sequence number | shm, in shared memory |
//! | [`attention`] | how a producer learns that its consumer has stopped looking, without a fence of its own | shm |
//! | [`bells`] | which of many rings have something: a two-level bit set | shm, in shared memory |
//! | [`split`] | which pieces of a message are copied by its receiver, and which by its sender | shm, in shared memory |
//! | [`revocable`] | the right to use something of another process, which its owner can take back | shm, in shared memory |
//! | [`free_list`] | a stack of indices | packet pools, slabs |
//! | [`queue`] | a bounded queue for any number of producers and consumers | completion queues |
//! | [`slab`] | values under a token that carries a generation | operations in flight |
//! | [`try_lock`] | a lock that is tried, not waited for | matching, slabs |
//! | [`biased_lock`] | the same, free of charge for its usual thread | devices, links |
//! | `alone` | a step that one thread takes without an atomic exchange, until another one comes | [`queue`] |
//! | [`barrier`] | a memory barrier of which one side is free | [`attention`], [`biased_lock`], [`sleepers`] |
//! | [`sleepers`] | threads that sleep until somebody rings | waiting |
//! | [`chores`] | what progress has to do, in one word | progress |
//! | [`earliest`] | the earliest of many points in time | deadlines |
//! | [`hurdles`] | a count and two flags that one load finds absent | routes to peers |
//! | [`aside`] | what many threads put aside, to be taken up by whoever polls next | verbs |
//! | [`ticks`] | numbers that only grow, and who listens for them | barriers of groups |
//!
//! Atomics and cells come from `primitives` and nowhere else (`cargo xtask test` checks), so that
//! under `--cfg loom` every structure here is model-checked; those on the heap also run under Miri.
//! The ones that live in shared memory are `repr(C)` and generic over where their bytes lie.

mod alone;
pub mod aside;
pub mod attention;
pub mod barrier;
pub mod bells;
pub mod biased_lock;
pub mod chores;
pub mod earliest;
pub mod free_list;
pub mod hurdles;
pub(crate) mod primitives;
pub mod queue;
pub mod revocable;
pub mod ring;
pub mod slab;
pub mod sleepers;
pub mod split;
pub mod ticks;
pub mod try_lock;

pub use aside::Aside;
pub use biased_lock::BiasedLock;
pub use chores::{Chores, Waiting};
pub use earliest::Earliest;
pub use free_list::FreeList;
pub use hurdles::Hurdles;
pub use queue::Queue;
pub use revocable::Revocable;
pub use slab::Slab;
pub use sleepers::Sleepers;
pub use split::Split;
pub use ticks::Ticks;
pub use try_lock::TryLock;
