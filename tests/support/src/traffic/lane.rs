//! A thread of a rank, with a device of its own: posts what its scripts say, and checks all that
//! comes back.

use super::inbox::{ACK, Arrivals, DONE, Inbox};
use super::script::{GET, Script, Step, StepKind, Tally};
use super::{Layout, SLOTS, Taking};
use crate::words::{fill, wrong};
use carrack::{
    Buffer, CompQueue, Device, OpError, Outcome, PostError, Rank, Status, Tag, UserContext,
    WaitError,
};
use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Operations of a lane to one peer that are in flight at a time.
const IN_FLIGHT: usize = 16;
/// Messages of a lane to one peer that the peer has not acknowledged.
const WINDOW: u64 = 256;
/// Arrivals after which a lane acknowledges them.
const EACH: u64 = 64;
/// Receives that wait for one peer.
const RECEIVES: usize = 16;
/// Byte that overwrites a buffer once its operation has ended.
const USED: u8 = 0xa5;
/// Byte behind the message in a receive's buffer.
const BEHIND: u8 = 0x5a;

pub(super) struct Lane<'a> {
    at: &'a Taking,
    lane: u32,
    device: &'a Device,
    inbox: &'a Inbox,
    /// Queues of this lane's ended operations, and of its ended receives.
    ended: CompQueue,
    received: CompQueue,
    peers: Vec<Peer>,
    flights: HashMap<u64, Flight>,
    next: u64,
    /// Buffers to use again. A message that was still read from one shows by its wrong bytes.
    spare: Vec<Vec<u8>>,
    moved: bool,
}

/// A lane's state for another rank.
struct Peer {
    rank: Rank,
    mine: Script,
    theirs: Script,
    expected: Tally,
    /// Next step to begin, and arrivals at the peer that the steps before it cause.
    next: u64,
    sent: u64,
    in_flight: usize,
    /// Next step of the peer that needs a receive.
    coming: Option<Step>,
    receives: usize,
    told: u64,
    told_done: bool,
    busy_slots: [[bool; SLOTS]; 2],
    /// Gets that must follow their puts, and whose post returned a retry.
    due: Vec<(Step, usize)>,
    /// Values of the words there, as the sums of this lane's additions.
    added: [u64; 2],
    gone: bool,
}

/// Operation in flight.
struct Flight {
    peer: usize,
    step: Step,
    what: What,
}

#[derive(Clone, Copy, Debug)]
enum What {
    Message { owned: bool },
    Put(usize),
    Get(usize),
    Add { held: u64 },
    Flush,
}

impl<'a> Lane<'a> {
    pub(super) fn of(at: &'a Taking, lane: u32) -> Self {
        let me = at.runtime.rank().0;
        let others = (0..at.runtime.size()).filter(|&rank| rank != me);
        let peers = others.map(|rank| {
            let theirs = Script::new(at.plan, rank, me, lane);
            Peer {
                rank: Rank(rank),
                mine: Script::new(at.plan, me, rank, lane),
                theirs,
                expected: theirs.arrivals(),
                next: 0,
                sent: 0,
                in_flight: 0,
                coming: theirs.next_send(0),
                receives: 0,
                told: 0,
                told_done: false,
                busy_slots: [[false; SLOTS]; 2],
                due: Vec::new(),
                added: [0; 2],
                gone: false,
            }
        });
        Self {
            at,
            lane,
            device: &at.devices[lane as usize],
            inbox: &at.inboxes[lane as usize],
            ended: CompQueue::new(4096),
            received: CompQueue::new(4096),
            peers: peers.collect(),
            flights: HashMap::new(),
            next: 0,
            spare: Vec::new(),
            moved: false,
        }
    }

    pub(super) fn run(mut self) {
        let mut idle = 0;
        let mut moved = Instant::now();
        while !(0..self.peers.len()).all(|peer| self.has_ended(peer)) {
            let seen = self.inbox.activity.load(Ordering::Relaxed);
            self.moved = self.at.runtime.progress_device(self.device).expect("progress");
            while let Some(status) = self.ended.pop() {
                let flight = self.flights.remove(&status.user_context.0).expect("it ends once");
                self.end(flight, status);
            }
            while let Some(status) = self.received.pop() {
                self.receive(status);
            }
            for peer in 0..self.peers.len() {
                self.serve(peer);
            }
            idle = if self.moved { 0 } else { idle + 1 };
            if self.moved {
                moved = Instant::now();
            }
            if idle > 50 {
                assert!(moved.elapsed() < self.at.patience, "nothing moves: {}", self.state());
                // The wait is short because room in a ring wakes no thread.
                let quiet = || {
                    self.ended.is_empty()
                        && self.received.is_empty()
                        && self.inbox.activity.load(Ordering::Relaxed) == seen
                };
                match self.at.runtime.wait_for(Duration::from_millis(1), || !quiet()) {
                    Ok(()) | Err(WaitError::TimedOut(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        }
        assert!(self.flights.is_empty());
    }

    /// Describes a lane that hangs.
    fn state(&self) -> String {
        let peers = self.peers.iter().map(|peer| {
            let whats =
                self.flights.values().filter(|flight| self.peers[flight.peer].rank == peer.rank);
            let whats: Vec<_> = whats.map(|flight| (flight.what, flight.step)).collect();
            format!(
                "\n{} (down: {:?}): step {}, {} receives, told {}, done {}, gone {}, in flight \
                {whats:?}, {:?} of {:?}",
                peer.rank,
                self.at.runtime.peer_down(peer.rank),
                peer.next,
                peer.receives,
                peer.told,
                peer.told_done,
                peer.gone,
                self.inbox.from(peer.rank.0),
                peer.expected,
            )
        });
        format!("rank {} lane {}{}", self.at.runtime.rank().0, self.lane, peers.collect::<String>())
    }

    fn has_ended(&self, at: usize) -> bool {
        let peer = &self.peers[at];
        let Arrivals { tally, done, .. } = self.inbox.from(peer.rank.0);
        if Some(peer.rank) == self.at.victim {
            return peer.gone && peer.in_flight == 0 && peer.receives == 0;
        }
        assert!(tally.count <= peer.expected.count, "{} is told twice of something", peer.rank);
        let ended = peer.told_done && done && tally.count == peer.expected.count;
        assert!(!ended || tally == peer.expected, "{} is told of something else", peer.rank);
        ended
    }

    /// Begins all operations that can begin now.
    fn serve(&mut self, at: usize) {
        let peer = &mut self.peers[at];
        peer.gone |=
            Some(peer.rank) == self.at.victim && self.at.runtime.peer_down(peer.rank).is_some();
        if peer.gone {
            return;
        }
        let arrived = self.inbox.from(peer.rank.0);
        if arrived.tally.count - peer.told >= EACH && self.say(at, ACK | arrived.tally.count) {
            self.peers[at].told = arrived.tally.count;
        }
        while self.peers[at].receives < RECEIVES && !self.peers[at].gone {
            let Some(step) = self.peers[at].coming else { break };
            self.post_receive(at, step);
        }
        for (step, slot) in std::mem::take(&mut self.peers[at].due) {
            self.get(at, step, slot);
        }
        loop {
            let peer = &self.peers[at];
            let room = peer.in_flight < IN_FLIGHT && peer.sent < arrived.acked + WINDOW;
            if peer.gone || !room || peer.next == self.at.plan.steps {
                break;
            }
            let step = peer.mine.step(peer.next);
            if !self.begin(at, step) {
                break;
            }
            self.moved = true;
            self.at.begun();
            self.peers[at].next += 1;
        }
        let peer = &self.peers[at];
        let all = peer.next == self.at.plan.steps && peer.in_flight == 0 && peer.due.is_empty();
        if all && !peer.told_done && self.say(at, DONE) {
            self.peers[at].told_done = true;
        }
    }

    /// Tells a peer something about the traffic. Returns `false` if that is not possible now.
    fn say(&mut self, at: usize, tag: u64) -> bool {
        let mut am = self.at.runtime.post_am(self.peers[at].rank, &[], self.inbox.am);
        am = am.tag(Tag(tag)).device(self.device);
        match am.try_submit() {
            Ok(outcome) => !outcome.is_retry(),
            Err(error) => self.lost(at, &error),
        }
    }

    /// Checks that a refused post was one to a rank that has ended. Returns `false`: nothing was
    /// begun.
    #[track_caller]
    fn lost(&mut self, at: usize, error: &PostError) -> bool {
        let peer = &mut self.peers[at];
        let named = matches!(error, PostError::PeerDown { rank, .. } if *rank == peer.rank);
        assert!(named && self.at.victim == Some(peer.rank), "{}: {error}", peer.rank);
        peer.gone = true;
        false
    }

    fn post_receive(&mut self, at: usize, step: Step) {
        let peer = &mut self.peers[at];
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.resize(step.size + step.salt as usize % 9, BEHIND);
        let tag = Tag(u64::from(self.lane) << 48 | step.number);
        let mut receive = self.at.runtime.post_recv(peer.rank, buffer, tag).comp(&self.received);
        receive =
            receive.device(self.device).user_context(UserContext((at as u64) << 48 | step.number));
        peer.coming = peer.theirs.next_send(step.number + 1);
        peer.receives += 1;
        match receive.try_submit().expect("a receive") {
            Outcome::Done(status) => self.receive(status),
            Outcome::Posted => {}
            Outcome::Retry(reason) => panic!("a receive is tried again: {reason:?}"),
        }
    }

    /// Checks a receive that has ended.
    fn receive(&mut self, status: Status) {
        self.moved = true;
        let (at, number) =
            ((status.user_context.0 >> 48) as usize, status.user_context.0 & 0xffff_ffff_ffff);
        let peer = &mut self.peers[at];
        peer.receives -= 1;
        if let Some(error) = &status.error {
            return self.fails(at, error);
        }
        let (rank, step) = (peer.rank, peer.theirs.step(number));
        assert_eq!((status.rank, status.size), (rank, step.size));
        assert_eq!(wrong(status.bytes().unwrap(), step.salt, 0), None, "{step:?} from {rank}");
        let Buffer::Vec(buffer) = status.buffer else { panic!("another buffer") };
        assert!(buffer[step.size..].iter().all(|&byte| byte == BEHIND), "{step:?} runs over");
        self.used(buffer);
        self.inbox.note(rank.0, number);
    }

    /// Checks that a failed operation was one with a rank that has ended.
    #[track_caller]
    fn fails(&mut self, at: usize, error: &OpError) {
        let peer = &mut self.peers[at];
        let named = match error {
            OpError::PeerDown { rank, .. } => *rank == peer.rank,
            _ => false,
        };
        assert!(named && self.at.victim == Some(peer.rank), "{}: {error}", peer.rank);
        peer.gone = true;
    }

    /// Begins a step. Returns `false` if that is not possible now.
    fn begin(&mut self, at: usize, step: Step) -> bool {
        match step.kind {
            StepKind::Send | StepKind::Am => self.send(at, step),
            StepKind::Put { mapped } => self.put(at, step, usize::from(!mapped)),
            StepKind::Add { mapped } => self.add(at, step, usize::from(!mapped)),
            StepKind::Flush => {
                let rank = self.peers[at].rank;
                let (ended, device, context) =
                    (self.ended.clone(), self.device, UserContext(self.next));
                let flush = self.at.runtime.post_flush(rank).comp(&ended).device(device);
                let outcome = flush.user_context(context).try_submit();
                self.begun(at, step, What::Flush, outcome)
            }
        }
    }

    fn send(&mut self, at: usize, step: Step) -> bool {
        let owned = step.salt & 2 == 0 || step.size > self.at.runtime.max_eager();
        let mut buffer = Some(self.filled(step));
        let (runtime, rank) = (&self.at.runtime, self.peers[at].rank);
        let (ended, context) = (self.ended.clone(), UserContext(self.next));
        let tag = match step.kind {
            StepKind::Send => Tag(u64::from(self.lane) << 48 | step.number),
            _ => Tag(step.number),
        };
        let what = What::Message { owned };
        // What is given away waits in the backlog if need be; what is borrowed is tried again.
        macro_rules! called {
            ($post:expr) => {{
                let mut post = $post.comp(&ended).device(self.device).user_context(context);
                match owned {
                    true => post.submit().map(|()| Outcome::Posted),
                    false => post.try_submit(),
                }
            }};
        }
        let given = if owned { buffer.take() } else { None };
        let outcome = match (step.kind, given, &buffer) {
            (StepKind::Send, Some(given), _) => called!(runtime.post_send(rank, given, tag)),
            (_, Some(given), _) => {
                called!(runtime.post_am(rank, given, self.inbox.am).tag(tag))
            }
            (StepKind::Send, None, Some(lent)) => {
                called!(runtime.post_send(rank, &lent[..], tag))
            }
            (_, None, lent) => {
                let lent = lent.as_deref().unwrap_or_default();
                called!(runtime.post_am(rank, lent, self.inbox.am).tag(tag))
            }
        };
        if let Some(lent) = buffer {
            self.used(lent);
        }
        let begun = self.begun(at, step, what, outcome);
        self.peers[at].sent += u64::from(begun);
        begun
    }

    /// Takes a buffer back and overwrites it. An operation that still reads it sends bytes that
    /// the receiver finds wrong.
    fn used(&mut self, mut buffer: Vec<u8>) {
        buffer.fill(USED);
        if self.spare.len() < 2 * IN_FLIGHT {
            self.spare.push(buffer);
        }
    }

    fn put(&mut self, at: usize, step: Step, region: usize) -> bool {
        let Some(slot) = self.peers[at].busy_slots[region].iter().position(|busy| !busy) else {
            return false;
        };
        self.peers[at].busy_slots[region][slot] = true;
        let buffer = self.filled(step);
        let rank = self.peers[at].rank;
        let (ended, context) = (self.ended.clone(), UserContext(self.next));
        let rmr = &self.at.theirs[rank.0 as usize][region];
        let mut put = self.at.runtime.post_put(rank, buffer, rmr, self.place(slot));
        put = put.remote_comp(self.inbox.notification).tag(Tag(step.number));
        let outcome = put.comp(&ended).device(self.device).user_context(context).try_submit();
        let begun = self.begun(at, step, What::Put(slot), outcome);
        let peer = &mut self.peers[at];
        peer.sent += 2 * u64::from(begun);
        // One that has begun may have ended by now, and its slot be another's.
        peer.busy_slots[region][slot] &= begun;
        begun
    }

    fn place(&self, slot: usize) -> u64 {
        let layout = Layout::new(self.at.plan, self.at.runtime.size());
        layout.slot(self.at.runtime.rank().0, self.lane, slot)
    }

    /// Gets the bytes of a put, as soon as the put is complete.
    fn get(&mut self, at: usize, step: Step, slot: usize) {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.clear();
        buffer.resize(step.size, BEHIND);
        let rank = self.peers[at].rank;
        let (ended, context) = (self.ended.clone(), UserContext(self.next));
        let rmr = &self.at.theirs[rank.0 as usize][region_of(step)];
        let mut get = self.at.runtime.post_get(rank, buffer, rmr, self.place(slot));
        get = get.remote_comp(self.inbox.notification).tag(Tag(step.number | GET));
        let outcome = get.comp(&ended).device(self.device).user_context(context).try_submit();
        if !self.begun(at, step, What::Get(slot), outcome) {
            self.peers[at].due.push((step, slot));
        }
    }

    fn add(&mut self, at: usize, step: Step, region: usize) -> bool {
        let peer = &self.peers[at];
        let (rank, held) = (peer.rank, peer.added[region]);
        let (ended, context) = (self.ended.clone(), UserContext(self.next));
        let layout = Layout::new(self.at.plan, self.at.runtime.size());
        let word = layout.word(self.at.runtime.rank().0, self.lane);
        let rmr = &self.at.theirs[rank.0 as usize][region];
        let add = self.at.runtime.post_fetch_add(rank, rmr, word, step.salt);
        let outcome = add.comp(&ended).device(self.device).user_context(context).try_submit();
        let begun = self.begun(at, step, What::Add { held }, outcome);
        if begun {
            self.peers[at].added[region] = held.wrapping_add(step.salt);
        }
        begun
    }

    /// Returns a buffer with a step's bytes.
    fn filled(&mut self, step: Step) -> Vec<u8> {
        let mut buffer = self.spare.pop().unwrap_or_default();
        buffer.resize(step.size, 0);
        fill(&mut buffer, step.salt, 0);
        buffer
    }

    /// Notes the outcome of a post. Returns `true` if the operation was begun.
    #[track_caller]
    fn begun(
        &mut self,
        at: usize,
        step: Step,
        what: What,
        outcome: Result<Outcome, PostError>,
    ) -> bool {
        let outcome = match outcome {
            Ok(Outcome::Retry(_)) => return false,
            Ok(outcome) => outcome,
            Err(error) => return self.lost(at, &error),
        };
        self.peers[at].in_flight += 1;
        let (id, flight) = (self.next, Flight { peer: at, step, what });
        self.next += 1;
        match outcome {
            Outcome::Done(status) => self.end(flight, status),
            _ => assert!(self.flights.insert(id, flight).is_none()),
        }
        true
    }

    /// Checks an operation that has ended.
    fn end(&mut self, Flight { peer: at, step, what }: Flight, status: Status) {
        self.moved = true;
        let peer = &mut self.peers[at];
        peer.in_flight -= 1;
        assert_eq!(status.rank, peer.rank);
        if let What::Put(slot) | What::Get(slot) = what {
            peer.busy_slots[region_of(step)][slot] =
                matches!(what, What::Put(_)) && status.error.is_none();
        }
        if let Some(error) = &status.error {
            return self.fails(at, error);
        }
        let bytes = status.buffer.as_slice();
        match what {
            // Two threads that make progress for one device may carry out in another order what
            // came in two batches.
            What::Add { held } if self.at.plan.lanes == 1 => {
                assert_eq!(status.value(), Some(held), "{step:?} on {}", status.rank)
            }
            What::Add { .. } => assert!(status.value().is_some()),
            What::Get(_) => {
                assert_eq!(wrong(bytes.unwrap(), step.salt, 0), None, "{step:?} is got otherwise")
            }
            What::Message { owned: false } | What::Flush => {}
            What::Put(_) | What::Message { owned: true } => {
                assert_eq!(bytes.map(<[u8]>::len), Some(step.size), "the buffer comes back");
                assert_eq!(
                    wrong(bytes.unwrap(), step.salt, 0),
                    None,
                    "{step:?}: the buffer has changed"
                );
            }
        }
        if let Buffer::Vec(buffer) = status.buffer {
            self.used(buffer);
        }
        if let What::Put(slot) = what
            && !self.peers[at].gone
        {
            self.get(at, step, slot);
        }
    }
}

fn region_of(step: Step) -> usize {
    match step.kind {
        StepKind::Put { mapped } | StepKind::Add { mapped } => usize::from(!mapped),
        _ => 0,
    }
}
