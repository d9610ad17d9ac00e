//! The interface that users call. Only modules that stand above it, such as `collective` and
//! `alloc`, depend on it.
//!
//! | module | one idea |
//! |---|---|
//! | `runtime`, `builder`, `device` | a rank of a job, its start, and the making of its devices |
//! | [`post`] | one builder for each operation, and the verbs that post it |
//! | [`buffer`] | the buffers of operations |
//! | `drive` | a future that makes progress |
//! | `handler` | handlers that get the runtime |
//! | `probe` | looks for messages without receiving them; taking back receives |
//! | `waiting` | calls that make progress, and that wait meanwhile |
//! | `memory`, `invalidate` | memory that other ranks reach, and its end |
//! | `stream_counter` | the making of counters that streams wait for |
//! | `pending` | the operations that a rank waits for |

pub mod buffer;
mod builder;
mod device;
mod drive;
mod handler;
mod invalidate;
mod memory;
mod pending;
pub mod post;
mod probe;
mod runtime;
mod stream_counter;
mod waiting;

pub use builder::RuntimeBuilder;
pub use device::DeviceBuilder;
pub use drive::Drive;
pub(crate) use invalidate::{Withdrawn, withdraw};
pub use probe::{Probe, Ticket};
pub use runtime::Runtime;
