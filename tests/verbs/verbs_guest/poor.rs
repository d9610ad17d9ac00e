//! Ranks that may lock little memory, or have few of everything: the job goes on, or an error says
//! what is missing.

use super::course::Course;
use super::is_in_guests;
use super::network::LIMIT;
use crate::support::ranks::{Ranks, Role, listing};
use crate::support::traffic::script::Plan;
use crate::support::traffic::{SMALL, Taking};
use crate::support::{Job, OverVerbs, Watchdog, built, rdma_device, rng, until};
use carrack::bootstrap::InProcess;
use carrack::explain::Verdict;
use carrack::settings::{GpuChoice, Settings};
use carrack::{Rank, Runtime, StartError, Synchronizer, Tag};
use rand::Rng;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::time::{Duration, Instant};

// ---- memory that may be locked ------------------------------------------------------------------

/// 64 KiB, and no right to go beyond.
const LITTLE_LOCKED: &[&str] = &[
    "setpriv",
    "--bounding-set=-ipc_lock",
    "--inh-caps=-ipc_lock",
    "sh",
    "-c",
    "ulimit -l 64 && exec \"$@\"",
    "sh",
];

#[test]
fn little_memory_to_lock_is_named_and_the_job_goes_on_by_another_way() {
    if !is_in_guests("little memory to lock", "1") {
        return;
    }
    let _watchdog = Watchdog::patient("little memory to lock", LIMIT);
    Ranks::start_under(LITTLE_LOCKED, "verbs_guest::little_locked", 2, &[rng().random()]).succeed();
}

pub(crate) fn little_locked(role: &Role) {
    let start = |settings| {
        Runtime::builder().settings(built(settings)).bootstrap(Box::new(role.bootstrap())).start()
    };
    let error = start(OverVerbs::settings()).expect_err("it cannot lock its packets");
    assert!(matches!(error, StartError::NoTransport(_)), "{error}");
    assert!(error.to_string().contains("`ulimit -l` is 64 KiB"), "{error}");
    let runtime = start(Settings::builder().gpu(GpuChoice::None)).unwrap();
    let plan = Plan {
        seed: role.words[0],
        steps: 100,
        lanes: 1,
        large: 15,
        longest: 60_000,
        room: 50_000,
    };
    Taking::part(role, runtime.clone(), plan, None).run();
    let paths = runtime.explain(Duration::from_secs(10));
    let to_the_other = paths.iter().find(|paths| paths.rank != runtime.rank()).unwrap();
    assert_eq!(to_the_other.chosen(), Some("shm"));
    let of_verbs = to_the_other.paths.iter().find(|path| path.transport == "verbs").unwrap();
    let Verdict::Refused(why) = &of_verbs.verdict else { panic!("{of_verbs:?}") };
    assert!(why.contains("`ulimit -l` is 64 KiB"), "{why}");
    role.meet("over", &runtime, 0..role.size);
}

// ---- settings -----------------------------------------------------------------------------------

#[test]
fn few_of_one_thing_cost_time_only() {
    if !is_in_guests("small settings", "1") {
        return;
    }
    let _watchdog = Watchdog::patient("small settings", LIMIT);
    for setting in SMALL {
        println!("{setting}");
        Course::of(60).start(&[setting]).succeed();
    }
}

#[test]
fn few_of_everything_cost_time_only() {
    if !is_in_guests("all settings small", "1") {
        return;
    }
    let _watchdog = Watchdog::patient("all settings small", LIMIT);
    Course { lanes: 2, ..Course::of(60) }.start(SMALL).succeed();
}

// ---- descriptors --------------------------------------------------------------------------------

#[test]
fn a_rank_that_runs_out_of_descriptors_is_told_so() {
    if !is_in_guests("few descriptors", "1") {
        return;
    }
    let _watchdog = Watchdog::patient("few descriptors", LIMIT);
    Ranks::start("verbs_guest::few", 1, &[]).succeed();
}

/// Starts two ranks in one process, with more and more descriptors until they work.
pub(crate) fn few(_: &Role) {
    // libibverbs looks for its drivers once, and takes those that it cannot open for missing.
    let whole = getrlimit(Resource::Nofile);
    attempt(whole).unwrap();
    for spare in 0..100 {
        let used = listing("/proc/self/fd").len() as u64;
        setrlimit(Resource::Nofile, Rlimit { current: Some(used - 1 + spare), ..whole }).unwrap();
        let outcome = attempt(whole);
        setrlimit(Resource::Nofile, whole).unwrap();
        match outcome {
            Ok(()) => {
                eprintln!("{spare} descriptors are enough, or were until there were more");
                assert!(spare > 5, "it was not poor");
                return;
            }
            Err(error) => {
                eprintln!("with {spare} descriptors: {error}");
                let names_it =
                    ["open files", "ulimit -n"].iter().any(|words| error.contains(words));
                assert!(names_it, "with {spare} descriptors: {error}");
            }
        }
    }
    panic!("a hundred descriptors are not enough");
}

/// Connects two ranks. A rank that lacks a descriptor for a caller accepts it once there is one,
/// which the `whole` limit allows after a while.
fn attempt(whole: Rlimit) -> Result<(), String> {
    let text = |error: &dyn std::error::Error| error.to_string();
    let mut ranks = Vec::new();
    for (at, bootstrap) in InProcess::job(2).map_err(|error| text(&error))?.into_iter().enumerate()
    {
        let settings = OverVerbs::settings()
            .setting("verbs_device", rdma_device(at))
            .setting("verbs_retries", 7);
        let settings = built(settings);
        let started = Runtime::builder().settings(settings).bootstrap(Box::new(bootstrap)).start();
        ranks.push(started.map_err(|error| text(&error))?);
    }
    let arrived = Synchronizer::new(1);
    let mut receive = ranks[1].post_recv(Rank(0), vec![0; 100], Tag(1)).comp(&arrived);
    assert!(receive.try_submit().map_err(|error| text(&error))?.is_posted());
    let mut sent = false;
    let mut failed = None;
    let start = Instant::now();
    until(&ranks, || {
        if start.elapsed() > Duration::from_secs(3) {
            setrlimit(Resource::Nofile, whole).unwrap();
        }
        if !sent && failed.is_none() {
            match ranks[0].post_send(Rank(1), &[5; 100][..], Tag(1)).try_submit() {
                Ok(outcome) => sent = outcome.is_done(),
                Err(error) => failed = Some(text(&error)),
            }
        }
        arrived.test() || failed.is_some()
    });
    if let Some(error) = failed {
        return Err(error);
    }
    let status = arrived.take().unwrap().remove(0).ok().map_err(|error| text(&error))?;
    assert_eq!(status.bytes().unwrap(), [5; 100]);
    Ok(())
}
