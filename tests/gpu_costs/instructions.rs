//! How many instructions operations on memory of a GPU take in this library, outside of the driver.
//!
//! Counted by callgrind, which runs this program once more; what the mock's functions take is taken off. A build that is not optimised as
//! a release is, or a machine without valgrind, has nothing to count: the test says so.

use super::profile::instructions;
use super::{Ground, put};
use carrack::transports::gpu::cuda::CudaDriver;
use carrack::{Counter, Rank, Rmr, Runtime, Tag};
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use super::support::{Job, OverShm, built, connect, unstarted};
use carrack::region::Region;

const ROLE: &str = "TEST_GPU_INSTRUCTIONS";

/// Operations that are counted.
const COUNTED: u64 = 1024;
/// Puts that are under way at a time.
const WINDOW: u64 = 512;

#[inline(never)]
fn measured_puts(ground: &Ground, from: &Region, to: &Rmr, over: &Counter) {
    (0..WINDOW).for_each(|_| put(ground, from.whole(), to, over));
}

#[inline(never)]
fn measured_ends(ground: &Ground, over: &Counter, wanted: u64) {
    ground.until(|| over.get() == wanted);
}

#[inline(never)]
fn measured_fruitless(runtime: &Runtime) {
    for _ in 0..COUNTED {
        runtime.progress().unwrap();
    }
}

#[inline(never)]
fn measured_send(rank: &Runtime, from: &Region, sent: &Counter) {
    let send = rank.post_send(Rank(1), from.whole(), Tag(1)).comp(sent);
    assert!(send.allow_retry(false).call().unwrap().is_posted());
}

#[inline(never)]
fn measured_arrival(rank: &Runtime) -> bool {
    rank.progress().unwrap()
}

#[inline(never)]
fn measured_landing(rank: &Runtime) -> bool {
    rank.progress().unwrap()
}

#[inline(never)]
fn measured_finish(rank: &Runtime) -> bool {
    rank.progress().unwrap()
}

#[test]
fn puts_in_their_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let ground = Ground::new("put-instructions");
    let (from, window) = (ground.plain(), ground.plain());
    let registered = ground.runtime.register_memory(&window).unwrap();
    let (to, over) = (ground.runtime.get_rmr(&registered), Counter::new());
    let ground = black_box(ground);
    for round in 0..COUNTED / WINDOW + 1 {
        if round == 0 {
            (0..WINDOW).for_each(|_| put(&ground, from.whole(), &to, &over));
            ground.until(|| over.get() == WINDOW);
            continue;
        }
        measured_puts(&ground, &from, &to, &over);
        measured_ends(&ground, &over, (round + 1) * WINDOW);
    }
    ground.word("mock_hold");
    (0..2).for_each(|_| put(&ground, from.whole(), &to, &over));
    ground.runtime.progress().unwrap();
    measured_fruitless(&ground.runtime);
    ground.word("mock_release");
    ground.until(|| over.get() % WINDOW == 2);
}

#[test]
fn messages_in_their_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let ground = Ground::new("send-instructions");
    let start = |bootstrap| {
        let driver = Arc::new(CudaDriver::at(&ground.library));
        let builder = Runtime::builder().settings(built(OverShm::settings())).gpu_driver(driver);
        builder.bootstrap(Box::new(bootstrap)).start().unwrap()
    };
    let ranks: Vec<Runtime> = unstarted(2).into_iter().map(start).collect();
    connect(&ranks);
    let (from, to) = (ground.plain(), ground.plain());
    let (sent, received) = (Counter::new(), Counter::new());
    let ranks = black_box(ranks);
    for message in 1..=COUNTED / 8 {
        let receive = ranks[1].post_recv(Rank(0), to.whole(), Tag(1)).comp(&received).call().unwrap();
        assert!(receive.is_posted());
        if message <= 8 {
            let send = ranks[0].post_send(Rank(1), from.whole(), Tag(1)).comp(&sent);
            assert!(send.allow_retry(false).call().unwrap().is_posted());
            while sent.get() < message {
                ranks.iter().for_each(|rank| drop(rank.progress().unwrap()));
            }
            continue;
        }
        ground.word("mock_hold");
        measured_send(&ranks[0], &from, &sent);
        assert!(measured_arrival(&ranks[1]));
        ground.word("mock_release");
        while received.get() < message {
            measured_landing(&ranks[1]);
        }
        while sent.get() < message {
            assert!(measured_finish(&ranks[0]));
        }
    }
}
