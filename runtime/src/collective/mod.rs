//! Collective operations of a [`Group`]: barrier, broadcast, allgather; each as a call and as a
//! future.
//!
//! ```text
//! group      the members, and their order
//! boards     (a module of its own) notes that members leave for each other: small, matched by
//!            group, number, step and sender
//! call       one operation in progress: sends and receives notes and bytes; checks that all
//!            members mean the same
//! barrier, broadcast, allgather     one algorithm each: an `async fn` over a call
//! ```
//!
//! The n-th operation of one member meets the n-th of each other, whichever thread began it. Each
//! note names its operation and the members. So members of different operations get an error that
//! names both, and none waits for ever. A member that fails tells all others.
//!
//! A further operation, such as a reduction, is one more `async fn` over a
//! [`CollectiveCall`](call::CollectiveCall).

mod allgather;
mod barrier;
mod broadcast;
mod call;
mod exchange;
mod group;

pub use group::Group;

use crate::api::Runtime;
use crate::error::CollectiveError;

impl Runtime {
    /// Returns once every rank has called it: see [`Group::barrier`].
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn barrier(&self) -> Result<(), CollectiveError> {
        self.world().barrier()
    }

    /// Returns each rank's bytes, of any number each: see [`Group::allgatherv`].
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn allgatherv(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.world().allgatherv(mine)
    }

    /// Returns each rank's bytes, in the order of ranks: see [`Group::allgather`].
    ///
    /// # Errors
    /// See [`CollectiveError`].
    pub fn allgather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>, CollectiveError> {
        self.world().allgather(mine)
    }
}
