//! Traffic of all kinds of operations between ranks, over verbs, and how it may end.

use crate::support::guests::NEVER_GIVES_UP;
use crate::support::ranks::{Ranks, Role, die, listing};
use crate::support::traffic::Taking;
use crate::support::traffic::script::Plan;
use crate::support::{Job, OverVerbs, rdma_device, rng};
use carrack::Rank;
use rand::Rng;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Ranks that may be lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Parting {
    None,
    /// Each of two ranks loses the other one.
    EachOther,
    /// A rank that kills itself after `after` steps.
    Kill {
        rank: u32,
        after: u64,
    },
}

/// Parameters of the ranks' traffic.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Course {
    pub(crate) ranks: u32,
    /// Steps from each rank to each other one, for each lane.
    pub(crate) steps: u64,
    pub(crate) lanes: u64,
    pub(crate) parting: Parting,
}

/// A NIC that gives up, when nothing has been answered for a quarter of a minute.
const GIVES_UP: [(&str, &str); 2] =
    [("CARRACK_VERBS_TIMEOUT", "19"), ("CARRACK_VERBS_RETRIES", "6")];

/// Words of a rank when a third of its steps has begun, and when it has lost its peer.
pub(crate) const RUNNING: &str = "running";
pub(crate) const PARTED: &str = "parted";

impl Course {
    /// Creates a course between two ranks, without a loss.
    pub(crate) const fn of(steps: u64) -> Self {
        Self { ranks: 2, steps, lanes: 1, parting: Parting::None }
    }

    pub(crate) fn words(self) -> Vec<u64> {
        let (parting, rank, after) = match self.parting {
            Parting::None => (0, 0, 0),
            Parting::EachOther => (1, 0, 0),
            Parting::Kill { rank, after } => (2, rank.into(), after),
        };
        // Ranks of two machines need the same seed.
        let seed = std::env::var("TEST_SEED").ok().and_then(|text| text.parse().ok());
        let seed = seed.unwrap_or_else(|| {
            if super::told("NODES").as_deref() == Some("2") { 7 } else { rng().random() }
        });
        vec![seed, self.steps, self.lanes, parting, rank, after]
    }

    /// Returns the variables for the NIC's retries. The TCP connection shows that a rank was
    /// killed; only the NIC notices a cut network.
    pub(crate) const fn nic(self) -> [(&'static str, &'static str); 2] {
        match self.parting {
            Parting::EachOther => GIVES_UP,
            Parting::None | Parting::Kill { .. } => NEVER_GIVES_UP,
        }
    }

    /// Starts the ranks of the course, with variables of the environment.
    pub(crate) fn start(self, variables: &[&str]) -> Ranks {
        let nic = self.nic().map(|(name, value)| format!("{name}={value}"));
        let variables = nic.iter().map(String::as_str).chain(variables.iter().copied());
        let wrapper: Vec<&str> = std::iter::once("env").chain(variables).collect();
        Ranks::start_under(&wrapper, "verbs_guest::course", self.ranks, &self.words())
    }
}

/// Runs a rank on its course.
pub(crate) fn rank(role: &Role) {
    let [seed, steps, lanes, parting, rank, after] = role.words[..] else { panic!("six words") };
    let parting = match parting {
        0 => Parting::None,
        1 => Parting::EachOther,
        _ => Parting::Kill { rank: rank as u32, after },
    };
    let before = listing("/proc/self/fd").len();
    let device = match role.is_far() {
        true => "rxe0".to_owned(),
        false => rdma_device(role.rank as usize),
    };
    let settings = OverVerbs::settings().setting("verbs_device", device).build().unwrap();
    let runtime = role.runtime_with(settings);
    let plan = Plan { seed, steps, lanes: lanes as u32, large: 15, longest: 60_000, room: 50_000 };
    let (victim, dies_at) = match parting {
        Parting::None => (None, u64::MAX),
        Parting::EachOther => (Some(Rank(1 - role.rank)), u64::MAX),
        Parting::Kill { rank, after } if rank == role.rank => (None, after),
        Parting::Kill { rank, .. } => (Some(Rank(rank)), u64::MAX),
    };
    let mut taking = Taking::part(role, runtime.clone(), plan, victim);
    (taking.dies_at, taking.patience) = (dies_at, Duration::from_secs(200));
    let third = steps * lanes * u64::from(role.size - 1) / 3;
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while taking.steps() < third && !ended.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(1));
            }
            says(role, RUNNING);
        });
        taking.run();
        ended.store(true, Ordering::Relaxed);
    });
    if dies_at != u64::MAX {
        die();
    }
    if parting == Parting::EachOther {
        says(role, PARTED);
        if role.is_far() {
            // They cannot tell each other that they are done, and need not.
            return;
        }
    }
    role.meet(
        "over",
        &runtime,
        (0..role.size).filter(|&rank| parting == Parting::EachOther || Some(Rank(rank)) != victim),
    );
    drop((taking, runtime));
    if !role.is_far() {
        assert_eq!(listing("/proc/self/fd").len(), before, "descriptors are left");
    }
}

/// Says something to the process that has started this rank.
fn says(role: &Role, what: &str) {
    match role.is_far() {
        // A line of its own: what libtest has begun has no end.
        true => println!("\n{what}"),
        false => role.says(what),
    }
}
