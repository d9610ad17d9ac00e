//! Connections of the TCP transport that break while both processes live: nothing is lost, and
//! nothing comes twice.
//!
//! A relay stands between two devices. It drops what it holds whenever the test cuts it.

use crate::support::{Watchdog, pattern, rng};
use carrack::transports::contract::{
    Batch, Device, Domain, Event, Header, Identity, Link, Op, OpToken, PeerId, Submit, Transport,
};
use carrack::transports::mem::{Buffer, HostAllocator, MemMut, MemRef, PacketPool, copy::copy_now};
use carrack::transports::tcp::address::Address;
use carrack::transports::tcp::{Options, Tcp};
use rand::Rng;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Forwards connections until they are cut.
struct Relay {
    at: SocketAddr,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let open = Arc::new(Mutex::new(Vec::new()));
        let all = open.clone();
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect(target) else { continue };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || forward(from, to));
                }
                all.lock().unwrap().extend([near, far]);
            }
        });
        Self { at, open }
    }

    /// Ends all connections.
    fn cut(&self) {
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream) {
    let mut bytes = [0; 3000];
    while let Ok(len @ 1..) = from.read(&mut bytes) {
        if to.write_all(&bytes[..len]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// A rank with one device.
struct Side {
    device: Arc<dyn Device>,
    _domain: Arc<dyn Domain>,
    batch: Batch,
}

impl Side {
    fn new(me: u32) -> Self {
        let transport = Tcp::new(Options::default());
        let info = transport.devices().unwrap().remove(0);
        let identity = Identity { me: PeerId(me), ranks: 2, secret: [3; 16] };
        let domain = transport.open(&info, identity).unwrap();
        let packets = PacketPool::new(Arc::new(HostAllocator), 8 << 10, 64);
        let device = domain.device(Arc::new(packets)).unwrap();
        Self { device, _domain: domain, batch: Batch::new(32) }
    }

    fn poll(&mut self, mut each: impl FnMut(Event)) {
        self.device.poll(&mut self.batch, &mut |batch| batch.drain().for_each(&mut each));
    }

    fn address(&self) -> Address {
        Address::decode(&self.device.address()).unwrap()
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

#[test]
fn nothing_is_lost_or_doubled_however_often_the_connection_is_cut() {
    const MESSAGES: u64 = 30_000;
    const PUTS: u64 = 300;
    const PUT: usize = 300_000;
    let _watchdog = Watchdog::over("cuts");
    let mut rng = rng();
    let [mut here, mut there] = [0, 1].map(Side::new);
    let (relay, out) = there.link_from(&here, 1);
    let (_, back) = here.link_from(&there, 0);
    bring_up(&[&out, &back], &mut [&mut here, &mut there]);
    let mut window = Some(back.expose(vec![0; PUT].into()).map_err(|(why, _)| why).unwrap());
    let (mut sent, mut arrived, mut puts, mut ended, mut cuts) = (0, 0, 0, 0, 0);
    let mut next_cut = Instant::now();
    while arrived < MESSAGES || ended < PUTS {
        if Instant::now() > next_cut {
            cuts += 1;
            relay.cut();
            next_cut = Instant::now() + Duration::from_millis(rng.random_range(1..20));
        }
        for _ in 0..rng.random_range(0..20) {
            let (header, bytes) = (Header([sent, 0]), pattern(sent, len(sent)));
            let op = Op::AmCopied { header, bytes: MemRef::host(&bytes) };
            if sent < MESSAGES && out.submit(op).unwrap() == Submit::Done {
                sent += 1;
            }
        }
        if puts == ended && puts < PUTS {
            let to = window.as_ref().unwrap().place();
            let mut buffer = Buffer::from(pattern(puts, PUT));
            let put = Op::Put { to, buffer: &mut buffer, token: OpToken(puts) };
            puts += u64::from(out.submit(put).unwrap() == Submit::Posted);
        }
        here.poll(|event| match event {
            Event::Completion { token, outcome, buffer } => {
                outcome.unwrap();
                assert_eq!((token, buffer.len()), (OpToken(ended), PUT));
                let there = window.take().unwrap().take_back();
                assert!(there.as_slice() == buffer.as_slice(), "put {ended}");
                window = Some(back.expose(there).map_err(|(why, _)| why).unwrap());
                ended += 1;
            }
            Event::Connected { .. } => {}
            other => panic!("{other:?}"),
        });
        there.poll(|event| match event {
            Event::Arrived { header, payload, .. } => {
                assert_eq!(header.0[0], arrived);
                let mut bytes = vec![0; payload.len()];
                copy_now(MemMut::host(&mut bytes), payload.view()).unwrap();
                assert_eq!(bytes, pattern(arrived, len(arrived)));
                arrived += 1;
            }
            Event::Connected { .. } => {}
            other => panic!("{other:?}"),
        });
    }
    assert!(cuts > 10, "{cuts}");
}
