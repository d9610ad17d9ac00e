//! The faces of the runtime that users call. Nothing of the runtime depends on them.
//!
//! | module | one idea |
//! |---|---|
//! | `probe` | looks for messages without receiving them; taking back receives |
//! | `waiting` | calls that wait, making progress |

mod probe;
mod waiting;

pub use probe::Probe;
