//! The program's own threads use the devices at the same time.

use crate::support::Watchdog;
use crate::support::amount;
use crate::support::gpu_ranks::{
    Gpus, Kind, PATIENCE, get, holds, put, receive, registered, send, told,
};
use crate::support::ranks::{Ranks, Role};
use carrack::transports::gpu::Flavour;
use carrack::{Rank, Tag};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// gpu.md, streams rule 1: the program's use of its devices neither delays the library's copies
/// nor is delayed by them. `transports/tests/cuda` tests the loading of modules, the
/// synchronisation of devices, and kernels that need a whole device.
#[test]
fn a_program_that_allocates_frees_and_synchronises_all_the_time_disturbs_no_message() {
    let _watchdog = Watchdog::over("own_threads");
    Ranks::start("gpu_ordeals::own_threads", 2, &[amount("TEST_OWN_THREADS", 60, 600)]).succeed();
}

const LEN: usize = 1 << 20;

pub(crate) fn rank(role: &Role) {
    let gpus = Gpus::here();
    let runtime = gpus.runtime(role);
    let (has_ended, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (gpus, has_ended, rounds) = (&gpus, &has_ended, &rounds);
            scope.spawn(move || {
                let gpu = &gpus.all[thread % gpus.all.len()];
                let kept = gpu.stream().unwrap();
                while !has_ended.load(Ordering::Relaxed) {
                    for flavour in
                        [Flavour::Plain, Flavour::Shareable, Flavour::Pooled, Flavour::Pinned]
                    {
                        let region = gpu.allocate(5000, flavour).unwrap();
                        region.slice(3, 4).unwrap().write(b"mine").unwrap();
                        let own = gpu.stream().unwrap();
                        kept.wait(&own.record().unwrap()).unwrap();
                        own.synchronize().unwrap();
                        kept.synchronize().unwrap();
                        assert_eq!(region.slice(3, 4).unwrap().to_vec().unwrap(), b"mine");
                    }
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let _ends = Ends(&has_ended);
        traffic(role, &gpus, &runtime);
        // At least once each way, however quick the messages were.
        let seen = rounds.load(Ordering::Relaxed);
        runtime
            .wait_for(PATIENCE, || rounds.load(Ordering::Relaxed) > seen + 4)
            .expect("the program goes on");
    });
    role.meet("over", &runtime, 0..2);
}

/// Ends the threads, also when a message has failed.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Messages there and back, and puts and gets, from memory that is fresh each time.
fn traffic(role: &Role, gpus: &Gpus, runtime: &carrack::Runtime) {
    let other = Rank(1 - role.rank);
    let window = Kind::Plain(1).region(gpus, LEN);
    let _mr = registered(role, runtime, "window", &window);
    let rmr = told(role, "window", other.0);
    for round in 0..role.words[0] {
        let kind = Kind::ALL[round as usize % Kind::ALL.len()];
        let (mine, theirs) = (2 * round + u64::from(role.rank), 2 * round + u64::from(other.0));
        if role.rank == 0 {
            send(runtime, other, kind.full(gpus, LEN, mine), Tag(round)).unwrap().ok().unwrap();
        }
        let came =
            receive(runtime, other, kind.empty(gpus, LEN), Tag(round)).unwrap().ok().unwrap();
        holds(&came.buffer, LEN, theirs);
        if role.rank == 1 {
            send(runtime, other, kind.full(gpus, LEN, mine), Tag(round)).unwrap().ok().unwrap();
        }
        let way = put(runtime, || kind.full(gpus, LEN, mine), &rmr, 0);
        assert_eq!(way.why(), "", "it is mapped");
        let (_, back) = get(runtime, || Kind::Plain(0).empty(gpus, LEN), &rmr, 0);
        holds(&back, LEN, mine);
    }
    role.meet("traffic", runtime, 0..2);
}
