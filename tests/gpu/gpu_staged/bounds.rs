//! Bounds of the pinned host memory for staging, and operation with little of it.

use super::{BLOCK, BLOCKS, completed, device, received, sent, with_driver};
use crate::support::ranks::Role;
use crate::support::words::{fill, wrong};
use carrack::transports::mem::Region;
use carrack::{PostError, Rank, RemoteKey, Synchronizer, Tag};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const PIECE: usize = 1 << 20;

fn fill_all(region: &Region, salt: u64) {
    let mut bytes = vec![0; PIECE];
    for at in (0..region.len()).step_by(PIECE) {
        let len = PIECE.min(region.len() - at);
        fill(&mut bytes[..len], salt, at as u64 / 8);
        region.slice(at, len).unwrap().write(&bytes[..len]).unwrap();
    }
}

#[track_caller]
fn check_all(region: &Region, salt: u64) {
    for at in (0..region.len()).step_by(PIECE) {
        let len = PIECE.min(region.len() - at);
        let bytes = region.slice(at, len).unwrap().to_vec().unwrap();
        assert_eq!(wrong(&bytes, salt, at as u64 / 8), None, "from byte {at} on");
    }
}

/// Runs the role: neither rank can allocate pinned memory.
pub(crate) fn poor(role: &Role) {
    let (runtime, driver) = with_driver(role, 64 << 20);
    let driver = driver.unwrap();
    driver.faults().refuse_pinned(true);
    let region = device(&runtime, 9 * BLOCK + 77);
    let mr = runtime.register_memory(&region).unwrap();
    role.tells("memory", &mr.remote_key().to_bytes());
    let rmr = RemoteKey::from_bytes(&role.told("memory", 1)).unwrap();
    if role.rank == 0 {
        fill_all(&region, 1);
        assert!(sent(&runtime, 1, region.whole(), 1).unwrap().error.is_none());
        runtime.barrier().unwrap();
        fill_all(&region, 2);
        let put = completed(&runtime, |done| {
            runtime.post_put(Rank(1), region.whole(), &rmr, 0).comp(done).submit()
        });
        assert!(put.unwrap().error.is_none());
        runtime.barrier().unwrap();
        runtime.barrier().unwrap();
        let get = completed(&runtime, |done| {
            runtime.post_get(Rank(1), region.whole(), &rmr, 0).comp(done).submit()
        });
        assert!(get.unwrap().error.is_none());
        check_all(&region, 3);
        let add = completed(&runtime, |done| {
            runtime.post_fetch_add(Rank(1), &rmr, 8, 1).comp(done).submit()
        });
        let word = region.slice(8, 8).unwrap().to_vec().unwrap();
        let held = add.unwrap().ok().unwrap().value().unwrap();
        assert_eq!(held.to_le_bytes(), word[..]);
    } else {
        assert!(received(&runtime, 0, region.whole(), 1).unwrap().error.is_none());
        check_all(&region, 1);
        runtime.barrier().unwrap();
        runtime.barrier().unwrap();
        check_all(&region, 2);
        fill_all(&region, 3);
        runtime.barrier().unwrap();
    }
    runtime.barrier().unwrap();
    assert_eq!(driver.counters().pinned, 0);
    role.meet("over", &runtime, 0..2);
}

/// Returns the size of the memory of this process's own that no file stands behind, in bytes.
fn anonymous() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

const LARGE: usize = (256 << 20) + 1;
/// Blocks, rings and packets; far from the length of a message.
const MORE: usize = 48 << 20;

/// Runs the role: a message, a put and a get are larger than all the host memory that they may
/// take.
pub(crate) fn bounded(role: &Role) {
    let (runtime, driver) = with_driver(role, 600 << 20);
    let region = device(&runtime, LARGE);
    let mr = runtime.register_memory(&region).unwrap();
    role.tells("memory", &mr.remote_key().to_bytes());
    let rmr = RemoteKey::from_bytes(&role.told("memory", 1)).unwrap();
    let (before, most) = (anonymous(), Cell::new(0));
    let calls = Cell::new(0_u32);
    let sampled = || {
        calls.set(calls.get().wrapping_add(1));
        if calls.get().is_multiple_of(64) {
            most.set(most.get().max(anonymous()));
        }
    };
    for way in 0..3 {
        let done = Synchronizer::new(1);
        let is_source = role.rank == u32::from(way == 2);
        if is_source {
            fill_all(&region, way);
        }
        runtime.barrier().unwrap();
        let to_pageable = || driver.as_ref().map(|driver| driver.counters().to_pageable);
        let before = to_pageable();
        let posted = match (role.rank, way) {
            (0, 0) => runtime.post_send(Rank(1), region.whole(), Tag(1)).comp(&done).submit(),
            (_, 0) => runtime.post_recv(Rank(0), region.whole(), Tag(1)).comp(&done).submit(),
            (0, 1) => runtime.post_put(Rank(1), region.whole(), &rmr, 0).comp(&done).submit(),
            (0, _) => runtime.post_get(Rank(1), region.whole(), &rmr, 0).comp(&done).submit(),
            _ => Ok(()),
        };
        posted.unwrap();
        let has_ended = || role.has_said(&format!("done {way}"), 0);
        runtime
            .wait_for(super::PATIENCE, || {
                sampled();
                if role.rank == 0 || way == 0 { done.test() } else { has_ended() }
            })
            .unwrap();
        if role.rank == 0 || way == 0 {
            assert!(done.take().unwrap().remove(0).error.is_none());
        }
        assert_eq!(to_pageable(), before, "copies for which a driver's call would wait");
        if role.rank == 0 {
            role.says(&format!("done {way}"));
        }
        if !is_source {
            check_all(&region, way);
        }
    }
    let more = most.get().saturating_sub(before);
    assert!(most.get() > 0 && more < MORE, "{more} bytes of host memory");
    if let Some(driver) = driver {
        let counters = driver.counters();
        assert!((2..=2 * BLOCKS).contains(&counters.pinned), "{counters:?}");
        assert_eq!(counters.unpinned, 0, "none is freed while the runtime lives");
    }
    role.meet("over", &runtime, 0..2);
}

const MESSAGES: u64 = 12;

/// Runs the role: all ranks send to, put to and get from all others at the same time, more than
/// there are blocks for.
pub(crate) fn crowd(role: &Role) {
    let (runtime, driver) = with_driver(role, 512 << 20);
    let me = role.rank;
    let len = |number: u64| (number as usize % 4) * BLOCK + 1 + 1013 * number as usize;
    // For each message a place at each side.
    let room = 4 * BLOCK + 16_384;
    let place =
        |owner: &Region, number: u64, len: usize| owner.slice(number as usize * room, len).unwrap();
    let all = || device(&runtime, 3 * MESSAGES as usize * room);
    let (source, target, exposed) = (all(), all(), all());
    let mr = runtime.register_memory(&exposed).unwrap();
    role.tells("memory", &mr.remote_key().to_bytes());
    let salt =
        |from: u32, to: u32, number: u64| u64::from(from) << 40 | u64::from(to) << 20 | number;
    let write = |region: &Region, at: u64, salt: u64, len: usize| {
        let mut bytes = vec![0; len];
        fill(&mut bytes, salt, 0);
        place(region, at, len).write(&bytes).unwrap();
    };
    let others: Vec<u32> = (0..3).filter(|&other| other != me).collect();
    let mut rmrs = std::collections::HashMap::new();
    for &other in &others {
        rmrs.insert(other, RemoteKey::from_bytes(&role.told("memory", other)).unwrap());
        for number in 0..MESSAGES {
            let at = u64::from(other) * MESSAGES + number;
            write(&source, at, salt(me, other, number), len(number));
            if number % 3 == 2 {
                // What the other one gets.
                write(&exposed, at, salt(me, other, number), len(number));
            }
        }
    }
    runtime.barrier().unwrap();
    // Two threads for one device: they take in batches of fragments concurrently.
    let ended = Arc::new(AtomicBool::new(false));
    let second = {
        let (runtime, ended) = (runtime.clone(), ended.clone());
        std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                runtime.progress().unwrap();
                std::thread::yield_now();
            }
        })
    };
    let count = others.len() * MESSAGES as usize + others.len() * MESSAGES.div_ceil(3) as usize;
    let done = Synchronizer::new(count);
    let keep_on = |submit: &mut dyn FnMut() -> Result<(), PostError>| {
        while let Err(error) = submit() {
            let is_full =
                matches!(error, PostError::OffersFull { .. } | PostError::BacklogFull { .. });
            assert!(is_full, "{error}");
            runtime.progress().unwrap();
        }
    };
    for number in 0..MESSAGES {
        for &other in &others {
            let at = u64::from(other) * MESSAGES + number;
            let (there, tag) = (u64::from(me) * MESSAGES + number, Tag(number));
            let (to, rmr, len) = (Rank(other), &rmrs[&other], len(number));
            match number % 3 {
                0 => {
                    let mut recv = runtime.post_recv(to, place(&target, at, len), tag).comp(&done);
                    keep_on(&mut || recv.submit());
                    let mut send = runtime.post_send(to, place(&source, at, len), tag).comp(&done);
                    keep_on(&mut || send.submit());
                }
                1 => {
                    let mut put = runtime
                        .post_put(to, place(&source, at, len), rmr, there * room as u64)
                        .comp(&done);
                    keep_on(&mut || put.submit());
                }
                _ => {
                    let mut get = runtime
                        .post_get(to, place(&target, at, len), rmr, there * room as u64)
                        .comp(&done);
                    keep_on(&mut || get.submit());
                }
            }
        }
    }
    runtime.wait_for(super::PATIENCE, || done.test()).expect("all come to an end");
    assert!(done.take().unwrap().iter().all(|status| status.error.is_none()));
    runtime.barrier().unwrap();
    ended.store(true, Ordering::Relaxed);
    second.join().unwrap();
    for number in 0..MESSAGES {
        for &other in &others {
            let at = u64::from(other) * MESSAGES + number;
            let region = if number % 3 == 1 { &exposed } else { &target };
            let bytes = place(region, at, len(number)).to_vec().unwrap();
            assert_eq!(
                wrong(&bytes, salt(other, me, number), 0),
                None,
                "number {number} of rank {other}"
            );
        }
    }
    assert!(runtime.pending().operations.is_empty(), "{}", runtime.pending());
    if let Some(driver) = driver {
        // Each way, and for each of two peers one more, or two while one message waits for another.
        let pinned = driver.counters().pinned;
        assert!((2..=2 * (BLOCKS + 4)).contains(&pinned), "{pinned} blocks");
    }
    role.meet("over", &runtime, 0..3);
}
