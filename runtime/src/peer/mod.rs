//! Where a rank is, the link to it, and what waits for it.
//!
//! | module | one idea |
//! |---|---|
//! | [`absent`] | ranks that are waited for and have published no address |
//! | [`address`] | what a device publishes, and where |
//! | [`route`] | from a device to one peer: the link, and the backlog |
//! | [`backlog`] | operations that wait for an event, a staging copy, or room |
//! | [`hold`] | a bound on messages that wait for their receives |
//! | [`excess`] | a bound on what a peer that breaks the rules may have waiting here |
//! | [`state`] | what is known of a rank's life |

mod absent;
pub(crate) mod address;
pub(crate) mod backlog;
pub(crate) mod excess;
pub(crate) mod hold;
pub(crate) mod route;
mod state;

pub(crate) use absent::Absent;
pub use state::PeerState;
pub(crate) use state::Suspects;
