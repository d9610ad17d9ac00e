//! A rank is killed while engines copy from and to its memory, its own and the others'.

use crate::support::amount;
use crate::support::gpu_ranks::{
    Gpus, Kind, PATIENCE, are_real, completed, filled, receive, registered, send, told,
};
use crate::support::ranks::{Ranks, Role, die};
use crate::support::words::wrong;
use crate::support::{Watchdog, rng};
use carrack::region::Region;
use carrack::{OpError, PostError, Rank, RemoteKey, Runtime, Status, Synchronizer, Tag};
use carrack_simulators::gpu::FakeConfig;
use rand::Rng;
use std::time::Duration;

/// gpu.md, life and death rule 1; legacy IPC rule 5. All three ranks are exporters and importers.
/// The two that are left end their operations with the dead one with that error, and go on with
/// each other. The memory that the dead one had mapped can be freed.
#[test]
fn a_rank_that_is_killed_in_mid_copy_costs_the_others_what_they_had_with_it_and_no_more() {
    let count = amount("TEST_KILLS", 9, 30);
    let _watchdog = Watchdog::patient("kills", Duration::from_secs(100 + 10 * count));
    let mut rng = rng();
    for number in 0..count {
        let victim = rng.random_range(0..3);
        let words = [victim.into(), number % KINDS.len() as u64, rng.random_range(0..6 * ROUNDS)];
        println!("kill {number}: words {words:?}");
        Ranks::start("gpu_ordeals::kills", 3, &words).succeed_except(Rank(victim));
    }
}

const KINDS: [Kind; 3] = [Kind::Plain(0), Kind::Shareable(1), Kind::Pooled(0)];
/// Messages each way between two ranks, and puts and gets.
const ROUNDS: u64 = 12;

fn len() -> usize {
    if are_real() { (8 << 20) + 1 } else { 300_001 }
}

pub(crate) fn rank(role: &Role) {
    let [victim, kind, when] = role.words[..] else { panic!("three words") };
    let (victim, kind) = (victim as u32, KINDS[kind as usize]);
    // Simulated engines take their time, so that most of it is in mid-copy.
    let slow = FakeConfig { copy_delay: Duration::from_micros(300), ..FakeConfig::devices(2) };
    let gpus = Gpus::of(slow);
    let runtime = gpus.runtime(role);
    let others: Vec<u32> = (0..3).filter(|&rank| rank != role.rank).collect();
    let windows: Vec<_> = others
        .iter()
        .map(|other| {
            let region = kind.region(&gpus, len());
            (registered(role, &runtime, &format!("window for {other}"), &region), region)
        })
        .collect();
    let lane = |phase: u64, other: u32| {
        let regions = [(); 3].map(|()| kind.region(&gpus, len()));
        let rmr = told(role, &format!("window for {}", role.rank), other);
        Lane::new(&runtime, (role.rank, other, victim), phase, regions, rmr)
    };
    let mut lanes: Vec<_> = others.iter().map(|&other| lane(0, other)).collect();
    let mut ended = 0;
    while !lanes.iter().all(Lane::has_ended) {
        runtime.progress_all().unwrap();
        ended += lanes.iter_mut().map(Lane::step).sum::<u64>();
        if role.rank == victim && ended >= when {
            die();
        }
    }
    if role.rank == victim {
        die();
    }
    drop(lanes);
    nothing_is_begun_with(
        &runtime,
        &gpus,
        Rank(victim),
        &told(role, &format!("window for {}", role.rank), victim),
    );
    let survivor = others.iter().copied().find(|&other| other != victim).unwrap();
    // They go on with each other.
    let mut lane = lane(1, survivor);
    while !lane.has_ended() {
        runtime.progress_all().unwrap();
        lane.step();
    }
    drop(lane);
    let names: Vec<_> = windows.iter().map(|(_, region)| (region.addr(), region.id())).collect();
    role.meet("done", &runtime, [role.rank, survivor].into_iter());
    drop(windows);
    let are_free = || names.iter().all(|&name| !gpus.has(name));
    runtime.wait_for(PATIENCE, are_free).expect("the dead hold nothing");
    role.meet("over", &runtime, [role.rank, survivor].into_iter());
}

/// Checks that all operations with a killed rank are refused or fail with that reason, also while
/// its memory is still mapped.
fn nothing_is_begun_with(runtime: &Runtime, gpus: &Gpus, gone: Rank, rmr: &RemoteKey) {
    let buffer = || Kind::Plain(0).empty(gpus, 1000);
    let outcomes = [
        ("a send", send(runtime, gone, buffer(), Tag(9))),
        ("a receive", receive(runtime, gone, buffer(), Tag(9))),
        (
            "a put",
            completed(runtime, |done| runtime.post_put(gone, buffer(), rmr, 0).comp(done).submit()),
        ),
        (
            "a get",
            completed(runtime, |done| runtime.post_get(gone, buffer(), rmr, 0).comp(done).submit()),
        ),
    ];
    for (what, outcome) in outcomes {
        match outcome.map(Status::ok) {
            Err(PostError::PeerDown { rank, .. }) | Ok(Err(OpError::PeerDown { rank, .. }))
                if rank == gone => {}
            other => panic!("{what}: {other:?}"),
        }
    }
}

/// Everything between this rank and another: messages both ways, and puts and gets.
struct Lane<'a> {
    runtime: &'a Runtime,
    me: u32,
    other: u32,
    may_die: bool,
    phase: u64,
    /// For sending, receiving, and for what is put and got.
    regions: [Region; 3],
    flows: [Flow; 3],
    rmr: RemoteKey,
    is_down: bool,
}

/// Operations of one sort, one after the other.
#[derive(Default)]
struct Flow {
    in_flight: Option<Synchronizer>,
    ended: u64,
}

const SEND: usize = 0;
const RECEIVE: usize = 1;

impl<'a> Lane<'a> {
    fn new(
        runtime: &'a Runtime,
        (me, other, victim): (u32, u32, u32),
        phase: u64,
        regions: [Region; 3],
        rmr: RemoteKey,
    ) -> Self {
        let (may_die, flows) = (other == victim, Default::default());
        Self { runtime, me, other, may_die, phase, regions, flows, rmr, is_down: false }
    }

    /// Returns `true` if all operations are done, or the other rank has ended and none is in
    /// flight.
    fn has_ended(&self) -> bool {
        let has_ended =
            |flow: &Flow| flow.in_flight.is_none() && (self.is_down || flow.ended >= ROUNDS);
        // One that will die is waited for until it has.
        self.flows.iter().all(has_ended) && self.is_down == self.may_die
    }

    /// Advances all flows, and returns the number of operations that have ended.
    fn step(&mut self) -> u64 {
        (0..self.flows.len()).map(|which| u64::from(self.step_one(which))).sum()
    }

    fn step_one(&mut self, which: usize) -> bool {
        let flow = &mut self.flows[which];
        let ended = match &flow.in_flight {
            Some(done) if !done.test() => return false,
            in_flight => in_flight.as_ref().map(|done| done.take().unwrap().remove(0)),
        };
        flow.in_flight = None;
        let has_ended = ended.is_some();
        if let Some(status) = ended {
            self.look_at(which, status);
        }
        // Those with one that will die go on until it does.
        if !self.is_down && (self.may_die || self.flows[which].ended < ROUNDS) {
            self.begin(which);
        }
        has_ended
    }

    fn look_at(&mut self, which: usize, status: Status) {
        let (number, is_get) = (self.flows[which].ended, self.flows[which].ended % 2 == 1);
        self.flows[which].ended += 1;
        match status.ok() {
            Ok(status) => match which {
                RECEIVE => self.holds(&status.buffer, self.salt(self.other, self.me, number)),
                SEND => assert_eq!(status.size, len()),
                _ if is_get => {
                    self.holds(&status.buffer, self.salt(self.me, self.other, number - 1))
                }
                _ => {}
            },
            Err(OpError::PeerDown { rank, .. }) if self.may_die => {
                assert_eq!(rank.0, self.other);
                self.is_down = true;
            }
            Err(error) => panic!("{} with {}, {which}: {error}", self.me, self.other),
        }
    }

    #[track_caller]
    fn holds(&self, buffer: &carrack::Buffer, salt: u64) {
        let bytes = buffer.to_vec().unwrap();
        assert_eq!((bytes.len(), wrong(&bytes, salt, 0)), (len(), None), "from {}", self.other);
    }

    fn salt(&self, from: u32, to: u32, number: u64) -> u64 {
        ((self.phase * 3 + u64::from(from)) * 3 + u64::from(to)) * 1000 + number
    }

    fn begin(&mut self, which: usize) {
        let (done, number) = (Synchronizer::new(1), self.flows[which].ended);
        let (slice, peer) = (self.regions[which].whole(), Rank(self.other));
        let fill = |slice: &carrack::region::RegionSlice| {
            let bytes = filled(len(), self.salt(self.me, self.other, number));
            slice.write(&bytes).unwrap();
        };
        let runtime = self.runtime;
        let tag = Tag(self.phase);
        let begun = match which {
            SEND => {
                fill(&slice);
                runtime.post_send(peer, slice, tag).comp(&done).submit()
            }
            RECEIVE => {
                slice.write(&vec![0; len()]).unwrap();
                runtime.post_recv(peer, slice, tag).comp(&done).submit()
            }
            _ if number % 2 == 0 => {
                fill(&slice);
                let mut post = runtime.post_put(peer, slice, &self.rmr, 0).comp(&done);
                post.submit()
            }
            _ => {
                slice.write(&vec![0; len()]).unwrap();
                let mut post = runtime.post_get(peer, slice, &self.rmr, 0).comp(&done);
                post.submit()
            }
        };
        match begun {
            Ok(()) => self.flows[which].in_flight = Some(done),
            Err(PostError::PeerDown { rank, .. }) if self.may_die => {
                assert_eq!(rank, peer);
                self.is_down = true;
            }
            other => panic!("{} with {peer}, {which}: {other:?}", self.me),
        }
    }
}
