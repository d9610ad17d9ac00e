//! Ranks with a simulated NIC each, on one network. A fault of one NIC concerns its rank alone.

use super::{LIMIT, nics_go_on, pattern};
use carrack::transports::contract::{
    Batch, Device, Domain, DownCause, Event, Header, Identity, Link, Op, Payload, PeerId, Short,
    Submit, SubmitError, Transport, Unavailable,
};
use carrack::transports::mem::{HostAllocator, MemMut, MemRef, PacketPool, copy::copy_now};
use carrack_simulators::nic::{Config, Faults, SimulatedNic};
use carrack_transports::verbs::VerbsOptions;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Longest wait for an event that must come.
const PATIENCE: Duration = Duration::from_secs(LIMIT.as_secs() / 2);

pub const PACKET: usize = 4096;

/// Returns the name of a new network.
pub fn fabric() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("faults {} {}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

pub fn options() -> VerbsOptions {
    VerbsOptions { packet_size: PACKET, receives: 32, ..VerbsOptions::default() }
}

pub fn identity(me: u32, ranks: u32) -> Identity {
    Identity { me: PeerId(me), ranks, secret: [9; 16] }
}

/// A rank.
pub struct Side {
    // Before the NIC that it is of.
    pub device: Arc<dyn Device>,
    _domain: Arc<dyn Domain>,
    pub nic: Arc<SimulatedNic>,
    batch: Batch,
}

pub fn nic(config: Config, fabric: &str) -> Arc<SimulatedNic> {
    Arc::new(SimulatedNic::new(Config { fabric: Some(fabric.into()), ..config }).unwrap())
}

impl Side {
    pub fn open(
        nic: Arc<SimulatedNic>,
        options: VerbsOptions,
        me: Identity,
    ) -> Result<Self, Unavailable> {
        let pool = PacketPool::new(Arc::new(HostAllocator), PACKET, 64);
        Self::open_with(&pool, nic, options, me)
    }

    /// Opens a side that receives into packets of that pool.
    pub fn open_with(
        pool: &PacketPool,
        nic: Arc<SimulatedNic>,
        options: VerbsOptions,
        me: Identity,
    ) -> Result<Self, Unavailable> {
        let transport = nic.transport(options);
        let info = transport.devices()?.remove(0);
        let domain = transport.open(&info, me)?;
        let device = domain.device(Arc::new(pool.clone()))?;
        Ok(Self { device, _domain: domain, nic, batch: Batch::new(8) })
    }

    pub fn faults(&self) -> &Arc<Faults> {
        self.nic.faults()
    }

    pub fn poll(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        self.device.poll(&mut self.batch, &mut |batch: &mut Batch| events.extend(batch.drain()));
        events
    }
}

/// One direction between two ranks.
#[derive(Default)]
pub struct Way {
    link: Option<Arc<dyn Link>>,
    /// Grows whenever it is made again: nothing of an older one may come.
    turn: u64,
    sent: u64,
    got: u64,
    /// Cause of the end that the sender's or the receiver's side was told. The connections of both
    /// ways end together.
    pub down: Option<DownCause>,
    /// `true` if the receiver has released the connection. Messages in flight may still come.
    is_released: bool,
}

/// Event of a rank that is not part of this fixture.
#[derive(Debug)]
pub enum Heard {
    Message,
    End(DownCause),
}

/// Three ranks, all of which talk to each other.
pub struct Fixture {
    pub sides: Vec<Side>,
    pub ways: BTreeMap<(usize, usize), Way>,
    /// Events at the three ranks about a fourth one, which is not part of this fixture.
    pub of_the_fourth: Vec<(usize, Heard)>,
    fabric: String,
}

/// Returns the network that these are on.
pub fn fabric_of(fixture: &Fixture) -> String {
    fixture.fabric.clone()
}

fn size(number: u64) -> usize {
    [0, 1, 8, 40, 41, 204, 205, 1000, PACKET][number as usize % 9]
}

pub fn submit(link: &Arc<dyn Link>, header: [u64; 2], bytes: &[u8]) -> Result<Submit, SubmitError> {
    link.submit(Op::AmCopied { header: Header(header), bytes: MemRef::host(bytes) })
}

pub fn submit_with_more(
    link: &Arc<dyn Link>,
    [first, second]: [u64; 2],
    bytes: &[u8],
) -> Result<Submit, SubmitError> {
    match link.am_more((first, second), bytes) {
        Short::Done => Ok(Submit::Done),
        Short::Busy(busy) => Ok(Submit::Busy(busy)),
        Short::Ask => submit(link, [first, second], bytes),
    }
}

pub fn bytes_of(payload: &Payload) -> Vec<u8> {
    let mut bytes = vec![0; payload.len()];
    copy_now(MemMut::host(&mut bytes), payload.view()).unwrap();
    bytes
}

impl Default for Fixture {
    fn default() -> Self {
        Self::with(&Config::default(), &options())
    }
}

impl Fixture {
    pub fn with(config: &Config, options: &VerbsOptions) -> Self {
        let fabric = fabric();
        let side = |me| {
            Side::open(nic(config.clone(), &fabric), options.clone(), identity(me, 4)).unwrap()
        };
        let sides = (0..3).map(side).collect();
        let mut fixture = Self { sides, ways: BTreeMap::new(), of_the_fourth: Vec::new(), fabric };
        for from in 0..3 {
            for to in (0..3).filter(|to| *to != from) {
                fixture.ways.insert((from, to), Way::default());
                fixture.connect(from, to).unwrap();
            }
        }
        fixture.all_go_on(3);
        fixture
    }

    /// Makes one direction anew.
    pub fn connect(&mut self, from: usize, to: usize) -> Result<(), SubmitError> {
        let link =
            self.sides[from].device.connect(&self.sides[to].device.address(), PeerId(to as u32))?;
        let way = self.ways.get_mut(&(from, to)).unwrap();
        *way = Way {
            link: Some(link),
            turn: way.turn + 1,
            is_released: way.is_released,
            ..Way::default()
        };
        Ok(())
    }

    /// Connects two ranks in both directions, after their connection has ended.
    pub fn connect_again(&mut self, one: usize, other: usize) {
        self.ways.get_mut(&(other, one)).unwrap().link = None;
        self.connect(one, other).unwrap();
        self.connect(other, one).unwrap();
    }

    /// Has one rank release its link to the other, which still sends and hears of it.
    pub fn release(&mut self, one: usize, of: usize) {
        self.way(one, of).link = None;
        self.way(of, one).is_released = true;
        self.talk_until("it has released the link", |fixture| {
            fixture.ways[&(of, one)].down.is_some()
        });
    }

    fn way(&mut self, from: usize, to: usize) -> &mut Way {
        self.ways.get_mut(&(from, to)).unwrap()
    }

    /// Lets every rank poll once, and checks the arrivals: whole, in order, once, and not after
    /// the end.
    #[track_caller]
    pub fn step(&mut self) {
        for at in 0..self.sides.len() {
            for event in self.sides[at].poll() {
                match event {
                    Event::Arrived { from: PeerId(3), .. } => {
                        self.of_the_fourth.push((at, Heard::Message))
                    }
                    Event::PeerDown { peer: PeerId(3), cause } => {
                        self.of_the_fourth.push((at, Heard::End(cause)));
                    }
                    Event::Arrived { from, header: Header([number, turn]), payload, .. } => {
                        let way = self.way(from.0 as usize, at);
                        if way.is_released && turn < way.turn {
                            continue;
                        }
                        assert_eq!((turn, number), (way.turn, way.got), "from {from} to {at}");
                        assert!(
                            bytes_of(&payload) == pattern(number, size(number)),
                            "{number} is torn"
                        );
                        way.got += 1;
                        let got = way.got;
                        let back = self.way(at, from.0 as usize);
                        assert!(
                            back.down.is_none(),
                            "{got} from {from} came to {at} after the end"
                        );
                    }
                    Event::PeerDown { peer, cause } => {
                        let way = self.way(at, peer.0 as usize);
                        assert!(way.down.is_none(), "{at} is told twice of {peer}: {cause}");
                        way.down = Some(cause);
                    }
                    Event::Connected { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
        }
    }

    /// Sends a message each way that is possible, and lets every rank poll.
    #[track_caller]
    pub fn talk(&mut self) {
        for way in self.ways.values_mut() {
            let Some(link) = way.link.as_ref().filter(|_| way.down.is_none()) else { continue };
            // Some wait for others, though none follow: then for the poll.
            let sent = match way.sent % 4 {
                3 => {
                    submit_with_more(link, [way.sent, way.turn], &pattern(way.sent, size(way.sent)))
                }
                _ => submit(link, [way.sent, way.turn], &pattern(way.sent, size(way.sent))),
            };
            match sent {
                Ok(Submit::Done) => way.sent += 1,
                Ok(Submit::Busy(_)) | Err(SubmitError::Down { .. }) => {}
                other => panic!("{other:?}"),
            }
        }
        self.step();
    }

    /// Talks until something is so.
    #[track_caller]
    pub fn talk_until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let start = Instant::now();
        while !done(self) {
            self.talk();
            if start.elapsed() > PATIENCE {
                panic!("it does not come: {what}; {:?}", self.state());
            }
            // What takes longer waits for a timer, and other tests need the CPU.
            if start.elapsed() > Duration::from_millis(200) {
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    fn state(&self) -> Vec<String> {
        let state = |(pair, way): (&(usize, usize), &Way)| {
            format!("{pair:?}: sent {}, got {}, down {:?}", way.sent, way.got, way.down)
        };
        self.ways.iter().map(state).collect()
    }

    /// Waits until `count` more messages, and all that were sent, arrive on every way that has not
    /// ended.
    #[track_caller]
    pub fn all_go_on(&mut self, count: u64) {
        let until: Vec<(usize, usize, u64)> = self
            .ways
            .iter()
            .filter(|(_, way)| way.down.is_none())
            .map(|(pair, way)| (pair.0, pair.1, way.got + count))
            .collect();
        self.talk_until("all go on", |fixture| {
            until.iter().all(|&(from, to, want)| {
                let way = &fixture.ways[&(from, to)];
                assert!(way.down.is_none(), "{from} to {to}: {:?}", way.down);
                way.got >= want
            })
        });
        let start = Instant::now();
        while self.ways.values().any(|way| way.down.is_none() && way.got < way.sent) {
            self.step();
            assert!(start.elapsed() < PATIENCE, "messages are lost: {:?}", self.state());
        }
    }

    /// Checks that the connection of two ranks ends on both sides, and no other's. Returns what the
    /// first was told.
    #[track_caller]
    pub fn only_these_end(&mut self, what: &str, one: usize, other: usize) -> DownCause {
        self.talk_until(what, |fixture| {
            fixture.ways[&(one, other)].down.is_some() && fixture.ways[&(other, one)].down.is_some()
        });
        let ended = self.ways.iter().filter(|(_, way)| way.down.is_some()).count();
        assert_eq!(ended, 2, "{what}: {:?}", self.state());
        self.all_go_on(10);
        self.ways[&(one, other)].down.clone().unwrap()
    }

    /// Returns `true` if anything has arrived since that way was made.
    pub fn has_arrived(&self, from: usize, to: usize) -> bool {
        self.ways[&(from, to)].got > 0
    }

    /// Polls until nothing has come for a while.
    pub fn settle(&mut self) {
        for _ in 0..200 {
            self.step();
            nics_go_on();
        }
    }

    /// Sends one way until there is no room, while the receiver does not poll. Then nothing is in
    /// flight.
    pub fn fill(&mut self, from: usize, to: usize) {
        let way = self.way(from, to);
        let link = way.link.clone().unwrap();
        let next =
            |way: &Way| submit(&link, [way.sent, way.turn], &pattern(way.sent, size(way.sent)));
        while matches!(next(way), Ok(Submit::Done)) {
            way.sent += 1;
        }
        for _ in 0..200 {
            assert!(self.sides[from].poll().is_empty());
            nics_go_on();
        }
    }

    /// Ends the connection of two ranks, unless it has ended.
    #[track_caller]
    pub fn end_in_order(&mut self, one: usize, other: usize) {
        for (goes, stays) in [(one, other), (other, one)] {
            let is_up = |way: &Way| way.link.is_some() && way.down.is_none();
            if is_up(&self.ways[&(goes, stays)]) && self.ways[&(stays, goes)].down.is_none() {
                self.release(goes, stays);
                break;
            }
        }
        for pair in [(one, other), (other, one)] {
            let way = self.ways.get_mut(&pair).unwrap();
            (way.link, way.is_released) = (None, true);
        }
        self.settle();
        for pair in [(one, other), (other, one)] {
            self.way(pair.0, pair.1).down = None;
        }
    }

    /// Ends the connection of two ranks while no rank sends, so that all receives are posted.
    #[track_caller]
    pub fn end_in_silence(&mut self, one: usize, other: usize) {
        self.settle();
        self.way(one, other).link = None;
        self.way(other, one).is_released = true;
        let start = Instant::now();
        while self.ways[&(other, one)].down.is_none() {
            self.step();
            assert!(start.elapsed() < PATIENCE, "it does not hear of the end: {:?}", self.state());
        }
        self.end_in_order(one, other);
    }

    /// Checks that all ranks except `rank` go on with each other.
    #[track_caller]
    pub fn the_others_go_on(&mut self, rank: usize, count: u64) {
        let others: Vec<_> =
            self.ways.keys().copied().filter(|(from, to)| *from != rank && *to != rank).collect();
        let until: Vec<_> = others.iter().map(|pair| self.ways[pair].got + count).collect();
        self.talk_until("the others go on", |fixture| {
            others.iter().zip(&until).all(|(pair, want)| fixture.ways[pair].got >= *want)
        });
    }

    /// Closes a rank's device, and checks that what it has sent arrives, and then its end.
    #[track_caller]
    pub fn close_and_expect_everything(&mut self, rank: usize) {
        std::thread::scope(|scope| {
            let device = self.sides[rank].device.clone();
            let closing = scope.spawn(move || device.close());
            self.talk_until("the end of it", |fixture| {
                (0..3).filter(|to| *to != rank).all(|to| fixture.ways[&(to, rank)].down.is_some())
            });
            closing.join().unwrap();
        });
        for to in (0..3).filter(|to| *to != rank) {
            let (way, back) = (&self.ways[&(rank, to)], &self.ways[&(to, rank)]);
            assert_eq!(back.down, Some(DownCause::Closed));
            assert_eq!(way.got, way.sent, "what was sent before the end");
        }
    }

    /// Waits until a connection of this rank ends, and returns the other rank of it.
    #[track_caller]
    pub fn who_has_lost(&mut self, what: &str, rank: usize) -> usize {
        let lost = |fixture: &Self| {
            (0..3).filter(|to| *to != rank).find(|to| fixture.ways[&(rank, *to)].down.is_some())
        };
        self.talk_until(what, |fixture| lost(fixture).is_some());
        lost(self).unwrap()
    }

    /// Rank 0 reports the end of rank 3, because of what it has done, and all others go on.
    #[track_caller]
    pub fn reports_the_attacker(&mut self, what: &str) -> DownCause {
        let mut cause = None;
        self.talk_until(what, |fixture| {
            fixture.of_the_fourth.iter().any(|(_, event)| matches!(event, Heard::End(_)))
        });
        for (at, event) in self.of_the_fourth.drain(..) {
            match event {
                Heard::End(found) => {
                    assert!(at == 0 && cause.is_none(), "{what}: {at} is told of {found}");
                    cause = Some(found);
                }
                // What could still be a message is one, before the end.
                Heard::Message => assert!(at == 0 && cause.is_none(), "{what}: after the end"),
            }
        }
        self.all_go_on(5);
        assert!(self.of_the_fourth.is_empty(), "{what}: {:?}", self.of_the_fourth);
        cause.unwrap()
    }
}
