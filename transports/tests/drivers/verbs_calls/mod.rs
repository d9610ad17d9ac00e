//! What the transport takes for granted of verbs, call by call, between two devices of one process.
//!
//! The same tests run on the simulated NIC (the default) and on a real libibverbs: see [`verbs`].
//! Where devices are known to differ, the simulated one has to be as the specification says, and
//! others are let be.

mod errors;
mod memory;
mod messages;
mod queues;
