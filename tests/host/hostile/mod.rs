//! Peers that break the protocol on purpose: pending connections, and senders and receivers that
//! write nonsense into memory shared with a victim. The victim refuses, or reports the peer by
//! name. It never panics, hangs or crashes, and its other links go on (SECURITY.md).

#![expect(unsafe_code, reason = "the ends of a ring are made by unsafe functions")]

mod receivers;
mod runtime;
mod users;

use crate::support::alone::is_alone;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::bootstrap::Bootstrap;
use carrack::transports::contract::{
    Batch, Device, DownCause, Event, Header, Identity, Link, Op, PeerId, Submit, SubmitError,
    Transport,
};
use carrack::transports::mem::{HostAllocator, MemMut, MemRef, PacketPool, copy::copy_now};
use carrack::{OpError, ProgressError, Rank, Runtime, Tag};
use carrack_transports::internals::shm::{
    HandshakeMessage, MAX_MESSAGE, PROTOCOL, ShmAddress, SocketNamespace, greeting,
};
use carrack_transports::net::greeting::{Failure, Progress};
use carrack_transports::net::packets::{Channel, Listener, Received};
use carrack_transports::net::proof::Role;
use carrack_transports::shm::segment::{BellPage, Segment, SegmentSlots};
use carrack_transports::shm::{Geometry, Shm};
use carrack_transports::sync::ring::{Producer, Slots};
use rand::rngs::SmallRng;
use rand::{Rng, RngCore};
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const GEOMETRY: Geometry = Geometry { slots: 16, chunks: 4, chunk_size: 4096 };
const SECRET: [u8; 16] = [9; 16];
/// The victim is rank 0, the attacker calls itself rank 1, an honest peer is rank 2.
const ATTACKER: PeerId = PeerId(1);
const INLINE: u8 = 1;
/// Kinds of control messages of large messages, in a header.
const FIN: u64 = 14;
const GRANT: u64 = 11;
const FIN_WRITE: u64 = 12;
const PIECES: u64 = 19;
const CHUNK: u8 = 2;

fn device(me: u32) -> Arc<dyn Device> {
    let transport = Shm::new(GEOMETRY);
    let info = transport.devices().unwrap().remove(0);
    let domain =
        transport.open(&info, Identity { me: PeerId(me), ranks: 3, secret: SECRET }).unwrap();
    // Packets larger than chunks, so that only the transport itself checks the end of a chunk.
    domain.device(Arc::new(PacketPool::new(Arc::new(HostAllocator), 16384, 64))).unwrap()
}

/// A victim with an honest peer.
struct Fixture {
    victim: Arc<dyn Device>,
    honest: Arc<dyn Device>,
    link: Arc<dyn Link>,
    sent: u64,
    batch: Batch,
}

impl Fixture {
    fn new() -> Self {
        let (victim, honest) = (device(0), device(2));
        let link = honest.connect(&victim.address(), PeerId(0)).unwrap();
        let mut fixture = Self { victim, honest, link, sent: 0, batch: Batch::new(32) };
        while !fixture.link.is_up() {
            assert!(fixture.poll().is_empty());
        }
        fixture.others_go_on();
        fixture
    }

    /// Returns the victim's events, and makes progress for the honest peer.
    fn poll(&mut self) -> Vec<Event> {
        self.honest.poll(&mut self.batch, &mut |batch: &mut Batch| _ = batch.drain());
        let mut events = Vec::new();
        self.victim.poll(&mut self.batch, &mut |batch: &mut Batch| events.extend(batch.drain()));
        events
    }

    fn until(&mut self, what: &str, mut found: impl FnMut(Event) -> bool) {
        let start = Instant::now();
        loop {
            for event in self.poll() {
                if found(event) {
                    return;
                }
            }
            assert!(start.elapsed() < LIMIT / 2, "the victim does not notice: {what}");
        }
    }

    /// Checks that a message of the honest peer's arrives, and nothing else does.
    #[track_caller]
    fn others_go_on(&mut self) {
        for size in [8, 4000] {
            let (number, bytes) = (self.sent, pattern(self.sent, size));
            let op = Op::AmCopied { header: Header([number; 2]), bytes: MemRef::host(&bytes) };
            assert_eq!(self.link.submit(op), Ok(Submit::Done));
            self.sent += 1;
            self.until("an honest message", |event| match event {
                Event::Arrived { from: PeerId(2), header, payload, .. } => {
                    let mut found = vec![0; payload.len()];
                    copy_now(MemMut::host(&mut found), payload.view()).unwrap();
                    assert_eq!((header, found), (Header([number; 2]), bytes.clone()));
                    true
                }
                other => panic!("{other:?}"),
            });
        }
    }

    fn knock(&self) -> Channel {
        Channel::connect(&ShmAddress::decode(&self.victim.address()).unwrap().name).unwrap()
    }

    /// Returns a channel whose proof as this rank is complete, before its hello.
    fn prove(&mut self, rank: PeerId) -> Channel {
        let mut channel = self.knock();
        self.greet(Role::Dialer, rank, SECRET, &mut channel).unwrap();
        channel
    }

    /// Goes through a greeting with the victim, to its end.
    fn greet(
        &mut self,
        role: Role,
        me: PeerId,
        secret: [u8; 16],
        channel: &mut Channel,
    ) -> Result<(), Failure> {
        let mut greeting = greeting(role, &Identity { me, ranks: 3, secret }).unwrap();
        let start = Instant::now();
        loop {
            if let Progress::Proven(_) = greeting.advance(channel)? {
                return Ok(());
            }
            assert!(self.poll().is_empty(), "a pending connection causes no event");
            assert!(start.elapsed() < LIMIT / 2, "the victim does not answer");
        }
    }

    /// Sends a hello that is right in everything, and returns the attacker's end of the link.
    fn enter(&mut self) -> Attacker {
        let channel = self.prove(ATTACKER);
        let (segment, fd) = Segment::create(GEOMETRY).unwrap();
        channel.send(&hello().encode(), &[fd.as_fd()]).unwrap();
        let (message, _) = self.answer(&channel);
        assert!(matches!(message, Some(HandshakeMessage::Welcome { .. })), "{message:?}");
        let slots = SegmentSlots::of(segment.clone());
        // SAFETY: the only writing end of a fresh ring.
        let producer = unsafe { Producer::new(slots.clone()) };
        Attacker { channel, producer, slots, segment }
    }

    /// Returns the victim's answer, which may be to hang up.
    fn answer(&mut self, channel: &Channel) -> (Option<HandshakeMessage>, Vec<OwnedFd>) {
        let start = Instant::now();
        loop {
            assert!(self.poll().is_empty(), "a pending connection causes no event");
            let mut bytes = [0; MAX_MESSAGE];
            match channel.receive(&mut bytes).unwrap() {
                // The victim's part of the greeting is no answer.
                Received::Message(len, _)
                    if PROTOCOL.read(&bytes[..len]).is_ok_and(|(kind, _)| kind < 3) => {}
                Received::Message(len, fds) => {
                    return (Some(HandshakeMessage::decode(&bytes[..len]).unwrap()), fds);
                }
                Received::Closed => return (None, Vec::new()),
                Received::Nothing => {}
            }
            assert!(start.elapsed() < LIMIT / 2, "the victim does not answer");
        }
    }

    #[track_caller]
    fn reports_the_attacker(&mut self, what: &str) {
        self.until(what, |event| match event {
            Event::PeerDown { peer, cause } => {
                assert_eq!(peer, ATTACKER);
                assert!(matches!(cause, DownCause::Protocol(_)), "{what}: {cause}");
                true
            }
            // What could still be a message is one.
            Event::Arrived { from: ATTACKER, .. } => false,
            other => panic!("{what}: {other:?}"),
        });
        self.others_go_on();
    }
}

struct Attacker {
    channel: Channel,
    producer: Producer<SegmentSlots>,
    slots: SegmentSlots,
    segment: Arc<Segment>,
}

impl Attacker {
    fn place(&mut self, chunk: u32, len: u32) {
        let place = (u64::from(chunk) | u64::from(len) << 32).to_le_bytes();
        self.producer.push(CHUNK, [1, 2], MemRef::host(&place)).unwrap();
        let _ = &self.channel;
        let _ = self.segment.geometry();
    }
}

fn hello() -> HandshakeMessage {
    HandshakeMessage::Hello { geometry: GEOMETRY }
}

fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let fd =
        rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[test]
fn a_connection_that_makes_no_sense_is_refused_and_others_go_on() {
    let _watchdog = Watchdog::over("nonsense");
    let mut rng = rng();
    let mut fixture = Fixture::new();
    let (_segment, right) = Segment::create(GEOMETRY).unwrap();
    let size = rustix::fs::fstat(&right).unwrap().st_size as u64;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let short = memfd(4096, seals);
    let long = memfd(size + 4096, seals);
    let shrinkable = memfd(size, SealFlags::GROW);
    let unsealed = memfd(size, SealFlags::empty());
    let file: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
    let socket: OwnedFd = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();

    let said = |bytes: Vec<u8>| (bytes, vec![right.as_fd()]);
    let with = |fds: Vec<BorrowedFd<'static>>| (hello().encode(), fds);
    let _ = with(Vec::new());
    let mut other_version = hello().encode();
    other_version[12] += 1;
    let mut other_magic = hello().encode();
    other_magic[0] ^= 1;
    let geometry = |change: fn(&mut Geometry)| {
        let mut geometry = GEOMETRY;
        change(&mut geometry);
        HandshakeMessage::Hello { geometry }.encode()
    };
    let mut attempts: Vec<(Vec<u8>, Vec<BorrowedFd<'_>>)> = vec![
        said(other_version),
        said(other_magic),
        said(geometry(|geometry| geometry.slots = 0)),
        said(geometry(|geometry| geometry.slots = 17)),
        said(geometry(|geometry| geometry.slots = 1 << 31)),
        said(geometry(|geometry| geometry.chunks = 0)),
        said(geometry(|geometry| geometry.chunks = 65)),
        said(geometry(|geometry| geometry.chunks = u32::MAX)),
        said(geometry(|geometry| geometry.chunk_size = !63)),
        said(geometry(|geometry| geometry.chunk_size = 8192)),
        said(HandshakeMessage::Welcome { bell: 0, fenced: false }.encode()),
        said(HandshakeMessage::Refusal("no, you".into()).encode()),
        said(HandshakeMessage::Bye.encode()),
        (hello().encode(), vec![]),
        (hello().encode(), vec![right.as_fd(), right.as_fd()]),
        (hello().encode(), vec![right.as_fd(); 4]),
        (hello().encode(), vec![short.as_fd()]),
        (hello().encode(), vec![long.as_fd()]),
        (hello().encode(), vec![shrinkable.as_fd()]),
        (hello().encode(), vec![unsealed.as_fd()]),
        (hello().encode(), vec![file.as_fd()]),
        (hello().encode(), vec![socket.as_fd()]),
        (hello().encode()[..20].to_vec(), vec![right.as_fd()]),
        (vec![0; MAX_MESSAGE + 1], vec![right.as_fd()]),
    ];
    for _ in 0..200 {
        let len = rng.random_range(1..=MAX_MESSAGE + 40);
        attempts.push((random(&mut rng, len), vec![]));
        // A hello with one bit wrong where every bit counts: magic, version, kind.
        let mut bytes = hello().encode();
        bytes[rng.random_range(0..20)] ^= 1 << rng.random_range(0..8);
        attempts.push(said(bytes));
    }
    let mut near = SECRET;
    near[15] ^= 1;
    for secret in [near, [0; 16]] {
        let mut channel = fixture.knock();
        let end = fixture.greet(Role::Dialer, ATTACKER, secret, &mut channel).unwrap_err();
        assert!(end.to_string().contains("secret"), "{end}");
    }
    for rank in [3, u32::MAX] {
        let mut channel = fixture.knock();
        // The victim's proof comes in front of its refusal, or is not sent at all.
        let _ = fixture.greet(Role::Dialer, PeerId(rank), SECRET, &mut channel);
        assert!(!matches!(fixture.answer(&channel).0, Some(HandshakeMessage::Welcome { .. })));
    }
    // Each without a proof, and behind one: a right hello is not enough.
    let each = attempts.iter().flat_map(|attempt| [(attempt, false), (attempt, true)]);
    for (at, ((bytes, fds), proves)) in each.enumerate() {
        let channel = if proves { fixture.prove(ATTACKER) } else { fixture.knock() };
        channel.send(bytes, fds).unwrap();
        let (answer, fds) = fixture.answer(&channel);
        match answer {
            None => {}
            Some(HandshakeMessage::Refusal(why)) => assert!(!why.is_empty()),
            other => panic!("attempt {at} was answered with {other:?}"),
        }
        assert!(fds.is_empty(), "attempt {at} was given descriptors");
        if at % 20 == 0 {
            fixture.others_go_on();
        }
    }
    let channel = fixture.knock();
    channel.send(&hello().encode(), &[right.as_fd()]).unwrap();
    let (answer, fds) = fixture.answer(&channel);
    assert!(
        matches!(answer, None | Some(HandshakeMessage::Refusal(_))) && fds.is_empty(),
        "{answer:?}"
    );
    // Who brings more descriptors than a message carries.
    let channel = fixture.prove(ATTACKER);
    send_many(&channel, &hello().encode(), &right, 20);
    let (answer, fds) = fixture.answer(&channel);
    assert!(matches!(answer, None | Some(HandshakeMessage::Refusal(_))) && fds.is_empty());
    // Silent connections, and one that hangs up.
    let silent: Vec<Channel> = (0..50).map(|_| fixture.knock()).collect();
    drop(fixture.knock());
    fixture.others_go_on();
    drop(silent);
    fixture.others_go_on();
    // After all that an honest one is let in.
    fixture.enter();
}

#[test]
fn more_than_a_thousand_silent_connections_keep_no_rank_out() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let _watchdog = Watchdog::over("silence");
    let limit = getrlimit(Resource::Nofile);
    // Both ends are of this process.
    let wanted = 4000;
    let may = limit.maximum.is_none_or(|most| most >= wanted);
    if limit.current.is_some_and(|now| now < wanted) && may {
        setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), ..limit }).unwrap();
    }
    let mut fixture = Fixture::new();
    let mut silent = Vec::new();
    for _ in 0..if may { 1300 } else { 200 } {
        silent.push(fixture.knock());
        fixture.poll();
    }
    fixture.others_go_on();
    let mut attacker = fixture.enter();
    attacker.place(u32::MAX, 1);
    fixture.reports_the_attacker("one that came behind them");
    if may {
        // The first to come have had to go, and the last have not.
        let is_closed = |channel: &Channel| {
            let told = |received| matches!(received, Ok(Received::Message(..)));
            while told(channel.receive(&mut [0; MAX_MESSAGE])) {}
            matches!(channel.receive(&mut [0; MAX_MESSAGE]), Ok(Received::Closed))
        };
        assert!(is_closed(&silent[0]) && !is_closed(&silent[1299]));
    }
}

/// Sends as `Channel::send` does, with as many descriptors as the kernel lets through.
fn send_many(channel: &Channel, bytes: &[u8], fd: &OwnedFd, count: usize) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let fds = vec![fd.as_fd(); count];
    let mut space =
        vec![std::mem::MaybeUninit::uninit(); SendAncillaryMessage::ScmRights(&fds).size()];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(channel, &[std::io::IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
}

#[test]
fn refused_connections_leave_no_descriptor_behind() {
    let _watchdog = Watchdog::over("descriptors");
    // Descriptors are the process's, and other tests have theirs.
    if !is_alone(module_path!(), "refused_connections_leave_no_descriptor_behind") {
        return;
    }
    let mut fixture = Fixture::new();
    let (_segment, right) = Segment::create(GEOMETRY).unwrap();
    let mut counts = Vec::new();
    for _ in 0..3 {
        for _ in 0..20 {
            let channel = if counts.is_empty() { fixture.knock() } else { fixture.prove(ATTACKER) };
            send_many(&channel, &hello().encode(), &right, 3);
            fixture.answer(&channel);
            let mut attacker = fixture.enter();
            attacker.place(u32::MAX, 1);
            fixture.reports_the_attacker("a chunk that is not there");
        }
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mapped = maps.lines().filter(|line| line.contains("carrack-segment")).count();
        counts.push((std::fs::read_dir("/proc/self/fd").unwrap().count(), mapped));
    }
    assert!(counts.iter().all(|count| *count == counts[0]), "descriptors and mappings: {counts:?}");
}

#[test]
fn a_record_of_impossible_shape_ends_its_link_and_no_other() {
    let _watchdog = Watchdog::over("shapes");
    let mut fixture = Fixture::new();
    for (slots, len) in [
        (0_u64, 0_u64),
        (0, 8),
        (2, 40),
        (1, 41),
        (4, 209),
        (4, 0),
        (255, 9),
        (5, 250),
        (4, 0xffff),
        (1, 0xffff),
    ] {
        let attacker = fixture.enter();
        let control = 1 | slots << 32 | u64::from(INLINE) << 40 | len << 48;
        attacker.slots.control(0).store(control, Ordering::Release);
        fixture.reports_the_attacker(&format!("{slots} slots of {len} bytes"));
    }
}

#[test]
fn a_record_that_names_what_is_not_there_ends_its_link_and_no_other() {
    let _watchdog = Watchdog::over("chunks");
    let mut fixture = Fixture::new();
    for (chunk, len) in
        [(4, 1), (4, 0), (63, 8), (u32::MAX, 8), (0, 4097), (3, u32::MAX), (1 << 20, 1 << 20)]
    {
        let mut attacker = fixture.enter();
        attacker.place(chunk, len);
        fixture.reports_the_attacker(&format!("{len} bytes in chunk {chunk}"));
    }
    for len in [0, 1, 7, 9, 40, 208] {
        let mut attacker = fixture.enter();
        attacker.producer.push(CHUNK, [1, 2], MemRef::host(&vec![0; len])).unwrap();
        fixture.reports_the_attacker(&format!("a place of {len} bytes"));
    }
    for kind in [0, 3, 77, 255] {
        let mut attacker = fixture.enter();
        attacker.producer.push(kind, [1, 2], MemRef::host(b"x")).unwrap();
        fixture.reports_the_attacker(&format!("a record of kind {kind}"));
    }
}

#[test]
fn a_ring_full_of_random_bytes_harms_its_sender_only() {
    let _watchdog = Watchdog::over("random rings");
    let mut rng = rng();
    let mut fixture = Fixture::new();
    for round in 0..150 {
        let attacker = fixture.enter();
        scribble(&attacker, &mut rng, round % 2 == 0);
        // Records that can be messages are messages. The others are reported, or are no records at
        // all.
        let mut down = false;
        for _ in 0..300 {
            for event in fixture.poll() {
                match event {
                    Event::Arrived { from: ATTACKER, payload, .. } => {
                        assert!(payload.len() <= 4096);
                        let mut bytes = vec![0; payload.len()];
                        copy_now(MemMut::host(&mut bytes), payload.view()).unwrap();
                    }
                    Event::PeerDown { peer: ATTACKER, cause } => {
                        assert!(matches!(cause, DownCause::Protocol(_)), "{cause}");
                        down = true;
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        if !down {
            drop(attacker);
            fixture.until("the attacker has hung up", |event| {
                matches!(event, Event::PeerDown { peer: ATTACKER, .. })
            });
        }
        fixture.others_go_on();
    }
}

fn scribble(attacker: &Attacker, rng: &mut SmallRng, plausible: bool) {
    for at in 0..GEOMETRY.slots as usize {
        let mut body = [0; 56];
        rng.fill_bytes(&mut body);
        if plausible {
            // Header, then a place that may be right.
            body[16..24].copy_from_slice(
                &(rng.random_range(0..6_u64) | rng.random_range(0..5000_u64) << 32).to_le_bytes(),
            );
        }
        // SAFETY: the slot is host memory of 56 bytes; that the victim may read it meanwhile is the
        // point.
        unsafe {
            attacker.slots.write(at, |to| {
                let to = MemMut::from_raw(to, 56, carrack::transports::mem::Place::Host);
                copy_now(to, MemRef::host(&body)).unwrap();
            });
        }
    }
    for at in (0..GEOMETRY.slots as usize).rev() {
        let control = if plausible {
            let len = [0, 8, 8, 8, 40, 41, 208, 209][rng.random_range(0..8)] as u64;
            let slots = [1, 1, 1, 2, 4][rng.random_range(0..5)] as u64;
            let kind = [1, 2, 2, 1, 3][rng.random_range(0..5)] as u64;
            (at as u64 + 1) | slots << 32 | kind << 40 | len << 48
        } else {
            rng.random::<u64>() & !0xffff_ffff | (at as u64 + 1)
        };
        attacker.slots.control(at).store(control, Ordering::Release);
    }
}

#[test]
fn a_sender_that_speaks_out_of_turn_is_reported() {
    let _watchdog = Watchdog::over("out of turn");
    let mut fixture = Fixture::new();
    let (_segment, fd) = Segment::create(GEOMETRY).unwrap();
    for bytes in [
        hello().encode(),
        HandshakeMessage::Refusal("no".into()).encode(),
        vec![1, 2, 3],
        vec![0; 300],
    ] {
        let attacker = fixture.enter();
        attacker.channel.send(&bytes, &[fd.as_fd()]).unwrap();
        fixture.reports_the_attacker(&format!("{} bytes out of turn", bytes.len()));
    }
}
