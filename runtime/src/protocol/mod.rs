//! Decisions, without any input or output: pure functions and plain data.
//!
//! | module | one idea |
//! |---|---|
//! | [`header`] | the sixteen bytes before each message |
//! | [`select`] | which path leads to a peer, and why no other |
//! | [`eager`] | how one message is to be submitted |

pub(crate) mod eager;
pub(crate) mod header;
pub(crate) mod select;
