//! Peers: their addresses, the links to them, and the operations that wait for them.
//!
//! | module | one idea |
//! |---|---|
//! | [`absent`] | ranks that are waited for and have published no address |
//! | [`address`] | the addresses that devices publish |
//! | [`route`] | from a device to one peer: the link, and the backlog |
//! | [`backlog`] | operations that wait for an event, a staging copy, or room |
//! | [`endpoint`] | a device as its peers see it |
//! | [`pace`] | how often a device is polled that polls by system calls |
//! | [`shares`] | the division of a copy between its two sides |
//! | [`hold`] | a bound on messages that wait for their receives |
//! | [`state`] | the known state of a rank |

mod absent;
pub(crate) mod address;
pub(crate) mod backlog;
mod endpoint;
pub(crate) mod hold;
mod pace;
pub(crate) mod route;
pub(crate) mod shares;
mod state;

pub(crate) use absent::Absent;
pub(crate) use endpoint::Endpoint;
pub use state::PeerState;
pub(crate) use state::Suspects;
