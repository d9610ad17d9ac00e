//! Properties of verbs that the transport relies on, call by call, between two devices of one
//! process.
//!
//! The same tests run on the simulated NIC (the default) and on a real libibverbs: see [`verbs`].
//! Where devices are known to differ, the simulated one has to follow the specification, and
//! others may differ.

mod errors;
mod memory;
mod messages;
mod queues;
