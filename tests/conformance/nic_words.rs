//! Atomic operations on words whose agent is their owner's NIC, and errors of ranks without a NIC.

use crate::support::keys::{with_keys_of, without_keys};
use crate::support::sink::Sink;
use crate::support::{Job, pattern, posted, settle, step, until};
use carrack::buffer::Region;
use carrack::region::AtomicError;
use carrack::{
    AtomicAgent, AwaitError, Mr, OpError, Outcome, PostError, Rank, RegisterError, RemoteKey,
    Runtime, Synchronizer, Tag,
};
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};

crate::support::over_each_transport!(
    a_nic_counts_for_all_ranks_and_each_sees_another_number,
    compare_and_swap_by_a_nic_is_a_lock,
    an_owner_that_makes_no_progress_is_not_needed,
    a_word_has_one_agent,
    what_makes_no_sense_is_refused_before_a_nic_hears_of_it,
    words_that_are_withdrawn_while_in_use_end_operations_and_no_connection,
);

/// Registers memory of a rank's whose words are the NIC's. `None`: the rank has no NIC, and says
/// so.
fn words<J: Job>(owner: &Runtime, region: &Region) -> Option<(Mr, RemoteKey)> {
    match owner.registration(region).atomics(AtomicAgent::Nic).register() {
        Ok(mr) => {
            assert!(J::IS_RDMA, "{} has no NIC", J::NAME);
            let rmr = mr.remote_key();
            assert_eq!(rmr.atomics(), AtomicAgent::Nic);
            Some((mr, rmr))
        }
        Err(RegisterError::NoAtomics(why)) => {
            assert!(!J::IS_RDMA && why.contains(J::NAME) && why.contains("it has no NIC"), "{why}");
            None
        }
        Err(other) => panic!("{other}"),
    }
}

/// Adds to a word, again while the outcome is a retry, and makes progress on this rank alone until
/// the operation ends.
fn add(rank: &Runtime, rmr: &RemoteKey, offset: u64, value: u64) -> u64 {
    let mut post = rank.post_fetch_add(rmr.owner(), rmr, offset, value);
    let status = post.wait().unwrap();
    assert_eq!((status.rank, status.size), (rmr.owner(), 8));
    status.value().unwrap()
}

fn swap(rank: &Runtime, rmr: &RemoteKey, offset: u64, expected: u64, new: u64) -> u64 {
    let mut post = rank.post_compare_swap(rmr.owner(), rmr, offset, expected, new);
    post.wait().unwrap().value().unwrap()
}

fn word(region: &Region, offset: usize) -> u64 {
    let mut bytes = [0; 8];
    region.slice(offset, 8).unwrap().read(&mut bytes).unwrap();
    u64::from_le_bytes(bytes)
}

/// Counts a thread off when dropped, also after a panic, so that no other thread waits for it.
struct Left<'a>(&'a AtomicU64);

impl Drop for Left<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Runs something on a thread for each rank; who is done first goes on answering the others.
fn on_each<T: Send>(ranks: &[Runtime], act: impl Fn(&Runtime) -> T + Sync) -> Vec<T> {
    let left = AtomicU64::new(ranks.len() as u64);
    std::thread::scope(|scope| {
        let (left, act) = (&left, &act);
        let run = |rank: &'_ Runtime| {
            let one = Left(left);
            let answer = act(rank);
            drop(one);
            while left.load(Ordering::Acquire) > 0 {
                rank.progress().unwrap();
                std::thread::yield_now();
            }
            answer
        };
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn a_nic_counts_for_all_ranks_and_each_sees_another_number<J: Job>() {
    const EACH: u64 = 400;
    let ranks = J::ranks(3);
    let region = Region::host(64);
    let Some((_mr, rmr)) = words::<J>(&ranks[1], &region) else { return };
    let wire = rmr.slice(16, 16).unwrap().to_bytes();
    let seen = on_each(&ranks, |rank| {
        let rmr = RemoteKey::from_bytes(&wire).unwrap();
        (0..EACH).map(|_| add(rank, &rmr, 8, 3)).collect::<Vec<_>>()
    });
    // Of each rank in order, the owner's among them, and none twice.
    assert!(seen.iter().all(|seen| seen.is_sorted()));
    let all: BTreeSet<u64> = seen.into_iter().flatten().collect();
    assert!(
        all.into_iter().eq((0..3 * EACH).map(|number| 3 * number)),
        "a number is lost, or there twice"
    );
    assert_eq!(word(&region, 24), 9 * EACH);
    assert_eq!((word(&region, 16), word(&region, 32)), (0, 0), "words next to it");
}

fn compare_and_swap_by_a_nic_is_a_lock<J: Job>() {
    const EACH: u64 = 60;
    let ranks = J::ranks(3);
    let region = Region::host(8);
    let Some((_mr, rmr)) = words::<J>(&ranks[0], &region) else { return };
    let wire = rmr.to_bytes();
    let guarded = AtomicU64::new(0);
    let tries = on_each(&ranks, |rank| {
        let rmr = RemoteKey::from_bytes(&wire).unwrap();
        let me = u64::from(rank.rank().0) + 1;
        let mut tries = 0;
        for _ in 0..EACH {
            while swap(rank, &rmr, 0, 0, me) != 0 {
                tries += 1;
                std::thread::yield_now();
            }
            // Two steps: who is not alone here loses some.
            let found = guarded.load(Ordering::Relaxed);
            std::thread::yield_now();
            guarded.store(found + 1, Ordering::Relaxed);
            assert_eq!(swap(rank, &rmr, 0, me, 0), me, "another has taken the lock away");
        }
        tries
    });
    assert_eq!(guarded.load(Ordering::Relaxed), 3 * EACH);
    println!("in vain: {tries:?}");
}

fn an_owner_that_makes_no_progress_is_not_needed<J: Job>() {
    let ranks = J::ranks(2);
    let region = Region::host(64);
    let Some((_mr, rmr)) = words::<J>(&ranks[1], &region) else { return };
    let first = Sink::keeping();
    // It waits until its owner has told where the word is, and takes part in a flush.
    for _ in 0..2 {
        ranks[0].post_fetch_add(Rank(1), &rmr, 0, 5).comp(&first).submit().unwrap();
    }
    let pending = ranks[0].pending().to_string();
    assert!(pending.contains("atomic operation, rank 1") && pending.contains("NIC"), "{pending}");
    let flushed = Sink::keeping();
    assert!(
        posted(&ranks, || ranks[0].post_flush(Rank(1)).comp(&flushed).try_submit()).is_posted()
    );
    until(&ranks, || flushed.count() == 1);
    assert_eq!((first.count(), word(&region, 0)), (2, 10), "the flush was early");
    let held: BTreeSet<_> = first.take().iter().map(|status| status.value().unwrap()).collect();
    assert_eq!(held, BTreeSet::from([0, 5]));
    // From now on only rank 0 does anything.
    for number in 0..100 {
        assert_eq!(add(&ranks[0], &rmr, 0, 1), 10 + number);
    }
    assert_eq!((swap(&ranks[0], &rmr, 0, 110, 7), swap(&ranks[0], &rmr, 0, 110, 8)), (110, 7));
    assert_eq!(word(&region, 0), 7);
}

fn a_word_has_one_agent<J: Job>() {
    let [zero, one] = J::pair();
    let region = one.allocate(256).unwrap();
    let part = |at| region.subregion(at, 64).unwrap();
    let Some((nics, rmr)) = words::<J>(&one, &part(64)) else { return };
    for overlapping in [&region, &part(64), &part(120), &part(8)] {
        let refused = one.register_memory(overlapping).unwrap_err();
        assert!(matches!(refused, RegisterError::OtherAgent { .. }), "{refused}");
    }
    let neighbour = one.register_memory(&part(128)).unwrap();
    let refused = one.registration(&region).atomics(AtomicAgent::Nic).register().unwrap_err();
    assert!(refused.to_string().contains("a word has one agent"), "{refused}");
    // Who has only half of the name asks the owner, who does not do what is the NIC's.
    let ranks = [zero, one];
    let cut = without_keys(&rmr);
    assert_eq!(cut.atomics(), AtomicAgent::Owner);
    let sink = Sink::keeping();
    assert!(
        posted(&ranks, || ranks[0].post_fetch_add(Rank(1), &cut, 0, 1).comp(&sink).try_submit())
            .is_posted()
    );
    let error = sink.one(&ranks).ok().unwrap_err();
    assert!(matches!(error, OpError::Refused(_)), "{error}");
    // A forged key does not bring words of the CPU's to the NIC: the operation fails.
    let forged = with_keys_of(&neighbour.remote_key(), &rmr);
    assert_eq!(forged.atomics(), AtomicAgent::Nic);
    let mut post = ranks[0].post_fetch_add(Rank(1), &forged, 0, 1).comp(&sink);
    match posted(&ranks, || post.try_submit()) {
        Outcome::Posted => {
            let error = sink.one(&ranks).ok().unwrap_err();
            assert!(error.to_string().contains("another agent"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(region.whole().to_vec().unwrap(), [0; 256]);
    // Both end, and the other agent may have the words.
    drop((nics, neighbour));
    settle(&ranks);
    drop(ranks[1].register_memory(&region).unwrap());
    drop(ranks[1].registration(&region).atomics(AtomicAgent::Nic).register().unwrap());
}

fn what_makes_no_sense_is_refused_before_a_nic_hears_of_it<J: Job>() {
    let ranks: [Runtime; 2] = J::pair();
    let region = Region::host(104);
    let zero = &ranks[0];
    let Some((mr, rmr)) = words::<J>(&ranks[1], &region.subregion(0, 100).unwrap()) else { return };
    let held = on_each(&ranks, |rank| (rank.rank() == Rank(0)).then(|| add(rank, &rmr, 8, 1)));
    assert_eq!(held, [Some(0), None]);
    let rmr = mr.remote_key();
    for offset in [93, 96, 100, u64::MAX, u64::MAX - 7] {
        let refused = zero.post_fetch_add(Rank(1), &rmr, offset, 1).wait();
        assert!(
            matches!(refused, Err(AwaitError::Post(PostError::Outside { room: 100, .. }))),
            "{refused:?}"
        );
    }
    let part = rmr.slice(4, 40).unwrap();
    for (rmr, offset, at) in [(&rmr, 4, 4), (&rmr, 9, 9), (&part, 0, 4), (&part, 8, 12)] {
        let sink = Sink::keeping();
        let outcome = posted_or_refused(&ranks, || {
            zero.post_fetch_add(Rank(1), rmr, offset, 1).comp(&sink).try_submit()
        });
        let error = match outcome {
            Err(PostError::Atomic(error)) => error,
            other => panic!("{other:?}"),
        };
        assert!(matches!(error, AtomicError::Unaligned { offset } if offset == at), "{error}");
    }
    let elsewhere = zero.post_fetch_add(Rank(0), &rmr, 0, 1).wait();
    assert!(
        matches!(
            elsewhere,
            Err(AwaitError::Post(PostError::Owner { rank: Rank(0), owner: Rank(1) }))
        ),
        "{elsewhere:?}"
    );
    let other =
        zero.post_fetch_add(Rank(1), &rmr, 0, 1).require(carrack_transports::cuda_ipc::NAME).wait();
    assert!(
        matches!(&other, Err(AwaitError::Post(PostError::Path { why, .. })) if why.contains("NIC")),
        "{other:?}"
    );
    let mut right = zero.post_fetch_add(Rank(1), &part, 4, 1).require(J::PATH);
    assert_eq!(right.wait().unwrap().value(), Some(1));
    // Its memory is put to and got from as any other.
    let (sink, bytes) = (Sink::keeping(), pattern(1, 24));
    let _ =
        posted(&ranks, || zero.post_put(Rank(1), bytes.clone(), &rmr, 16).comp(&sink).try_submit());
    assert!(sink.one(&ranks).error.is_none());
    let _ =
        posted(&ranks, || zero.post_get(Rank(1), vec![0; 24], &rmr, 16).comp(&sink).try_submit());
    assert_eq!(sink.one(&ranks).buffer.to_vec().unwrap(), bytes);
    assert_eq!(word(&region, 8), 2);
}

/// Calls like `posted`, but returns a refusal.
fn posted_or_refused(
    ranks: &[Runtime],
    mut call: impl FnMut() -> Result<Outcome, PostError>,
) -> Result<Outcome, PostError> {
    loop {
        match call() {
            Ok(Outcome::Retry(_)) => step(ranks),
            other => return other,
        }
    }
}

fn words_that_are_withdrawn_while_in_use_end_operations_and_no_connection<J: Job>() {
    let ranks = J::ranks(3);
    let region = Region::host(64);
    let Some(_) = words::<J>(&ranks[1], &region) else { return };
    for round in 0..20 {
        let (mr, rmr) = words::<J>(&ranks[1], &region).unwrap();
        let (before, sinks) = (word(&region, 8), [0, 1, 2].map(|_| Sink::keeping()));
        let (mut counted, mut stale, mut in_flight) = (0, 0, 0);
        let mut mr = Some(mr);
        for number in 0..60 {
            for (rank, sink) in ranks.iter().zip(&sinks) {
                let mut post = rank.post_fetch_add(Rank(1), &rmr, 8, 1).comp(sink);
                match posted_or_refused(&ranks, || post.try_submit()) {
                    Ok(_) => in_flight += 1,
                    Err(PostError::Stale(Rank(1))) => stale += 1,
                    Err(other) => panic!("{other}"),
                }
                if number == 3 * round {
                    // Deregisters while operations are in flight.
                    mr = None;
                }
            }
        }
        until(&ranks, || sinks.iter().map(Sink::count).sum::<usize>() == in_flight);
        for status in sinks.iter().flat_map(|sink| sink.take()) {
            match status.error.as_deref() {
                None => counted += 1,
                Some(OpError::Stale(Rank(1))) => stale += 1,
                Some(OpError::Begin(error)) if matches!(**error, PostError::Stale(_)) => stale += 1,
                Some(other) => panic!("{other}"),
            }
        }
        assert_eq!((counted + stale, word(&region, 8) - before), (180, counted), "round {round}");
        assert!(mr.is_none() && stale > 0, "round {round}: no end was noticed");
        // The connections stand, and so do other registrations.
        settle(&ranks);
        assert!(ranks.iter().all(|rank| rank.pending().down.is_empty()));
    }
    let arrived = Synchronizer::new(1);
    let _ = ranks[1].post_recv(Rank(0), vec![0; 5], Tag(1)).comp(&arrived).try_submit().unwrap();
    let _ = posted(&ranks, || ranks[0].post_send(Rank(1), b"still", Tag(1)).try_submit());
    until(&ranks, || arrived.test());
}
