//! Devices that come to rest, also after random schedules of posts, polls, cuts and pauses.

use super::relays::relayed;
use super::{PACKET, TestRank, arrival, bring_up, send, send_as};
use crate::contract::{Armed, Device, Event, Link, PeerId};
use crate::net::key::DeviceKey;
use crate::net::streams::TcpChannel;
use crate::tcp::address::TcpAddress;
use crate::tcp::outgoing::Line;
use crate::tcp::pending::ProvedConnection;
use crate::tcp::wire::{self, Hello};
use carrack_test_support::relay::Relay;
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use zerocopy::little_endian::U64;

/// Time in which what is due now wakes a thread.
const SHORT: Duration = Duration::from_millis(2);

/// Random schedules that are tried.
const CASES: u32 = 30;

/// A link over a relay, with the numbers of its device and its peer's.
struct Relayed {
    from: usize,
    to: usize,
    relay: Relay,
    link: Arc<dyn Link>,
    sent: u64,
    came: u64,
}

/// Polls a side. Each link's messages come once, and in order.
fn take(sides: &mut [TestRank], at: usize, links: &mut [Relayed]) {
    for event in sides[at].poll() {
        match event {
            Event::Connected { .. } => {}
            Event::Arrived { from, header, .. } => {
                let link = &mut links[usize::try_from(header.0[1]).unwrap()];
                assert_eq!((link.from, link.to), (from.0 as usize, at));
                assert_eq!(header.0[0], link.came);
                link.came += 1;
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Returns `true` if a thread that waits for the device sleeps as long.
fn rests(side: &TestRank, span: Duration) -> bool {
    let Armed::Wait(fd) = side.device.arm() else { return false };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let span = Timespec::try_from(span).unwrap();
    let woken = rustix::event::poll(&mut fds, Some(&span)).unwrap();
    side.device.disarm(true);
    woken == 0
}

#[derive(Clone, Debug)]
enum RestStep {
    Poll(usize),
    Post(usize, usize),
    Cut(usize),
    Pause(u64),
}

fn step() -> impl Strategy<Value = RestStep> {
    prop_oneof![
        20 => any::<usize>().prop_map(RestStep::Poll),
        10 => (any::<usize>(), 0..PACKET).prop_map(|(link, len)| RestStep::Post(link, len)),
        1 => any::<usize>().prop_map(RestStep::Cut),
        3 => (0..500_u64).prop_map(RestStep::Pause),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: CASES, ..ProptestConfig::default() })]

    #[test]
    fn each_message_comes_once_and_all_come_to_rest_whatever_is_cut_and_however_late_polls_are(
        count in 1..=4_usize,
        pairs in proptest::collection::vec((0..4_usize, 0..4_usize), 1..8),
        window in prop_oneof![Just(256), Just(4 * PACKET), Just(1 << 20)],
        steps in proptest::collection::vec(step(), 0..400),
    ) {
        let mut sides: Vec<TestRank> =
            (0..count).map(|me| TestRank::with(me as u32, 64, window)).collect();
        let mut links: Vec<Relayed> = Vec::new();
        let (each, mut done) = (steps.len() / pairs.len(), 0);
        for (number, (from, to)) in pairs.iter().enumerate() {
            let (from, to) = (from % count, to % count);
            let (relay, address) = relayed(&sides[to]);
            let link = sides[from].device.connect(&address, PeerId(to as u32)).unwrap();
            links.push(Relayed { from, to, relay, link, sent: 0, came: 0 });
            let until = if number + 1 == pairs.len() { steps.len() } else { done + each };
            for step in &steps[done..until] {
                match step {
                    RestStep::Poll(at) => take(&mut sides, at % count, &mut links),
                    RestStep::Post(at, len) => {
                        let at = at % links.len();
                        let Relayed { link, sent, .. } = &mut links[at];
                        *sent += u64::from(send_as(link, [*sent, at as u64], *len));
                    }
                    RestStep::Cut(at) => links[at % links.len()].relay.cut(),
                    RestStep::Pause(micros) => std::thread::sleep(Duration::from_micros(*micros)),
                }
            }
            done = until;
        }
        let start = Instant::now();
        while links.iter().any(|link| link.came < link.sent || !link.link.is_up()) {
            (0..count).for_each(|at| take(&mut sides, at, &mut links));
            let state = |it: &Relayed| (it.from, it.to, it.link.is_up(), it.sent, it.came);
            let left: Vec<_> = links.iter().map(state).collect();
            assert!(start.elapsed() < Duration::from_secs(10), "{left:?}");
        }
        let (start, mut since) = (Instant::now(), Instant::now());
        while since.elapsed() < Duration::from_millis(20) {
            for at in 0..count {
                take(&mut sides, at, &mut links);
                if !rests(&sides[at], SHORT) {
                    since = Instant::now();
                }
            }
            assert!(start.elapsed() < Duration::from_secs(5), "a device does not come to rest");
        }
    }
}

#[test]
fn a_listener_that_lacks_descriptors_wakes_no_thread_until_it_listens_again() {
    let mut here = TestRank::new(0);
    let port = TcpAddress::decode(&here.device.address()).unwrap().port;
    let _caller = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    let start = Instant::now();
    loop {
        here.device.listen_later(&mut here.device.polling.lock(), Errno::MFILE);
        // On a busy machine the tick can come first.
        if rests(&here, SHORT) {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "the caller wakes the thread");
    }
    here.poll_for(Duration::from_millis(200));
    assert!(!here.device.polling.lock().pending.is_empty());
}

#[test]
fn a_thread_sleeps_no_longer_than_a_tick_while_a_connection_waits_for_the_end_of_dialling() {
    let here = TestRank::new(0);
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let home = listener.local_addr().unwrap();
    let socket = TcpStream::connect(home).unwrap();
    let channel = TcpChannel::over(socket, wire::limits(Duration::from_secs(5))).unwrap();
    let [from, to, window, attempt, received] = [5, 0, 1 << 20, 1, 0].map(U64::from);
    let hello = Hello { from, to, window, attempt, received };
    let connection =
        ProvedConnection { channel, peer: PeerId(1), device: DeviceKey([1; 16]), hello, home };
    assert!(rests(&here, Duration::from_millis(200)), "nothing is to be done");
    here.device.polling.lock().crossed.push(connection);
    assert!(!rests(&here, Duration::from_secs(2)));
}

#[test]
fn a_connection_that_has_ended_wakes_no_thread_while_a_forked_child_has_it() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let (relay, address) = relayed(&there);
    let link = here.device.connect(&address, PeerId(1)).unwrap();
    bring_up(&[&link], &mut [&mut here, &mut there]);
    // As a child has it: the kernel's connection is closed when both have closed theirs.
    let child = match &here.device.shared.link(0).unwrap().sending.lock().line {
        Line::Up(socket) => socket.try_clone().unwrap(),
        other => panic!("{other:?}"),
    };
    relay.cut();
    for _ in 0..50 {
        here.poll_for(Duration::from_millis(3));
        there.poll_for(Duration::from_millis(3));
    }
    assert!(link.is_up() && (0..20).any(|_| rests(&here, SHORT)));
    drop(child);
}

#[test]
fn memory_of_a_burst_is_given_back_when_a_link_rests() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let link = here.connect(&there, 1);
    bring_up(&[&link], &mut [&mut here, &mut there]);
    let mut came = 0;
    (0..2000).for_each(|number| {
        while !send(&link, number, 1000) {
            here.poll();
            came += there.poll().len();
        }
    });
    while came < 2000 {
        here.poll();
        came += there.poll().len();
    }
    for _ in 0..10 {
        here.poll_for(Duration::from_millis(60));
        there.poll_for(Duration::from_millis(60));
    }
    let end = here.device.shared.link(0).unwrap();
    let room = end.sending.lock().flow.bytes_of_memory();
    assert!(room < 64 << 10, "{room}");
}

#[test]
fn pending_connections_that_say_nothing_go_where_descriptors_are_lacking() {
    let mut here = TestRank::new(0);
    let port = TcpAddress::decode(&here.device.address()).unwrap().port;
    let _silent = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    here.poll_for(Duration::from_millis(2100));
    let polling = || here.device.polling.lock();
    assert_eq!(polling().pending.len(), 1);
    here.device.listen_later(&mut polling(), Errno::MFILE);
    assert!(polling().pending.is_empty());
}

#[test]
fn what_is_kept_for_a_poll_is_news_again_to_a_poll_that_found_none() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let out = here.connect(&there, 1);
    bring_up(&[&out], &mut [&mut here, &mut there]);
    let shared = here.device.shared.clone();
    // As the thread does that sends what is left: it has taken the list while a poll looks at it.
    shared.news.store(false, Ordering::SeqCst);
    shared.left.lock().push(0);
    assert!(shared.send_left(u64::MAX));
    assert!(matches!(here.device.arm(), Armed::Ready), "a thread sleeps, and nothing is sent");
}

#[test]
fn a_message_waits_for_others_behind_one_that_was_sent_and_not_behind_one_that_came() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let out = here.connect(&there, 1);
    bring_up(&[&out], &mut [&mut here, &mut there]);
    let back = there.connect(&here, 0);
    bring_up(&[&back], &mut [&mut here, &mut there]);
    let waits =
        |side: &TestRank| side.device.shared.link(0).unwrap().sending.lock().flow.unsent() > 0;
    // A thread that is stopped for longer than messages wait takes another turn.
    let mut turns = (0..1000).map(|turn| {
        here.poll_for(SHORT);
        there.poll_for(SHORT);
        assert!(send(&back, turn, 8) && send(&out, turn, 8));
        let has_waited = send(&out, turn, 8) && waits(&here);
        let start = Instant::now();
        while here.poll().iter().all(|event| arrival(event).is_none()) {
            assert!(start.elapsed() < Duration::from_secs(5), "nothing comes");
        }
        assert!(send(&out, turn, 8) && !waits(&here), "an answer waits");
        has_waited
    });
    assert!(turns.any(|has_waited| has_waited), "each message is a call of the socket");
}

#[test]
fn an_answer_to_what_was_acknowledged_does_not_wait_for_others() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let out = here.connect(&there, 1);
    bring_up(&[&out], &mut [&mut here, &mut there]);
    let back = there.connect(&here, 0);
    bring_up(&[&back], &mut [&mut here, &mut there]);
    let waits =
        |side: &TestRank| side.device.shared.link(0).unwrap().sending.lock().flow.unsent() > 0;
    let mut waited = Vec::new();
    for turn in 0..1000 {
        there.poll_for(Duration::from_micros(50));
        assert!(send(&back, turn, PACKET));
        let start = Instant::now();
        while here.poll().iter().all(|event| arrival(event).is_none()) {
            there.poll();
            assert!(start.elapsed() < Duration::from_secs(5), "nothing comes");
        }
        assert!(send(&out, turn, 8));
        if waits(&here) {
            waited.push(turn);
        }
        here.poll();
    }
    assert!(waited.is_empty(), "answers that waited: {waited:?}");
}

/// Sends messages one way and polls both sides, until `count` have come.
fn stream(link: &Arc<dyn Link>, sides: &mut [TestRank; 2], count: u64) {
    let start = Instant::now();
    for number in 0..count {
        while !send(link, number, 8) {
            sides[0].poll();
        }
        let mut came = Vec::new();
        while came.is_empty() {
            // It may have been left for a poll.
            sides[0].poll();
            came = sides[1].poll();
            assert!(start.elapsed() < Duration::from_secs(20), "message {number} is lost");
        }
        assert_eq!(came.iter().filter_map(arrival).collect::<Vec<_>>(), [(0, number)]);
    }
}

/// Streams until the receiver's connection is out of the epoll set. On a machine that is busy a
/// pause between two messages is long enough to put it back.
fn stream_apart(link: &Arc<dyn Link>, sides: &mut [TestRank; 2]) {
    let start = Instant::now();
    while !is_apart(&sides[1]) {
        stream(link, sides, 100);
        assert!(start.elapsed() < Duration::from_secs(20), "it stays in the set");
    }
}

fn is_apart(side: &TestRank) -> bool {
    let link = side.device.shared.link(0).unwrap();
    let sending = link.sending.lock();
    sending.is_apart && sending.watched.is_none()
}

#[test]
fn a_connection_that_is_polled_leaves_the_epoll_set_until_a_thread_sleeps() {
    let mut sides = [0, 1].map(TestRank::new);
    let link = sides[0].connect(&sides[1], 1);
    let [here, there] = &mut sides;
    bring_up(&[&link], &mut [here, there]);
    stream_apart(&link, &mut sides);
    // A thread sleeps, and another one polls: the connection stays in the set.
    let Armed::Wait(fd) = sides[1].device.arm() else { panic!("something is there") };
    let fd = rustix::io::dup(fd).unwrap();
    stream(&link, &mut sides, 200);
    assert!(!is_apart(&sides[1]));
    assert!(send(&link, 0, 8));
    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)), Ok(1));
    sides[1].device.disarm(true);
    assert_eq!(sides[1].poll().iter().filter_map(arrival).count(), 1);
    stream_apart(&link, &mut sides);
    // One that comes to rest without a sleep is watched again.
    let start = Instant::now();
    while is_apart(&sides[1]) {
        sides[1].poll();
        assert!(start.elapsed() < Duration::from_secs(20), "it stays out of the set");
    }
    // What is due, an acknowledgement for one, may wake it once more.
    while !rests(&sides[1], SHORT) {
        sides[1].poll();
        assert!(start.elapsed() < Duration::from_secs(20), "it does not come to rest");
    }
    assert!(send(&link, 0, 8));
    assert!(!rests(&sides[1], Duration::from_secs(20)), "the message is not told of");
}

#[test]
fn a_connection_out_of_the_epoll_set_goes_on_when_there_is_room_and_after_a_cut() {
    let mut sides = [0, 1].map(TestRank::new);
    let (relay, address) = relayed(&sides[1]);
    let link = sides[0].device.connect(&address, PeerId(1)).unwrap();
    let back = sides[1].connect(&sides[0], 0);
    let [here, there] = &mut sides;
    bring_up(&[&link, &back], &mut [here, there]);
    let (start, mut turn) = (Instant::now(), 0);
    while !is_apart(&sides[0]) || !is_apart(&sides[1]) {
        turn += 1;
        assert!(start.elapsed() < Duration::from_secs(20), "they stay in the set");
        assert!(send(&link, turn, 8) && send(&back, turn, 8));
        for side in &mut sides {
            while side.poll().is_empty() {}
        }
    }
    let mut sent = 0;
    for round in 0..3 {
        // The peer reads nothing until all room is taken.
        while send(&link, sent, PACKET - 100) {
            sent += 1;
        }
        if round == 1 {
            relay.cut();
        }
        let (start, mut came) = (Instant::now(), 0);
        while came < sent {
            sides[0].poll();
            for number in sides[1].poll().iter().filter_map(arrival) {
                assert_eq!(number, (0, came));
                came += 1;
            }
            assert!(start.elapsed() < Duration::from_secs(20), "{came} of {sent} came");
        }
        sent = 0;
    }
}
