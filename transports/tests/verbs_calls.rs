//! Properties of verbs that the transport relies on, call by call, between two devices of one
//! process.
//!
//! The same tests run on the simulated NIC (the default) and on a real libibverbs: see [`verbs`].
//! Where devices are known to differ, the simulated one has to follow the specification, and
//! others may differ.

mod verbs;

#[path = "verbs_calls/errors.rs"]
mod errors;
#[path = "verbs_calls/memory.rs"]
mod memory;
#[path = "verbs_calls/messages.rs"]
mod messages;
#[path = "verbs_calls/queues.rs"]
mod queues;
