//! Decisions, without any input or output: pure functions and plain data.
//!
//! | module | one idea |
//! |---|---|
//! | [`header`] | the sixteen bytes before each message |
//! | [`select`] | the choice of a path to a peer, and the reasons against the others |
//! | [`wire`] | the payloads of the runtime's own messages |
//! | [`eager`] | the plan of one message |
//! | [`rndv`] | messages in several pieces: their two sides |
//! | [`flow`] | the holds of senders |
//! | [`rma`] | who carries out a put, a get or an atomic operation |
//! | [`rkey`] | remote keys as bytes, and the checks of bounds |

pub(crate) mod eager;
pub(crate) mod flow;
pub(crate) mod header;
pub(crate) mod rkey;
pub(crate) mod rma;
pub(crate) mod rndv;
pub(crate) mod select;
pub(crate) mod wire;
