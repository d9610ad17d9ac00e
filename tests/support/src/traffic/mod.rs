//! Traffic of all kinds of operations between ranks. Each operation is accounted for: by its end,
//! by its effect on the other side, and by its bytes.
//!
//! | module | one idea |
//! |---|---|
//! | [`script`] | the steps from each rank to each other one, known to both |
//! | [`lane`] | a thread of a rank with a device of its own: posts, checks, counts |
//! | [`inbox`] | unsolicited arrivals: active messages and notifications |

pub mod inbox;
pub mod lane;
pub mod script;

use super::ranks::{Role, die};
use carrack::buffer::Region;
use carrack::{Device, Mr, Rank, RemoteKey, Runtime};
use inbox::Inbox;
use lane::Lane;
use script::{Plan, Script};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Settings that make all resources scarce except the backlog. Traffic gives its buffers away, and
/// a full backlog would then be an error.
pub const SMALL: &[&str] = &[
    "CARRACK_OFFERS=16",
    "CARRACK_VERBS_DEPTH=16",
    "CARRACK_VERBS_RECEIVES=8",
    "CARRACK_PACKETS_MAX=16",
    "CARRACK_PACKET_SIZE=256",
    "CARRACK_POLL_BATCH=1",
    "CARRACK_UNEXPECTED=4096",
];

/// Puts of a lane to one rank that are in flight at a time, in each of its regions.
pub const SLOTS: usize = 4;

/// A rank that takes part in traffic.
pub struct Taking {
    pub runtime: Runtime,
    plan: Plan,
    /// Rank that may end without notice.
    victim: Option<Rank>,
    devices: Vec<Device>,
    inboxes: Vec<Arc<Inbox>>,
    /// Memory that peers map, and memory that they cannot map.
    regions: [Region; 2],
    _registered: [Mr; 2],
    /// Remote keys of each rank's regions.
    theirs: Vec<[RemoteKey; 2]>,
    steps: AtomicU64,
    /// Number of begun steps at which the rank kills itself.
    pub dies_at: u64,
    /// Longest time without any event that is no error.
    pub patience: Duration,
}

/// Layout of the regions: the places of each rank's lanes.
#[derive(Clone, Copy)]
pub struct Layout {
    ranks: usize,
    lanes: usize,
    room: usize,
}

impl Layout {
    fn new(plan: Plan, ranks: u32) -> Self {
        Self { ranks: ranks as usize, lanes: plan.lanes as usize, room: plan.room }
    }

    /// Returns the word that one lane of one rank adds to.
    pub fn word(self, from: u32, lane: u32) -> u64 {
        8 * (from as usize * self.lanes + lane as usize) as u64
    }

    pub fn slot(self, from: u32, lane: u32, slot: usize) -> u64 {
        let words = (8 * self.ranks * self.lanes).next_multiple_of(64);
        (words + self.room * ((from as usize * self.lanes + lane as usize) * SLOTS + slot)) as u64
    }

    fn len(self) -> usize {
        self.slot(self.ranks as u32, 0, 0) as usize
    }
}

impl Taking {
    /// Creates this rank's resources. It returns when all ranks have created theirs.
    pub fn part(role: &Role, runtime: Runtime, plan: Plan, victim: Option<Rank>) -> Self {
        let mut devices = vec![runtime.default_device().clone()];
        for _ in 1..plan.lanes {
            devices.push(runtime.device().build().unwrap());
        }
        let me = runtime.rank().0;
        let inboxes: Vec<_> =
            (0..plan.lanes).map(|lane| Inbox::register(&runtime, plan, lane)).collect();
        let len = Layout::new(plan, role.size).len();
        let regions = [runtime.allocate(len).unwrap(), Region::host(len)];
        let registered = [0, 1].map(|at| runtime.register_memory(&regions[at]).unwrap());
        let [mapped, other] = [0, 1].map(|at| registered[at].remote_key().to_bytes());
        let told = [&(mapped.len() as u32).to_le_bytes(), &mapped[..], &other[..]].concat();
        role.tells("regions", &told);
        let theirs = (0..role.size).map(|rank| {
            let told = role.told("regions", rank);
            let len = u32::from_le_bytes(*told.first_chunk().unwrap()) as usize;
            [&told[4..4 + len], &told[4 + len..]].map(|bytes| RemoteKey::from_bytes(bytes).unwrap())
        });
        let theirs = theirs.collect();
        assert!(victim != Some(Rank(me)), "a victim does not know that it is one");
        Self {
            runtime,
            plan,
            victim,
            devices,
            inboxes,
            regions,
            _registered: registered,
            theirs,
            steps: AtomicU64::new(0),
            dies_at: u64::MAX,
            patience: Duration::from_secs(20),
        }
    }

    /// Steps begun so far, of all lanes.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Runs all steps of this rank, and waits for the peers' operations with it.
    pub fn run(&self) {
        std::thread::scope(|scope| {
            for lane in 0..self.plan.lanes {
                scope.spawn(move || {
                    // Else the other lanes would wait for this one, and seem to hang.
                    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        Lane::of(self, lane).run()
                    }));
                    if ended.is_err() {
                        std::process::exit(101);
                    }
                });
            }
        });
        let layout = Layout::new(self.plan, self.runtime.size());
        for from in (0..self.runtime.size()).filter(|&from| Some(Rank(from)) != self.victim) {
            for lane in (0..self.plan.lanes).filter(|_| Rank(from) != self.runtime.rank()) {
                let script = Script::new(self.plan, from, self.runtime.rank().0, lane);
                for (region, mapped) in self.regions.iter().zip([true, false]) {
                    let word = region.fetch_add(layout.word(from, lane) as usize, 0).unwrap();
                    assert_eq!(
                        word,
                        script.added(mapped),
                        "rank {from} has added too often or too seldom"
                    );
                }
            }
        }
    }

    fn begun(&self) {
        if self.steps.fetch_add(1, Ordering::Relaxed) == self.dies_at {
            die();
        }
    }
}
