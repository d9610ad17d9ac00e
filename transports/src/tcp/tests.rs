//! Devices of one process that send to each other, directly and over a relay.

mod calls;
mod closing;
mod relays;
mod rest;

use super::TcpOptions;
use super::address::TcpAddress;
use super::device::TcpDevice;
use super::outgoing::Line;
use crate::contract::{
    Batch, Device, DownCause, Event, Header, Identity, Link, Op, Payload, PeerId, Submit, close_all,
};
use crate::mem::{HostAllocator, MemRef, Packet, PacketPool, PacketSource};
use crate::net::key::DeviceKey;
use relays::{held, relayed, silent};
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const RANKS: u32 = 8;
const PACKET: usize = 4096;
const TIMEOUT: Duration = Duration::from_secs(5);

fn identity(me: u32) -> Identity {
    Identity { me: PeerId(me), ranks: RANKS, secret: [5; 16] }
}

/// A rank with one device.
struct TestRank {
    device: Arc<TcpDevice>,
    batch: Batch,
    _held: Vec<Packet>,
}

impl TestRank {
    fn new(me: u32) -> Self {
        Self::with(me, usize::MAX, 1 << 20)
    }

    /// Makes a side with at most `packets` free packets, and a window of `window` bytes.
    fn with(me: u32, packets: usize, window: usize) -> Self {
        Self::within(TIMEOUT, me, packets, window)
    }

    /// Makes a side for which a peer that is silent for `timeout` counts as gone.
    fn within(timeout: Duration, me: u32, packets: usize, window: usize) -> Self {
        let pool = PacketPool::new(Arc::new(HostAllocator), PACKET, 64);
        let all: Vec<Packet> = std::iter::from_fn(|| PacketSource::take(&pool)).collect();
        let held = all.into_iter().skip(packets).collect();
        let options = TcpOptions { packet_size: PACKET, window, timeout, ..TcpOptions::default() };
        let device = TcpDevice::open(options, identity(me), Arc::new(pool)).unwrap();
        Self { device, batch: Batch::new(8), _held: held }
    }

    fn poll(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.device.poll(&mut self.batch, &mut |batch: &mut Batch| events.extend(batch.drain()));
        events
    }

    /// Polls for as long, and returns what came.
    fn poll_for(&mut self, span: Duration) -> Vec<Event> {
        let (start, mut events) = (Instant::now(), Vec::new());
        while start.elapsed() < span {
            let came = self.poll();
            // Long silences are for timers. Spinning would slow the tests that run meanwhile.
            if came.is_empty() && span >= Duration::from_millis(1) {
                std::thread::sleep(Duration::from_micros(100));
            }
            events.extend(came);
        }
        events
    }

    fn connect(&self, to: &Self, peer: u32) -> Arc<dyn Link> {
        self.device.connect(&to.device.address(), PeerId(peer)).unwrap()
    }
}

fn bring_up(links: &[&Arc<dyn Link>], sides: &mut [&mut TestRank]) {
    let start = Instant::now();
    while links.iter().any(|link| !link.is_up()) {
        for side in sides.iter_mut() {
            for event in side.poll() {
                assert!(matches!(event, Event::Connected { .. }), "{event:?}");
            }
        }
        assert!(start.elapsed() < Duration::from_secs(20), "the links do not come up");
    }
}

fn send(link: &Arc<dyn Link>, number: u64, len: usize) -> bool {
    send_as(link, [number, 0], len)
}

fn send_as(link: &Arc<dyn Link>, header: [u64; 2], len: usize) -> bool {
    let bytes = vec![7; len];
    let op = Op::AmCopied { header: Header(header), bytes: MemRef::host(&bytes) };
    link.submit(op).unwrap() == Submit::Done
}

/// Returns the sender and the number of a message.
fn arrival(event: &Event) -> Option<(u32, u64)> {
    match event {
        Event::Arrived { from, header, .. } => Some((from.0, header.0[0])),
        _ => None,
    }
}

fn is_down(event: &Event) -> bool {
    matches!(event, Event::PeerDown { .. })
}

/// Polls both sides until their links share one connection.
fn until_shared(sides: &mut [&mut TestRank; 2]) {
    let start = Instant::now();
    while sides.iter().any(|side| {
        side.device.shared.link(0).is_none_or(|link| {
            !link.is_up.load(Ordering::SeqCst) || side.device.shared.link(1).is_some()
        })
    }) {
        for side in sides.iter_mut() {
            side.poll();
        }
        assert!(start.elapsed() < Duration::from_secs(10), "each has a connection of its own");
    }
}

#[test]
fn links_of_both_ways_share_a_connection_whichever_side_dials_first_and_after_each_cut() {
    for is_late in [false, true, false, true, false, true] {
        let [mut here, mut there] = [0, 1].map(TestRank::new);
        let ((one, to_there), (other, to_here)) = (relayed(&there), relayed(&here));
        let out = here.device.connect(&to_there, PeerId(1)).unwrap();
        if is_late {
            bring_up(&[&out], &mut [&mut here, &mut there]);
        }
        let back = there.device.connect(&to_here, PeerId(0)).unwrap();
        for number in 0..5 {
            until_shared(&mut [&mut here, &mut there]);
            assert!(send(&out, number, 8) && send(&back, number, 8));
            let (start, mut came) = (Instant::now(), [None; 2]);
            while came != [Some((1, number)), Some((0, number))] {
                for (side, came) in [&mut here, &mut there].into_iter().zip(&mut came) {
                    *came = came.or(side.poll().iter().find_map(arrival));
                }
                assert!(start.elapsed() < Duration::from_secs(10), "message {number}: {came:?}");
            }
            if number < 4 {
                one.cut();
                other.cut();
                let _ = [&mut here, &mut there].map(|side| side.poll_for(Duration::from_millis(2)));
            }
        }
    }
}

/// Closes the first side on a thread of its own while the second polls; `afterwards`: once the
/// first has closed. Returns what came.
fn close_while_polled(closes: &TestRank, polls: &mut TestRank, afterwards: bool) -> Vec<Event> {
    let start = Instant::now();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| closes.device.close());
        while afterwards && !closing.is_finished() {
            assert!(start.elapsed() < TIMEOUT, "it waits for the peer");
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut events = Vec::new();
        while !closing.is_finished() || !events.last().is_some_and(is_down) {
            events.extend(polls.poll());
            assert!(start.elapsed() < 3 * TIMEOUT, "{events:?}");
        }
        events
    })
}

fn is_closed(event: &Event) -> bool {
    matches!(event, Event::PeerDown { cause: DownCause::Closed, .. })
}

#[test]
fn messages_come_before_the_end_of_a_sender_that_gives_way_to_its_peers_connection() {
    // The peer's kernel has room, whether the peer polls or not.
    for afterwards in [false, true] {
        for polls in 0..20 {
            let mut sides = [0, 1].map(TestRank::new);
            // The one with the higher key gives way.
            sides.sort_by_key(|side| side.device.shared.address.key.0);
            let [mut low, mut high] = sides;
            let [to_low, to_high] = [&low, &high].map(|side| side.device.shared.identity.me.0);
            let out = high.connect(&low, to_low);
            // Its connection comes up a step before that of its peer.
            high.poll_for(Duration::from_micros(100));
            let _back = low.connect(&high, to_high);
            let (mut sent, mut came) = (0, Vec::new());
            let start = Instant::now();
            while !out.is_up() {
                came.extend(low.poll());
                high.poll();
                assert!(start.elapsed() < TIMEOUT);
            }
            sent += u64::from(send(&out, sent, 100));
            (0..polls).for_each(|_| came.extend(low.poll()));
            came.extend(close_while_polled(&high, &mut low, afterwards));
            let numbers: Vec<_> = came.iter().filter_map(arrival).map(|it| it.1).collect();
            assert_eq!(numbers, (0..sent).collect::<Vec<_>>(), "{polls} polls: {came:?}");
            assert!(came.last().is_some_and(is_closed), "{polls} polls: {came:?}");
        }
    }
}

#[test]
fn a_device_that_closes_when_its_link_has_taken_its_peers_connection_tells_its_end() {
    for polls in 0..40 {
        let [mut here, mut there] = [0, 1].map(TestRank::new);
        let out = here.connect(&there, 1);
        bring_up(&[&out], &mut [&mut here, &mut there]);
        let _back = there.connect(&here, 0);
        let mut events: Vec<_> = (0..polls).flat_map(|_| here.poll()).collect();
        events.extend(close_while_polled(&there, &mut here, false));
        assert!(events.iter().filter(|event| is_down(event)).all(is_closed), "{events:?}");
    }
}

#[test]
fn the_end_of_a_peer_is_told_once_where_both_of_its_links_tell_of_it() {
    for _ in 0..10 {
        let [mut here, mut there] = [0, 1].map(TestRank::new);
        let (out, back) = (here.connect(&there, 1), there.connect(&here, 0));
        bring_up(&[&out, &back], &mut [&mut here, &mut there]);
        // Both ways are read often, so that one poll finds both ends.
        for number in 0..20 {
            assert!(send(&out, number, 8) && send(&back, number, 8));
            here.poll_for(Duration::from_micros(100));
            there.poll_for(Duration::from_micros(100));
        }
        drop(back);
        there.device.close();
        let ends = here.poll_for(Duration::from_millis(100));
        assert_eq!(ends.iter().filter(|event| is_down(event)).count(), 1, "{ends:?}");
    }
}

#[test]
fn messages_come_before_the_end_of_their_sender_while_the_user_keeps_all_packets() {
    const MESSAGES: u64 = 6;
    let (mut here, mut there) = (TestRank::with(0, 1, 1 << 20), TestRank::new(1));
    let (out, back) = (here.connect(&there, 1), there.connect(&here, 0));
    bring_up(&[&out, &back], &mut [&mut here, &mut there]);
    for number in 0..MESSAGES {
        assert!(send(&back, number, 1000));
    }
    there.device.close();
    let events = here.poll_for(Duration::from_millis(200));
    let came: Vec<_> = events.iter().filter_map(arrival).collect();
    assert_eq!(came, (0..MESSAGES).map(|number| (1, number)).collect::<Vec<_>>());
    assert!(events.last().is_some_and(is_down), "{events:?}");
    let aside = |event: &&Event| matches!(event, Event::Arrived { payload: Payload::Aside(_), .. });
    assert!(events.iter().filter(aside).count() > 1, "{events:?}");
}

#[test]
fn a_window_that_is_smaller_than_a_message_opens_again_while_other_links_are_busy() {
    const OTHERS: u32 = 5;
    let mut here = TestRank::with(0, 64, 512);
    let mut others: Vec<TestRank> = (1..=OTHERS).map(|me| TestRank::with(me, 64, 512)).collect();
    let mut small = TestRank::with(6, 64, 512);
    let links: Vec<_> = others.iter().map(|side| side.connect(&here, 0)).collect();
    let link = small.connect(&here, 0);
    let mut sides: Vec<&mut TestRank> = others.iter_mut().chain([&mut here, &mut small]).collect();
    bring_up(&links.iter().chain([&link]).collect::<Vec<_>>(), &mut sides);
    let (start, mut sent) = (Instant::now(), 0);
    while sent < 20 {
        for link in &links {
            send(link, 0, 100);
        }
        // Less than a quarter of the window, then more than the rest.
        sent += u64::from(send(&link, sent, if sent.is_multiple_of(2) { 60 } else { 480 }));
        here.poll();
        small.poll();
        others.iter_mut().for_each(|side| drop(side.poll()));
        assert!(start.elapsed() < Duration::from_secs(3), "message {sent} finds no room");
    }
}

#[test]
fn two_senders_that_never_pause_have_their_turns() {
    let mut here = TestRank::new(0);
    let mut senders = [1, 2].map(TestRank::new);
    let links = [0, 1].map(|at| senders[at].connect(&here, 0));
    let [one, two] = &mut senders;
    bring_up(&[&links[0], &links[1]], &mut [&mut here, one, two]);
    let (mut came, start) = ([0_u64; 2], Instant::now());
    while came.iter().sum::<u64>() < 100_000 {
        for (side, link) in senders.iter_mut().zip(&links) {
            while send(link, 0, 8) {}
            side.poll();
        }
        for (from, _) in here.poll().iter().filter_map(arrival) {
            came[from as usize - 1] += 1;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{came:?}");
    }
    assert!(came.iter().all(|came| *came > 10_000), "{came:?}");
}

#[test]
fn a_link_whose_end_was_read_does_not_begin_anew_when_the_last_acknowledgement_is_lost() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let (relay, address) = relayed(&here);
    let link = there.device.connect(&address, PeerId(0)).unwrap();
    bring_up(&[&link], &mut [&mut here, &mut there]);
    relay.is_mute.store(true, Ordering::SeqCst);
    assert!((0..3).all(|number| send(&link, number, 8)));
    drop(link);
    let (start, mut events) = (Instant::now(), Vec::new());
    while !events.last().is_some_and(is_down) {
        there.poll();
        events.extend(here.poll());
        assert!(start.elapsed() < Duration::from_secs(5), "{events:?}");
    }
    relay.is_mute.store(false, Ordering::SeqCst);
    relay.cut();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(500) {
        there.poll();
        events.extend(here.poll());
    }
    let came: Vec<_> = events.iter().filter_map(arrival).collect();
    assert_eq!(came, [(1, 0), (1, 1), (1, 2)]);
    assert_eq!(events.iter().filter(|event| is_down(event)).count(), 1, "{events:?}");
}

#[test]
fn a_link_whose_end_was_read_does_not_begin_anew_while_other_messages_of_its_sender_wait() {
    let (mut here, mut there) = (TestRank::with(0, 1, 1 << 20), TestRank::new(1));
    let (relay, address) = relayed(&here);
    let link = there.device.connect(&address, PeerId(0)).unwrap();
    let other = there.connect(&here, 0);
    bring_up(&[&link, &other], &mut [&mut here, &mut there]);
    relay.is_mute.store(true, Ordering::SeqCst);
    assert!((0..3).all(|number| send(&link, number, 8)));
    drop(link);
    // They come one at a time, since the user keeps all packets.
    (0..900).for_each(|number| while !send_as(&other, [number, 1], 1000) {});
    let (start, mut came, mut cut) = (Instant::now(), Vec::new(), None);
    while cut.is_none_or(|at: Instant| at.elapsed() < Duration::from_millis(500)) {
        if cut.is_none() && came.len() == 3 && start.elapsed() > Duration::from_millis(50) {
            cut = Some(Instant::now());
            relay.is_mute.store(false, Ordering::SeqCst);
            relay.cut();
        }
        there.poll_for(Duration::from_micros(500));
        for event in here.poll() {
            if let Event::Arrived { header: Header([number, 0]), .. } = event {
                came.push(number);
            }
        }
        assert!(start.elapsed() < 2 * TIMEOUT, "{came:?}");
    }
    assert_eq!(came, [0, 1, 2]);
    here.device.close();
}

#[test]
fn a_peer_at_whose_port_another_device_listens_is_gone() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let mut address = TcpAddress::decode(&there.device.address()).unwrap();
    address.key = DeviceKey([1; 16]);
    let _link = here.device.connect(&address.encode(), PeerId(1)).unwrap();
    let start = Instant::now();
    while !here.poll().iter().any(is_down) {
        there.poll();
        assert!(start.elapsed() < Duration::from_secs(5), "no side says that the peer is gone");
    }
}

#[test]
fn a_peer_that_answers_at_none_of_its_addresses_is_gone_after_the_timeout() {
    let (listener, _filling) = silent();
    let mut here = TestRank::with(0, usize::MAX, 1 << 20);
    let mut address = TcpAddress::decode(&here.device.address()).unwrap();
    address.port = listener.local_addr().unwrap().port();
    address.hosts = (1..=8).map(|host| Ipv4Addr::new(127, 0, 0, host).into()).collect();
    let begin = Instant::now();
    let _link = here.device.connect(&address.encode(), PeerId(1)).unwrap();
    let mut down = None;
    while down.is_none() && begin.elapsed() < 10 * TIMEOUT {
        down = here.poll().into_iter().find_map(|event| match event {
            Event::PeerDown { peer: PeerId(1), cause } => Some(cause),
            _ => None,
        });
        std::thread::sleep(Duration::from_micros(100));
    }
    let took = begin.elapsed();
    assert!(matches!(&down, Some(DownCause::Gone(why)) if why.contains("for 5 s")), "{down:?}");
    assert!(took >= TIMEOUT && took < TIMEOUT * 3 / 2, "{took:?}");
}

#[test]
fn a_process_that_could_not_ask_does_not_take_a_peer_for_dead() {
    let (listener, _filling) = silent();
    let timeout = Duration::from_secs(2);
    let mut here = TestRank::within(timeout, 0, usize::MAX, 1 << 20);
    let mut address = TcpAddress::decode(&here.device.address()).unwrap();
    address.port = listener.local_addr().unwrap().port();
    address.hosts = vec![Ipv4Addr::LOCALHOST.into()];
    let _link = here.device.connect(&address.encode(), PeerId(1)).unwrap();
    here.poll_for(Duration::from_millis(100));
    std::thread::sleep(timeout);
    let events = here.poll_for(timeout / 2);
    assert!(!events.iter().any(is_down), "{events:?}");
    let events = here.poll_for(timeout);
    assert!(events.iter().any(is_down), "{events:?}");
}

#[test]
fn what_comes_late_of_a_connection_that_the_peer_has_left_does_not_stop_the_link() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let mut address = TcpAddress::decode(&there.device.address()).unwrap();
    let (at, go) = held(address.port);
    (address.hosts, address.port) = (vec![at.ip()], at.port());
    let out = here.device.connect(&address.encode(), PeerId(1)).unwrap();
    bring_up(&[&out], &mut [&mut here, &mut there]);
    go.send(()).unwrap();
    std::thread::sleep(Duration::from_millis(250));
    let back = there.connect(&here, 0);
    let polls = |here: &mut TestRank, there: &mut TestRank, span: u64| {
        let (start, mut came) = (Instant::now(), Vec::new());
        while start.elapsed() < Duration::from_millis(span) {
            came.extend(here.poll());
            came.extend(there.poll());
        }
        came
    };
    polls(&mut here, &mut there, 50);
    go.send(()).unwrap();
    polls(&mut here, &mut there, 400);
    assert!(back.is_up());
    go.send(()).unwrap();
    polls(&mut here, &mut there, 200);
    assert!(send(&out, 0, 8));
    let came = polls(&mut here, &mut there, 1000);
    assert!(came.iter().filter_map(arrival).any(|it| it == (0, 0)), "{came:?}");
}

#[test]
fn a_link_that_takes_an_end_which_has_lost_its_connection_is_told_of_once_it_is_up() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let (relay, to_here) = relayed(&here);
    let link = there.device.connect(&to_here, PeerId(0)).unwrap();
    bring_up(&[&link], &mut [&mut here, &mut there]);
    relay.cut();
    let end = here.device.shared.link(0).unwrap();
    let start = Instant::now();
    while matches!(end.sending.lock().line, Line::Up(_)) {
        here.poll();
        assert!(start.elapsed() < TIMEOUT, "the cut is not noticed");
    }
    let back = here.connect(&there, 1);
    let (start, mut events) = (Instant::now(), Vec::new());
    while start.elapsed() < Duration::from_millis(300) {
        events.extend(here.poll());
        there.poll();
    }
    assert!(back.is_up());
    assert!(matches!(events[..], [Event::Connected { peer: PeerId(1) }]), "{events:?}");
}

#[test]
fn messages_of_a_device_that_closes_come_over_the_connection_that_follows_a_cut() {
    const MESSAGES: u64 = 6000;
    for round in 0..6 {
        let [mut here, mut there] = [0, 1].map(|me| TestRank::with(me, usize::MAX, 64 << 20));
        let ((one, to_here), (_other, to_there)) = (relayed(&here), relayed(&there));
        let out = there.device.connect(&to_here, PeerId(0)).unwrap();
        bring_up(&[&out], &mut [&mut here, &mut there]);
        // In every other round the ends of the other side have a link too, and it was used.
        let back = (round % 2 == 0).then(|| here.device.connect(&to_there, PeerId(1)).unwrap());
        if let Some(back) = &back {
            assert!(send(back, 0, 8));
            for _ in 0..10 {
                here.poll_for(Duration::from_millis(2));
                there.poll_for(Duration::from_millis(2));
            }
        }
        // More than the sockets hold.
        (0..MESSAGES).for_each(|number| while !send(&out, number, PACKET) {});
        // A cut that lasts for some of the pauses between two attempts, during which the receiver
        // is refused where the sender has listened.
        let span = Duration::from_millis(if round < 4 { 0 } else { 400 });
        let (start, mut came, mut end) = (Instant::now(), Vec::new(), None);
        let mut cut_at = None;
        std::thread::scope(|scope| {
            let closing = scope.spawn(|| there.device.close());
            while end.is_none() && start.elapsed() < 3 * TIMEOUT {
                let events = here.poll();
                came.extend(events.iter().filter_map(arrival).map(|it| it.1));
                end = events.into_iter().find(is_down);
                if came.len() > 500 && cut_at.is_none_or(|at: Instant| at.elapsed() < span) {
                    assert!(cut_at.is_some() || !closing.is_finished());
                    one.cut();
                    cut_at = cut_at.or_else(|| Some(Instant::now()));
                }
            }
        });
        assert!(came.iter().copied().eq(0..MESSAGES), "{round}: {} came, {end:?}", came.len());
        assert!(end.as_ref().is_some_and(is_closed), "{round}: {end:?}");
    }
}

#[test]
fn the_end_of_a_peer_is_told_once_where_another_of_its_connections_is_being_made() {
    for polls in 0..60 {
        let [mut here, mut there] = [0, 1].map(TestRank::new);
        let out = there.connect(&here, 0);
        bring_up(&[&out], &mut [&mut here, &mut there]);
        assert!(send(&out, 0, 8));
        here.poll_for(Duration::from_micros(300));
        let _second = there.connect(&here, 0);
        for _ in 0..polls {
            there.poll_for(Duration::from_micros(10));
            here.poll_for(Duration::from_micros(10));
        }
        there.poll_for(Duration::from_micros(200));
        there.device.close();
        let start = Instant::now();
        let mut ends = Vec::new();
        while !ends.iter().any(is_down) && start.elapsed() < TIMEOUT {
            ends.extend(here.poll());
        }
        ends.extend(here.poll_for(Duration::from_millis(20)));
        let downs = ends.iter().filter(|event| is_down(event)).count();
        assert_eq!(downs, 1, "{polls} polls: {ends:?}");
    }
}
