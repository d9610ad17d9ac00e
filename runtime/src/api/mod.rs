//! The faces of the runtime that users call. Nothing of the runtime depends on them.
//!
//! | module | one idea |
//! |---|---|
//! | `drive` | a future that makes progress |
//! | `handler` | handlers that get the runtime |
//! | `probe` | looks for messages without receiving them; taking back receives |
//! | `waiting` | calls that wait, making progress |

mod drive;
mod handler;
mod probe;
mod waiting;

pub use drive::Drive;
pub use probe::Probe;
