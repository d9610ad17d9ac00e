//! The bootstrap under other launchers than `carrack run`: a store at rank 0 over TCP.
//!
//! Torchrun's variables `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` are the
//! [`Invitation`] to a job; any launcher, or a few shells, can set them. In jobs of PMI, PMIx and
//! Slurm an invitation is made of what [their launcher](super::source) tells.
//!
//! # The port
//!
//! With torchrun an agent's own store listens on `MASTER_PORT`. So rank 0 of this bootstrap listens
//! on `CARRACK_PORT`, by default [`PORT_OFFSET`] above `MASTER_PORT` ([`port_for_master`]). A port
//! that is taken is an error that says so. A rank that reaches another job's port gets an error,
//! because secret or size differ. Where `MASTER_ADDR` is `localhost` or a loopback address, rank 0
//! listens on the loopback only.
//!
//! # The secret
//!
//! `CARRACK_JOB_SECRET`, at least 16 bytes of any text, the same for all ranks, or the secret of a
//! launcher's exchange. Both sides of a connection prove that they hold it ([`JobKey`] has the
//! formulas). Without it the key is made from what an attacker can know; rank 0 warns of that on
//! stderr. Later frames are neither encrypted nor signed: the bootstrap refuses processes that are
//! not of the job, and trusts the network in between. An eavesdropper can guess a short secret.
//!
//! # The store, and what it costs
//!
//! Rank 0 has the table, and one connection for each rank, which lasts as long as the job. A put is
//! one frame, a get two, a fence two for each rank. A start-up of N ranks is O(N) at rank 0.
//!
//! # Threads
//!
//! Rank 0 of such a job has a thread, `carrack-store`, which answers the other ranks while the
//! program computes, and sleeps otherwise (docs/architecture.md, "Threads"). It ends with the
//! bootstrap. The other ranks have no such thread.
//!
//! # Ends
//!
//! A rank whose connection ends without its announcement is lost ([`BootstrapError::RankGone`] for
//! all); so is one that has not come within `CARRACK_BOOTSTRAP_TIMEOUT`. While ranks are
//! missing, a process that calls as one of them with another secret or size ends the job. So does
//! one that calls as a rank that is there already. All ranks are told at once. Rank 0 tells those,
//! too, that come within three seconds after its end. A second rank 0 calls the first.
//! [`finish`](Bootstrap::finish) of rank 0 waits until all others have finished or are lost, so
//! rank 0 is the last, as in MPI. After five seconds it names the ranks that it awaits on stderr.
//! Start several ranks of one process in threads of their own.
//!
//! | module | idea |
//! |---|---|
//! | [`variables`] | what the environment says |
//! | [`key`] | the secret, and what is made of it |
//! | `join` | calling rank 0 |
//! | `store` | the thread of rank 0 |
//! | `stand_in` | the answer of a launcher whose rank 0 has ended |

#![forbid(unsafe_code)]

pub(super) mod join;
pub mod key;
mod stand_in;
mod store;
pub mod variables;

use std::env;
use std::net::TcpListener;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread::JoinHandle;

use carrack_transports::fork::Owner;
use rustix::event::{EventfdFlags, eventfd};

use super::Bootstrap;
use super::client::{Client, Host, Wire, by_client};
use super::error::BootstrapError;
use super::exchange::Exchange;
use super::job::JobId;
use super::server::Server;
use crate::settings::Settings;
use store::Store;

pub use key::JobKey;
pub use stand_in::StandIn;
pub use variables::{Invitation, PORT_OFFSET, port_for_master};

/// The bootstrap of a program whose environment tells where rank 0 is. See the [module](self).
///
/// A process has one, which its runtimes share. In a forked child every call is an error.
#[derive(Debug)]
pub struct FromEnvironment {
    rank: u32,
    size: u32,
    place_on_node: u32,
    job: JobId,
    client: Client,
    /// Descriptor that ends the store's thread, and the thread, at rank 0.
    store: Option<(OwnedFd, JoinHandle<()>)>,
    owner: Owner,
    /// The launcher's, which is told of this rank's end.
    exchange: Option<Box<dyn Exchange>>,
}

impl FromEnvironment {
    /// Returns the bootstrap that the environment describes, or `None` without `RANK` and
    /// `WORLD_SIZE`. Waits for rank 0 to come; rank 0 does not wait.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::Environment`] when a variable is missing or wrong.
    /// [`BootstrapError::Listen`] when the port is taken. [`BootstrapError::NotReached`] when rank
    /// 0 has not come in time. [`BootstrapError::NotAdmitted`] when rank 0 refuses this rank:
    /// another secret, a number that is taken, another size. [`BootstrapError::Os`].
    pub fn from_env(settings: &Settings) -> Result<Option<Self>, BootstrapError> {
        let text = |name: &str| env::var_os(name).map(|text| text.to_string_lossy().into_owned());
        Invitation::read(text, settings)?.map(|invitation| Self::join(&invitation)).transpose()
    }

    /// Starts as [`from_env`](Self::from_env), from given values of the variables.
    ///
    /// # Errors
    ///
    /// The errors of [`from_env`](Self::from_env).
    pub fn join(invitation: &Invitation) -> Result<Self, BootstrapError> {
        Self::enter(invitation, None)
    }

    /// Starts as [`join`](Self::join). Rank 0 may have opened its listener already.
    pub(super) fn enter(
        invitation: &Invitation,
        listener: Option<TcpListener>,
    ) -> Result<Self, BootstrapError> {
        let Invitation { rank, size, place_on_node, .. } = *invitation;
        let is_exchanged = listener.is_some();
        let (wire, host, salt, store) = if rank == 0 {
            let salt = join::salt()?;
            let (wire, store) = Self::serve(invitation, listener, &salt)?;
            (wire, invitation.to_string(), salt, Some(store))
        } else {
            let joined = join::join(invitation)?;
            (Wire::Tcp(joined.channel), joined.address.to_string(), joined.salt, None)
        };
        let client = Client::new(rank, wire, Host::Zero(host))?;
        let job = invitation.key.job(&salt);
        let (owner, exchange) = (Owner::this_process(), None);
        let this = Self { rank, size, place_on_node, job, client, store, owner, exchange };
        // An exchange leads all ranks to the one listener that it was opened for.
        let twin = (rank == 0 && size > 1 && !is_exchanged)
            .then(|| join::twin_elsewhere(invitation, &salt))
            .flatten();
        twin.map_or(Ok(this), Err)
    }

    /// Tells the launcher of this rank's end when this is dropped.
    pub(super) fn keep(mut self, exchange: Box<dyn Exchange>) -> Self {
        self.exchange = Some(exchange);
        self
    }

    /// Starts the store's thread. Returns rank 0's own connection to it.
    fn serve(
        invitation: &Invitation,
        listener: Option<TcpListener>,
        salt: &key::Salt,
    ) -> Result<(Wire, (OwnedFd, JoinHandle<()>)), BootstrapError> {
        let os = |doing| move |source| BootstrapError::Os { doing, source };
        let size = invitation.size;
        let listener = match listener {
            None if size > 1 => Some(join::listen_alone(invitation)?),
            opened => opened.filter(|_| size > 1),
        };
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| BootstrapError::os("making an eventfd", errno))?;
        let stopped = stop.try_clone().map_err(os("duplicating an eventfd"))?;
        let (own, theirs) = store::pair()?;
        let server = Server::new(invitation.key.job(salt), size);
        let proof = (invitation.key.key(), join::claim(invitation, salt));
        let ends = (invitation.patience, stopped);
        let store = Store::new(listener, proof, server, theirs, ends)?;
        let thread = std::thread::Builder::new()
            .name("carrack-store".into())
            .spawn(move || store.serve())
            .map_err(os("starting the bootstrap's thread"))?;
        Ok((own, (stop, thread)))
    }
}

impl Bootstrap for FromEnvironment {
    by_client!();

    fn place_on_node(&self) -> u32 {
        self.place_on_node
    }
}

impl Drop for FromEnvironment {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The thread belongs to the parent; a forked child has none to wait for.
            return std::mem::forget(self.store.take());
        }
        if let Some((stop, thread)) = self.store.take() {
            // The write can only fail when the counter is full: the thread is told already.
            let _ = rustix::io::write(&stop, &1_u64.to_ne_bytes());
            let _ = thread.join();
        }
        if let Some(exchange) = &mut self.exchange {
            exchange.end();
        }
    }
}

#[cfg(test)]
mod tests;
