//! Decisions, without any input or output: pure functions and plain data.
//!
//! | module | one idea |
//! |---|---|
//! | [`header`] | the sixteen bytes before each message |
//! | [`select`] | the choice of a path to a peer, and the reasons against the others |
//! | [`wire`] | the payloads of the runtime's own messages |
//! | [`eager`] | the plan of one message |
//! | [`rndv`] | messages in several pieces: their two sides |
//! | [`flow`] | what receivers tell senders to hold |

pub(crate) mod eager;
pub(crate) mod flow;
pub(crate) mod header;
pub(crate) mod rndv;
pub(crate) mod select;
pub(crate) mod wire;
