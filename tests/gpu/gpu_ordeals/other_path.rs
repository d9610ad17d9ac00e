//! GPU memory of a node's ranks is mapped whatever path their messages take.

use crate::support::gpu_ranks::{Gpus, Kind, holds};
use crate::support::sink::Sink;
use crate::support::{Job, OverLoopback, OverShm, Watchdog, built, connect, unstarted};
use carrack::settings::SettingsBuilder;
use carrack::transports::contract::{
    AddressBlob, Armed, Batch, Caps, Cost, Device, DeviceInfo, Domain, Identity, Link, Locality,
    Matcher, PeerId, Polled, Reach, SubmitError, Transport, Unavailable,
};
use carrack::transports::mem::PacketSource;
use carrack::{Rank, Runtime, Tag};
use carrack_simulators::gpu::FakeConfig;
use carrack_transports::shm::{Geometry, Shm};
use std::sync::Arc;
use std::time::Duration;

const NAME: &str = "far";

/// Shared memory under another name, as a transport between nodes that is the cheapest path.
struct Far(Shm);

struct FarDomain {
    inner: Arc<dyn Domain>,
    caps: Caps,
}

struct FarDevice(Arc<dyn Device>);

impl Transport for Far {
    fn name(&self) -> &'static str {
        NAME
    }

    fn devices(&self) -> Result<Vec<DeviceInfo>, Unavailable> {
        self.0.devices()
    }

    fn open(
        &self,
        device: &DeviceInfo,
        identity: Identity,
    ) -> Result<Arc<dyn Domain>, Unavailable> {
        let inner = self.0.open(device, identity)?;
        let caps = Caps { locality: Locality::Network, ..inner.caps().clone() };
        Ok(Arc::new(FarDomain { inner, caps }))
    }
}

impl Domain for FarDomain {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn device(&self, packets: Arc<dyn PacketSource>) -> Result<Arc<dyn Device>, Unavailable> {
        Ok(Arc::new(FarDevice(self.inner.device(packets)?)))
    }
}

impl Device for FarDevice {
    fn address(&self) -> AddressBlob {
        self.0.address()
    }

    fn reach(&self, to: &AddressBlob) -> Reach {
        match self.0.reach(to) {
            Reach::Yes(_) => Reach::Yes(Cost { latency_ns: 1 }),
            refused => refused,
        }
    }

    fn connect(&self, to: &AddressBlob, peer: PeerId) -> Result<Arc<dyn Link>, SubmitError> {
        self.0.connect(to, peer)
    }

    fn poll(&self, batch: &mut Batch, matcher: &mut dyn Matcher) -> Polled {
        self.0.poll(batch, matcher)
    }

    fn arm(&self) -> Armed<'_> {
        self.0.arm()
    }

    fn disarm(&self, is_told: bool) {
        self.0.disarm(is_told);
    }

    fn revoke(&self, peer: PeerId) -> bool {
        self.0.revoke(peer)
    }

    fn close(&self) {
        self.0.close();
    }
}

fn ranks(gpus: &Gpus, settings: SettingsBuilder) -> Vec<Runtime> {
    let geometry = Geometry { slots: 256, chunks: 16, chunk_size: 8192 };
    let start = |bootstrap| {
        let far = Box::new(Far(Shm::new(geometry)));
        let builder = Runtime::builder().settings(built(settings.clone())).transport(far);
        builder.bootstrap(Box::new(bootstrap)).gpu_driver(gpus.driver.clone()).start().unwrap()
    };
    let ranks: Vec<_> = unstarted(2).into_iter().map(start).collect();
    connect(&ranks);
    ranks
}

#[test]
fn messages_between_gpus_of_a_node_are_fetched_by_the_receiver_over_any_transport() {
    let _watchdog = Watchdog::over("another path within the node");
    let gpus = Gpus::of(FakeConfig::devices(1));
    for (settings, is_mapped) in [(OverShm::settings(), true), (OverLoopback::settings(), false)] {
        let ranks = ranks(&gpus, settings);
        let explained = ranks[0].explain(Duration::from_secs(10));
        let peer = explained.iter().find(|peer| peer.rank == Rank(1)).unwrap();
        assert_eq!(peer.chosen(), Some(NAME));
        let way = peer.kinds.iter().find(|kind| kind.memory.starts_with("device 0")).unwrap();
        let is_fetched = way.way.contains("fetched by the receiver's copy engine");
        assert_eq!(is_fetched, is_mapped, "{way:?}");
        let (left, came) = (Sink::keeping(), Sink::keeping());
        let (source, target) = (Kind::Plain(0).full(&gpus, 100_000, 3), Kind::Plain(0));
        let target = target.empty(&gpus, 100_000);
        ranks[1].post_recv(Rank(0), target, Tag(1)).comp(&came).submit().unwrap();
        ranks[0].post_send(Rank(1), source, Tag(1)).comp(&left).submit().unwrap();
        holds(&came.one(&ranks).buffer, 100_000, 3);
        holds(&left.one(&ranks).buffer, 100_000, 3);
    }
}
