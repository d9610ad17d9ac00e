//! Attacks at the TCP port, with and without the secret.

use super::attacker::{Attacker, ME, PATIENCE, SECRET, answer, door, greet, knock};
use crate::support::alone::is_alone;
use crate::support::nics::{Fixture, Heard, Side, fabric_of, identity, nic, options};
use crate::support::{Watchdog, random, rng};
use carrack::transports::contract::{DownCause, Event, PeerId};
use carrack_simulators::nic::Config;
use carrack_transports::internals::verbs::{
    MAX_MESSAGE, QueuePairEnd, RdmaAddress, SetupChannel, SetupMessage, SetupReceived,
};
use carrack_transports::net::key::DeviceKey;
use carrack_transports::net::proof::Role;
use rand::Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io::Write;
use std::net::{TcpListener, TcpStream};

/// Proves to be a rank and says hello, is refused, and returns the reason.
#[track_caller]
fn turned_away(fixture: &mut Fixture, from: PeerId, message: SetupMessage) -> String {
    let mut attacker = Attacker::at_the_door(fixture);
    let key = attacker.key;
    greet(fixture, &mut attacker.channel, Role::Dialer, (from, SECRET), key).unwrap();
    attacker.channel.send(&message).unwrap();
    let why = match answer(fixture, &mut attacker.channel) {
        SetupReceived::Message(SetupMessage::Refusal(why)) => why,
        other => panic!("{message:?} is answered with {other:?}"),
    };
    assert!(fixture.of_the_fourth.is_empty(), "a pending connection causes no event");
    why
}

#[test]
fn a_dialer_that_cannot_be_let_in_is_told_why() {
    let _watchdog = Watchdog::over("hellos");
    let mut fixture = Fixture::default();
    let good = Attacker::at_the_door(&mut fixture).mine;
    for secret in [[8; 16], [0; 16]] {
        let mut attacker = Attacker::at_the_door(&mut fixture);
        let (who, key) = ((ME, secret), attacker.key);
        let why = greet(&mut fixture, &mut attacker.channel, Role::Dialer, who, key).unwrap_err();
        assert!(why.to_string().contains("secret"), "{why}");
    }
    for rank in [4, u32::MAX] {
        let why = turned_away(&mut fixture, PeerId(rank), SetupMessage::Hello(good));
        assert!(why.contains("a job of 4 ranks"), "{why}");
    }
    for wrong in [
        QueuePairEnd { queue_pair: 1 << 24, ..good },
        QueuePairEnd { first_psn: u32::MAX, ..good },
        QueuePairEnd { window: 0, ..good },
        QueuePairEnd { mtu: 0, ..good },
        QueuePairEnd { mtu: 6, ..good },
        QueuePairEnd { word_addr: good.word_addr + 1, ..good },
    ] {
        let why = turned_away(&mut fixture, ME, SetupMessage::Hello(wrong));
        assert!(why.contains("impossible values"), "{wrong:?}: {why}");
    }
    for size in [0, 1, u32::MAX] {
        let wrong = QueuePairEnd { packet_size: size, ..good };
        assert!(
            turned_away(&mut fixture, ME, SetupMessage::Hello(wrong))
                .contains("CARRACK_PACKET_SIZE")
        );
    }
    for message in [SetupMessage::Ready, SetupMessage::Crossed, SetupMessage::Refusal("you".into())]
    {
        assert!(turned_away(&mut fixture, ME, message).contains("it began with"));
    }
    // A hello that is right, from a caller that has proved nothing.
    let mut attacker = Attacker::at_the_door(&mut fixture);
    attacker.channel.send(&SetupMessage::Hello(good)).unwrap();
    let mut said = answer(&mut fixture, &mut attacker.channel);
    while matches!(said, SetupReceived::Wrong(_)) {
        // The victim's opening.
        said = answer(&mut fixture, &mut attacker.channel);
    }
    assert!(matches!(said, SetupReceived::Message(SetupMessage::Refusal(_))), "{said:?}");
    fixture.all_go_on(20);
}

#[test]
fn ends_that_lead_nowhere_or_to_others_harm_no_rank() {
    let _watchdog = Watchdog::over("ends");
    let mut fixture = Fixture::default();
    let honest = RdmaAddress::decode(&fixture.sides[1].device.address()).unwrap();
    for change in [
        |end: &mut QueuePairEnd, _: &RdmaAddress| end.gid = [0; 16],
        |end: &mut QueuePairEnd, honest: &RdmaAddress| end.gid = honest.gid,
        |end: &mut QueuePairEnd, honest: &RdmaAddress| (end.gid, end.queue_pair) = (honest.gid, 2),
        |end: &mut QueuePairEnd, _: &RdmaAddress| (end.word_addr, end.word_key) = (0, u32::MAX),
        |end: &mut QueuePairEnd, _: &RdmaAddress| end.window = u32::MAX,
        |end: &mut QueuePairEnd, _: &RdmaAddress| (end.reads, end.lid) = (255, u16::MAX),
    ] {
        let mut attacker = Attacker::at_the_door(&mut fixture);
        change(&mut attacker.mine, &honest);
        attacker.say_hello(&mut fixture, ME);
        match answer(&mut fixture, &mut attacker.channel) {
            SetupReceived::Message(SetupMessage::Welcome(_)) => {
                attacker.channel.send(&SetupMessage::Ready).unwrap();
                fixture.all_go_on(20);
                drop(attacker);
                fixture.reports_the_attacker("it goes");
            }
            SetupReceived::Message(SetupMessage::Refusal(_)) => {
                // It was let in as far as a queue pair that could not be joined.
                fixture.all_go_on(5);
                fixture.of_the_fourth.clear();
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_device_that_is_passed_off_as_another_s_takes_nothing_from_that_one() {
    let _watchdog = Watchdog::over("keys");
    let mut fixture = Fixture::default();
    for rank in [0, 1, 2] {
        let theirs = RdmaAddress::decode(&fixture.sides[rank].device.address()).unwrap().key;
        let mut attacker = Attacker::at_the_door(&mut fixture);
        attacker.key = theirs;
        attacker.say_hello(&mut fixture, ME);
        attacker.is_let_in(&mut fixture);
        fixture.all_go_on(20);
        // Also those that come only now.
        for peer in [1, 2] {
            fixture.release(0, peer);
            fixture.connect_again(0, peer);
        }
        fixture.all_go_on(20);
        attacker.send(3);
        fixture.reports_the_attacker("at last");
    }
}

#[test]
fn hello_twice_is_one_connection_after_the_other() {
    let _watchdog = Watchdog::over("twice");
    let mut fixture = Fixture::default();
    let mut first = Attacker::enter(&mut fixture);
    let mut others = Vec::new();
    for _ in 0..20 {
        let mut second = Attacker::at_the_door(&mut fixture);
        second.key = first.key;
        second.say_hello(&mut fixture, ME);
        // For it to be heard before the next one is.
        fixture.settle();
        others.push(second);
    }
    assert!(fixture.of_the_fourth.is_empty());
    first.send(0);
    fixture.reports_the_attacker("the first");
    // The last one is let in; those before it were sent away.
    others.pop().unwrap().is_let_in(&mut fixture);
    for mut other in others {
        assert!(matches!(answer(&mut fixture, &mut other.channel), SetupReceived::Closed(_)));
    }
    fixture.all_go_on(20);
    fixture.reports_the_attacker("the last has gone");
}

#[test]
fn garbage_is_refused_or_hung_up_on() {
    let _watchdog = Watchdog::over("garbage");
    let mut fixture = Fixture::default();
    let mut rng = rng();
    for round in 0..150 {
        let (mut stream, len) =
            (TcpStream::connect(door(&fixture, 0)).unwrap(), rng.random_range(1..2 * MAX_MESSAGE));
        let mut bytes = random(&mut rng, len);
        if round % 2 == 0 {
            // Framed as a message is, and a hello with a bit wrong.
            let hello = SetupMessage::Hello(QueuePairEnd::default());
            bytes = hello.encode();
            let at = rng.random_range(0..bytes.len());
            bytes[at] ^= 1 << rng.random_range(0..8);
            let length = (bytes.len() as u32).to_le_bytes();
            bytes.splice(0..0, length);
        }
        let _ = stream.write_all(&bytes);
        fixture.talk();
        if round % 10 == 0 {
            fixture.all_go_on(2);
        }
    }
    fixture.all_go_on(20);
    assert!(fixture.of_the_fourth.is_empty());
}

#[test]
fn two_thousand_connections_that_say_nothing_or_one_byte_keep_no_rank_out() {
    let _watchdog = Watchdog::over("silence");
    let limit = getrlimit(Resource::Nofile);
    // Both ends are of this process.
    let wanted = 6000;
    let may = limit.maximum.is_none_or(|most| most >= wanted);
    if limit.current.is_some_and(|now| now < wanted) && may {
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit }).unwrap();
    }
    let mut fixture = Fixture::default();
    let mut silent = Vec::new();
    let count = if may { 2000 } else { 200 };
    for number in 0..count {
        let mut stream = TcpStream::connect(door(&fixture, 0)).unwrap();
        if number % 2 == 0 {
            stream.write_all(b"C").unwrap();
        }
        silent.push(stream);
        fixture.step();
    }
    fixture.all_go_on(20);
    // Now two connections are let in: one that has to authenticate itself, and a rank.
    let mut attacker = Attacker::enter(&mut fixture);
    attacker.send(16);
    fixture.talk_until("its message", |fixture| !fixture.of_the_fourth.is_empty());
    attacker.send(0);
    fixture.reports_the_attacker("its end");
    let fabric = fabric_of(&fixture);
    let mut rank = Side::open(nic(Config::default(), &fabric), options(), identity(3, 4)).unwrap();
    let link = rank.device.connect(&fixture.sides[0].device.address(), PeerId(0)).unwrap();
    let start = std::time::Instant::now();
    while !link.is_up() {
        for event in rank.poll() {
            assert!(matches!(event, Event::Connected { .. }), "{event:?}");
        }
        fixture.step();
        assert!(start.elapsed() < PATIENCE);
    }
    // The first to come have had to go.
    let mut another = knock(&fixture, 0);
    another.send(&SetupMessage::Bye).unwrap();
    drop(silent);
    fixture.all_go_on(20);
}

/// A rank that hangs up before it has answered is called again, which takes a descriptor.
#[test]
fn a_rank_that_cannot_be_called_again_for_want_of_a_descriptor_is_called_later() {
    // Descriptors are the process's, and other tests need theirs.
    if !is_alone(
        module_path!(),
        "a_rank_that_cannot_be_called_again_for_want_of_a_descriptor_is_called_later",
    ) {
        return;
    }
    let _watchdog = Watchdog::over("called later");
    let mut fixture = Fixture::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut address = RdmaAddress::decode(&fixture.sides[1].device.address()).unwrap();
    address.key = DeviceKey::fresh().unwrap();
    address.tcp_port = listener.local_addr().unwrap().port();
    let _link = fixture.sides[0].device.connect(&address.encode(), ME).unwrap();
    let mut called = accept(&mut fixture, &listener);
    greet(&mut fixture, &mut called, Role::Listener, (ME, SECRET), address.key).unwrap();
    let hello = answer(&mut fixture, &mut called);
    assert!(matches!(hello, SetupReceived::Message(SetupMessage::Hello(_))), "{hello:?}");
    drop(called);
    let limit = getrlimit(Resource::Nofile);
    // Also where one has just been closed: those below are open for ever.
    setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).unwrap();
    for _ in 0..100 {
        fixture.all_go_on(1);
    }
    assert!(
        listener.accept().is_err_and(|error| error.raw_os_error() == Some(libc::EMFILE)),
        "it was not poor"
    );
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut called = accept(&mut fixture, &listener);
    called.send(&SetupMessage::Refusal("enough".into())).unwrap();
    fixture.talk_until("a refusal", |fixture| !fixture.of_the_fourth.is_empty());
    assert!(
        matches!(
            &fixture.of_the_fourth[..],
            [(0, Heard::End(DownCause::Refused(why)))] if why == "enough"
        ),
        "{:?}",
        fixture.of_the_fourth
    );
}

#[track_caller]
fn accept(fixture: &mut Fixture, listener: &TcpListener) -> SetupChannel {
    let start = std::time::Instant::now();
    loop {
        if let Ok((stream, _)) = listener.accept() {
            return SetupChannel::over(stream).unwrap();
        }
        fixture.step();
        assert!(start.elapsed() < PATIENCE, "no call: {:?}", fixture.of_the_fourth);
    }
}
