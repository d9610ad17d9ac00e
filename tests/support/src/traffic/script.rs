//! Script of the steps from each rank to each other one. Both sides derive a step from its number.

use crate::words::mix;

/// Kind of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepKind {
    /// A message that meets a receive.
    Send,
    /// An active message.
    Am,
    /// A put with notification, and then a get with notification of what was put.
    Put { mapped: bool },
    /// An addition to a word.
    Add { mapped: bool },
    /// A wait for all of these.
    Flush,
}

#[derive(Clone, Copy, Debug)]
pub struct Step {
    pub number: u64,
    pub kind: StepKind,
    pub size: usize,
    /// Seed of its bytes; also the addend.
    pub salt: u64,
}

/// Amount and sizes of the traffic.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    /// Steps from each rank to each other one, for each lane.
    pub steps: u64,
    /// Devices of a rank, each with a thread.
    pub lanes: u32,
    /// Percentage of messages that are longer than a packet.
    pub large: u64,
    /// Longest message, in bytes.
    pub longest: usize,
    /// Longest put, in bytes.
    pub room: usize,
}

/// Longest message in one piece.
const PACKET: u64 = 8192;

/// The steps from one rank to another.
#[derive(Clone, Copy, Debug)]
pub struct Script {
    seed: u64,
    plan: Plan,
}

/// Effect of a script on the other side: number of arrivals, and sum of their mixed tags.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Tally {
    pub count: u64,
    pub sum: u64,
}

impl Tally {
    pub fn note(&mut self, tag: u64) {
        self.count += 1;
        self.sum = self.sum.wrapping_add(mix(tag));
    }
}

/// Bit of a notification's tag that marks a get.
pub const GET: u64 = 1 << 62;

impl Script {
    pub fn new(plan: Plan, from: u32, to: u32, lane: u32) -> Self {
        let pair = u64::from(from) << 40 | u64::from(to) << 20 | u64::from(lane);
        Self { seed: mix(plan.seed ^ mix(pair)), plan }
    }

    pub fn step(&self, number: u64) -> Step {
        let salt = mix(self.seed ^ mix(number));
        let mut rest = mix(salt);
        let mut below = |limit: u64| {
            let found = rest % limit;
            rest = mix(rest);
            found
        };
        let kind = match below(100) {
            0..35 => StepKind::Send,
            35..60 => StepKind::Am,
            60..75 => StepKind::Put { mapped: below(2) == 0 },
            75..98 => StepKind::Add { mapped: below(2) == 0 },
            _ => StepKind::Flush,
        };
        let large = below(100) < self.plan.large;
        let small = below(100);
        let (room, shortest) = match kind {
            StepKind::Put { .. } => (self.plan.room as u64, 1),
            _ => (self.plan.longest as u64, 0),
        };
        let size = match small {
            _ if large => PACKET + 1 + below(room - PACKET),
            0..60 => shortest + below(41),
            60..95 => shortest + below(1000),
            _ => shortest + below(PACKET),
        };
        Step { number, kind, size: (size as usize).min(room as usize), salt }
    }

    /// Returns the first step from `number` on that is a message for a receive.
    pub fn next_send(&self, number: u64) -> Option<Step> {
        (number..self.plan.steps).map(|at| self.step(at)).find(|step| step.kind == StepKind::Send)
    }

    /// Returns all arrivals at the receiver.
    pub fn arrivals(&self) -> Tally {
        let mut tally = Tally::default();
        for number in 0..self.plan.steps {
            match self.step(number).kind {
                StepKind::Send | StepKind::Am => tally.note(number),
                StepKind::Put { .. } => {
                    tally.note(number);
                    tally.note(number | GET);
                }
                StepKind::Add { .. } | StepKind::Flush => {}
            }
        }
        tally
    }

    /// Returns the sum of all additions to the word.
    pub fn added(&self, to_mapped: bool) -> u64 {
        let steps = (0..self.plan.steps).map(|at| self.step(at));
        let adds = steps.filter(|step| step.kind == StepKind::Add { mapped: to_mapped });
        adds.fold(0, |sum, step| sum.wrapping_add(step.salt))
    }
}

#[test]
fn a_script_has_steps_of_all_kinds_and_sizes_and_they_can_be_told_apart() {
    let plan = Plan { seed: 5, steps: 2000, lanes: 1, large: 10, longest: 50_000, room: 20_000 };
    let script = Script::new(plan, 0, 1, 0);
    let steps: Vec<Step> = (0..plan.steps).map(|at| script.step(at)).collect();
    let count = |which: &dyn Fn(&Step) -> bool| steps.iter().filter(|step| which(step)).count();
    assert!(count(&|step| step.size > 8192) > 100 && count(&|step| step.size <= 40) > 500);
    assert!(count(&|step| step.size > 30_000) > 10 && steps.iter().all(|step| step.size <= 50_000));
    for kind in [
        StepKind::Send,
        StepKind::Am,
        StepKind::Flush,
        StepKind::Put { mapped: true },
        StepKind::Add { mapped: false },
    ] {
        assert!(count(&|step| step.kind == kind) > 10, "{kind:?}");
    }
    assert!(
        count(
            &|step| matches!(step.kind, StepKind::Put { .. }) && !(1..=20_000).contains(&step.size)
        ) == 0
    );
    assert_ne!(script.arrivals(), Script::new(plan, 1, 0, 0).arrivals());
    assert_ne!(script.added(true), Script::new(plan, 0, 1, 1).added(true));
}
