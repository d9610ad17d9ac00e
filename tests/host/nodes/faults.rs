//! Faults of the network between two nodes, and a rank that is killed.

use super::{Faulty, LIMIT, NONE, RANKS, node_of, start};
use crate::support::nodes::{Nodes, Weather};
use crate::support::ranks::{PARENT, Role};
use crate::support::{happens, patience, posted};
use carrack::buffer::Region;
use carrack::{CompQueue, OpError, PostError, Rank, RemoteKey, Status, Tag};
use rustix::process::Signal;
use std::time::{Duration, Instant};

pub(super) fn millis(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[test]
#[ignore = "full: needs network namespaces"]
fn frames_that_are_late_lost_doubled_and_out_of_order_harm_no_message() {
    let weather = Weather {
        delay: millis(10),
        jitter: millis(5),
        lost: 0.01,
        doubled: 0.01,
        ..Weather::default()
    };
    let Some(job) = Faulty::traffic("weather", weather, 60, NONE) else { return };
    job.ranks.succeed();
}

#[test]
#[ignore = "full: needs network namespaces"]
fn a_cut_of_two_seconds_harms_no_message_in_either_direction_or_both() {
    let cuts = [[true, true], [true, false], [false, true]];
    let Some(job) = Faulty::traffic("cut", Weather::default(), 1000, NONE) else { return };
    for cut in cuts {
        job.nodes.cut(cut);
        std::thread::sleep(millis(2000));
        job.nodes.cut([false; 2]);
        job.is_still_going();
        std::thread::sleep(millis(20));
    }
    job.ranks.succeed();
}

#[test]
#[ignore = "full: needs network namespaces"]
fn a_rank_that_is_killed_on_another_node_harms_only_itself() {
    let Some(job) = Faulty::traffic("kill", Weather::default(), 1000, 3) else { return };
    job.ranks.signal(Rank(3), Signal::KILL);
    job.ranks.succeed_except(Rank(3));
}

/// State of a connection whose cable is pulled.
pub(super) const IDLE: u64 = 0;
pub(super) const BUSY: u64 = 1;
pub(super) const NEVER_MADE: u64 = 2;

#[test]
#[ignore = "full: needs network namespaces"]
fn a_cable_that_is_pulled_for_good_ends_every_operation_in_time() {
    for (state, sleeps) in [(IDLE, 0), (IDLE, 1), (BUSY, 0), (BUSY, 1), (NEVER_MADE, 0)] {
        pull("pulled", 5, state, sleeps, |nodes| nodes.cut([true; 2]));
    }
    pull("card down", 5, BUSY, 1, cards_down);
}

/// Sees to it that the kernel of each node knows that there is no way.
pub(super) fn cards_down(nodes: &Nodes) {
    for node in [0, 1] {
        nodes.card(node, "down");
    }
}

pub(super) fn pull(test: &str, timeout: u64, state: u64, sleeps: u64, pull: impl Fn(&Nodes)) {
    let words = [timeout, state, sleeps];
    let Some(mut job) = Faulty::start(test, Weather::default(), "pulled", &words) else { return };
    assert!((0..RANKS).all(|rank| job.ranks.hears("ready", rank)), "{words:?}");
    pull(&job.nodes);
    job.ranks.says("pulled");
    println!("state {state}, sleeps {sleeps}");
    job.ranks.succeed();
}

/// Runs the role of a rank whose peers on the other node fall silent for good.
pub(super) fn pulled(role: &Role) {
    let [timeout, state, sleeps] = role.words[..] else { panic!("three words") };
    let runtime = start(role, timeout);
    let all = std::slice::from_ref(&runtime);
    let region = Region::host(1 << 20);
    let registered = runtime.register_memory(&region).unwrap();
    role.tells("key", &registered.remote_key().to_bytes());
    let far: Vec<_> = (0..RANKS).filter(|&rank| node_of(rank) != node_of(role.rank)).collect();
    let near = Rank(role.rank ^ 1);
    let keys = far.iter().map(|&rank| RemoteKey::from_bytes(&role.told("key", rank)).unwrap());
    let keys: Vec<_> = keys.collect();
    let (ended, mut flying) = (CompQueue::new(64), 0);
    let exchange = |rank| {
        let _ = posted(all, || runtime.post_send(rank, &[7; 100], Tag(1)).try_submit());
        let status = runtime.post_recv(rank, vec![0; 100], Tag(1)).wait().unwrap();
        assert_eq!(status.bytes(), Some(&[7; 100][..]));
    };
    if state != NEVER_MADE {
        far.iter().for_each(|&rank| exchange(Rank(rank)));
    }
    exchange(near);
    for &rank in &far {
        let mut receive = runtime.post_recv(Rank(rank), vec![0; 100], Tag(2)).comp(&ended);
        receive.submit().unwrap();
        flying += 1;
    }
    role.says("ready");
    assert!(happens(all, LIMIT, || role.has_said("pulled", PARENT)));
    let began = Instant::now();
    if state != IDLE {
        for (&rank, key) in far.iter().zip(&keys) {
            let rank = Rank(rank);
            runtime.post_send(rank, vec![1; 100], Tag(3)).comp(&ended).submit().unwrap();
            runtime.post_send(rank, vec![1; 1 << 20], Tag(3)).comp(&ended).submit().unwrap();
            runtime.post_put(rank, vec![1; 1 << 20], key, 0).comp(&ended).submit().unwrap();
            runtime.post_get(rank, vec![1; 1 << 20], key, 0).comp(&ended).submit().unwrap();
            runtime.post_fetch_add(rank, key, 0, 1).comp(&ended).submit().unwrap();
            runtime.post_flush(rank).comp(&ended).submit().unwrap();
            flying += 6;
        }
    }
    let limit = Duration::from_secs(timeout);
    let check = |status: Status| match status.error.as_deref() {
        Some(OpError::PeerDown { rank, cause }) => {
            assert!(far.contains(&rank.0), "{rank} is down: {cause}");
            let took = began.elapsed();
            let is_in_time = limit.mul_f64(0.8) <= took && took <= patience(limit.mul_f64(1.2));
            assert!(is_in_time, "{took:?} of {limit:?}: {cause}");
        }
        // A short message is complete when it is copied.
        None if status.size == 100 => {}
        error => panic!("{error:?}"),
    };
    while flying > 0 {
        if sleeps == 1 {
            check(ended.wait_pop(&runtime).unwrap());
            flying -= 1;
        } else {
            runtime.progress().unwrap();
            while let Some(status) = ended.pop() {
                check(status);
                flying -= 1;
            }
        }
    }
    for &rank in &far {
        let refused = runtime.post_send(Rank(rank), &[1], Tag(1)).try_submit();
        assert!(matches!(refused, Err(PostError::PeerDown { .. })), "{refused:?}");
    }
    exchange(near);
    role.meet("over", &runtime, [near.0].into_iter());
    let began = Instant::now();
    drop(runtime);
    assert!(began.elapsed() < patience(limit), "teardown took {:?}", began.elapsed());
}
