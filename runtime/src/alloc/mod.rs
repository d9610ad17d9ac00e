//! Memory of GPUs that the ranks of a node have together, and memory that grows in place.
//!
//! [`GrowableBuffer`] is one rank's, of one or several GPUs: addresses that stay, and memory that
//! comes and goes there. All else here is memory of several ranks.
//!
//! One rank of them, the leader, allocates; the others map what it has, so that kernels and copy
//! engines of all read and write the same bytes. Every call is collective, and ends alike at all
//! ranks: with memory for each, or with an error for each that names the rank which could not, and
//! its driver's reason.
//!
//! | module | one idea |
//! |---|---|
//! | `growable` | memory that grows and shrinks where it lies: [`GrowableBuffer`] |
//! | `scope` | which ranks have memory together: [`Scope`] |
//! | `shared` | one allocation for each call: [`SharedDeviceAllocator`] |
//! | `making` | how its leader makes it, and the others map it |
//! | `pool` | many small allocations in few blocks: [`SharedPool`] |
//! | `buddy` | the pieces of a block, by powers of two |
//! | `region` | what a call gives: [`SharedRegion`] |
//! | `stats` | what there is: [`SharedStats`] |
//! | `wire` | what ranks tell each other |
//! | `error` | what can go wrong |
//!
//! Rules, for whoever uses memory of several ranks:
//!
//! - **The same calls in the same order** on all ranks of the scope. Calls that differ are an error
//!   at all of them, and are named.
//! - **Letting go is no call.** A [`SharedRegion`] is dropped when its rank needs it no more, in
//!   any order; the memory is freed, or used again, when all ranks have let go of it. Work of GPUs
//!   on it must be over before.
//! - **Addresses differ.** Each rank has the memory at an address of its own
//!   ([`Region::addr`](crate::region::Region::addr), for kernels).
//! - **Nobody orders accesses.** Messages, barriers and events do.
//! - **It is not cleared**, and what lies there may be somebody's who had it before.
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

/// What is exposed to others is exposed by whole blocks of the driver: so sizes are multiples of it
/// (gpu.md, legacy IPC rule 2).
const BLOCK: usize = 2 << 20;

/// Pieces that a rank tells of in one message to have let go of.
const POOL_FREED: usize = 16;

/// Bytes that can be asked for, at most.
const MOST: usize = isize::MAX as usize / 2;
