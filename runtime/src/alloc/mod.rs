//! GPU memory that the ranks of a node share, and GPU memory that grows in place.
//!
//! [`GrowableBuffer`] belongs to one rank, on one or several GPUs: constant addresses, at which
//! memory comes and goes. Everything else here is memory of several ranks.
//!
//! One rank, the leader, allocates. The others map its memory, so that kernels and copy engines of
//! all ranks read and write the same bytes. Every call is collective, and ends alike at all ranks:
//! with memory for each, or with an error for each. The error names the rank that failed, and its
//! driver's reason.
//!
//! | module | one idea |
//! |---|---|
//! | `growable` | memory that grows and shrinks in place: [`GrowableBuffer`] |
//! | `scope` | the ranks that share memory: [`Scope`] |
//! | `shared` | one allocation for each call: [`SharedDeviceAllocator`] |
//! | `making` | the allocation at the leader, and its mappings at the others |
//! | `pool` | many small allocations in few blocks: [`SharedPool`] |
//! | `buddy` | the pieces of a block, by powers of two |
//! | `region` | the result of a call: [`SharedRegion`] |
//! | `stats` | counts of memory in use: [`SharedStats`] |
//! | `wire` | the messages between ranks |
//! | `error` | errors |
//!
//! Rules for users of memory of several ranks:
//!
//! - **The same calls in the same order** on all ranks of the scope. A call that differs is an
//!   error at all of them, which names both calls.
//! - **A release is local.** Each rank drops a [`SharedRegion`] when it does not need it any more,
//!   in any order. The memory is freed, or used again, when all ranks have released it. Work of
//!   GPUs on it must have finished before.
//! - **Addresses differ.** Each rank has the memory at an address of its own
//!   ([`Region::addr`](crate::region::Region::addr), for kernels).
//! - **Accesses are not ordered.** Messages, barriers and events order them.
//! - **Memory is not cleared.** It may hold bytes of its previous user.
//!
//! ```
//! use carrack::alloc::{Scope, SharedDeviceAllocator};
//! # use carrack::Runtime;
//! # use carrack::settings::{GpuChoice, Settings};
//! # let settings = Settings::builder().gpu(GpuChoice::Fake).build()?;
//! # let runtime = Runtime::builder().settings(settings).start()?;
//! # let gpu = runtime.gpu_drivers()[0].devices()?.remove(0);
//! // On every rank of the group, each with the GPU that it works with:
//! let allocator = SharedDeviceAllocator::new(&runtime.world(), &gpu, Scope::Node)?;
//! let field = allocator.allocate(1_000_000)?;
//! if allocator.is_leader() {
//!     field.slice(0, 5).ok_or("inside")?.write(b"hello")?;
//! }
//! runtime.barrier()?;
//! assert_eq!(field.slice(0, 5).ok_or("inside")?.to_vec()?, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod buddy;
mod error;
mod growable;
mod making;
mod pool;
mod region;
mod scope;
mod shared;
mod stats;
mod wire;

pub use error::SharedAllocError;
pub use growable::{GrowableBuffer, GrowableBuilder, GrowableError};
pub use pool::SharedPool;
pub use region::SharedRegion;
pub use scope::Scope;
pub use shared::SharedDeviceAllocator;
pub use stats::SharedStats;

/// Granularity of sizes. A driver exposes whole blocks to other processes (gpu.md, legacy IPC rule
/// 2).
const BLOCK: usize = 2 << 20;

/// Released pieces that a rank reports in one message, at most.
const POOL_FREED: usize = 16;

/// Bytes of one allocation, at most.
const MOST: usize = isize::MAX as usize / 2;
