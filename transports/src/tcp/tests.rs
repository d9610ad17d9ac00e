//! Peers whose machine does not answer.

use super::address::Address;
use super::{Options, Tcp};
use crate::contract::{Batch, Device, DownCause, Event, Identity, PeerId, Transport};
use crate::mem::{HostAllocator, PacketPool};
use rustix::net::{AddressFamily, SocketType, ipproto};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(2);

fn device() -> Arc<dyn Device> {
    let transport = Tcp::new(Options { timeout: TIMEOUT, ..Options::default() });
    let info = transport.devices().unwrap().remove(0);
    let identity = Identity { me: PeerId(0), ranks: 2, secret: [3; 16] };
    let packets = PacketPool::new(Arc::new(HostAllocator), 8 << 10, 4);
    transport.open(&info, identity).unwrap().device(Arc::new(packets)).unwrap()
}

/// Returns a listener whose kernel answers no more connects, and the connections that fill it.
fn silent() -> (TcpListener, Vec<TcpStream>) {
    let family = AddressFamily::INET;
    let socket = rustix::net::socket(family, SocketType::STREAM, Some(ipproto::TCP)).unwrap();
    rustix::net::bind(&socket, &SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0))).unwrap();
    rustix::net::listen(&socket, 0).unwrap();
    let listener = TcpListener::from(socket);
    let at = SocketAddr::from((Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port()));
    let short = Duration::from_millis(100);
    let filling = std::iter::from_fn(|| TcpStream::connect_timeout(&at, short).ok()).collect();
    (listener, filling)
}

#[test]
fn a_peer_that_answers_at_none_of_its_addresses_is_gone_after_the_timeout() {
    let (listener, _filling) = silent();
    let device = device();
    let mut address = Address::decode(&device.address()).unwrap();
    address.port = listener.local_addr().unwrap().port();
    address.hosts = (1..=8).map(|host| Ipv4Addr::new(127, 0, 0, host).into()).collect();
    let begin = Instant::now();
    let _link = device.connect(&address.encode(), PeerId(1)).unwrap();
    let (mut batch, mut down) = (Batch::new(8), None);
    while down.is_none() && begin.elapsed() < 10 * TIMEOUT {
        device.poll(&mut batch, &mut |batch| {
            down = batch.drain().find_map(|event| match event {
                Event::PeerDown { peer: PeerId(1), cause } => Some(cause),
                _ => None,
            });
        });
    }
    let took = begin.elapsed();
    assert!(matches!(&down, Some(DownCause::Gone(why)) if why.contains("for 2 s")), "{down:?}");
    assert!(took >= TIMEOUT && took < TIMEOUT * 3 / 2, "{took:?}");
}
