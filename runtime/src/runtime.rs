//! The runtime: a rank of a job, and its resources.

use crate::bootstrap::{Alone, Bootstrap, FromEnvironment, FromLauncher, InProcess, launchers};
use crate::chores::{Chores, Waiting};
use crate::collective::Boards;
use crate::comp::{AsCompletion, Registry};
use crate::datapath::{Exposures, Staging, Unmapped, Words};
use crate::deadline::Deadlines;
use crate::device::{Device, DeviceBuilder, DeviceInner};
use crate::error::{OpError, ResourceError, StartError};
use crate::matching::{Engines, MatchingEngine};
use crate::names::{DEFAULT_ENGINE, Rank, RemoteComp};
use crate::op::Ended;
use crate::peer::excess::WaitingOffers;
use crate::peer::hold::Unexpected;
use crate::peer::{Absent, Suspects};
use crate::post::{Retries, end_copies};
use crate::progress::{Complaints, InLine, ProgressThread, drop_told, dump_on_signal, signal};
use crate::region::{Regions, note_runtime};
use crate::settings::{GpuChoice, Settings};
use crate::simulators;
use crate::streams::{Here, Streams};
use carrack_transports::contract::{
    Domain, DownCause, Identity, Locality, PeerId, Transport, Unavailable,
};
use carrack_transports::fork::Owner;
use carrack_transports::gpu::Driver;
use carrack_transports::gpu::cuda::CudaDriver;
use carrack_transports::gpu::none::NoGpu;
use carrack_transports::mem::{Buffer, PacketAllocator, PacketPool};
use carrack_transports::shm::Geometry;
use carrack_transports::signals::Listener;
use carrack_transports::sync::Sleepers;
use carrack_transports::{registry, verbs};
use parking_lot::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

/// A rank of a job, and its resources. Clones are handles to the same one; when the last is
/// dropped, everything that is still waiting ends with an error, and peers see this rank gone in
/// order.
#[derive(Clone)]
pub struct Runtime(pub(crate) Arc<Inner>, Option<Arc<ProgressThread>>);

pub(crate) struct Inner {
    /// Tells runtimes of one process apart.
    pub(crate) id: u64,
    /// The process that started it: a fork has no business here.
    owner: Owner,
    pub(crate) rank: Rank,
    pub(crate) size: u32,
    /// Tells names of this job from those of others.
    pub(crate) job: u64,
    pub(crate) settings: Settings,
    pub(crate) drivers: Vec<Arc<dyn Driver>>,
    pub(crate) domains: Vec<(&'static str, Arc<dyn Domain>)>,
    pub(crate) unavailable: Vec<Unavailable>,
    devices: RwLock<Vec<Device>>,
    /// There are others than the default one.
    has_further_devices: AtomicBool,
    /// Something has made progress: a call of the program's, a thread, or a future.
    is_driven: AtomicBool,
    /// Held while a device is made.
    pub(crate) making_devices: Mutex<()>,
    default_device: std::sync::OnceLock<Device>,
    pub(crate) engines: Engines,
    pub(crate) comps: Registry,
    pub(crate) regions: Arc<Regions>,
    /// The lists below that are not empty.
    pub(crate) chores: Chores,
    pub(crate) deadlines: Deadlines,
    /// Messages that wait for their receives.
    pub(crate) unexpected: Unexpected,
    pub(crate) waiting_offers: WaitingOffers,
    pub(crate) suspects: Suspects,
    pub(crate) absent: Absent,
    /// Futures that have to be polled again.
    pub(crate) retries: Retries,
    /// Errors of progress that no call has returned yet.
    pub(crate) complaints: Complaints,
    /// Hears SIGUSR1.
    _dump: Option<Listener>,
    /// Ranks that are known to be gone.
    down: Waiting<HashMap<Rank, DownCause>>,
    pub(crate) sleepers: Arc<Sleepers>,
    pub(crate) boards: Boards,
    /// GPU memory in which messages lie.
    pub(crate) exposures: Exposures,
    /// The reasons why GPU memory of other ranks was not mapped.
    pub(crate) unmapped: Unmapped,
    /// Host memory on the way to and from GPUs.
    pub(crate) staging: Arc<Staging>,
    /// Words of GPUs that are being changed for peers.
    pub(crate) words: Words,
    /// The words and operations that streams of GPUs wait for.
    pub(crate) streams: Streams,
    /// This rank among those of this process.
    pub(crate) here: Here,
    // Last: whatever else ends may still have something to say to the launcher.
    pub(crate) bootstrap: Box<dyn Bootstrap>,
}

/// Starts a runtime: see [`Runtime::builder`].
#[derive(Default)]
#[must_use = "a builder does nothing until `start` is called"]
pub struct RuntimeBuilder {
    settings: Option<Settings>,
    bootstrap: Option<Box<dyn Bootstrap>>,
    drivers: Vec<Arc<dyn Driver>>,
    transports: Vec<Box<dyn Transport>>,
}

impl RuntimeBuilder {
    /// Sets the settings, in place of those of the environment.
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = Some(settings);
        self
    }

    /// Finds the other ranks through this, and not through the launcher.
    pub fn bootstrap(mut self, bootstrap: Box<dyn Bootstrap>) -> Self {
        self.bootstrap = Some(bootstrap);
        self
    }

    /// Adds a GPU driver of the caller, in addition to those of the settings.
    pub fn gpu_driver(mut self, driver: Arc<dyn Driver>) -> Self {
        self.drivers.push(driver);
        self
    }

    /// Adds a transport of the caller, in place of the build's own of that
    /// [name](Transport::name). The settings decide on its use as for any other; one whose name
    /// they do not know is tried after all others.
    pub fn transport(mut self, transport: Box<dyn Transport>) -> Self {
        self.transports.push(transport);
        self
    }

    /// Starts it.
    pub fn start(self) -> Result<Runtime, StartError> {
        let settings = match self.settings {
            Some(settings) => settings,
            None => Settings::from_env()?,
        };
        let bootstrap: Box<dyn Bootstrap> = match self.bootstrap {
            Some(bootstrap) => bootstrap,
            None => match FromLauncher::from_env()? {
                Some(launcher) => Box::new(launcher),
                None => match FromEnvironment::from_env(&settings)? {
                    Some(tree) => Box::new(tree),
                    None => {
                        launchers::check(&settings)?;
                        Box::new(Alone::new()?)
                    }
                },
            },
        };
        let mut drivers = self.drivers;
        drivers.push(driver(&settings)?);
        if settings.gpu_copier() {
            drivers.iter().for_each(|driver| driver.use_copiers());
        }
        let (rank, size) = (bootstrap.rank(), bootstrap.size());
        let identity =
            Identity { me: PeerId(rank), ranks: size, secret: *bootstrap.job().as_bytes() };
        let place = bootstrap.place_on_node();
        let (mut domains, unavailable) =
            open_transports(&settings, self.transports, &identity, place);
        if domains.is_empty() {
            return Err(StartError::NoTransport(unavailable));
        }
        // A transport within the node tells which peers share its GPUs.
        let is_node = |(_, domain): &(_, Arc<dyn Domain>)| domain.caps().locality == Locality::Node;
        if settings.gpu_ipc().is_allowed() && domains.iter().any(is_node) {
            domains.push(registry::maps_of_gpus(drivers.clone()));
        }
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let sleepers = Sleepers::new().map_err(|error| StartError::System(error.to_string()))?;
        let sleepers = Arc::new(sleepers);
        let chores = Chores::waking(&sleepers);
        let inner = Inner {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            owner: Owner::this_process(),
            rank: Rank(rank),
            size,
            job: bootstrap.job().tag(),
            drivers,
            domains,
            unavailable,
            devices: RwLock::default(),
            has_further_devices: AtomicBool::new(false),
            is_driven: AtomicBool::new(false),
            making_devices: Mutex::new(()),
            default_device: std::sync::OnceLock::new(),
            engines: Engines::new(),
            comps: Registry::new(),
            regions: Arc::new(Regions::new(&chores)),
            deadlines: Deadlines::new(&chores),
            unexpected: Unexpected::new(settings.unexpected(), settings.packet_size()),
            waiting_offers: WaitingOffers::new(settings.offers()),
            suspects: Suspects::new(&chores),
            absent: Absent::new(),
            retries: Retries::new(&chores),
            complaints: Complaints::new(&chores),
            words: Words::new(&chores),
            _dump: dump_on_signal(settings.dump().is_on(), &chores),
            chores,
            settings,
            down: Waiting::new(),
            sleepers,
            exposures: Exposures::default(),
            unmapped: Unmapped::default(),
            staging: Arc::default(),
            streams: Streams::default(),
            here: Here::enter(*bootstrap.job().as_bytes(), Rank(rank)),
            boards: Boards::new(Rank(rank), size),
            bootstrap,
        };
        let mut runtime = Runtime(Arc::new(inner), None);
        note_runtime(&runtime.0);
        let device = runtime.device().build().map_err(|error| match error {
            ResourceError::Device(why) => StartError::NoTransport(why),
            other => StartError::System(other.to_string()),
        })?;
        let _ = runtime.0.default_device.set(device);
        if runtime.0.settings.progress().is_thread() {
            let thread = ProgressThread::start(&runtime.0);
            let thread = thread
                .map_err(|error| StartError::System(format!("no progress thread: {error}")))?;
            runtime.1 = Some(Arc::new(thread));
        }
        Ok(runtime)
    }
}

fn driver(settings: &Settings) -> Result<Arc<dyn Driver>, StartError> {
    Ok(match settings.gpu() {
        GpuChoice::Fake => simulators::gpus(settings.fake_gpus())?,
        GpuChoice::None => Arc::new(NoGpu::because("CARRACK_GPU=none")),
        // Opened by the first question, and never initialised behind the program's back.
        GpuChoice::Auto => Arc::new(CudaDriver::adopt()),
        GpuChoice::Cuda => Arc::new(CudaDriver::initialise()?),
    })
}

type Domains = Vec<(&'static str, Arc<dyn Domain>)>;

fn open_transports(
    settings: &Settings,
    own: Vec<Box<dyn Transport>>,
    identity: &Identity,
    place: u32,
) -> (Domains, Vec<Unavailable>) {
    let mut all = transports(settings, place);
    let mut others = Vec::new();
    for transport in own {
        match all.iter_mut().find(|built| built.name() == transport.name()) {
            Some(built) => *built = transport,
            None => others.push(transport),
        }
    }
    let mut domains = Vec::new();
    let mut unavailable = Vec::new();
    let wanted = |transport: &dyn Transport| {
        settings.transports().iter().position(|choice| choice.name() == transport.name())
    };
    let (mut named, left_out): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|transport| wanted(&**transport).is_some());
    named.sort_by_key(|transport| wanted(&**transport));
    for transport in named.iter().chain(&others) {
        let opened = transport.devices().and_then(|devices| match devices.first() {
            Some(device) => transport.open(device, identity.clone()),
            None => Err(Unavailable::new(transport.name(), "it has no device")),
        });
        match opened {
            Ok(domain) => domains.push((transport.name(), domain)),
            Err(why) => {
                // Most machines have no RDMA device, which is no error.
                if transport.name() == verbs::NAME {
                    tracing::info!(%why, "a transport cannot be used");
                } else {
                    tracing::warn!(%why, "a transport cannot be used");
                }
                unavailable.push(why);
            }
        }
    }
    for transport in &left_out {
        unavailable.push(Unavailable::new(transport.name(), "CARRACK_TRANSPORT leaves it out"));
    }
    (domains, unavailable)
}

/// Returns all transports of this build, for the rank at this place on its node.
fn transports(settings: &Settings, place: u32) -> Vec<Box<dyn Transport>> {
    let fits = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let geometry = Geometry {
        slots: fits(settings.shm_slots()),
        chunks: fits(settings.shm_chunks()),
        chunk_size: fits(settings.packet_size()),
    };
    let verbs = verbs_options(settings, place);
    let kernel_copy = settings.kernel_copy().is_allowed();
    let mut all = registry::all(settings.packet_size(), geometry, kernel_copy, &verbs);
    all.push(Box::new(simulators::nic(verbs)));
    all
}

/// Returns the settings of queue pairs and paths.
fn verbs_options(settings: &Settings, place: u32) -> verbs::Options {
    let byte = |number: usize| u8::try_from(number).unwrap_or(u8::MAX);
    let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let device = settings.verbs_device();
    verbs::Options {
        device: (!device.eq_ignore_ascii_case("auto")).then(|| device.to_owned()),
        place,
        rails: byte(settings.verbs_rails()),
        gid_index: settings.verbs_gid().map(byte),
        traffic_class: byte(settings.verbs_traffic_class()),
        service_level: byte(settings.verbs_service_level()),
        hop_limit: byte(settings.verbs_hop_limit()),
        timeout: byte(settings.verbs_timeout()),
        retries: byte(settings.verbs_retries()),
        send_depth: count(settings.verbs_depth()),
        receives: count(settings.verbs_receives()),
        packet_size: settings.packet_size(),
        on_demand: settings.verbs_odp().is_on(),
        relaxed: settings.verbs_relaxed_ordering().is_on(),
        thread_domains: count(settings.verbs_thread_domains()),
        ..verbs::Options::default()
    }
}

impl Runtime {
    /// Starts a runtime as the environment says: as a rank of the launcher's job, as a rank of the
    /// job that torchrun's variables name ([`FromEnvironment`]), or alone in a job of one.
    ///
    /// # Errors
    /// See [`StartError`]. A process that another launcher started as one of several is refused,
    /// unless `CARRACK_BOOTSTRAP` is `alone` ([`launchers`]).
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

    /// Starts a job of `size` ranks in this process, with the environment's settings: for tests,
    /// and for programs with several ranks.
    pub fn in_process(size: u32) -> Result<Vec<Self>, StartError> {
        Self::in_process_with(size, &Settings::from_env()?)
    }

    /// Starts a job of `size` ranks in this process, with these settings.
    pub fn in_process_with(size: u32, settings: &Settings) -> Result<Vec<Self>, StartError> {
        let job = InProcess::job(size)?;
        job.into_iter()
            .map(|bootstrap| {
                Self::builder().settings(settings.clone()).bootstrap(Box::new(bootstrap)).start()
            })
            .collect()
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.0.rank
    }

    /// Returns the number of ranks in the job.
    pub fn size(&self) -> u32 {
        self.0.size
    }

    /// Returns the local rank: the number of this rank among those of its node, from 0. The ranks
    /// of a node share its resources by it: see [`Bootstrap::place_on_node`].
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
        self.0.engine(DEFAULT_ENGINE)
    }

    /// Returns the longest eager message in bytes.
    pub fn max_eager(&self) -> usize {
        self.0.settings.packet_size()
    }

    /// Gives a completion object a name by which other ranks' active messages reach it. The name is
    /// the same on all ranks that register in the same order; peers may use it once it is
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

    /// Gives a completion object a name that was set aside.
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

    /// Returns the bytes of messages that have come before their receives. The limit is
    /// `CARRACK_UNEXPECTED`, plus the messages that the links to this rank hold
    /// (`CARRACK_SHM_SLOTS`, `CARRACK_SHM_CHUNKS`, `CARRACK_VERBS_DEPTH`).
    pub fn unexpected_bytes(&self) -> usize {
        self.0.unexpected.bytes()
    }

    /// Returns the reason of a rank's end, if it is gone and all of its messages have been
    /// signaled to its completion objects. From then on no message comes from it.
    pub fn peer_down(&self, rank: Rank) -> Option<DownCause> {
        let cause = self.0.down().get(&rank).cloned()?;
        let waits = |device: &Device| {
            let undelivered = &device.0.undelivered;
            !undelivered.is_empty() && undelivered.lock().has_from(rank)
        };
        // Its earlier messages may still wait for their completion object.
        (!self.0.devices().iter().any(waits)).then_some(cause)
    }
}

impl Runtime {
    /// Returns a temporary handle.
    pub(crate) fn of(inner: Arc<Inner>) -> Self {
        Self(inner, None)
    }
}

impl std::fmt::Debug for Runtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Runtime({} of {})", self.0.rank, self.0.size)
    }
}

impl Inner {
    pub(crate) fn devices(&self) -> RwLockReadGuard<'_, Vec<Device>> {
        self.devices.read()
    }

    fn devices_mut(&self) -> RwLockWriteGuard<'_, Vec<Device>> {
        self.devices.write()
    }

    pub(crate) fn add_device(&self, device: Device) {
        let mut devices = self.devices_mut();
        devices.push(device);
        self.has_further_devices.store(devices.len() > 1, Ordering::Release);
    }

    /// Returns `true` if there are devices other than the default one: without the lock, as
    /// progress asks each time.
    #[inline]
    pub(crate) fn has_further_devices(&self) -> bool {
        self.has_further_devices.load(Ordering::Acquire)
    }

    /// Notes that something makes progress.
    #[inline]
    pub(crate) fn note_driven(&self) {
        if !self.is_driven() {
            self.is_driven.store(true, Ordering::Relaxed);
        }
    }

    /// Returns `true` if something has made progress before.
    #[inline]
    pub(crate) fn is_driven(&self) -> bool {
        self.is_driven.load(Ordering::Relaxed)
    }

    pub(crate) fn down(&self) -> MutexGuard<'_, HashMap<Rank, DownCause>> {
        self.down.lock()
    }

    /// Returns `true` if any rank is known to be gone.
    #[inline]
    pub(crate) fn any_down(&self) -> bool {
        !self.down.is_empty()
    }

    /// Notes that a rank is gone, and ends the receives that only it could have answered. Their
    /// completion objects are signalled by the next progress on `device`: this may be called where
    /// they cannot be.
    #[cold]
    pub(crate) fn gone(&self, device: &DeviceInner, rank: Rank, cause: &DownCause) {
        device.tell_later(device.fail_transfers(self, rank, cause));
        device.tell_later(self.note_gone(rank, cause));
    }

    /// Notes that a rank is gone. Returns the receives that only it could have answered.
    pub(crate) fn note_gone(&self, rank: Rank, cause: &DownCause) -> Vec<Ended> {
        let mut down = self.down();
        down.entry(rank).or_insert_with(|| cause.clone());
        self.down.set_count(down.len());
        drop(down);
        // Its other half is in `Engines::begin`.
        fence(Ordering::SeqCst);
        self.boards.wake();
        self.streams.gone(rank, cause);
        let error = || OpError::PeerDown { rank, cause: cause.clone() };
        let devices = self.devices().clone();
        // First those that are not in an engine yet.
        let mut ended: Vec<_> =
            devices.iter().flat_map(|device| device.0.fail_ordered(rank, &error)).collect();
        let receives = self.engines.each().flat_map(|engine| engine.receives_from(rank));
        ended.extend(receives.map(|receive| receive.into_status(error())));
        ended
    }

    #[inline]
    pub(crate) fn default_device(&self) -> &Device {
        // Set before `start` gives the runtime to anybody.
        match self.default_device.get() {
            Some(device) => device,
            None => unreachable!("a runtime is handed out with its default device"),
        }
    }

    pub(crate) fn engine(&self, index: u16) -> &MatchingEngine {
        match self.engines.get(index) {
            Some(engine) => engine,
            None => unreachable!("engines 0 and 1 are within the limit"),
        }
    }

    /// Returns `true` in a process other than the one that started the runtime.
    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        !self.owner.is_here()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if self.is_forked() {
            return;
        }
        self.exposures.end();
        self.complaints.end();
        // First: copies on streams end only when these go on.
        self.streams.end();
        let devices = std::mem::take(&mut *self.devices_mut());
        let (mut ended, mut copies) = (Vec::new(), Vec::new());
        for device in &devices {
            ended.extend(device.0.close());
            let (ordered, on_streams) = device.0.end_ordered();
            ended.extend(ordered);
            copies.extend(on_streams);
            let undelivered = std::mem::take(&mut *device.0.undelivered.lock());
            ended.extend(undelivered.into_statuses());
            ended.extend(device.0.close_transfers(self));
            ended.extend(
                device
                    .0
                    .outstanding
                    .drain()
                    .into_iter()
                    .map(|on_link| on_link.op.end(Buffer::Empty, Some(OpError::Closed))),
            );
            ended.extend(
                device
                    .0
                    .landing
                    .lock()
                    .drain(..)
                    .map(|landing| landing.into_status(OpError::Closed)),
            );
            ended.extend(device.0.line.lock().drain(..).map(InLine::close));
        }
        for engine in self.engines.each() {
            ended.extend(
                engine
                    .all_receives()
                    .into_iter()
                    .map(|receive| receive.into_status(OpError::Closed)),
            );
        }
        for (comp, status) in ended {
            // A full object cannot be waited for any more.
            let _ = signal(comp.as_ref(), status);
        }
        // Last: the words that these streams wait for are released now.
        end_copies(copies);
        drop_told();
        // A rank that unwinds has not ended in order, and the launcher is right to say so.
        if !std::thread::panicking()
            && let Err(error) = self.bootstrap.finish()
        {
            tracing::debug!(%error, "the launcher did not hear that this rank has finished");
        }
    }
}
