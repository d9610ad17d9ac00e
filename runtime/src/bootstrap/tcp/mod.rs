//! The bootstrap of a program that somebody else's launcher has started: over TCP, with torchrun's
//! variables.
//!
//! `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` say who a process is and where rank 0 is;
//! any launcher, or a few shells, can set them. Under `carrack run` its descriptor wins.
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
//! each connection begins with a challenge and a keyed hash ([`JobKey`] has the formulas). Without
//! it the key is made from `MASTER_PORT` and `TORCHELASTIC_RUN_ID`, which anyone can know who
//! reaches the port; that is logged as a warning. What is sent afterwards is neither encrypted nor
//! signed: the bootstrap keeps strangers and other jobs out, and trusts the network in between. A
//! short secret can be guessed from what is overheard: draw a random one.
//!
//! # The tree, and what it costs
//!
//! Ranks are places of a tree in which [`ARITY`](tree::ARITY) are below each; 4096 ranks are three
//! levels. Each calls rank 0 once, is told its place and who is above it, and connects there. So
//! rank 0 sees a short connection for each rank, and knows some forty bytes of it; nobody has more
//! than 17 connections that last.
//!
//! | | frames |
//! |---|---|
//! | put | one for each level up; rank 0 has the whole table, and gets one for each put |
//! | get | one for each level up, until a rank knows, and as many down; what came down is kept (1 MiB) |
//! | fence | one up and one down on each connection |
//! | first departure | the same |
//!
//! A start-up of N ranks, a put and some gets each, is O(log N) frames a rank on the average, O(N)
//! at rank 0.
//!
//! # Threads
//!
//! A rank of such a job has a thread that sleeps, `carrack-tree`: the ranks below it ask through
//! it, whatever the program is doing. It is one of two threads that a rank has without having asked
//! (docs/architecture.md, "Threads"): a rank that answered only in the program's own calls would
//! hold up all ranks below it. It ends with the bootstrap.
//!
//! # Ends
//!
//! A rank whose connection ends without a word is lost ([`BootstrapError::RankGone`] for all):
//! those below it cannot ask any more, what they know stays. [`finish`](Bootstrap::finish) waits
//! until all ranks below have finished or are lost, and so rank 0 is the last, as in MPI.
//! Bootstraps of several ranks in one process are for threads of their own. A rank that has not
//! come within `CARRACK_BOOTSTRAP_TIMEOUT` is lost, too.
//!
//! | module | idea |
//! |---|---|
//! | [`variables`] | what the environment says |
//! | [`key`] | the secret, and proofs of it |
//! | [`greeting`] | how a connection begins |
//! | `join` | calling rank 0, and the rank above |
//! | `register` | rank 0's list of who has come |
//! | `porch` | those who have connected, and have not said who they are |
//! | [`wire`] | frames on a stream |
//! | [`tree`] | puts, gets, fences and departures, without I/O |
//! | `link` | a connection to a neighbour |
//! | `state` | the tree and its links |
//! | `thread` | what serves them |

#![forbid(unsafe_code)]

pub mod greeting;
mod join;
pub mod key;
mod link;
mod porch;
mod register;
mod state;
mod thread;
pub mod tree;
pub mod variables;
pub mod wire;

use std::env;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use carrack_transports::fork::Owner;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, getpid};

use super::Bootstrap;
use super::arrivals::Arrivals;
use super::error::BootstrapError;
use super::job::JobId;
use super::protocol::{Frame, check_key, check_total, check_value};
use crate::settings::Settings;
use link::Link;
use porch::{Host, Porch};
use register::Register;
use state::State;
use thread::Shared;
use tree::Tree;

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
    made_in: Pid,
    owner: Owner,
    shared: Arc<Shared>,
    /// What `wait_fd` gives.
    get_news: OwnedFd,
    fence_news: OwnedFd,
    /// Held through a fence, so that those of several threads take turns.
    fence_turn: Mutex<()>,
    thread: Option<JoinHandle<()>>,
}

impl FromEnvironment {
    /// The bootstrap that the environment describes, or `None` where there is neither a `RANK` nor
    /// a `WORLD_SIZE`. Waits for rank 0 to come; rank 0 waits for nobody.
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
        let Invitation { rank, size, .. } = *invitation;
        if rank == 0 {
            let salt = join::nonce()?;
            let state = State::new(Tree::new(0, 0, size), 0, Arrivals::new()?, None);
            let Some(listener) =
                (size > 1).then(|| join::listen_as_zero(invitation)).transpose()?
            else {
                return Self::start(invitation, salt, state, None);
            };
            let host = Host::Zero(Register::new(size, salt), Instant::now() + invitation.patience);
            let porch = Porch::new(invitation.key.clone(), host, listener);
            return Self::start(invitation, salt, state, Some(porch));
        }
        let joined = join::join(invitation)?;
        let (stream, above, address) = joined.above;
        let link = Link::new(stream, above, address)
            .map_err(|source| BootstrapError::Os { doing: "setting a connection up", source })?;
        let (place, salt) = (joined.welcome.place, joined.welcome.salt);
        let state = State::new(Tree::new(rank, place, size), rank, Arrivals::new()?, Some(link));
        let porch = Porch::new(invitation.key.clone(), Host::Other { salt, size }, joined.listener);
        Self::start(invitation, salt, state, Some(porch))
    }

    /// Without a porch there is nobody else, and so no thread.
    fn start(
        invitation: &Invitation,
        salt: key::Nonce,
        mut state: State,
        porch: Option<Porch>,
    ) -> Result<Self, BootstrapError> {
        let get_news = state.arrivals.for_gets().try_clone_to_owned();
        let get_news = get_news
            .map_err(|source| BootstrapError::Os { doing: "duplicating an eventfd", source })?;
        let fence_news = state.arrivals.for_fences()?;
        state.is_over = porch.is_none();
        let shared = Shared::new(state)?;
        let served = Arc::clone(&shared);
        let start = |porch| {
            std::thread::Builder::new()
                .name("carrack-tree".into())
                .spawn(move || thread::serve(&served, porch))
                .map_err(|source| BootstrapError::Os {
                    doing: "starting the bootstrap's thread",
                    source,
                })
        };
        Ok(Self {
            rank: invitation.rank,
            size: invitation.size,
            place_on_node: invitation.place_on_node,
            job: invitation.key.job(&salt),
            made_in: getpid(),
            owner: Owner::this_process(),
            thread: porch.map(start).transpose()?,
            shared,
            get_news,
            fence_news,
            fence_turn: Mutex::new(()),
        })
    }

    fn state(&self) -> Result<MutexGuard<'_, State>, BootstrapError> {
        if !self.owner.is_here() {
            // The thread and its connections are the parent's.
            let used_in = getpid().as_raw_pid();
            return Err(BootstrapError::Forked { made_in: self.made_in.as_raw_pid(), used_in });
        }
        Ok(self.shared.state())
    }

    /// Sends as much as there is room for; the thread does the rest.
    fn say(&self, state: &mut State, frame: Frame) -> Result<(), BootstrapError> {
        state.arrivals.check_end()?;
        state.say(frame);
        if state.has_to_send() {
            self.shared.wake();
        }
        Ok(())
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
        check_key(key)?;
        check_value(value)?;
        let mut state = self.state()?;
        let total = state.bytes_put + key.len() + value.len();
        check_total(total)?;
        state.bytes_put = total;
        self.say(&mut state, Frame::Put { key: key.into(), value: value.into() })
    }

    fn get(&self, key: &str) -> Result<Option<Vec<u8>>, BootstrapError> {
        check_key(key)?;
        let mut state = self.state()?;
        if let Some(value) = state.arrivals.answer(key) {
            return Ok(Some(value));
        }
        if state.arrivals.ask(key) {
            // Asked even when a rank is gone: what it put before is still to be had.
            self.say(&mut state, Frame::Get { key: key.into() })?;
            // Where it is known here, it is here.
            return Ok(state.arrivals.answer(key));
        }
        state.arrivals.check_get()?;
        Ok(None)
    }

    fn fence(&self) -> Result<(), BootstrapError> {
        let _turn = self.fence_turn.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.state()?;
        state.arrivals.check_fence()?;
        let number = state.fences + 1;
        state.fences = number;
        self.say(&mut state, Frame::Fence { number })?;
        while !state.arrivals.fence_is_done(number)? {
            drop(state);
            match poll(&mut [PollFd::new(&self.fence_news, PollFlags::IN)], None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(BootstrapError::os("waiting for a fence", errno)),
            }
            state = self.state()?;
        }
        Ok(())
    }

    /// As the trait says; and waits for all ranks below in the tree to finish, who ask through this
    /// one.
    fn finish(&self) -> Result<(), BootstrapError> {
        let mut state = self.state()?;
        // Also when the rank above is gone: those below are to leave in order.
        state.say(Frame::Finished);
        let end = state.arrivals.check_end();
        drop(state);
        self.shared.wake();
        self.shared.wait_until_over();
        end
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.get_news.as_fd())
    }
}

impl Drop for FromEnvironment {
    fn drop(&mut self) {
        if !self.owner.is_here() {
            // The thread is the parent's, and goes on: here is none to wait for, or to detach.
            return std::mem::forget(self.thread.take());
        }
        self.shared.state().stop = true;
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests;
