//! Instructions of this library for operations on memory of a GPU, without those of the driver. A
//! small copy takes the driver some two microseconds, of which a thousand instructions are a
//! seventh.
//!
//! Callgrind runs this program once more and counts them. Instructions of the mock's functions,
//! and of their callees, are subtracted.

use super::{CostsFixture, mock, put};
use crate::profile::counted;
use crate::report::Count;
use crate::support::{Job, OverShm, built, connect, unstarted};
use carrack::region::Region;
use carrack::transports::gpu::{CopierState, Flavour};
use carrack::{Counter, Piece, Rank, RemoteKey, Runtime, Tag};
use std::hint::black_box;
use std::sync::Arc;

const ROLE: &str = "TEST_GPU_INSTRUCTIONS";

/// Puts that are in flight at a time, and puts that are counted.
const WINDOW: u64 = 512;
const PUTS: u64 = 2 * WINDOW;

/// Counted calls of progress that find no copy complete.
const PASSES: u64 = 1000;

/// Messages, and those before, which warm up.
const MESSAGES: u64 = 100;
const WARM_UP: u64 = 8;

/// Counted functions: test, function, number of calls.
const MEASURED: [(&str, &str, u64); 10] = [
    ("puts_in_their_role", "measured_puts", PUTS),
    ("puts_in_their_role", "measured_ends", PUTS),
    // Two copies are in flight, and progress queries the first one's event.
    // With a poll of TCP: under callgrind calls are so slow that no device is left alone.
    ("puts_in_their_role", "measured_fruitless", PASSES),
    ("messages_in_their_role", "measured_send", MESSAGES),
    // Until the copy is in flight.
    ("messages_in_their_role", "measured_arrival", MESSAGES),
    // The receiver queries the copy three times, and the last query finds it complete. Its sender
    // hears of it.
    ("messages_in_their_role", "measured_message", MESSAGES),
    // One that the resident copier takes: until its command is written.
    ("copier_puts_in_their_role", "measured_copier_put", MESSAGES),
    // Each piece of a batch that it takes.
    ("batches_in_their_role", "measured_batch", BATCHES * PIECES),
    // The same where they do not come in the order of their targets.
    ("batches_in_their_role", "measured_shuffled", BATCHES * PIECES),
    // Between host memory: with the copy itself.
    ("batches_in_their_role", "measured_on_the_host", BATCHES * PIECES),
];

/// Batches, and pieces of each.
const BATCHES: u64 = 20;
const PIECES: u64 = 1000;

#[inline(never)]
fn measured_puts(fixture: &CostsFixture, from: &Region, to: &RemoteKey, done: &Counter) {
    (0..WINDOW).for_each(|_| put(fixture, from.whole(), to, done));
}

#[inline(never)]
fn measured_ends(fixture: &CostsFixture, done: &Counter, wanted: u64) {
    fixture.until(|| done.get() == wanted);
}

#[inline(never)]
fn measured_fruitless(rank: &Runtime) {
    (0..PASSES).for_each(|_| drop(rank.progress()));
}

#[inline(never)]
fn measured_send(rank: &Runtime, from: &Region, sent: &Counter) {
    let mut send = rank.post_send(Rank(1), from.whole(), Tag(1)).comp(sent);
    send.submit().unwrap();
}

#[inline(never)]
fn measured_arrival(rank: &Runtime) {
    assert!(rank.progress().unwrap(), "the offer has come, and the copy is in flight");
}

#[inline(never)]
fn measured_message(ranks: &[Runtime], [sent, received]: [&Counter; 2], wanted: u64) {
    while received.get() < wanted {
        drop(ranks[1].progress());
    }
    while sent.get() < wanted {
        drop(ranks[0].progress());
    }
}

#[test]
fn puts_in_their_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let fixture = black_box(CostsFixture::new("put-instructions"));
    let (from, window) = (fixture.plain(), fixture.plain());
    let registered = fixture.runtime.register_memory(&window).unwrap();
    let (to, done) = (registered.remote_key(), Counter::new());
    (0..WINDOW).for_each(|_| put(&fixture, from.whole(), &to, &done));
    fixture.until(|| done.get() == WINDOW);
    for window in 1..=PUTS / WINDOW {
        measured_puts(&fixture, &from, &to, &done);
        measured_ends(&fixture, &done, (window + 1) * WINDOW);
    }
    let wanted = done.get() + 2;
    fixture.word("mock_hold");
    (0..2).for_each(|_| put(&fixture, from.whole(), &to, &done));
    drop(fixture.runtime.progress());
    measured_fruitless(&fixture.runtime);
    fixture.word("mock_release");
    fixture.until(|| done.get() == wanted);
}

#[inline(never)]
fn measured_copier_put(fixture: &CostsFixture, from: &Region, to: &RemoteKey, done: &Counter) {
    put(fixture, from.slice(0, 8).unwrap(), to, done);
}

#[test]
fn copier_puts_in_their_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let fixture = black_box(CostsFixture::with_copier("copier-put-instructions"));
    let (from, window) = (fixture.plain(), fixture.plain());
    let registered = fixture.runtime.register_memory(&window).unwrap();
    let (to, done) = (registered.remote_key(), Counter::new());
    let copies = || match fixture.gpu.copier() {
        CopierState::On { copies, .. } => copies,
        _ => 0,
    };
    let mut ended = 0;
    while copies() < WARM_UP {
        put(&fixture, from.whole(), &to, &done);
        ended += 1;
        fixture.until(|| done.get() == ended);
    }
    let before = copies();
    for message in 1..=MESSAGES {
        measured_copier_put(&fixture, &from, &to, &done);
        fixture.until(|| done.get() == ended + message);
    }
    assert_eq!(copies() - before, MESSAGES, "the copier had all of them");
}

/// Between two ranks of a process: the copy's way is that of memory that another process has
/// mapped.
#[test]
fn messages_in_their_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let fixture = CostsFixture::new("send-instructions");
    let start = |bootstrap| {
        let driver = Arc::new(mock::open(&fixture.library));
        let builder = Runtime::builder().settings(built(OverShm::settings())).gpu_driver(driver);
        builder.bootstrap(Box::new(bootstrap)).start().unwrap()
    };
    let ranks: Vec<Runtime> = black_box(unstarted(2).into_iter().map(start).collect());
    connect(&ranks);
    let (from, to) = (fixture.plain(), fixture.plain());
    let (sent, received) = (Counter::new(), Counter::new());
    for message in 1..=WARM_UP + MESSAGES {
        let receive =
            ranks[1].post_recv(Rank(0), to.whole(), Tag(1)).comp(&received).try_submit().unwrap();
        assert!(receive.is_posted());
        if message <= WARM_UP {
            let mut send = ranks[0].post_send(Rank(1), from.whole(), Tag(1)).comp(&sent);
            send.submit().unwrap();
            while sent.get() < message {
                ranks.iter().for_each(|rank| drop(rank.progress()));
            }
            continue;
        }
        measured_send(&ranks[0], &from, &sent);
        measured_arrival(&ranks[1]);
        measured_message(&ranks, [&sent, &received], message);
    }
}

#[inline(never)]
fn measured_batch(fixture: &CostsFixture, pieces: &[Piece<'_>], done: &Counter) {
    let mut put = fixture.runtime.post_put_batch(Rank(0), pieces).comp(done);
    put.submit().unwrap();
}

#[inline(never)]
fn measured_shuffled(fixture: &CostsFixture, pieces: &[Piece<'_>], done: &Counter) {
    let mut put = fixture.runtime.post_put_batch(Rank(0), pieces).comp(done);
    put.submit().unwrap();
}

#[inline(never)]
fn measured_on_the_host(fixture: &CostsFixture, pieces: &[Piece<'_>]) {
    let mut put = fixture.runtime.post_put_batch(Rank(0), pieces);
    put.wait().unwrap();
}

#[test]
fn batches_in_their_role() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let fixture = black_box(CostsFixture::with_copier("batch-instructions"));
    let room = 128 * PIECES as usize;
    let [from, window] = [0, 1].map(|_| fixture.gpu.allocate(room, Flavour::Plain).unwrap());
    let registered = fixture.runtime.register_memory(&window).unwrap();
    let (to, done) = (registered.remote_key(), Counter::new());
    let piece = |at: usize| {
        let start = 128 * (at ^ 1);
        Piece { local: &from, range: start..start + 64, rmr: &to, offset: 128 * at as u64 }
    };
    let pieces: Vec<_> = (0..PIECES as usize).map(piece).collect();
    let lists = || fixture.word("mock_lists");
    while lists() == 0 {
        warm_up(&fixture, &pieces, &done);
    }
    let (before, ended) = (lists(), done.get());
    for batch in 1..=BATCHES {
        measured_batch(&fixture, &pieces, &done);
        fixture.until(|| done.get() == ended + batch);
    }
    assert_eq!(lists() - before, BATCHES as i32, "the copier had all of them");
    // 389 and 1000 have no divisor in common.
    let shuffled: Vec<_> =
        (0..PIECES as usize).map(|at| piece(at * 389 % PIECES as usize)).collect();
    for batch in 1..=BATCHES {
        measured_shuffled(&fixture, &shuffled, &done);
        fixture.until(|| done.get() == ended + BATCHES + batch);
    }
    assert_eq!(lists() - before, 2 * BATCHES as i32, "and these");

    let [from, window] = [0, 1].map(|_| Region::host(room));
    let registered = fixture.runtime.register_memory(&window).unwrap();
    let to = registered.remote_key();
    let pieces: Vec<_> =
        pieces.into_iter().map(|piece| Piece { local: &from, rmr: &to, ..piece }).collect();
    (0..BATCHES).for_each(|_| measured_on_the_host(&fixture, &pieces));
}

fn warm_up(fixture: &CostsFixture, pieces: &[Piece<'_>], done: &Counter) {
    let wanted = done.get() + 1;
    let mut put = fixture.runtime.post_put_batch(Rank(0), pieces).comp(done);
    put.submit().unwrap();
    fixture.until(|| done.get() == wanted);
}

pub(crate) fn counts() -> Vec<Count> {
    let count = |(role, name, times): (&str, &str, u64)| {
        let (role, path) =
            (format!("gpu_costs::instructions::{role}"), format!("{}::{name}", module_path!()));
        let all = counted(&path, &role, ROLE, is_the_drivers);
        (name.replacen("measured", "gpu", 1), all / times)
    };
    MEASURED.into_iter().map(count).collect()
}

/// Returns `true` if the function is one of the driver, such as `cuMemcpyDtoDAsync_v2`.
fn is_the_drivers(function: &str) -> bool {
    function
        .strip_prefix("cu")
        .is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_uppercase()))
}
