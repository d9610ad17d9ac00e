//! The start of a runtime.

use super::Runtime;
use super::invalidate::note_runtime;
use crate::bootstrap::{Bootstrap, Source};
use crate::chores::Chores;
use crate::datapath::Carrier;
use crate::deadline::Deadlines;
use crate::error::{ResourceError, StartError};
use crate::local::{Domains, Here, Local};
use crate::names::Rank;
use crate::progress::{Core, ProgressThread};
use crate::settings::{GpuChoice, ProgressChoice, Settings};
use crate::simulators;
use carrack_transports::contract::{Domain, Identity, Locality, PeerId, Transport, Unavailable};
use carrack_transports::fork::Owner;
use carrack_transports::gpu::Driver;
use carrack_transports::gpu::cuda::CudaDriver;
use carrack_transports::gpu::none::NoGpu;
use carrack_transports::registry;
use carrack_transports::sync::Sleepers;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Builder of a runtime: see [`Runtime::builder`].
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

    /// Sets the bootstrap that finds the other ranks, in place of the launcher's.
    pub fn bootstrap(mut self, bootstrap: Box<dyn Bootstrap>) -> Self {
        self.bootstrap = Some(bootstrap);
        self
    }

    /// Adds a GPU driver of the caller, in addition to those of the settings.
    pub fn gpu_driver(mut self, driver: Arc<dyn Driver>) -> Self {
        self.drivers.push(driver);
        self
    }

    /// Adds a transport of the caller, in place of the build's own of that [name](Transport::name).
    /// The settings decide on its use as for any other transport; one whose name they do not know
    /// is tried last.
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
            None => Source::find(&settings)?.join(&settings)?,
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
        let maps = registry::maps_of_gpus(settings.of_transports(), drivers.clone());
        let maps_nothing = maps.map(|maps| {
            if domains.iter().any(is_node) {
                domains.push(maps);
            }
        });
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let sleepers = Sleepers::new().map_err(|error| {
            StartError::System(format!(
                "no eventfd: {error}; raise the limit on open files (`ulimit -n`)"
            ))
        })?;
        let sleepers = Arc::new(sleepers);
        let chores = Chores::waking(&sleepers);
        let local = Local {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            owner: Owner::this_process(),
            rank: Rank(rank),
            size,
            job: bootstrap.job().tag(),
            drivers,
            domains,
            unavailable,
            maps_nothing: maps_nothing.err(),
            deadlines: Deadlines::new(&chores),
            chores,
            settings,
            sleepers,
            here: Here::enter(*bootstrap.job().as_bytes(), Rank(rank)),
            bootstrap,
        };
        let core = Core::new(Carrier::new(local));
        let mut runtime = Runtime(Arc::new(core), None);
        note_runtime(&runtime.0);
        let device = runtime.device().build().map_err(|error| match error {
            ResourceError::Device(why) => StartError::NoTransport(why),
            other => StartError::System(other.to_string()),
        })?;
        runtime.0.set_default_device(device);
        if runtime.0.settings.progress() == ProgressChoice::Thread {
            let thread = ProgressThread::start(&runtime.0);
            let thread = thread.map_err(|error| {
                StartError::System(format!(
                    "no progress thread: {error}; raise the limit on processes (`ulimit -u`)"
                ))
            })?;
            runtime.1 = Some(Arc::new(thread));
        }
        runtime.0.note_started();
        Ok(runtime)
    }
}

fn driver(settings: &Settings) -> Result<Arc<dyn Driver>, StartError> {
    Ok(match settings.gpu() {
        GpuChoice::Fake => simulators::gpus(settings.fake_gpus())?,
        GpuChoice::None => Arc::new(NoGpu::because("CARRACK_GPU=none")),
        // The first query opens the library. Only the program initialises CUDA.
        GpuChoice::Auto => Arc::new(CudaDriver::adopt()),
        GpuChoice::Cuda => Arc::new(CudaDriver::initialise()?),
    })
}

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
            None => Err(Unavailable::new(
                transport.name(),
                "it found no device; name another in CARRACK_TRANSPORT",
            )),
        });
        match opened {
            Ok(domain) => domains.push((transport.name(), domain)),
            Err(why) => {
                if transport.needs_a_device() {
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
pub(super) fn transports(settings: &Settings, place: u32) -> Vec<Box<dyn Transport>> {
    let of_transports = settings.of_transports();
    registry::all(of_transports, settings.packet_size(), place, simulators::nic)
}
