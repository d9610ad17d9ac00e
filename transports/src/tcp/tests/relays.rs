//! Relays between devices, and listeners that do not answer.

use super::TestRank;
use crate::contract::{AddressBlob, Device};
use crate::tcp::address::TcpAddress;
use carrack_test_support::relay::Relay;
use rustix::net::{AddressFamily, SocketType, ipproto};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// Returns a relay to a device, and the address of the device over it.
pub(super) fn relayed(to: &TestRank) -> (Relay, AddressBlob) {
    let mut address = TcpAddress::decode(&to.device.address()).unwrap();
    let relay = Relay::to(SocketAddr::new([127, 0, 0, 1].into(), address.port));
    (address.hosts, address.port) = (vec![relay.at.ip()], relay.at.port());
    (relay, address.encode())
}

/// Returns a listener whose kernel answers no more connects, and the connections that fill it.
pub(super) fn silent() -> (TcpListener, Vec<TcpStream>) {
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

/// Forwards one connection, and keeps what its listener answers until it is told to go on.
pub(super) fn held(target: u16) -> (SocketAddr, Sender<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let (go, goes) = channel();
    std::thread::spawn(move || {
        let (mut near, _) = listener.accept().unwrap();
        let mut far = TcpStream::connect(("127.0.0.1", target)).unwrap();
        let (mut near_in, mut far_in) = (near.try_clone().unwrap(), far.try_clone().unwrap());
        std::thread::spawn(move || {
            let mut bytes = [0; 3000];
            while let Ok(len @ 1..) = near_in.read(&mut bytes) {
                // The near side is read on when the far one has gone.
                let _ = far.write_all(&bytes[..len]);
            }
        });
        // First passes the welcome, then what follows is kept.
        far_in.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let mut bytes = [0; 3000];
        let mut kept = Vec::new();
        let mut is_held = false;
        loop {
            match far_in.read(&mut bytes) {
                Ok(0) => break,
                Ok(len) if is_held => kept.extend(&bytes[..len]),
                Ok(len) => near.write_all(&bytes[..len]).unwrap(),
                Err(_) => match goes.try_recv() {
                    Ok(()) if is_held => break,
                    Ok(()) => is_held = true,
                    Err(_) => {}
                },
            }
        }
        let _ = far_in.shutdown(Shutdown::Both);
        // The other device makes a connection of its own meanwhile.
        let _ = goes.recv();
        near.write_all(&kept).unwrap();
        let _ = near.shutdown(Shutdown::Write);
        std::thread::sleep(Duration::from_secs(20));
    });
    (at, go)
}
