//! Connections of the TCP transport that break while both processes live: nothing is lost, and
//! nothing comes twice.
//!
//! A relay stands between two devices. It drops what it holds whenever the test cuts it.

use crate::ordeals::soak;
use crate::support::ranks::{Ranks, Role};
use crate::support::relay::Relay;
use crate::support::{LIMIT, amount, pattern, rng};
use carrack::transports::contract::{
    Batch, Device, Domain, Event, Exposed, Header, Identity, Link, Op, OpToken, Payload, PeerId,
    Submit, Transport,
};
use carrack::transports::mem::{Buffer, HostAllocator, MemMut, MemRef, PacketPool, copy::copy_now};
use carrack_transports::internals::tcp::TcpAddress;
use carrack_transports::tcp::{Tcp, TcpOptions};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

/// A rank with one device.
struct Side {
    device: Arc<dyn Device>,
    _domain: Arc<dyn Domain>,
    batch: Batch,
}

impl Side {
    fn new(me: u32) -> Self {
        let transport = Tcp::new(TcpOptions::default());
        let info = transport.devices().unwrap().remove(0);
        let identity = Identity { me: PeerId(me), ranks: 2, secret: [3; 16] };
        let domain = transport.open(&info, identity).unwrap();
        let packets = PacketPool::new(Arc::new(HostAllocator), 8 << 10, 64);
        let device = domain.device(Arc::new(packets)).unwrap();
        Self { device, _domain: domain, batch: Batch::new(32) }
    }

    fn poll(&mut self, mut each: impl FnMut(Event)) {
        self.device
            .poll(&mut self.batch, &mut |batch: &mut Batch| batch.drain().for_each(&mut each));
    }

    fn address(&self) -> TcpAddress {
        TcpAddress::decode(&self.device.address()).unwrap()
    }

    /// Returns a relay to it, and a link over the relay.
    fn link_from(&self, other: &Self, peer: u32) -> (Relay, Arc<dyn Link>) {
        let mut address = self.address();
        let target = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), address.port);
        let relay = Relay::to(target);
        (address.hosts, address.port) = (vec![relay.at.ip()], relay.at.port());
        let link = other.device.connect(&address.encode(), PeerId(peer)).unwrap();
        (relay, link)
    }
}

fn bring_up(links: &[&Arc<dyn Link>], sides: &mut [&mut Side]) {
    while links.iter().any(|link| !link.is_up()) {
        for side in sides.iter_mut() {
            side.poll(|event| assert!(matches!(event, Event::Connected { .. }), "{event:?}"));
        }
    }
}

fn len(number: u64) -> usize {
    [0, 8, 40, 41, 700, 8000][number as usize % 6]
}

/// Messages each way, and puts.
static MESSAGES: LazyLock<u64> = LazyLock::new(|| amount("TEST_CUTS", 30_000, 30_000));
static PUTS: LazyLock<u64> = LazyLock::new(|| 300 + *MESSAGES / 1000);
const PUT: usize = 300_000;

/// Traffic of one way.
struct Traffic {
    link: Arc<dyn Link>,
    /// The other way: its sender exposes what puts go to.
    back: Arc<dyn Link>,
    window: Option<Box<dyn Exposed>>,
    sent: u64,
    arrived: u64,
    puts: u64,
    ended: u64,
}

impl Traffic {
    fn new(link: &Arc<dyn Link>, back: &Arc<dyn Link>) -> Self {
        let (link, back) = (link.clone(), back.clone());
        let mut traffic = Self { link, back, window: None, sent: 0, arrived: 0, puts: 0, ended: 0 };
        traffic.expose(vec![0; PUT].into());
        traffic
    }

    fn expose(&mut self, buffer: Buffer) {
        self.window = Some(self.back.expose(buffer).map_err(|(why, _)| why).unwrap());
    }

    fn has_ended(&self) -> bool {
        self.arrived == *MESSAGES && self.ended == *PUTS
    }

    fn post(&mut self, messages: u64) {
        for _ in 0..messages {
            let bytes = pattern(self.sent, len(self.sent));
            let op = Op::AmCopied { header: Header([self.sent, 0]), bytes: MemRef::host(&bytes) };
            if self.sent < *MESSAGES && self.link.submit(op).unwrap() == Submit::Done {
                self.sent += 1;
            }
        }
        if self.puts == self.ended && self.puts < *PUTS {
            let to = self.window.as_ref().unwrap().place();
            let mut buffer = Buffer::from(pattern(self.puts, PUT));
            let put = Op::Put { to, buffer: &mut buffer, token: OpToken(self.puts) };
            self.puts += u64::from(self.link.submit(put).unwrap() == Submit::Posted);
        }
    }

    /// Takes an event of the receiver.
    fn arrives(&mut self, header: Header, payload: &Payload) {
        assert_eq!(header.0[0], self.arrived);
        let mut bytes = vec![0; payload.len()];
        copy_now(MemMut::host(&mut bytes), payload.view()).unwrap();
        assert_eq!(bytes, pattern(self.arrived, len(self.arrived)));
        self.arrived += 1;
    }

    /// Takes an event of the sender.
    fn ends(&mut self, token: OpToken, buffer: &Buffer) {
        assert_eq!((token, buffer.len()), (OpToken(self.ended), PUT));
        let there = self.window.take().unwrap().take_back();
        assert!(there.as_slice() == buffer.as_slice(), "put {}", self.ended);
        self.expose(there);
        self.ended += 1;
    }
}

fn take(event: Event, leaving: &mut Traffic, coming: &mut Traffic) {
    match event {
        Event::Arrived { header, payload, .. } => coming.arrives(header, &payload),
        Event::Completion { token, outcome, buffer } => {
            outcome.unwrap();
            leaving.ends(token, &buffer);
        }
        Event::Connected { .. } => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn nothing_is_lost_or_doubled_either_way_however_often_connections_are_cut() {
    Ranks::start("cuts::cut", 1, &[rng().random()]).succeed();
}

/// A process of its own, as it measures its memory.
#[test]
fn a_rank_in_its_role() {
    let patience = LIMIT + Duration::from_secs(*MESSAGES / 5000);
    if let Some(role) = Role::of_this_process(patience) {
        cut(role.words[0]);
    }
}

/// Runs traffic over two links, each with a relay. Whichever connection the links share is cut
/// again and again.
fn cut(seed: u64) {
    let mut rng = SmallRng::seed_from_u64(seed);
    let [mut here, mut there] = [0, 1].map(Side::new);
    let (relay, out) = there.link_from(&here, 1);
    let (other_relay, back) = here.link_from(&there, 0);
    bring_up(&[&out, &back], &mut [&mut here, &mut there]);
    let (mut one, mut other) = (Traffic::new(&out, &back), Traffic::new(&back, &out));
    let (mut cuts, mut next_cut, mut next_arrival, mut early) = (0, Instant::now(), 0, 0);
    while !one.has_ended() || !other.has_ended() {
        let arrived = one.arrived + other.arrived;
        if Instant::now() > next_cut && arrived >= next_arrival {
            cuts += 1;
            // One, the other, or both.
            let which = rng.random_range(0..3);
            if which != 1 {
                relay.cut();
            }
            if which != 0 {
                other_relay.cut();
            }
            next_cut = Instant::now() + Duration::from_millis(rng.random_range(1..20));
            // Some come while connections are made; if all did, nothing would ever arrive.
            next_arrival = if rng.random() { arrived + rng.random_range(1..1000) } else { 0 };
        }
        one.post(rng.random_range(0..20));
        other.post(rng.random_range(0..20));
        here.poll(|event| take(event, &mut one, &mut other));
        there.poll(|event| take(event, &mut other, &mut one));
        if early == 0 && one.arrived > *MESSAGES / 10 {
            early = soak::resident();
        }
    }
    assert!(cuts > 10, "{cuts}");
    let late = soak::resident();
    eprintln!("{cuts} cuts; {early} bytes resident, then {late}");
    assert!(late < early + soak::SLACK, "{early} bytes after a tenth, {late} in the end");
}
