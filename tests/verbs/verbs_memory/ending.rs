//! Registrations that end during puts and gets. Operations succeed or fail with an error that says
//! so. No stale key reaches a NIC (it would end the connection), and no rank uses the memory
//! afterwards.

use super::{ONE_IN, nics, ranks, soon_again};
use crate::support::{Watchdog, settle, until};
use carrack::buffer::Region;
use carrack::{
    AwaitError, CompQueue, Mr, OpError, PostError, Rank, RemoteKey, Runtime, Status, Tag,
    UserContext,
};
use carrack_simulators::nic::Config;
use carrack_transports::verbs::VerbsOptions;
use parking_lot::Mutex;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const LEN: usize = 1 << 20;
const ROUNDS: u64 = 60;
/// Operations that must have succeeded, and must have been refused, before a registration ends and
/// the next one begins.
const AT_LEAST: u64 = 5;

/// Results of operations.
#[derive(Default)]
struct Tally {
    /// Threads that post.
    at_work: AtomicU64,
    succeeded: AtomicU64,
    stale: AtomicU64,
}

impl Tally {
    fn take(&self, status: &Status, filling: u8) {
        match status.error.as_deref() {
            None if status.user_context == UserContext(1) => {
                let bytes = status.buffer.to_vec().unwrap();
                assert!(
                    bytes.iter().all(|byte| *byte < filling),
                    "a get has brought bytes that no rank put there"
                );
                self.succeeded.fetch_add(1, Ordering::Relaxed);
            }
            None => {
                self.succeeded.fetch_add(1, Ordering::Relaxed);
            }
            Some(OpError::Stale(Rank(1))) => {
                self.stale.fetch_add(1, Ordering::Relaxed);
            }
            Some(other) => panic!("{other}"),
        }
    }
}

/// Puts and gets, of all lengths, to and from the region whose key rank 1 has published last.
fn load(rank: &Runtime, told: &Mutex<RemoteKey>, stop: &AtomicBool, tally: &Tally, seed: u64) {
    let (mut rng, ended) = (SmallRng::seed_from_u64(seed), CompQueue::new(256));
    let mut in_flight = 0;
    loop {
        let has_ended = stop.load(Ordering::Acquire);
        if !has_ended && in_flight < 64 {
            let rmr = told.lock().clone();
            let len = [1, 100, 5000, 60_000, 300_000][rng.random_range(0..5)];
            let offset = rng.random_range(0..=LEN - len) as u64;
            let outcome = if rng.random() {
                let bytes = vec![rng.random_range(0..100); len];
                rank.post_put(Rank(1), bytes, &rmr, offset).comp(&ended).submit()
            } else {
                let get = rank.post_get(Rank(1), vec![255; len], &rmr, offset).comp(&ended);
                { get }.user_context(UserContext(1)).submit()
            };
            match outcome {
                Ok(()) => in_flight += 1,
                Err(PostError::OffersFull { .. }) => {}
                Err(PostError::Stale(Rank(1))) => {
                    tally.stale.fetch_add(1, Ordering::Relaxed);
                }
                other => panic!("{other:?}"),
            }
        }
        rank.progress().unwrap();
        while let Some(status) = ended.pop() {
            tally.take(&status, 100);
            in_flight -= 1;
        }
        if has_ended && in_flight == 0 {
            tally.at_work.fetch_sub(1, Ordering::Release);
            return;
        }
    }
}

#[test]
fn a_region_is_deregistered_again_and_again_while_puts_and_gets_to_it_are_in_flight() {
    let _watchdog = Watchdog::over("deregistered under load");
    let ranks = ranks(&nics([(); 3].map(|()| Config::default())), &VerbsOptions::default());
    let owner = &ranks[1];
    let region = Region::host(LEN);
    let register = || -> (Mr, RemoteKey) {
        let mr = owner.register_memory(&region).unwrap();
        let rmr = mr.remote_key();
        (mr, rmr)
    };
    let (first, rmr) = register();
    let (told, stop, tally) = (Mutex::new(rmr), AtomicBool::new(false), Tally::default());
    std::thread::scope(|scope| {
        for (seed, at) in (0..).zip([0, 2, 0, 2]) {
            let (rank, told, stop, tally) = (&ranks[at], &told, &stop, &tally);
            tally.at_work.fetch_add(1, Ordering::Relaxed);
            scope.spawn(move || load(rank, told, stop, tally, seed));
        }
        let reached = |count: &AtomicU64, before| {
            until(std::slice::from_ref(owner), || {
                count.load(Ordering::Relaxed) >= before + AT_LEAST
            });
        };
        let mut mr = Some(first);
        for _ in 0..ROUNDS {
            reached(&tally.succeeded, tally.succeeded.load(Ordering::Relaxed));
            let before = tally.stale.load(Ordering::Relaxed);
            drop(mr.take());
            // The old key gives no access any more.
            reached(&tally.stale, before);
            let (next, rmr) = register();
            *told.lock() = rmr;
            mr = Some(next);
        }
        stop.store(true, Ordering::Release);
        // The owner still has to answer the operations that are left.
        until(std::slice::from_ref(owner), || tally.at_work.load(Ordering::Acquire) == 0);
    });
    let count = |what: &AtomicU64| what.load(Ordering::Relaxed);
    println!("{} succeeded, {} were stale", count(&tally.succeeded), count(&tally.stale));
    assert!(ranks.iter().all(|rank| rank.pending().down.is_empty()), "a connection has ended");
    // The memory is free once all ranks have released the ended registrations.
    settle(&ranks);
    let memory = region.downgrade();
    drop(region);
    assert!(memory.is_gone(), "a registration that has ended still keeps the memory");
}

/// Puts and gets of one rank, one after the other, which have to be stale.
fn all_are_stale(rank: &Runtime, rmr: &RemoteKey, when: &str) {
    for round in 0..4 {
        let ended = match round % 2 {
            0 => rank.post_get(Rank(1), vec![0; 8], rmr, 0).wait().map(drop),
            _ => rank.post_put(Rank(1), vec![7; 8], rmr, 0).wait().map(drop),
        };
        let is_stale = matches!(
            ended,
            Err(AwaitError::Post(PostError::Stale(Rank(1)))
                | AwaitError::Op(OpError::Stale(Rank(1))))
        );
        assert!(is_stale, "{when}: {ended:?}");
    }
}

/// Rounds of four ranks that register, use each other's memory and deregister. `agree` comes
/// after the registration of rank 1 has ended, and before the accesses of the others.
fn rounds(agree: impl Fn(&Runtime, u64) + Sync) {
    const ROUNDS: u64 = 100;
    // In a barrier of four, each rank hears of one only by a third rank.
    let nics = nics([(); 4].map(|()| Config::default()));
    let ranks = ranks(&nics, &soon_again());
    // Some withdrawals come late.
    nics.iter().for_each(|nic| nic.faults().lose_packets(ONE_IN));
    std::thread::scope(|scope| {
        // A thread that panics drops its rank, which the others notice.
        for rank in ranks {
            let agree = &agree;
            scope.spawn(move || {
                let rank = &rank;
                let region = Region::host(4096);
                for round in 0..ROUNDS {
                    let mr = rank.register_memory(&region).unwrap();
                    let keys = rank.exchange_keys(&mr).unwrap();
                    rank.post_put(Rank(1), vec![1; 8], &keys[1], 0).wait().unwrap();
                    rank.barrier().unwrap();
                    drop(mr);
                    agree(rank, round);
                    if rank.rank() != Rank(1) {
                        all_are_stale(rank, &keys[1], &format!("{round}"));
                    }
                    rank.barrier().unwrap();
                    let bytes = region.slice(0, 8).unwrap().to_vec().unwrap();
                    assert!(bytes != [7; 8], "round {round}: a put has arrived");
                }
                assert!(rank.pending().down.is_empty(), "a connection has ended");
                rank.barrier().unwrap();
            });
        }
    });
}

#[test]
fn what_begins_behind_a_barrier_is_stale_if_the_registration_ended_before_it() {
    let _watchdog = Watchdog::over("stale behind a barrier");
    rounds(|rank, _| rank.barrier().unwrap());
}

#[test]
fn what_begins_behind_other_collectives_is_stale_if_the_registration_ended_before_them() {
    let _watchdog = Watchdog::over("stale behind collectives");
    rounds(|rank, round| match round % 3 {
        0 => rank.block_on(rank.world().barrier_async()).unwrap().unwrap(),
        1 => drop(rank.world().allgather(&[1]).unwrap()),
        _ => drop(rank.world().broadcast(Rank(1), &[5; 100]).unwrap()),
    });
}

#[test]
fn what_begins_behind_a_message_of_the_owner_is_stale_if_the_registration_ended_before_it() {
    let _watchdog = Watchdog::over("stale behind a message");
    rounds(|rank, round| match rank.rank() {
        Rank(1) => [0, 2, 3].map(Rank).into_iter().for_each(|to| {
            drop(rank.post_send(to, b"ended", Tag(round)).wait().unwrap());
        }),
        _ => drop(rank.post_recv(Rank(1), vec![0; 5], Tag(round)).wait().unwrap()),
    });
}

#[test]
fn memory_is_not_free_until_the_ranks_whose_nics_reach_it_have_heard_that_its_registration_ended() {
    let _watchdog = Watchdog::over("freed after its registration");
    let ranks = ranks(&nics([(); 2].map(|()| Config::default())), &VerbsOptions::default());
    let region = Region::host(4096);
    let mr = ranks[1].register_memory(&region).unwrap();
    let (rmr, over) = (mr.remote_key(), CompQueue::new(4));
    let get = || {
        ranks[0].post_get(Rank(1), vec![0; 8], &rmr, 0).comp(&over).submit().unwrap();
        until(&ranks, || over.pop().is_some_and(|status| status.error.is_none()));
    };
    get();
    settle(&ranks);
    get();
    drop(mr);
    let is_free = || ranks[1].invalidate_memory(region.addr(), 1);
    let error = is_free().unwrap_err();
    assert_eq!((error.registrations, error.by_nics), (0, 1), "{error}");
    assert!(error.to_string().contains("let those ranks make progress"), "{error}");
    until(&ranks, || is_free().is_ok());
}

#[test]
fn the_orderly_end_of_a_rank_frees_what_its_nic_reached_where_a_further_device_never_met_it() {
    let _watchdog = Watchdog::over("freed by an orderly end");
    let nics = nics([(); 2].map(|()| Config::default()));
    let mut ranks = ranks(&nics, &VerbsOptions::default());
    let _further = ranks[1].device().build().unwrap();
    let region = Region::host(4096);
    let mr = ranks[1].register_memory(&region).unwrap();
    let (rmr, ended) = (mr.remote_key(), CompQueue::new(4));
    for _ in 0..2 {
        ranks[0].post_get(Rank(1), vec![0; 8], &rmr, 0).comp(&ended).submit().unwrap();
        until(&ranks, || ended.pop().is_some_and(|status| status.error.is_none()));
        settle(&ranks);
    }
    let leaving = ranks.remove(0);
    let leaving = std::thread::spawn(move || drop(leaving));
    until(&ranks, || leaving.is_finished());
    settle(&ranks);
    drop(mr);
    until(&ranks, || ranks[0].invalidate_memory(region.addr(), 1).is_ok());
}
