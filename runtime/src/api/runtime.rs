//! The runtime: a rank of a job, and its resources.

use super::builder::{RuntimeBuilder, transports};
use super::device::DeviceBuilder;
use crate::bootstrap::{InProcess, MpiComm};
use crate::comp::AsCompletion;
use crate::datapath::Device;
use crate::error::{ResourceError, StartError};
use crate::matching::MatchingEngine;
use crate::names::{Rank, RemoteComp};
use crate::peer::PeerState;
use crate::progress::{Core, ProgressThread};
use crate::settings::Settings;
use carrack_transports::contract::{DownCause, Transport};
use carrack_transports::gpu::Driver;
use carrack_transports::mem::{PacketAllocator, PacketPool};
use std::sync::Arc;

/// A rank of a job, and its resources. Clones are handles to the same rank. When the last one is
/// dropped, operations that still wait end with an error, and peers see an orderly end of this
/// rank. A status for which its completion object has no room then is lost.
#[derive(Clone)]
pub struct Runtime(pub(crate) Arc<Core>, pub(super) Option<Arc<ProgressThread>>);

impl Runtime {
    /// Starts a runtime as the environment says: as a rank of the launcher's job, or alone in a job
    /// of one ([`Source`](crate::bootstrap::Source)).
    ///
    /// # Errors
    /// See [`StartError`]. A process that a launcher started as one of several, and that cannot
    /// find its job, is refused, unless `CARRACK_BOOTSTRAP` is `alone`.
    pub fn start() -> Result<Self, StartError> {
        Self::builder().start()
    }

    /// Returns all transports of this build, made with these settings, those included that they
    /// leave out: for programs that list transports.
    pub fn all_transports(settings: &Settings) -> Vec<Box<dyn Transport>> {
        transports(settings, 0)
    }

    /// Starts a runtime with choices of the program's own.
    pub fn builder() -> RuntimeBuilder {
        RuntimeBuilder::default()
    }

    /// Starts a runtime as a rank of an MPI communicator's job, with the environment's settings.
    /// Each rank of the communicator must call it ([`MpiComm::join`]).
    ///
    /// # Errors
    /// [`BootstrapError::Mpi`](crate::bootstrap::BootstrapError::Mpi), and others of
    /// [`StartError`].
    pub fn from_mpi<'a>(comm: impl Into<MpiComm<'a>>) -> Result<Self, StartError> {
        let comm = comm.into();
        let settings = Settings::from_env().inspect_err(|_| comm.decline())?;
        let bootstrap = comm.join(&settings)?;
        Self::builder().settings(settings).bootstrap(Box::new(bootstrap)).start()
    }

    /// Starts a job of `size` ranks in this process, with the environment's settings: for tests,
    /// and for programs with several ranks.
    ///
    /// # Errors
    /// `size` is 0, or a rank cannot start.
    pub fn in_process(size: u32) -> Result<Vec<Self>, StartError> {
        Self::in_process_with(size, &Settings::from_env()?)
    }

    /// Starts a job of `size` ranks in this process, with these settings.
    ///
    /// # Errors
    /// `size` is 0, or a rank cannot start.
    pub fn in_process_with(size: u32, settings: &Settings) -> Result<Vec<Self>, StartError> {
        if size == 0 {
            return Err(StartError::System(
                "a job of 0 ranks was asked for; ask for 1 or more".into(),
            ));
        }
        let job = InProcess::job(size)?;
        job.into_iter()
            .map(|bootstrap| {
                Self::builder().settings(settings.clone()).bootstrap(Box::new(bootstrap)).start()
            })
            .collect()
    }

    /// Returns the number of this rank in the job.
    pub fn rank(&self) -> Rank {
        self.0.rank
    }

    /// Returns the number of ranks in the job.
    pub fn size(&self) -> u32 {
        self.0.size
    }

    /// Returns the local rank: the number of this rank among those of its node, from 0. The ranks
    /// of a node share its resources by it: see
    /// [`Bootstrap::place_on_node`](crate::bootstrap::Bootstrap::place_on_node).
    pub fn place_on_node(&self) -> u32 {
        self.0.bootstrap.place_on_node()
    }

    /// Returns the settings in force.
    pub fn settings(&self) -> &Settings {
        &self.0.settings
    }

    /// Returns the GPU drivers: the caller's own, then the one of the settings.
    pub fn gpu_drivers(&self) -> &[Arc<dyn Driver>] {
        &self.0.drivers
    }

    /// Makes a further device. All ranks must make theirs in the same order.
    ///
    /// Each device needs progress: messages may wait on it. Receives from a peer that has ended in
    /// order, or is lost to the bootstrap, fail only after all devices with a link to it have heard
    /// of the end.
    pub fn device(&self) -> DeviceBuilder<'_> {
        DeviceBuilder { runtime: &self.0, pool: None }
    }

    /// Returns the device that operations use when none is named.
    pub fn default_device(&self) -> &Device {
        self.0.default_device()
    }

    /// Makes a pool of packets over any memory, with the settings' packet size and limit. The
    /// runtime's GPU drivers are asked for the kind of the memory, and must confirm the
    /// allocator's.
    pub fn packet_pool(&self, allocator: Arc<dyn PacketAllocator>) -> PacketPool {
        let (size, limit) = (self.0.settings.packet_size(), self.0.settings.packets_max());
        PacketPool::checked_by(self.0.drivers.clone(), allocator, size, limit)
    }

    /// Makes a further matching engine. All ranks must make theirs in the same order.
    pub fn matching_engine(&self) -> Result<MatchingEngine, ResourceError> {
        self.0.engines.make()
    }

    /// Returns the matching engine that operations use when none is named.
    pub fn default_matching_engine(&self) -> &MatchingEngine {
        self.0.engines.default_engine()
    }

    /// Returns the longest eager message in bytes.
    pub fn max_eager(&self) -> usize {
        self.0.settings.packet_size()
    }

    /// Gives a completion object a name by which other ranks' active messages reach it. The name is
    /// the same on all ranks that register in the same order. Peers may use it once it is
    /// registered, so put a [`barrier`](Self::barrier) in between.
    pub fn register_comp(&self, comp: &impl AsCompletion) -> Result<RemoteComp, ResourceError> {
        self.0.comps.register(comp.as_completion().clone())
    }

    /// Gives a completion object the name that `text` makes, the same on every rank whatever the
    /// order of the calls: [`RemoteComp::named`]. Peers may use it once it is registered.
    ///
    /// # Errors
    /// [`ResourceError::Name`]: an object has that name.
    pub fn register_comp_named(
        &self,
        text: &str,
        comp: &impl AsCompletion,
    ) -> Result<RemoteComp, ResourceError> {
        self.0.comps.register_named(text, comp.as_completion().clone())
    }

    /// Reserves `count` consecutive names, and returns the first. For names that must be known
    /// before their objects are made, or that each rank uses in another order. A reserved name
    /// stays the same: when it is given to another object, messages for the earlier one reach the
    /// later one.
    pub fn reserve_comps(&self, count: u32) -> Result<RemoteComp, ResourceError> {
        self.0.comps.reserve(count)
    }

    /// Gives a completion object a [reserved](Self::reserve_comps) name.
    pub fn register_comp_at(
        &self,
        name: RemoteComp,
        comp: &impl AsCompletion,
    ) -> Result<(), ResourceError> {
        self.0.comps.register_at(name, comp.as_completion().clone())
    }

    /// Takes a name back. Progress reports and drops messages that come for it from now on, even
    /// after other objects have been registered. Messages that wait for room in the object are
    /// delivered when it has room, and dropped with its last handle.
    pub fn deregister_comp(&self, name: RemoteComp) -> Result<(), ResourceError> {
        self.0.comps.deregister(name)
    }

    /// Returns the bytes of memory that is kept for messages that have come before their receives,
    /// and for deliveries that a full completion object holds up: a few bytes in place take some
    /// 128, a message in a packet takes all of the packet. The limit is
    /// `CARRACK_UNEXPECTED`, plus the messages that the links to this rank hold
    /// (`CARRACK_SHM_SLOTS`, `CARRACK_SHM_CHUNKS`, `CARRACK_VERBS_DEPTH`).
    pub fn unexpected_bytes(&self) -> usize {
        self.0.unexpected.bytes()
    }

    /// Returns the reason of a rank's end, if it is gone and all of its messages have been
    /// signaled to its completion objects. From then on no message comes from it. A rank that does
    /// not exist is gone.
    pub fn peer_down(&self, rank: Rank) -> Option<DownCause> {
        let cause = self.0.known_down(rank)?;
        let waits = |device: &Device| device.0.undelivered.has_from(rank);
        // Earlier messages of the rank may still wait for their completion object.
        (!self.0.devices().iter().any(waits)).then_some(cause)
    }

    /// Returns the known state of a rank, from progress or from an operation that failed because
    /// the rank is gone. Messages that it sent before may still come;
    /// [`peer_down`](Self::peer_down) reports its end behind them. A rank that does not exist is
    /// [`Down`](PeerState::Down).
    pub fn peer_state(&self, rank: Rank) -> PeerState {
        match self.0.told_down(rank) {
            Some(cause) => PeerState::Down(cause),
            None if self.0.suspects.has(rank) => PeerState::Suspect,
            None => PeerState::Up,
        }
    }
}

impl Runtime {
    /// Returns a temporary handle.
    pub(crate) fn of(inner: Arc<Core>) -> Self {
        Self(inner, None)
    }
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Runtime({} of {})", self.0.rank, self.0.size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_of_no_rank_is_refused_in_words() {
        let error = Runtime::in_process(0).map(drop).unwrap_err().to_string();
        assert!(error.contains("0 ranks") && error.contains("1 or more"), "{error}");
    }
}
