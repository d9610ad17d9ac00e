//! Verb × operation × completion object × free room: each combination.
//!
//! An operation that is tried has a natural outcome. One that is submitted is `Posted` instead of
//! `Done`, and queued instead of `Retry`. If too many operations on memory wait for their peers, it
//! is an error. One that is waited for is `Done`. An operation that would end unseen is refused,
//! and does nothing.

use crate::memory::{AccessMethod, MemoryFixture, methods};
use crate::support::over_each_transport;
use crate::support::sink::{SORTS, Sink, Sort};
use crate::support::*;
use carrack::{
    AwaitError, Counter, Handler, Matching, Outcome, PostError, Rank, RemoteComp, RetryReason,
    Runtime, Status, Tag, UserContext,
};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

over_each_transport!(
    [#[ignore = "full: half a minute each"]];
    every_operation_keeps_to_what_is_allowed,
    every_operation_keeps_to_what_is_allowed_while_a_ring_is_full,
    every_operation_keeps_to_what_is_allowed_while_too_many_wait_for_the_peer,
);

/// Longer than a packet.
const LARGE: usize = 9000;
const OFFERS: usize = 16;
const CONTEXT: UserContext = UserContext(3);
/// Tag of the operations that make the room scarce.
const FILLER: Tag = Tag(99);
const HELD: u64 = 5;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum TriedOperation {
    Am {
        size: usize,
    },
    Send {
        size: usize,
    },
    /// A receive whose message has arrived, or has not.
    Recv {
        is_there: bool,
    },
    Put {
        notifies: bool,
    },
    Get {
        notifies: bool,
    },
    FetchAdd,
    CompareSwap,
    /// After a put, or after nothing.
    Flush {
        follows: bool,
    },
}

use TriedOperation::{Am, CompareSwap, FetchAdd, Flush, Get, Put, Recv, Send};

const MESSAGES: [TriedOperation; 7] = [
    Am { size: 8 },
    Am { size: LARGE },
    Send { size: 8 },
    Send { size: LARGE },
    Recv { is_there: true },
    Recv { is_there: false },
    Flush { follows: false },
];

const OF_MEMORY: [TriedOperation; 6] = [
    Put { notifies: false },
    Put { notifies: true },
    Get { notifies: false },
    Get { notifies: true },
    FetchAdd,
    CompareSwap,
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verb {
    TrySubmit,
    Submit,
    Wait,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Room {
    Enough,
    /// The ring to the peer is full.
    NoSlot,
    /// The largest number of operations waits for their peers.
    NoOffer,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct TriedCase {
    operation: TriedOperation,
    method: AccessMethod,
    room: Room,
    comp: Option<Sort>,
    verb: Verb,
    /// `true` if a NIC carries out puts and gets.
    has_nic: bool,
}

/// Outcome of an operation that is tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Nature {
    Done,
    Posted,
    Retry,
}

impl TriedCase {
    fn nature(&self) -> Nature {
        let is_asked = self.method != AccessMethod::Mapped;
        match (self.operation, self.room) {
            (Put { .. } | Get { .. }, _) if self.has_nic => Nature::Posted,
            (Am { .. } | Send { .. }, Room::NoSlot) => Nature::Retry,
            (Am { size: LARGE } | Send { size: LARGE }, Room::NoOffer) => Nature::Retry,
            (Am { size: LARGE } | Send { size: LARGE }, _) => Nature::Posted,
            (Am { .. } | Send { .. } | Recv { is_there: true }, _) => Nature::Done,
            (Recv { is_there: false } | Flush { follows: true }, _) => Nature::Posted,
            (Flush { follows: false }, _) => Nature::Done,
            (_, Room::NoOffer) if is_asked => Nature::Retry,
            // What is asked for waits for room in the backlog.
            _ if is_asked => Nature::Posted,
            _ => Nature::Done,
        }
    }

    fn is_message(&self) -> bool {
        matches!(self.operation, Am { .. } | Send { .. })
    }

    fn waits(&self) -> bool {
        self.verb == Verb::Wait
    }

    /// Returns `true` if no completion object would be told of its end, and it is not waited for.
    fn is_unseen(&self) -> bool {
        let may = self.is_message() || matches!(self.operation, Put { .. });
        !self.waits() && self.comp.is_none() && !may
    }

    fn check(&self, outcome: &Result<Outcome, PostError>) {
        if let Ok(Outcome::Retry(RetryReason::Full)) = outcome
            && self.has_nic
            && self.room == Room::NoSlot
            && matches!(self.operation, Put { .. } | Get { .. })
        {
            // Whether a queue pair that takes no more messages has room for these depends on what
            // its owner has heard of.
            assert_eq!(self.verb, Verb::TrySubmit);
            return;
        }
        let comes_to = match self.nature() {
            nature if self.verb == Verb::TrySubmit => nature,
            Nature::Retry if !self.waits() && !self.is_message() => {
                assert!(
                    matches!(outcome, Err(PostError::OffersFull { limit: OFFERS, .. })),
                    "{outcome:?}"
                );
                return;
            }
            _ if self.waits() => Nature::Done,
            _ => Nature::Posted,
        };
        match outcome {
            Ok(Outcome::Done(_)) => assert_eq!(comes_to, Nature::Done),
            Ok(Outcome::Posted) => assert_eq!(comes_to, Nature::Posted),
            Ok(Outcome::Retry(reason)) => {
                let full = if self.room == Room::NoSlot {
                    RetryReason::Full
                } else {
                    RetryReason::Unanswered
                };
                assert_eq!((comes_to, *reason), (Nature::Retry, full));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn every_operation_keeps_to_what_is_allowed<J: Job>() {
    each_case::<J>(Room::Enough);
}

fn every_operation_keeps_to_what_is_allowed_while_a_ring_is_full<J: Job>() {
    each_case::<J>(Room::NoSlot);
}

fn every_operation_keeps_to_what_is_allowed_while_too_many_wait_for_the_peer<J: Job>() {
    each_case::<J>(Room::NoOffer);
}

fn each_case<J: Job>(room: Room) {
    let mut seed = 0;
    let methods = methods::<J>();
    for &method in &methods {
        let bench = Bench::new::<J>(method);
        let messages = MESSAGES.iter().filter(|_| method == methods[0]);
        let flush = [Flush { follows: true }];
        let flush = flush.iter().filter(|_| method != AccessMethod::Mapped);
        for &operation in OF_MEMORY.iter().chain(messages).chain(flush) {
            for comp in SORTS.into_iter().map(Some).chain([None]) {
                for verb in [Verb::TrySubmit, Verb::Submit, Verb::Wait] {
                    seed += 1;
                    let has_nic = J::IS_RDMA;
                    let case = TriedCase { operation, method, room, comp, verb, has_nic };
                    println!("{case:?}");
                    let run = Run::new(&bench, case, seed);
                    if case.is_unseen() { run.is_refused() } else { run.run() }
                }
            }
        }
    }
}

/// Two ranks, and what the first one's operations are about.
struct Bench {
    fixture: MemoryFixture,
    /// Statuses at rank 1 of active messages, and of the notifications of puts and gets.
    told: Mutex<Vec<Status>>,
    name: RemoteComp,
    filler: RemoteComp,
}

impl Bench {
    fn new<J: Job>(method: AccessMethod) -> std::sync::Arc<Self> {
        let fixture = MemoryFixture::with_settings::<J>(
            J::settings().setting("shm_slots", 8).setting("tcp_window", 8192).offers(OFFERS),
            method,
            64,
        );
        if J::IS_RDMA {
            // The first asks where the region is.
            sent(&fixture.ranks, || {
                fixture.ranks[0].post_put(Rank(1), &[0], &fixture.rmr, 0).try_submit()
            });
            settle(&fixture.ranks);
        }
        std::sync::Arc::new_cyclic(|bench: &std::sync::Weak<Self>| {
            let bench = bench.clone();
            let tell = Handler::new(move |status| {
                bench.upgrade().unwrap().told.lock().push(status);
            });
            let name = fixture.ranks[1].register_comp(&tell).unwrap();
            let filler = fixture.ranks[1].register_comp(&Counter::new()).unwrap();
            Self { fixture, told: Mutex::default(), name, filler }
        })
    }

    fn ranks(&self) -> &[Runtime; 2] {
        &self.fixture.ranks
    }

    fn word(&self) -> u64 {
        u64::from_le_bytes(self.memory(8).try_into().unwrap())
    }

    fn memory(&self, len: usize) -> Vec<u8> {
        self.fixture.region.slice(0, len).unwrap().to_vec().unwrap()
    }
}

/// One case.
struct Run<'a> {
    bench: &'a Bench,
    case: TriedCase,
    payload: Vec<u8>,
    tag: Tag,
    comp: Option<Sink>,
    /// The other rank's side of a send.
    came: Sink,
    fillers: Sink,
    is_room_made: AtomicBool,
    is_met: AtomicBool,
}

impl<'a> Run<'a> {
    fn new(bench: &'a Bench, case: TriedCase, seed: u64) -> Self {
        let size = match case.operation {
            Am { size } | Send { size } => size,
            _ => 8,
        };
        Self {
            bench,
            case,
            payload: pattern(seed, size),
            tag: Tag(1000 + seed),
            comp: case.comp.map(Sink::new),
            came: Sink::keeping(),
            fillers: Sink::keeping(),
            is_room_made: AtomicBool::new(false),
            is_met: AtomicBool::new(false),
        }
    }

    fn run(&self) {
        let case = &self.case;
        self.prepare();
        self.take_room();
        let mut operation = self.operation();
        let mut outcome = self.call(&mut *operation);
        // A thread that sends what was gathered may hold the link at this moment.
        while matches!(outcome, Ok(Outcome::Retry(RetryReason::Lock))) {
            outcome = self.call(&mut *operation);
        }
        case.check(&outcome);
        let mut status = None;
        loop {
            match outcome {
                Ok(Outcome::Done(ended)) => status = Some(ended),
                Ok(Outcome::Posted) => {}
                // It is the caller's again: now that there is room it can go.
                Ok(Outcome::Retry(_)) | Err(PostError::OffersFull { .. }) => {
                    assert_eq!(
                        self.comp.as_ref().map_or(0, Sink::count),
                        0,
                        "not posted, and signalled"
                    );
                    self.make_room();
                    step(self.bench.ranks());
                    outcome = self.call(&mut *operation);
                    continue;
                }
                Err(error) => panic!("{error}"),
            }
            break;
        }
        self.make_room();
        self.meet();
        let is_done = status.is_some();
        if let (Some(comp), false) = (&self.comp, is_done) {
            until(self.bench.ranks(), || comp.count() > 0);
            status = comp.take().pop();
        }
        until(self.bench.ranks(), || self.has_effect());
        settle(self.bench.ranks());
        if let Some(comp) = &self.comp {
            let count = comp.count() + usize::from(!is_done && case.comp != Some(Sort::Counter));
            assert_eq!((count, comp.failed()), (usize::from(!is_done), 0), "signalled how often");
        }
        if let Some(status) = status {
            self.check_status(status);
        }
        self.check_effect();
        if case.room == Room::NoOffer {
            assert_eq!((self.fillers.count(), self.fillers.failed()), (2 * self.offers(), 0));
        }
        assert!(matches!(operation(), Err(PostError::Spent)), "it has ended");
    }

    /// Checks an operation that would end unseen: each time it is refused, without any effect.
    fn is_refused(&self) {
        let mut operation = self.operation();
        for _ in 0..2 {
            let refused = operation();
            assert!(matches!(refused, Err(PostError::NoCompletion(_))), "{refused:?}");
        }
        settle(self.bench.ranks());
        assert!(self.bench.told.lock().is_empty());
        assert_eq!(self.comp.as_ref().map_or(0, |comp| comp.count() + comp.failed()), 0);
    }

    /// Creates the preconditions of the case.
    fn prepare(&self) {
        let ranks = self.bench.ranks();
        match self.case.operation {
            Recv { is_there: true } => {
                sent(ranks, || {
                    ranks[1].post_send(Rank(0), &self.payload[..], self.tag).try_submit()
                });
                until(ranks, || ranks[0].default_matching_engine().waiting().0 == 1);
            }
            Get { .. } => {
                self.bench.fixture.region.slice(0, 8).unwrap().write(&self.payload).unwrap()
            }
            FetchAdd | CompareSwap => {
                self.bench.fixture.region.slice(0, 8).unwrap().write(&HELD.to_le_bytes()).unwrap();
            }
            _ => {}
        }
    }

    /// Returns the number of large messages that fill all room.
    fn offers(&self) -> usize {
        // A flush that follows a put leaves room for that.
        OFFERS - usize::from(self.case.operation == Flush { follows: true })
    }

    /// Makes the room scarce, and posts what a flush follows.
    fn take_room(&self) {
        let ranks = self.bench.ranks();
        match self.case.room {
            Room::Enough => {}
            Room::NoSlot => {
                let mut filler = ranks[0].post_am(Rank(1), b"filler", self.bench.filler);
                let mut posts = || filler.again().try_submit().unwrap();
                while !matches!(posts(), Outcome::Retry(RetryReason::Full)) {}
            }
            Room::NoOffer => {
                for _ in 0..self.offers() {
                    let mut filler =
                        ranks[0].post_send(Rank(1), vec![1; LARGE], FILLER).comp(&self.fillers);
                    assert!(posted(ranks, || filler.try_submit()).is_posted());
                }
            }
        }
        if let Flush { follows: true } = self.case.operation {
            let mut put = ranks[0].post_put(Rank(1), vec![7; 8], &self.bench.fixture.rmr, 8);
            put.submit().unwrap();
        }
    }

    fn make_room(&self) {
        if self.is_room_made.swap(true, Ordering::AcqRel) || self.case.room != Room::NoOffer {
            return;
        }
        let one = &self.bench.ranks()[1];
        for _ in 0..self.offers() {
            let _ = one
                .post_recv(Rank(0), vec![0; LARGE], FILLER)
                .comp(&self.fillers)
                .try_submit()
                .unwrap();
        }
    }

    /// Does the other rank's part in the operation.
    fn meet(&self) {
        if self.is_met.swap(true, Ordering::AcqRel) {
            return;
        }
        let one = &self.bench.ranks()[1];
        match self.case.operation {
            Send { size } => {
                one.post_recv(Rank(0), vec![0; size], self.tag).comp(&self.came).submit().unwrap();
            }
            Recv { is_there: false } => {
                let mut send = one.post_send(Rank(0), &self.payload[..], self.tag);
                sent(std::slice::from_ref(one), || send.try_submit());
            }
            _ => {}
        }
    }

    /// Returns the operation, to be called as often as need be.
    fn operation(&self) -> Box<dyn FnMut() -> Result<Outcome, PostError> + '_> {
        let TriedCase { operation, verb, .. } = self.case;
        let (zero, rmr, name) = (&self.bench.ranks()[0], &self.bench.fixture.rmr, self.bench.name);
        macro_rules! with_options {
            ($post:expr) => {{
                let mut post = $post.user_context(CONTEXT);
                if let Some(comp) = &self.comp {
                    post = post.comp(comp);
                }
                Box::new(move || match verb {
                    Verb::TrySubmit => post.try_submit(),
                    Verb::Submit => post.submit().map(|()| Outcome::Posted),
                    Verb::Wait => match post.wait() {
                        Ok(status) => Ok(Outcome::Done(status)),
                        Err(AwaitError::Post(error)) => Err(error),
                        Err(other) => panic!("{other}"),
                    },
                })
            }};
        }
        let payload = || self.payload.clone();
        match operation {
            Am { .. } => with_options!(zero.post_am(Rank(1), payload(), name).tag(self.tag)),
            Send { .. } => {
                with_options!(
                    zero.post_send(Rank(1), payload(), self.tag).matching(Matching::RankTag)
                )
            }
            Recv { .. } => with_options!(zero.post_recv(Rank(1), vec![0xa5; 8], self.tag)),
            Put { notifies: false } => with_options!(zero.post_put(Rank(1), payload(), rmr, 0)),
            Put { notifies: true } => {
                with_options!(
                    zero.post_put(Rank(1), payload(), rmr, 0).remote_comp(name).tag(self.tag)
                )
            }
            Get { notifies: false } => with_options!(zero.post_get(Rank(1), vec![0xa5; 8], rmr, 0)),
            Get { notifies: true } => {
                with_options!(
                    zero.post_get(Rank(1), vec![0xa5; 8], rmr, 0).remote_comp(name).tag(self.tag)
                )
            }
            FetchAdd => with_options!(zero.post_fetch_add(Rank(1), rmr, 0, 2)),
            CompareSwap => with_options!(zero.post_compare_swap(Rank(1), rmr, 0, HELD, HELD + 2)),
            Flush { .. } => with_options!(zero.post_flush(Rank(1))),
        }
    }

    /// Calls the operation. While the call waits for its end, the other rank goes on and does its
    /// part.
    fn call(
        &self,
        operation: &mut dyn FnMut() -> Result<Outcome, PostError>,
    ) -> Result<Outcome, PostError> {
        let case = &self.case;
        if !case.waits() {
            return operation();
        }
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                if case.nature() == Nature::Retry {
                    // So that the call finds no room at first.
                    std::thread::sleep(Duration::from_millis(1));
                }
                self.make_room();
                self.meet();
                while !ended.load(Ordering::Acquire) {
                    let _ = self.bench.ranks()[1].progress_all();
                    std::thread::yield_now();
                }
            });
            let outcome = operation();
            ended.store(true, Ordering::Release);
            outcome
        })
    }

    fn check_status(&self, status: Status) {
        assert!(status.error.is_none(), "{status:?}");
        assert_eq!((status.rank, status.user_context), (Rank(1), CONTEXT));
        match self.case.operation {
            Flush { .. } => {}
            FetchAdd | CompareSwap => assert_eq!(status.value(), Some(HELD)),
            _ => {
                assert_eq!(status.size, self.payload.len());
                assert_eq!(status.buffer.to_vec().unwrap(), self.payload, "the buffer comes back");
            }
        }
    }

    /// Returns `true` if the operation notifies the other rank.
    fn tells(&self) -> bool {
        match self.case.operation {
            Am { .. } => true,
            Put { notifies } | Get { notifies } => notifies,
            _ => false,
        }
    }

    /// Returns `true` if the operation has had its effect.
    fn has_effect(&self) -> bool {
        let is_put = matches!(self.case.operation, Put { .. });
        let is_told = !self.tells() || !self.bench.told.lock().is_empty();
        let is_met = self.bench.ranks()[1].default_matching_engine().waiting() == (0, 0);
        let is_free = self.case.room != Room::NoOffer || self.fillers.count() == 2 * self.offers();
        let is_send = matches!(self.case.operation, Send { .. });
        is_told
            && is_free
            && (is_met || is_send)
            && (!is_put || self.bench.memory(8) == self.payload)
    }

    /// Checks that the operation had its effect exactly once.
    fn check_effect(&self) {
        let told = std::mem::take(&mut *self.bench.told.lock());
        let tells = self.tells();
        assert_eq!(told.len(), usize::from(tells), "{told:?}");
        if let Some(status) = told.first() {
            assert_eq!(
                (status.rank, status.tag, status.size),
                (Rank(0), self.tag, self.payload.len())
            );
        }
        match self.case.operation {
            Am { .. } => assert_eq!(told[0].bytes().unwrap(), self.payload),
            Send { .. } => {
                let status = self.came.one(self.bench.ranks());
                assert_eq!(status.bytes().unwrap(), self.payload);
            }
            Put { .. } | Get { .. } => assert_eq!(self.bench.memory(8), self.payload),
            FetchAdd | CompareSwap => assert_eq!(self.bench.word(), HELD + 2),
            Recv { .. } | Flush { .. } => {}
        }
        let engine = self.bench.ranks()[1].default_matching_engine();
        assert_eq!(engine.waiting(), (0, 0), "unmatched messages and receives");
    }
}
