//! The exchange of addresses between the ranks of a job, before any transport connects them.
//!
//! A bootstrap is a small key-value table that all ranks share, and a fence. Ranks put their
//! addresses into it and poll for those of others; the data path never uses it.
//!
//! | module | idea |
//! |---|---|
//! | [`in_process`] | a job of one, and many ranks in one process for tests and loopback |
//! | [`launcher`] | the client of `carrack run`, over an inherited Unix socket |
//! | `adopt` | makes the inherited descriptor number an owned socket |
//! | `client` | a rank's side: one connection to a store |
//! | `arrivals` | answers from the launcher, and the wake-up of waiting threads |
//! | [`protocol`] | the frames between launcher and rank |
//! | [`server`] | the store: table, fence and departures, as a state machine without I/O |
//! | [`tcp`] | the bootstrap by torchrun's variables, with a store at rank 0 over TCP |
//! | [`source`] | which of these a process is to use, and how it then joins its job |
//! | `exchange` | what a launcher is used for: all ranks learn where rank 0's store is |
//! | [`pmi`] | the exchange by PMI-1: Hydra, Slurm, Flux |
//! | `pmix` | the exchange by PMIx: PRRTE, Slurm |
//! | `mpi` | the exchange by MPI, over a communicator of the program |
//! | `slurm` | the invitation in Slurm's variables |
//! | [`launchers`] | the variables of launchers, and those whose jobs cannot be joined |
//! | [`job`] | the identity and secret of a job |
//! | [`error`] | what can go wrong, and what to do then |
//!
//! ```
//! use carrack::bootstrap::{Bootstrap, InProcess};
//!
//! let job = InProcess::alone()?;
//! job.put("address", b"here")?;
//! assert_eq!(job.get("address")?.as_deref(), Some(&b"here"[..]));
//! job.fence()?;
//! # Ok::<(), carrack::bootstrap::BootstrapError>(())
//! ```

mod adopt;
mod arrivals;
mod client;
pub mod error;
mod exchange;
pub mod in_process;
pub mod job;
pub mod launcher;
pub mod launchers;
mod mpi;
pub mod pmi;
mod pmix;
pub mod protocol;
pub mod server;
mod slurm;
pub mod source;
pub mod tcp;

use std::os::fd::BorrowedFd;

pub use error::{BootstrapError, Departure};
pub use in_process::InProcess;
pub use job::JobId;
pub use launcher::FromLauncher;
pub use mpi::MpiComm;
pub use source::Source;
pub use tcp::FromEnvironment;

/// The largest number of ranks that `carrack run` starts.
pub const MAX_RANKS: u32 = 4096;

/// The largest number of ranks of a job, under any launcher.
pub const MAX_JOB: u32 = 16384;

/// A rank's number, its job's identity, a table that all ranks share, and a fence.
///
/// Every method may be called from any thread, and from several at once.
///
/// A key is written once. Putting the same value again is allowed and changes nothing; another
/// value is an error, so that an answer, once read, stays true. Keys of a library should start with
/// its name and a slash, because the whole job shares the table.
pub trait Bootstrap: Send + Sync {
    /// Returns the number of this rank, in `0..size`.
    fn rank(&self) -> u32;

    /// Returns the number of ranks in the job, at least one.
    fn size(&self) -> u32;

    /// Returns the number of this rank among those of its node, from 0. The ranks of a node share
    /// its resources by it, such as RDMA devices. Where the bootstrap does not know it, and under
    /// `carrack run`, which has all ranks on one node, it is the rank's own number.
    fn place_on_node(&self) -> u32 {
        self.rank()
    }

    /// Returns the job's identity, which is also the secret of its ranks.
    fn job(&self) -> &JobId;

    /// Puts a value into the table of all ranks. Never waits for an answer.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::TooLarge`] for a key over 256 bytes or a value over 64 KiB.
    /// [`BootstrapError::AlreadyPut`] for a second, different value; under a launcher a later call
    /// returns [`BootstrapError::Refused`]. [`BootstrapError::LauncherGone`].
    /// [`BootstrapError::StoreGone`].
    fn put(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError>;

    /// Returns the value of a key, or `None` before it is known. Never waits.
    ///
    /// The first call sends a request; later calls check for the answer. A caller polls, and may
    /// sleep on [`wait_fd`](Self::wait_fd) in between.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::RankGone`] when the key is missing and a rank left the job without having
    /// announced its end, so that the key may never come; [`BootstrapError::LauncherGone`].
    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError>;

    /// Fails when a missing key of this rank may never come, whatever happened to others:
    /// [`get`](Self::get) names only the first rank that is lost.
    ///
    /// # Errors
    /// The errors of [`get`](Self::get).
    fn check(&self, _rank: u32) -> Result<(), BootstrapError> {
        Ok(())
    }

    /// Returns `true` if a key that [`get`](Self::get) has asked for never comes. `rank`, whose key
    /// it is, has then ended in order without having put it. `false` where that is not known.
    /// Operations on a device that the rank never made then stay open, and waits look for it again
    /// and again.
    fn never_comes(&self, _key: &str, _rank: u32) -> bool {
        false
    }

    /// Blocks until every rank has called it as often as this rank has.
    ///
    /// Values that a rank put before its fence are in the table afterwards; `get` still polls for
    /// them. Fences of several threads of one rank take turns, and each call counts.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::RankGone`] when a rank has ended and so can never arrive;
    /// [`BootstrapError::LauncherGone`].
    fn fence(&self) -> Result<(), BootstrapError>;

    /// Announces that this rank has ended its runtime in order, and will neither put nor fence
    /// again.
    ///
    /// Other ranks can still get what it has put. Without this call, leaving the job counts as a
    /// failure of the rank.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::LauncherGone`], which a rank that is ending may ignore.
    fn finish(&self) -> Result<(), BootstrapError> {
        Ok(())
    }

    /// Returns a descriptor that is readable while an answer waits that no [`get`](Self::get) has
    /// returned. It also is while a frame waits that the next call to `get` would read.
    ///
    /// Threads sleep on it by `poll` or `epoll`, and never read from it. `None`: answers come at
    /// once, or there is no descriptor, so poll with pauses.
    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
