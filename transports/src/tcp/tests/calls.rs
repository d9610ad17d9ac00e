//! Calls that come in, and the ends to which they belong.

use super::{TIMEOUT, TestRank};
use crate::contract::{Device, PeerId};
use crate::net::key::DeviceKey;
use crate::net::streams::TcpChannel;
use crate::tcp::address::TcpAddress;
use crate::tcp::outgoing::Outgoing;
use crate::tcp::pending::ProvedConnection;
use crate::tcp::shared::TcpShared;
use crate::tcp::wire::{self, Hello};
use rustix::event::epoll::EventFlags;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::Duration;
use zerocopy::little_endian::U64;

#[test]
fn a_caller_that_did_not_hear_the_answer_is_taken_again_however_often_its_peer_has_dialled() {
    let mut here = TestRank::new(0);
    let listener = TcpListener::bind("0.0.0.0:0").unwrap();
    let mut address = TcpAddress::decode(&here.device.address()).unwrap();
    (address.key, address.port) = (DeviceKey([1; 16]), listener.local_addr().unwrap().port());
    address.hosts = vec![Ipv4Addr::LOCALHOST.into()];
    // Each caller is hung up on.
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let _link = here.device.connect(&address.encode(), PeerId(1)).unwrap();
    here.poll_for(Duration::from_millis(500));
    let (shared, link) = (&here.device.shared, here.device.shared.link(0).unwrap());
    let hello = |attempt: u64| hello_of(5, 0, attempt);
    assert!(link.answer(shared, &hello(1), 0).is_some_and(|it| it.attempt.get() > 2));
    let home = SocketAddr::from((Ipv4Addr::LOCALHOST, address.port));
    let socket = shared.connection(TcpStream::connect(home).unwrap());
    link.rise(shared, socket.clone(), home, &hello(1));
    link.lost(shared, &socket, 0);
    assert!(link.answer(shared, &hello(1), 0).is_none(), "it is older than the last");
    assert!(link.answer(shared, &hello(2), 0).is_some());
}

/// Brings a call of an end of the peer, number `from`.
fn calls(here: &TestRank, (peer, device): (PeerId, DeviceKey), hello: Hello) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let home = listener.local_addr().unwrap();
    let socket = TcpStream::connect(home).unwrap();
    let channel = TcpChannel::over(socket, wire::limits(TIMEOUT)).unwrap();
    here.device.shared.watch(channel.as_fd(), 0, EventFlags::empty()).unwrap();
    let connection = ProvedConnection { channel, peer, device, hello, home };
    here.device.admit(&mut here.device.polling.lock(), connection);
}

fn hello_of(from: u64, to: u64, attempt: u64) -> Hello {
    let [from, to, window, attempt, received] = [from, to, 1 << 20, attempt, 0].map(U64::from);
    Hello { from, to, window, attempt, received }
}

#[test]
fn a_call_that_names_an_end_belongs_to_no_other_that_has_answered_the_caller() {
    let here = TestRank::new(0);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let home = listener.local_addr().unwrap();
    let (of, shared) = ((PeerId(1), DeviceKey([1; 16])), &here.device.shared);
    // The caller has given this call up. Another end has called it meanwhile.
    calls(&here, of, hello_of(5, 0, 1));
    let number = DeviceKey::fresh().unwrap();
    let end = TcpShared::begin(&mut shared.outgoing.lock(), of, number);
    let socket = shared.connection(TcpStream::connect(home).unwrap());
    end.rise(shared, socket, home, &hello_of(5, end.number, 1));
    calls(&here, of, hello_of(5, end.number, 2));
    let knows_it = |link: &Outgoing| link.answer(shared, &hello_of(5, end.number, 2), 0).is_none();
    assert!(knows_it(&end) && !knows_it(&shared.link(0).unwrap()));
}

#[test]
fn a_caller_that_names_an_end_of_another_has_one_end_here_however_often_it_calls() {
    let here = TestRank::new(0);
    let (of, shared) = ((PeerId(1), DeviceKey([1; 16])), &here.device.shared);
    // An end with a link has answered the caller, which has given that up.
    let number = DeviceKey::fresh().unwrap();
    let served = TcpShared::begin(&mut shared.outgoing.lock(), of, number);
    assert!(served.serve(shared, &[]));
    calls(&here, of, hello_of(6, 0, 1));
    calls(&here, of, hello_of(5, 0, 1));
    let taken = shared.link(1).unwrap().number;
    (2..6).for_each(|attempt| calls(&here, of, hello_of(6, taken, attempt)));
    let links = shared.outgoing.lock();
    let others: Vec<_> = links.iter().flatten().map(|it| it.sending.lock().other).collect();
    assert_eq!(others, [6, 5, 6]);
}
