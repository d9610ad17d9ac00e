//! Destinations of a message's bytes, and the credits owed for them.

use crate::support::nics::{Side, bytes_of, fabric, identity, nic, options, submit};
use crate::support::{Watchdog, nics_go_on, pattern};
use carrack::transports::contract::{Armed, Event, Header, Link, PeerId, Submit};
use carrack::transports::mem::{HostAllocator, PacketPool, PacketSource};
use carrack_simulators::nic::Config;
use carrack_transports::verbs::VerbsOptions;
use std::sync::Arc;

/// Packets of the receiver.
const PACKETS: usize = 64;

/// Two ranks, the first of which sends to the second.
struct ReceivePair {
    // Before the devices that it is of.
    link: Arc<dyn Link>,
    sides: [Side; 2],
    sent: u64,
    got: u64,
}

impl ReceivePair {
    /// Creates two sides, the second of which receives into packets of that pool.
    fn with(pool: &PacketPool) -> Self {
        let (fabric, config) = (fabric(), Config::default());
        let options = VerbsOptions { packet_size: pool.packet_size(), ..options() };
        let open = |me| {
            Side::open_with(pool, nic(config.clone(), &fabric), options.clone(), identity(me, 2))
                .unwrap()
        };
        let mut sides = [open(0), open(1)];
        let link = sides[0].device.connect(&sides[1].device.address(), PeerId(1)).unwrap();
        while !link.is_up() {
            sides.iter_mut().for_each(|side| drop(side.poll()));
        }
        Self { link, sides, sent: 0, got: 0 }
    }

    /// Sends a message. Returns `false` if there is no room.
    fn send(&mut self, len: usize) -> bool {
        let sent = submit(&self.link, [self.sent, len as u64], &pattern(self.sent, len)).unwrap();
        self.sent += u64::from(matches!(sent, Submit::Done));
        matches!(sent, Submit::Done)
    }

    /// Polls the second side once, and checks that what comes is whole, and in order.
    fn receive(&mut self) {
        for event in self.sides[1].poll() {
            let Event::Arrived { header: Header([number, len]), payload, .. } = event else {
                continue;
            };
            assert_eq!(number, self.got);
            assert!(
                bytes_of(&payload) == pattern(number, len as usize),
                "{number}, of {len} bytes, is torn"
            );
            self.got += 1;
        }
    }

    fn receive_all(&mut self) {
        while self.got < self.sent {
            nics_go_on();
            self.receive();
        }
    }

    /// Sends a message, and has it taken in.
    fn pass(&mut self, len: usize) {
        while !self.send(len) {
            drop(self.sides[0].poll());
            self.receive();
            nics_go_on();
        }
        self.receive_all();
    }
}

fn pool(packet_size: usize) -> PacketPool {
    // Those of both ranks.
    PacketPool::new(Arc::new(HostAllocator), packet_size, 2 * PACKETS)
}

#[test]
fn a_message_of_any_length_is_whole_however_short_the_packets_are() {
    let _watchdog = Watchdog::over("lengths");
    for packet_size in [1, 8, 39, 40, 41, 56, 100, 4096] {
        let mut pair = ReceivePair::with(&pool(packet_size));
        for len in (0..=packet_size.min(120)).chain([packet_size]) {
            pair.pass(len);
        }
    }
}

#[test]
fn a_short_message_leaves_its_packet_as_it_was_and_a_longer_one_does_not() {
    let _watchdog = Watchdog::over("packets");
    for (len, are_written) in [(40, false), (41, true)] {
        let pool = pool(4096);
        let mut pair = ReceivePair::with(&pool);
        for _ in 0..4 * PACKETS {
            pair.pass(len);
        }
        drop(pair);
        let all: Vec<_> = std::iter::from_fn(|| pool.take_with_len(4096)).collect();
        assert!(all.len() >= PACKETS, "the devices are closed");
        let written =
            all.iter().any(|packet| packet.as_slice().unwrap().iter().any(|byte| *byte != 0));
        assert_eq!(written, are_written, "{len} bytes");
    }
}

#[test]
fn a_rank_that_goes_to_sleep_owes_its_peers_nothing() {
    let _watchdog = Watchdog::over("credits");
    let mut pair = ReceivePair::with(&pool(4096));
    while pair.send(8) {}
    // The largest number that may be in flight before the receiver polls.
    let window = pair.sent;
    assert!(window > 8, "more than a batch holds, so that the last poll's are owed for");
    pair.receive_all();
    let receiver = pair.sides[1].device.clone();
    while let Armed::Ready = receiver.arm() {
        pair.receive();
    }
    // Without another poll of its.
    while pair.sent < 2 * window {
        if !pair.send(8) {
            nics_go_on();
        }
    }
    receiver.disarm(true);
    pair.receive_all();
}
