//! Memory, as everything above the hardware sees it.
//!
//! | module | one idea |
//! |---|---|
//! | [`kind`] | kinds of memory: host, pinned, device (which), managed, unknown |
//! | [`view`] | ranges of memory that know their kind: [`MemRef`], [`MemMut`], [`HostViews`] |
//! | [`copy`](mod@copy) | the one function of the project that moves a user's bytes |
//! | [`region`] | memory with an owner, an identity and a kind: [`Region`], [`RegionSlice`] |
//! | [`hint`] | statements on raw memory: [`MR_HOST`], [`MR_DEVICE`], [`MR_UNKNOWN`] |
//! | [`known`] | raw memory of GPUs that was looked up before, for the whole process |
//! | `lent` | check that the program has not freed the memory that it gave |
//! | `extents` | the map behind `known`: values by ranges of addresses, with a limit |
//! | [`shared`] | host memory that other processes of the job can map |
//! | [`buffer`] | the memory that an operation holds while it runs: [`Buffer`] |
//! | [`loan`] | bytes that lie with their sender: [`Loan`] |
//! | [`transfer`] | a copy that takes time, holding both of its ends until it has ended |
//! | [`strided`] | strided memory, rows at regular distances in a region: [`Strided`] |
//! | [`hosts`] | many copies between two regions of host memory: [`Hosts`] |
//! | [`together`] | copies between regions that an engine is given together: [`Together`] |
//! | `by_way` | the same through blocks of pinned memory: [`ByWay`] |
//! | [`allocator`] | allocators of packet memory: [`PacketAllocator`], or a program's own |
//! | `block` | memory of an allocator, checked before its first use |
//! | `emptied` | boxes whose values were dropped, for other values |
//! | [`packet`] | fixed-size chunks of any kind of memory: [`Packet`], [`PacketSource`] |
//! | [`pool`] | an elastic, bounded, lock-free pool of packets |
//! | [`prefetch`](mod@prefetch) | cache lines that are read soon |
//!
//! The rule behind all of it: loads, stores and `memcpy` touch only memory that is known to be host
//! memory.

#![expect(unsafe_code, reason = "memory is mapped, lent, and copied by address")]

pub mod allocator;
mod block;
pub mod buffer;
mod by_way;
pub mod copy;
mod emptied;
mod extents;
pub mod hint;
pub mod hosts;
pub mod kind;
pub mod known;
mod lent;
pub mod loan;
pub(crate) mod memfd;
pub mod packet;
pub mod pool;
pub mod prefetch;
pub mod region;
pub mod shared;
pub mod strided;
pub mod together;
pub mod transfer;
pub mod view;

pub use allocator::{
    AllocError, Chunk, GpuAllocator, HostAllocator, PacketAllocator, PinnedAllocator,
};
pub use buffer::{Buffer, Buffers, SmallBytes};
pub use by_way::ByWay;
pub use copy::{Copied, CopyError, copy};
pub use emptied::emptied;
pub use hint::{MR_DEVICE, MR_HOST, MR_UNKNOWN, MemHint};
pub use hosts::Hosts;
pub use kind::{GpuUuid, MemKind};
pub use known::{KnownMemory, RawError};
pub use lent::Freed;
pub use loan::{Lender, Loan};
pub use memfd::MapError;
pub use packet::{Packet, PacketSource};
pub use pool::PacketPool;
pub use region::{AllocId, AtomicError, Keeper, Region, RegionSlice, SoleRegion, WeakRegion};
pub use strided::{Strided, StridedError};
pub use together::{Between, StridedRefused, Together, start_strided};
pub use transfer::{Refused, Transfer};
pub use view::{HostViews, MemMut, MemRef, Place};
