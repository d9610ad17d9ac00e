//! One rank: its seats, and the points one after another.

use super::benchmark::Reach;
use super::error::PerfError;
use super::figures::{Figures, Measured, together};
use super::measure::{Round, fitting};
use super::memory::Memories;
use super::order::Order;
use super::place::Cpus;
use super::plan::{Plan, Point};
use super::record::{Conditions, Record};
use super::seat::{Pace, Seat};
use super::{barrier, place};
use crate::own_ranks::{allowed_cpus, cpu_list, gather};
use carrack::{Rank, Runtime};
use quanta::Clock;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

/// Messages of the shortest round that is estimated from by itself. A shorter one is repeated,
/// because a step that the kernel interrupts looks like a slow one.
const FEW: u64 = 64;
/// The share of a point's time that a round must fill to be estimated from.
const ENOUGH: f64 = 0.1;
/// Messages of a round at the most.
const MOST: u64 = 1 << 34;
/// Time limit for the other rank's address, and at the end for operations in flight.
const PATIENCE: Duration = Duration::from_secs(30);

/// A rank that is ready to measure.
pub(super) struct Session {
    runtime: Runtime,
    memories: Memories,
    seats: Vec<Seat>,
    plan: Plan,
    clock: Clock,
    conditions: Conditions,
    /// CPUs of each rank.
    cpus: Cpus,
}

impl Session {
    /// Makes the seats, and agrees with the other ranks on what will be measured.
    pub(super) fn open(
        runtime: Runtime,
        plan: Plan,
        memories: Memories,
    ) -> Result<Self, PerfError> {
        let memory = &memories.own;
        plan.fits(runtime.size())?;
        // Seats are for two ranks; of more than two, rank 1 stands for all that rank 0 deals with.
        let peer = Rank(u32::from(runtime.rank() == Rank(0)));
        let (fingerprint, is_simulated) = (plan.fingerprint(), memory.is_simulated());
        let facts = Facts { fingerprint, cpus: allowed_cpus(), is_simulated }.exchange(&runtime)?;
        let given_up = Arc::new(AtomicBool::new(false));
        let shared = plan.share_device.then(|| memory.device(&runtime, true)).transpose()?;
        let seats = (0..plan.most_seats()).map(|number| {
            let device = shared.clone().map_or_else(|| memory.device(&runtime, false), Ok)?;
            Seat::new(&runtime, memory, device, peer, &given_up, number)
        });
        let seats = seats.collect::<Result<_, _>>()?;
        // Names may be used once they are registered.
        runtime.barrier()?;
        let explained = runtime.explain(PATIENCE);
        let path = explained.iter().find(|paths| paths.rank == peer);
        let conditions = Conditions {
            ranks: runtime.size(),
            device: if plan.share_device { "shared" } else { "own" },
            transport: path.and_then(|paths| paths.chosen()).unwrap_or("unknown"),
            mem: plan.sides.first.name(facts[0].is_simulated),
            peer_mem: plan.sides.others.name(facts[1].is_simulated),
        };
        let cpus = facts.into_iter().map(|facts| facts.cpus).collect();
        Ok(Self { runtime, memories, seats, plan, clock: Clock::new(), conditions, cpus })
    }

    /// Returns the plan.
    pub(super) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns the way in which this number of threads waits.
    fn pace(&self, threads: usize) -> Pace {
        self.plan.wait.unwrap_or_else(|| place::pace(&self.cpus, threads))
    }

    /// Returns a line that says how the session measures.
    pub(super) fn describe(&self) -> String {
        let cpus: Vec<_> = self.cpus.iter().map(|cpus| cpu_list(cpus)).collect();
        let cpus = cpus.join(" and ");
        let ranks = match self.runtime.size() {
            2 => "two".to_owned(),
            ranks => ranks.to_string(),
        };
        let mut threads: Vec<_> = self.plan.points.iter().map(|point| point.threads).collect();
        threads.sort_unstable();
        threads.dedup();
        let ways = threads.iter().map(|&threads| match self.pace(threads) {
            Pace::Spin if self.plan.pin && place::cores(&self.cpus, threads).is_some() => {
                format!("{threads} thread(s) a rank poll, pinned to a core each")
            }
            Pace::Spin => format!("{threads} thread(s) a rank poll"),
            Pace::Sleep => format!("{threads} thread(s) a rank sleep when idle"),
        });
        let ways = ways.collect::<Vec<_>>().join("; ");
        let (transport, memory) = (self.conditions.transport, self.conditions.memory());
        let devices =
            if self.plan.share_device { "; all threads of a rank share a device" } else { "" };
        format!("{ranks} ranks over {transport}, {memory}, on CPUs {cpus}; {ways}{devices}")
    }

    /// Measures all points as rank 0, and gives each result to `report`.
    pub(super) fn lead(
        &mut self,
        mut begin: impl FnMut(Point),
        mut report: impl FnMut(&Record) -> Result<(), PerfError>,
    ) -> Result<(), PerfError> {
        for (number, point) in self.plan.points.clone().into_iter().enumerate() {
            begin(point);
            Order::Point(number).give(&self.runtime)?;
            self.go_to(point)?;
            let record = self.point(point)?;
            if let Err(error) = report(&record) {
                // The others wait for an order, and have done nothing wrong.
                self.stop()?;
                return Err(error);
            }
        }
        self.stop()
    }

    fn stop(&self) -> Result<(), PerfError> {
        Order::Stop.give(&self.runtime)?;
        self.part()
    }

    /// Ends with the others. A message that a receiver fetches ends when the receiver says so on
    /// the message's device; a barrier does not wait for that.
    fn part(&self) -> Result<(), PerfError> {
        for seat in &self.seats {
            self.runtime.wait_drained(&seat.device, PATIENCE)?;
        }
        Ok(self.runtime.barrier()?)
    }

    fn point(&mut self, point: Point) -> Result<Record, PerfError> {
        let seed = fastrand::u64(..);
        Order::Check(seed).give(&self.runtime)?;
        self.check(point, seed, true)?;
        let wanted = self.plan.seconds.as_secs_f64();
        let count = estimated(
            |count| fitting(point, count),
            |count| Ok(self.measure(point, count)?.took.as_secs_f64() / wanted),
        )?;
        let figures = self.measure(point, count)?;
        let messages = count * point.threads as u64;
        let mut conditions = self.conditions.clone();
        if point.op.benchmark().reach == Reach::WithinRank {
            conditions.transport = "none";
        }
        Ok(Record::new(point, conditions, messages, figures))
    }

    fn measure(&mut self, point: Point, count: u64) -> Result<Figures, PerfError> {
        Order::Round(count).give(&self.runtime)?;
        let measured = self.round(point, count, true)?;
        together(&self.clock, count, measured).ok_or(PerfError::Nothing(count))
    }

    /// Does what rank 0 says, as any other rank.
    pub(super) fn follow(&mut self) -> Result<(), PerfError> {
        let nonsense = PerfError::Order { from: Rank(0) };
        let mut point = None;
        loop {
            match (Order::take(&self.runtime, Rank(0))?, point) {
                (Order::Point(number), _) => {
                    let Some(&next) = self.plan.points.get(number) else { return Err(nonsense) };
                    self.go_to(next)?;
                    point = Some(next);
                }
                (Order::Check(seed), Some(point)) => self.check(point, seed, false)?,
                (Order::Round(count), Some(point)) => {
                    self.round(point, count, false)?;
                }
                (Order::Stop, _) => return self.part(),
                (_, None) => return Err(nonsense),
            }
        }
    }

    fn go_to(&mut self, point: Point) -> Result<(), PerfError> {
        let pace = self.pace(point.threads);
        let me = self.runtime.rank().0 as usize;
        let cores = place::cores(&self.cpus, point.threads).filter(|_| self.plan.pin);
        if point.seats() == 0 {
            let own = cores.as_ref().map_or(&self.cpus[me], |cores| &cores[me]);
            place::run_on(own)?;
        }
        let (seats, others) = self.seats.split_at_mut(point.seats());
        let mut bystanders: Vec<_> = others.iter().map(|seat| seat.device.clone()).collect();
        for (number, seat) in seats.iter_mut().enumerate() {
            let cpus = cores
                .as_ref()
                .map_or_else(|| self.cpus[me].clone(), |cores| vec![cores[me][number]]);
            seat.prepare(pace, self.plan.share_device, cpus, std::mem::take(&mut bystanders));
        }
        Ok(self.runtime.barrier()?)
    }

    fn check(&self, point: Point, seed: u64, leads: bool) -> Result<(), PerfError> {
        if point.seats() == 0 {
            return barrier::check(&self.runtime, seed);
        }
        let (round, check) = (self.parameters(point, 0, leads), point.op.benchmark().check);
        self.seats[..point.seats()].iter().try_for_each(|seat| check(&round, seat, seed))
    }

    fn round(&mut self, point: Point, count: u64, leads: bool) -> Result<Vec<Measured>, PerfError> {
        if point.seats() == 0 {
            return barrier::round(&self.runtime, &self.clock, count, leads);
        }
        let mut seats = std::mem::take(&mut self.seats);
        let measured = self.parameters(point, count, leads).go(&mut seats[..point.seats()]);
        self.seats = seats;
        measured
    }

    fn parameters(&self, point: Point, count: u64, leads: bool) -> Round<'_> {
        let Memories { own: memory, theirs } = &self.memories;
        Round { memory, theirs: theirs.as_ref(), clock: &self.clock, point, count, leads }
    }
}

/// Returns the messages of a round that fills a point's time, estimated from shorter rounds. `fit`
/// rounds a count to what the point can do, and `share` returns the share of the time that a round
/// took.
fn estimated(
    fit: impl Fn(u64) -> u64,
    mut share: impl FnMut(u64) -> Result<f64, PerfError>,
) -> Result<u64, PerfError> {
    let mut count = fit(1);
    loop {
        let mut took = share(count)?;
        if took >= ENOUGH && count < FEW {
            took = took.min(share(count)?);
        }
        if took >= ENOUGH || count >= MOST {
            return Ok(fit(scaled(count, 1.0 / took)));
        }
        count = fit(scaled(count, (1.5 * ENOUGH / took).clamp(2.0, 64.0)));
    }
}

/// Returns a count times a factor, within bounds.
fn scaled(count: u64, factor: f64) -> u64 {
    // A float that is too large, or no number, becomes the nearest that there is.
    ((count as f64 * factor) as u64).clamp(1, MOST)
}

/// Figures that ranks tell each other before they begin.
#[derive(Serialize, Deserialize)]
struct Facts {
    /// A number that ranks share if they mean the same points.
    fingerprint: u64,
    cpus: Vec<usize>,
    /// The memory is that of a simulated GPU.
    is_simulated: bool,
}

impl Facts {
    /// Gathers the facts of all ranks, and compares what they mean to measure.
    fn exchange(self, runtime: &Runtime) -> Result<Vec<Self>, PerfError> {
        // Plain data: it has a form in JSON.
        let all = gather(runtime, &serde_json::to_string(&self).unwrap_or_default())?;
        let read = |(rank, text): (u32, &String)| {
            let facts: Option<Self> = serde_json::from_str(text).ok();
            let alike = facts.filter(|theirs| theirs.fingerprint == self.fingerprint);
            alike.ok_or(PerfError::DifferentArguments(Rank(rank)))
        };
        (0..).zip(&all).map(read).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::measure::warm_up;
    use super::*;

    /// Returns the time of all steps of a point in shares of its time, and the count of its last
    /// round. A step takes the share that `step` returns.
    fn total(mut step: impl FnMut() -> f64) -> (f64, u64) {
        let mut total = 0.0;
        let mut round = |count: u64| {
            let mut run = |steps: u64| (0..steps).map(|_| step()).sum::<f64>();
            let (warming, took) = (run(warm_up(count)), run(count));
            total += warming + took;
            Ok(took)
        };
        let count = estimated(|count| count, &mut round).unwrap();
        round(count).unwrap();
        (total, count)
    }

    #[test]
    fn slow_steps_take_little_more_than_the_time_that_was_asked_for() {
        for (step, wanted) in [(0.001, 1000), (0.05, 20), (0.3, 3), (1.0, 1)] {
            let (took, count) = total(|| step);
            assert!(count.abs_diff(wanted) <= 1 && took < 6.5, "{step}: {count}, {took}");
        }
        // One that takes longer than all of the time is done as rarely as can be.
        let (took, count) = total(|| 5.0);
        assert!(count == 1 && took <= 30.0, "{count}, {took}");
    }

    #[test]
    fn one_step_that_was_interrupted_does_not_count_as_slow_ones() {
        for interrupted in 0..8 {
            let mut steps = 0;
            let (_, count) = total(|| {
                steps += 1;
                if steps - 1 == interrupted { 0.5 } else { 1e-4 }
            });
            assert!(count > 5000, "{interrupted}: {count}");
        }
    }
}
