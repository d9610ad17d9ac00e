//! Two ranks in this process, each with a simulated GPU and a simulated NIC of its own, on a
//! network of theirs.

use crate::support::guard::Guarded;
use crate::support::sink::Sink;
use crate::support::{Job, OverSimulatedNic, built, connect, settle};
use carrack::bootstrap::InProcess;
use carrack::region::{Mr, Region};
use carrack::transports::gpu::{Driver, Flavour, Gpu};
use carrack::{OpError, Rank, RemoteKey, Runtime, Tag};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use carrack_simulators::nic::{Config, SimulatedNic};
use carrack_transports::verbs::VerbsOptions;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Place of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    Host,
    Gpu,
}

impl Place {
    pub(crate) const PAIRS: [(Self, Self); 4] = [
        (Self::Host, Self::Gpu),
        (Self::Gpu, Self::Host),
        (Self::Gpu, Self::Gpu),
        (Self::Host, Self::Host),
    ];
}

pub(crate) struct GpuFixture {
    pub(crate) ranks: Vec<Runtime>,
    pub(crate) drivers: Vec<FakeDriver>,
    pub(crate) nics: Vec<Arc<SimulatedNic>>,
    registered: Mutex<Vec<(Rank, Mr, Vec<u8>)>>,
}

impl GpuFixture {
    /// Creates a fixture whose NICs take dma-bufs, and no address of a GPU.
    pub(crate) fn new() -> Self {
        Self::with(false)
    }

    /// Creates two ranks. With `addresses`, the NICs also access a GPU's memory by its address.
    pub(crate) fn with(addresses: bool) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let fabric =
            format!("gpus {} {}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let drivers: Vec<_> = [11, 12]
            .map(|seed| FakeDriver::new(FakeConfig { seed, ..FakeConfig::default() }).unwrap())
            .into();
        let nic = |driver: &FakeDriver| {
            let gpus: Vec<Arc<dyn Driver>> =
                if addresses { vec![Arc::new(driver.clone())] } else { Vec::new() };
            Arc::new(
                SimulatedNic::new(Config {
                    fabric: Some(fabric.clone()),
                    gpus,
                    ..Config::default()
                })
                .unwrap(),
            )
        };
        let nics: Vec<_> = drivers.iter().map(nic).collect();
        for (driver, nic) in drivers.iter().zip(&nics) {
            let nic = Arc::downgrade(nic);
            driver.when_flushed(move || {
                if let Some(nic) = nic.upgrade() {
                    nic.flush();
                }
            });
        }
        let settings = built(OverSimulatedNic::settings());
        let start = |at: usize, bootstrap: InProcess| {
            let options =
                VerbsOptions { packet_size: settings.packet_size(), ..VerbsOptions::default() };
            let builder =
                Runtime::builder().settings(settings.clone()).bootstrap(Box::new(bootstrap));
            let builder = builder.gpu_driver(Arc::new(drivers[at].clone()));
            builder.transport(Box::new(nics[at].transport(options))).start().unwrap()
        };
        let job = InProcess::job(2).unwrap().into_iter().enumerate();
        let ranks: Vec<_> = job.map(|(at, bootstrap)| start(at, bootstrap)).collect();
        connect(&ranks);
        Self { ranks, drivers, nics, registered: Mutex::default() }
    }

    /// Copies that engines have begun, on either side.
    pub(crate) fn copies(&self) -> u64 {
        self.drivers.iter().map(|driver| driver.counters().copies).sum()
    }

    /// Flushes that a rank's GPU was asked for.
    pub(crate) fn flushes(&self, rank: usize) -> u64 {
        self.drivers[rank].counters().flushes
    }

    fn region(&self, rank: usize, place: Place, len: usize) -> Region {
        match place {
            Place::Host => Region::host(len),
            Place::Gpu => self.drivers[rank].gpu(0).unwrap().allocate(len, Flavour::Plain).unwrap(),
        }
    }

    /// Returns memory of a rank's, poisoned and guarded, at an odd place of its allocation.
    pub(crate) fn empty(&self, rank: usize, place: Place, len: usize) -> Guarded {
        let whole = self.region(rank, place, Guarded::room(len) + 13);
        Guarded::within(whole.subregion(13, Guarded::room(len)).unwrap(), len, len as u64)
    }

    /// Returns memory like `empty`, filled.
    pub(crate) fn full(&self, rank: usize, place: Place, bytes: &[u8]) -> Guarded {
        self.empty(rank, place, bytes.len()).filled(bytes)
    }

    /// Registers memory of the second rank's for the first, and returns the name of what the guards
    /// are around. The first rank's NIC knows where it is, or will never know.
    pub(crate) fn known(&self, guarded: &Guarded) -> RemoteKey {
        let slice = guarded.slice();
        let mr = self.ranks[1].register_memory(slice.region()).unwrap();
        let rmr = mr.remote_key();
        let rmr = rmr.slice(slice.offset() as u64, slice.len() as u64).unwrap();
        self.registered.lock().push((Rank(1), mr, rmr.to_bytes()));
        // The first operation asks where it is.
        let before = guarded.slice().to_vec().unwrap();
        let sink = Sink::keeping();
        let mut get = self.ranks[0].post_get(Rank(1), vec![0; 1], &rmr, 0).comp(&sink);
        get.submit().unwrap();
        assert_eq!(sink.one(&self.ranks).buffer.to_vec().unwrap(), before[..1]);
        settle(&self.ranks);
        rmr
    }

    /// Ends a registration, and lets that be known.
    pub(crate) fn withdraw(&self, rmr: &RemoteKey) {
        let mut registered = self.registered.lock();
        let at = registered.iter().position(|(_, _, name)| *name == rmr.to_bytes()).unwrap();
        let (rank, mr, _) = registered.swap_remove(at);
        self.ranks[rank.0 as usize].deregister_memory(mr);
        settle(&self.ranks);
    }

    /// Puts all of it, as the first rank.
    pub(crate) fn try_put(&self, source: &Guarded, rmr: &RemoteKey) -> Result<(), String> {
        let sink = Sink::keeping();
        let mut put = self.ranks[0].post_put(Rank(1), source.slice(), rmr, 0).comp(&sink);
        put.submit().map_err(|error| error.to_string())?;
        let status = sink.one(&self.ranks);
        status.error.map_or(Ok(()), |error| Err(error.to_string()))
    }

    #[track_caller]
    pub(crate) fn put(&self, source: &Guarded, rmr: &RemoteKey) {
        self.try_put(source, rmr).expect("a put");
    }

    /// Gets all of it, as the first rank.
    #[track_caller]
    pub(crate) fn get(&self, target: &Guarded, rmr: &RemoteKey) {
        let sink = Sink::keeping();
        let mut get = self.ranks[0].post_get(Rank(1), target.slice(), rmr, 0).comp(&sink);
        get.submit().unwrap();
        let status = sink.one(&self.ranks);
        assert!(status.error.is_none(), "{status:?}");
    }

    /// Sends from one rank to another, and waits for both ends.
    #[track_caller]
    pub(crate) fn send(&self, (from, source): (usize, &Guarded), (to, target): (usize, &Guarded)) {
        assert_eq!(self.try_send((from, source), (to, target)), None);
    }

    /// Sends like `send`, and returns the receiver's error.
    pub(crate) fn try_send(
        &self,
        (from, source): (usize, &Guarded),
        (to, target): (usize, &Guarded),
    ) -> Option<String> {
        let rank = |at: usize| Rank(u32::try_from(at).unwrap());
        let (left, came) = (Sink::keeping(), Sink::keeping());
        let recv = self.ranks[to].post_recv(rank(from), target.slice(), Tag(5));
        recv.comp(&came).submit().unwrap();
        let send = self.ranks[from].post_send(rank(to), source.slice(), Tag(5));
        let mut send = send.comp(&left);
        send.submit().unwrap();
        let (left, came) = (left.one(&self.ranks), came.one(&self.ranks));
        assert!(left.error.is_none(), "{left:?}");
        came.error.map(|error: Box<OpError>| error.to_string())
    }

    /// Returns the path from one rank's GPU to the other rank, and the reason why no other is
    /// taken.
    pub(crate) fn explained(&self, from: usize) -> (String, Option<String>) {
        let paths = self.ranks[from].explain(Duration::from_secs(10)).swap_remove(1 - from);
        let gpu = paths.kinds.into_iter().find(|kind| kind.memory.starts_with("device 0"));
        let gpu = gpu.expect("memory of the GPU is spoken of");
        (gpu.way, gpu.why)
    }
}
