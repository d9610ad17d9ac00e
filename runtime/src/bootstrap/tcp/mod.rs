//! The bootstrap of a program under another launcher: over TCP, with torchrun's variables.
//!
//! `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` name the process's rank and the address of
//! rank 0; any launcher, or a few shells, can set them. Under `carrack run` its descriptor wins.
//!
//! By `LOCAL_RANK`, the number of a process among those of its node, ranks of a node share out what
//! it has, such as RDMA devices; without it each goes by its `RANK`. It must be below
//! `LOCAL_WORLD_SIZE`, where that is set. torchrun's other variables (groups, roles, restarts) say
//! nothing that Carrack needs.
//!
//! # The port
//!
//! With torchrun an agent's own store listens on `MASTER_PORT`. So rank 0 of this bootstrap listens
//! on `CARRACK_PORT`, by default [`PORT_OFFSET`] above `MASTER_PORT`; where that is beyond 65535 it
//! is counted on from 1024 ([`port_beside`]). Jobs of one machine have different `MASTER_PORT`s,
//! and so different ports here, unless two of those are exactly `PORT_OFFSET` apart: a port that is
//! taken is an error that says so, and `CARRACK_PORT` the way out, the same for all ranks. The
//! other ranks listen on ports that the kernel chooses. A rank that comes to another job's port is
//! told so, by the secret or by its size. Where `MASTER_ADDR` is `localhost` or a loopback address,
//! ranks listen on the loopback only.
//!
//! # The secret
//!
//! `CARRACK_JOB_SECRET`, at least 16 bytes of any text, the same for all ranks. It is not sent:
//! both sides of a connection prove that they hold it ([`JobKey`] has the formulas). Without it the
//! key is made from `MASTER_PORT` and `TORCHELASTIC_RUN_ID`, which anyone can know who reaches the
//! port; rank 0 warns of that on stderr. What is sent afterwards is neither encrypted nor signed:
//! the bootstrap keeps strangers and other jobs out, and trusts the network in between. A short
//! secret can be guessed from what is overheard: draw a random one.
//!
//! # The store, and what it costs
//!
//! Rank 0 has the table, and one connection for each rank, which lasts as long as the job. A put is
//! one frame, a get two, a fence two for each rank. A start-up of N ranks is O(N) at rank 0.
//!
//! # Threads
//!
//! Rank 0 of such a job has a thread that sleeps, `carrack-store`: the other ranks ask it, whatever
//! the program is doing (docs/architecture.md, "Threads"). It ends with the bootstrap. The other
//! ranks have none.
//!
//! # Ends
//!
//! A rank whose connection ends without a word is lost ([`BootstrapError::RankGone`] for all); so
//! is one that has not come within `CARRACK_BOOTSTRAP_TIMEOUT`. A process that comes as a missing
//! rank with another secret or another size, and one that comes as a rank which is there, end the
//! job: all ranks are told at once. [`finish`](Bootstrap::finish) of rank 0 waits until all others
//! have finished or are lost, and so rank 0 is the last, as in MPI. Bootstraps of several ranks in
//! one process are for threads of their own.
//!
//! | module | idea |
//! |---|---|
//! | [`variables`] | what the environment says |
//! | [`key`] | the secret, and what is made of it |
//! | `join` | calling rank 0 |
//! | `store` | the thread of rank 0 |

#![forbid(unsafe_code)]

mod join;
pub mod key;
mod store;
pub mod variables;

use std::env;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::thread::JoinHandle;

use carrack_transports::fork::Owner;
use rustix::event::{EventfdFlags, eventfd};

use super::Bootstrap;
use super::client::{Client, Host, Wire};
use super::error::BootstrapError;
use super::job::JobId;
use super::server::Server;
use crate::settings::Settings;
use store::Store;

pub use key::JobKey;
pub use variables::{Invitation, PORT_OFFSET, port_beside};

/// The bootstrap of a program whose launcher sets torchrun's variables. See the [module](self).
///
/// There is one to a process: share it between runtimes. It must not be used after a `fork` in the
/// child, where every call is an error.
#[derive(Debug)]
pub struct FromEnvironment {
    rank: u32,
    size: u32,
    place_on_node: u32,
    job: JobId,
    client: Client,
    /// At rank 0: what ends the store's thread, and the thread.
    store: Option<(OwnedFd, JoinHandle<()>)>,
    owner: Owner,
}

impl FromEnvironment {
    /// The bootstrap that the environment describes, or `None` where there is neither a `RANK` nor
    /// a `WORLD_SIZE`. Waits for rank 0 to come; rank 0 does not wait.
    ///
    /// # Errors
    ///
    /// [`BootstrapError::Environment`] when a variable is missing or wrong;
    /// [`BootstrapError::Listen`] when the port is taken; [`BootstrapError::NotReached`] when rank
    /// 0 has not come in time; [`BootstrapError::NotAdmitted`] when it does not want this rank:
    /// another secret, a number that is taken, another size; [`BootstrapError::Os`].
    pub fn from_env(settings: &Settings) -> Result<Option<Self>, BootstrapError> {
        let text = |name: &str| env::var_os(name).map(|text| text.to_string_lossy().into_owned());
        Invitation::read(text, settings)?.map(|invitation| Self::join(&invitation)).transpose()
    }

    /// As [`from_env`](Self::from_env), with what the variables say given.
    ///
    /// # Errors
    ///
    /// Those of [`from_env`](Self::from_env).
    pub fn join(invitation: &Invitation) -> Result<Self, BootstrapError> {
        let Invitation { rank, size, place_on_node, .. } = *invitation;
        let (wire, host, salt, store) = if rank == 0 {
            let salt = join::salt()?;
            let (wire, store) = Self::serve(invitation, &salt)?;
            (wire, invitation.to_string(), salt, Some(store))
        } else {
            let joined = join::join(invitation)?;
            (Wire::Tcp(joined.channel), joined.address.to_string(), joined.salt, None)
        };
        let (client, job) = (Client::new(wire, Host::Zero(host))?, invitation.key.job(&salt));
        Ok(Self { rank, size, place_on_node, job, client, store, owner: Owner::this_process() })
    }

    /// Starts the store's thread. Returns rank 0's own connection to it.
    fn serve(
        invitation: &Invitation,
        salt: &key::Salt,
    ) -> Result<(Wire, (OwnedFd, JoinHandle<()>)), BootstrapError> {
        let os = |doing| move |source| BootstrapError::Os { doing, source };
        let size = invitation.size;
        let listener = (size > 1).then(|| join::listen_as_zero(invitation)).transpose()?;
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
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn place_on_node(&self) -> u32 {
        self.place_on_node
    }

    fn job(&self) -> &JobId {
        &self.job
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<(), BootstrapError> {
        self.client.put(key, value)
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
        self.client.get(key)
    }

    fn fence(&self) -> Result<(), BootstrapError> {
        self.client.fence()
    }

    /// As the trait says; rank 0 also waits for all others to finish, who ask it.
    fn finish(&self) -> Result<(), BootstrapError> {
        self.client.finish()
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.client.wait_fd())
    }
}

impl Drop for FromEnvironment {
    fn drop(&mut self) {
        let Some((stop, thread)) = self.store.take() else { return };
        if !self.owner.is_here() {
            // The thread is the parent's, and goes on: here is none to wait for, or to detach.
            return std::mem::forget(thread);
        }
        // It can only fail when the counter is full: then it is told.
        let _ = rustix::io::write(&stop, &1_u64.to_ne_bytes());
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests;
