//! GPUs under tests of several ranks: simulated ones, or real ones with `TEST_GPU=cuda`. Memory of
//! all kinds, and operations on memory of another rank, with the path that they took.

pub use super::gpus::are_real;
use super::ranks::Role;
pub use super::words::filled;
use super::words::wrong;
use super::{Job, OverShm, built};
use carrack::region::{Mr, Region};
use carrack::settings::SettingsBuilder;
use carrack::transports::gpu::cuda::CudaDriver;
use carrack::transports::gpu::{Driver, Flavour, Gpu};
use carrack::{Buffer, PostError, Rank, RemoteKey, Runtime, Status, Synchronizer, Tag};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use std::sync::Arc;
use std::time::Duration;

/// Longest wait of a rank.
pub const PATIENCE: Duration = Duration::from_secs(100);

/// Returns `true` if there are `devices` devices, and else prints the skipped test. Simulated
/// drivers have two.
pub fn enough_for(what: &str, devices: usize) -> bool {
    let found = if are_real() { Gpus::here().all.len() } else { 2 };
    if found < devices {
        println!("skipped: {what}: it needs {devices} devices, and there are {found}");
    }
    found >= devices
}

/// Returns `true` if faults can be injected, which only simulated devices allow.
pub fn can_order(what: &str) -> bool {
    if are_real() {
        println!("skipped: {what}: real devices fail as they like");
    }
    !are_real()
}

/// The devices that this process can see.
pub struct Gpus {
    pub driver: Arc<dyn Driver>,
    /// The same driver, if it is simulated.
    pub fake: Option<FakeDriver>,
    pub all: Vec<Arc<dyn Gpu>>,
}

impl Gpus {
    pub fn here() -> Self {
        Self::of(FakeConfig::devices(2))
    }

    /// Starts a driver under a mask, which a driver of real devices reads itself from
    /// `CUDA_VISIBLE_DEVICES`.
    pub fn under(mask: &str) -> Self {
        let visible = mask.split(',').map(|device| device.parse().unwrap()).collect();
        Self::of(FakeConfig { visible: Some(visible), ..FakeConfig::devices(2) })
    }

    /// Starts a driver: simulated as the configuration says, or real.
    pub fn of(config: FakeConfig) -> Self {
        let fake = (!are_real()).then(|| FakeDriver::new(config).unwrap());
        let driver: Arc<dyn Driver> = match &fake {
            Some(fake) => Arc::new(fake.clone()),
            None => Arc::new(CudaDriver::initialise().unwrap()),
        };
        let all = driver.devices().unwrap();
        Self { driver, fake, all }
    }

    /// Starts a rank between processes, whose driver this is.
    pub fn runtime(&self, role: &Role) -> Runtime {
        self.rank(OverShm::settings(), Box::new(role.bootstrap()))
    }

    /// Starts a rank of any job.
    pub fn rank(
        &self,
        settings: SettingsBuilder,
        bootstrap: Box<dyn carrack::bootstrap::Bootstrap>,
    ) -> Runtime {
        let builder = Runtime::builder().settings(built(settings)).bootstrap(bootstrap);
        builder.gpu_driver(self.driver.clone()).start().unwrap()
    }

    pub fn plain(&self, len: usize) -> Region {
        Kind::Plain(0).region(self, len)
    }

    /// Returns `true` if a region's memory still exists. Its address may belong to other memory
    /// now.
    pub fn has(&self, (addr, id): (usize, carrack::transports::mem::AllocId)) -> bool {
        self.driver.buffer_id(addr).unwrap() == Some(id)
    }
}

/// A kind of memory, and which device's; devices that are not there are the last one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Host,
    Pinned,
    Plain(usize),
    Shareable(usize),
    Pooled(usize),
}

impl Kind {
    /// All kinds, on the first device and on the last.
    pub const ALL: [Self; 8] = [
        Self::Host,
        Self::Pinned,
        Self::Plain(0),
        Self::Shareable(0),
        Self::Pooled(0),
        Self::Plain(1),
        Self::Shareable(1),
        Self::Pooled(1),
    ];

    pub fn region(self, gpus: &Gpus, len: usize) -> Region {
        let (at, flavour) = match self {
            Self::Host => return Region::host(len),
            Self::Pinned => (0, Flavour::Pinned),
            Self::Plain(at) => (at, Flavour::Plain),
            Self::Shareable(at) => (at, Flavour::Shareable),
            Self::Pooled(at) => (at, Flavour::Pooled),
        };
        gpus.all[at.min(gpus.all.len() - 1)].allocate(len, flavour).unwrap()
    }

    /// Returns memory of exactly that length, at an odd place of its region.
    pub fn empty(self, gpus: &Gpus, len: usize) -> Buffer {
        self.region(gpus, len + 13).slice(13, len).unwrap().into()
    }

    /// Returns memory like [`Self::empty`], filled.
    pub fn full(self, gpus: &Gpus, len: usize, salt: u64) -> Buffer {
        let slice = self.region(gpus, len + 7).slice(7, len).unwrap();
        slice.write(&filled(len, salt)).unwrap();
        slice.into()
    }

    /// Returns `true` if other processes can map it. Memory of a pool ends with its owner.
    pub fn is_mapped(self) -> bool {
        matches!(self, Self::Plain(_) | Self::Shareable(_))
    }
}

#[track_caller]
pub fn holds(buffer: &Buffer, len: usize, salt: u64) {
    let bytes = buffer.to_vec().unwrap();
    assert_eq!(wrong(&bytes[..len], salt, 0), None, "{len} B");
}

/// Submits an operation and waits for its end.
pub fn completed(
    runtime: &Runtime,
    submit: impl FnOnce(&Synchronizer) -> Result<(), PostError>,
) -> Result<Status, PostError> {
    let done = Synchronizer::new(1);
    submit(&done)?;
    runtime.wait_for(PATIENCE, || done.test()).expect("it comes to an end");
    Ok(done.take().unwrap().remove(0))
}

/// Sends, and waits until the buffer is free.
pub fn send(
    runtime: &Runtime,
    to: Rank,
    buffer: impl Into<Buffer>,
    tag: Tag,
) -> Result<Status, PostError> {
    completed(runtime, |done| runtime.post_send(to, buffer.into(), tag).comp(done).submit())
}

/// Receives, and waits for the message.
pub fn receive(
    runtime: &Runtime,
    from: Rank,
    buffer: impl Into<Buffer>,
    tag: Tag,
) -> Result<Status, PostError> {
    completed(runtime, |done| runtime.post_recv(from, buffer, tag).comp(done).submit())
}

/// Path of an operation on another rank's memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Went {
    /// By this rank's copy engine, in memory that it has mapped.
    Mapped,
    /// By its owner, and why.
    ByOwner(String),
}

impl Went {
    /// Returns the reason why the memory was not mapped.
    pub fn why(&self) -> &str {
        match self {
            Self::Mapped => "",
            Self::ByOwner(why) => why,
        }
    }
}

/// Puts a buffer, by the engine where that is possible.
pub fn put(runtime: &Runtime, make: impl Fn() -> Buffer, rmr: &RemoteKey, at: u64) -> Went {
    let call = |path: Option<&'static str>| {
        completed(runtime, |done| {
            let mut post = runtime.post_put(rmr.owner(), make(), rmr, at).comp(done);
            if let Some(path) = path {
                post = post.require(path);
            }
            post.submit()
        })
    };
    went(call).0
}

/// Gets bytes, by the engine where that is possible. What has come is in the buffer.
pub fn get(
    runtime: &Runtime,
    make: impl Fn() -> Buffer,
    rmr: &RemoteKey,
    at: u64,
) -> (Went, Buffer) {
    let call = |path: Option<&'static str>| {
        completed(runtime, |done| {
            let mut post = runtime.post_get(rmr.owner(), make(), rmr, at).comp(done);
            if let Some(path) = path {
                post = post.require(path);
            }
            post.submit()
        })
    };
    went(call)
}

/// Tries the copy engine first, and then any path.
fn went(call: impl Fn(Option<&'static str>) -> Result<Status, PostError>) -> (Went, Buffer) {
    let why = match call(Some(carrack_transports::cuda_ipc::NAME)) {
        Ok(status) => return (Went::Mapped, status.ok().expect("it is mapped").buffer),
        Err(PostError::Path { required: "cuda_ipc", why, .. }) => why,
        Err(error) => panic!("{error}"),
    };
    assert!(!why.is_empty(), "a way that is not taken is not taken for a reason");
    match call(None).map(Status::ok) {
        Ok(Ok(status)) => (Went::ByOwner(why), status.buffer),
        Ok(Err(error)) => panic!("{error}"),
        Err(error) => panic!("{error}"),
    }
}

/// Polls until a rank has said something. No event announces that.
pub fn heard(role: &Role, runtime: &Runtime, what: &str, by: u32) {
    while !role.has_said(what, by) {
        runtime.progress().unwrap();
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Registers memory, and tells the others of it.
pub fn registered(role: &Role, runtime: &Runtime, what: &str, region: &Region) -> Mr {
    let mr = runtime.register_memory(region).unwrap();
    role.tells(what, &mr.remote_key().to_bytes());
    mr
}

/// Returns the memory of which a rank tells.
pub fn told(role: &Role, what: &str, by: u32) -> RemoteKey {
    RemoteKey::from_bytes(&role.told(what, by)).unwrap()
}
