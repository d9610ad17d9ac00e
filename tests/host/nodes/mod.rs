//! Two nodes of two ranks each, with shared memory within a node and TCP between. Every message is
//! accounted for.
//!
//! | module | one idea |
//! |---|---|
//! | `faults` | bad weather between the nodes, cuts, cables that are pulled, a kill |
//! | `long` | more of that, in minutes, and in an hour |
//! | `launchers` | jobs that the launchers of clusters start |

mod faults;
mod launchers;
mod long;

use crate::ordeals::soak;
use crate::support::nodes::{Nodes, Weather};
use crate::support::ranks::{Ranks, Role};
use crate::support::traffic::Taking;
use crate::support::traffic::script::Plan;
use crate::support::{Watchdog, rng};
use carrack::settings::{GpuChoice, Settings, TransportChoice};
use carrack::{Rank, Runtime};
use rand::Rng;
use std::time::Duration;

const RANKS: u32 = 4;

fn node_of(rank: u32) -> u32 {
    rank / 2
}

/// Time limit of a rank in its role.
const LIMIT: Duration = Duration::from_secs(300);

/// In place of a victim's number: none.
const NONE: u64 = u64::MAX;

/// Plays the role of a rank. Without a role it does nothing.
#[test]
fn a_rank_in_its_role() {
    let Some(role) = Role::of_this_process(LIMIT + long::hours()) else { return };
    match role.name.as_str() {
        "traffic" => traffic(&role),
        "pulled" => faults::pulled(&role),
        "soak" => soak::part(&role, &start(&role, 60), role.words[0]),
        other => panic!("no role {other}"),
    }
}

/// Starts a rank that counts a peer as gone after this number of seconds.
fn start(role: &Role, peer_timeout: u64) -> Runtime {
    let transports = vec![TransportChoice::Shm, TransportChoice::Tcp];
    let settings = Settings::builder().transports(transports).gpu(GpuChoice::None);
    role.runtime(settings.setting("peer_timeout", peer_timeout))
}

/// Checks that shared memory serves the ranks of a node, and TCP those of another.
fn has_both_paths(role: &Role, runtime: &Runtime) {
    for peer in runtime.explain(Duration::from_secs(20)) {
        let expected = match peer.rank.0 {
            rank if rank == role.rank => continue,
            rank if node_of(rank) == node_of(role.rank) => "shm",
            _ => "tcp",
        };
        assert_eq!(peer.chosen(), Some(expected), "{peer:?}");
    }
}

/// A job on two nodes.
struct Faulty {
    nodes: Nodes,
    ranks: Ranks,
    _watchdog: Watchdog,
}

impl Faulty {
    fn start(test: &str, weather: Weather, role: &str, words: &[u64]) -> Option<Self> {
        let nodes = Nodes::make(test)?;
        nodes.have(weather);
        let wrapper = |rank| nodes.wrapper(node_of(rank));
        let ranks = Ranks::start_each_under(wrapper, &format!("nodes::{role}"), RANKS, words);
        let _watchdog = Watchdog::patient(test, LIMIT + long::hours());
        Some(Self { nodes, ranks, _watchdog })
    }

    /// Starts traffic of `steps` steps, and waits until it is in full swing.
    fn traffic(test: &str, weather: Weather, steps: u64, victim: u64) -> Option<Self> {
        let mut job = Self::start(test, weather, "traffic", &[rng().random(), steps, victim])?;
        assert!((0..RANKS).all(|rank| job.ranks.hears("in full swing", rank)));
        Some(job)
    }

    /// Sees to it that the traffic went on to the end of a fault.
    fn is_still_going(&self) {
        let is_going = (0..RANKS).any(|rank| !self.ranks.has_said("done", rank));
        assert!(is_going, "the traffic ended before the fault did: it was no test");
    }
}

/// Runs the role: all kinds of operations between all ranks.
fn traffic(role: &Role) {
    let [seed, steps, victim] = role.words[..] else { panic!("three words") };
    let runtime = start(role, 60);
    has_both_paths(role, &runtime);
    let plan = Plan { seed, steps, lanes: 1, large: 10, longest: 300_000, room: 270_000 };
    let is_victim = u64::from(role.rank) == victim;
    let victim = (victim != NONE && !is_victim).then_some(Rank(victim as u32));
    let mut taking = Taking::part(role, runtime.clone(), plan, victim);
    taking.patience = Duration::from_secs(90);
    // A rank of a launcher's job is killed by itself.
    if is_victim && role.is_far() {
        taking.dies_at = steps;
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while taking.steps() < steps / 2 {
                std::thread::sleep(Duration::from_millis(1));
            }
            role.says("in full swing");
        });
        taking.run();
    });
    role.says("done");
    role.meet("over", &runtime, (0..role.size).filter(|&rank| Some(Rank(rank)) != victim));
}
