//! This rank, independent of paths: its place in the job, and everything that it was started with.

use crate::bootstrap::Bootstrap;
use crate::chores::Chores;
use crate::deadline::Deadlines;
use crate::names::Rank;
use crate::settings::Settings;
use carrack_transports::contract::{Domain, Unavailable};
use carrack_transports::fork::Owner;
use carrack_transports::gpu::Driver;
use carrack_transports::sync::Sleepers;
use parking_lot::Mutex;
use std::sync::Arc;

/// The domains of a rank, each with the name of its transport.
pub(crate) type Domains = Vec<(&'static str, Arc<dyn Domain>)>;

/// This rank, and everything that it was started with.
pub(crate) struct Local {
    /// Number that tells runtimes of one process apart.
    pub(crate) id: u64,
    /// The process that started it, to refuse calls of a forked child.
    pub(crate) owner: Owner,
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    /// Number that tells names of this job from those of others.
    pub(crate) job: u64,
    pub(crate) settings: Settings,
    pub(crate) drivers: Vec<Arc<dyn Driver>>,
    pub(crate) domains: Domains,
    pub(crate) unavailable: Vec<Unavailable>,
    /// The setting for which no memory of other processes' GPUs is mapped.
    pub(crate) maps_nothing: Option<Unavailable>,
    /// The lists of the whole runtime that are not empty.
    pub(crate) chores: Chores,
    pub(crate) deadlines: Deadlines,
    pub(crate) sleepers: Arc<Sleepers>,
    /// This rank among those of this process.
    pub(crate) here: Here,
    // Last: other fields may still send to the launcher when they are dropped.
    pub(crate) bootstrap: Box<dyn Bootstrap>,
}

impl Local {
    /// Returns `true` in a process other than the one that started the runtime.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        !self.owner.is_here()
    }
}

/// Ranks of this very process, each with the secret of its job.
static HERE: Mutex<Vec<([u8; 16], Rank)>> = Mutex::new(Vec::new());

/// A rank of this process, while it lives.
pub(crate) struct Here {
    job: [u8; 16],
    rank: Rank,
}

impl Here {
    pub(crate) fn enter(job: [u8; 16], rank: Rank) -> Self {
        HERE.lock().push((job, rank));
        Self { job, rank }
    }

    /// Returns `true` if a rank of the same job is in this process. Its operation with this rank
    /// may come before or after this one on the same stream.
    pub(crate) fn has(&self, rank: Rank) -> bool {
        HERE.lock().contains(&(self.job, rank))
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        let mut here = HERE.lock();
        if let Some(at) = here.iter().position(|other| *other == (self.job, self.rank)) {
            here.swap_remove(at);
        }
    }
}
