//! Devices, engines, pools and runtimes, several of each.

use crate::support::hooked::{BootstrapCall, start_hooked};
use crate::support::over_each_transport;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::packet::{HostAllocator, PacketPool};
use carrack::{CollectiveError, Matching, Rank, ResourceError, Runtime, Tag};
use rand::seq::SliceRandom;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

over_each_transport!(
    messages_of_one_device_arrive_by_progress_on_its_counterpart_alone,
    engines_are_apart_and_go_by_number,
    jobs_of_one_process_do_not_hear_of_each_other,
    a_thread_takes_as_many_events_at_a_time_as_each_runtime_says,
    packets_of_a_pool_of_the_users_own_return_to_it,
    no_rank_passes_a_barrier_before_all_have_reached_it,
    an_allgather_gives_everybody_everything_whatever_its_length,
    an_allgather_of_unequal_lengths_is_an_error_on_all_ranks,
    messages_to_oneself_arrive_as_others_do,
    collectives_of_several_threads_meet_one_after_another,
    a_large_message_that_waits_is_received_by_way_of_another_device,
    a_bootstrap_may_make_progress_while_it_publishes_a_device,
);

fn messages_of_one_device_arrive_by_progress_on_its_counterpart_alone<J: Job>() {
    let ranks = J::pair();
    let sink = Sink::keeping();
    let name = ranks[1].register_comp(&sink).unwrap();
    let devices: Vec<_> =
        (0..3).map(|_| [0, 1].map(|at: usize| ranks[at].device().build().unwrap())).collect();
    for (at, [here, there]) in devices.iter().enumerate() {
        assert_eq!((here.index(), there.index()), (at as u32 + 1, at as u32 + 1));
        let mut am =
            ranks[0].post_am(Rank(1), vec![at as u8; 100], name).tag(Tag(at as u64)).device(here);
        while am.try_submit().unwrap().is_retry() {
            ranks[0].progress_device(here).unwrap();
            ranks[1].progress_device(there).unwrap();
        }
    }
    // The default device has heard nothing of it.
    for _ in 0..100 {
        ranks[1].progress().unwrap();
    }
    assert_eq!(sink.count(), 0);
    for at in [2, 0, 1] {
        while sink.count() == 0 {
            ranks[1].progress_device(&devices[at][1]).unwrap();
        }
        let status = sink.take().pop().unwrap();
        assert_eq!((status.tag, status.bytes().unwrap()), (Tag(at as u64), &[at as u8; 100][..]));
    }
}

fn engines_are_apart_and_go_by_number<J: Job>() {
    let ranks = J::pair();
    let ours: Vec<_> = (0..3).map(|_| ranks[0].matching_engine().unwrap()).collect();
    // Sent before the receiver has made its engines.
    for (at, engine) in ours.iter().enumerate() {
        let mut send = ranks[0].post_send(Rank(1), vec![at as u8], Tag(1)).matching_engine(engine);
        sent(&ranks, || send.try_submit());
    }
    sent(&ranks, || ranks[0].post_send(Rank(1), &[9], Tag(1)).try_submit());
    until(&ranks, || ranks[1].default_matching_engine().waiting().0 == 1);
    settle(&ranks);
    assert_eq!(ranks[1].default_matching_engine().waiting(), (1, 0));
    let theirs: Vec<_> = (0..3).map(|_| ranks[1].matching_engine().unwrap()).collect();
    for at in [1, 2, 0] {
        assert_eq!(theirs[at].waiting(), (1, 0));
        let mut recv = ranks[1].post_recv(Rank(0), vec![0], Tag(1)).matching_engine(&theirs[at]);
        assert_eq!(recv.wait().unwrap().bytes().unwrap(), [at as u8]);
    }
    let mut recv = ranks[1].post_recv(Rank(0), vec![0], Tag(1));
    assert_eq!(recv.wait().unwrap().bytes().unwrap(), [9]);
    let mut made = 5;
    let error = loop {
        match ranks[0].matching_engine() {
            Ok(_) => made += 1,
            Err(error) => break error,
        }
    };
    assert!(
        matches!(error, ResourceError::TooMany { limit, .. } if limit == made),
        "{made}: {error}"
    );
}

fn jobs_of_one_process_do_not_hear_of_each_other<J: Job>() {
    let jobs: Vec<[Runtime; 2]> = (0..4).map(|_| J::pair()).collect();
    let sinks: Vec<Sink> = jobs
        .iter()
        .map(|job| {
            let sink = Sink::keeping();
            job[1].register_comp(&sink).unwrap();
            sink
        })
        .collect();
    let name = jobs[0][0].register_comp(&Sink::keeping()).unwrap();
    for (at, job) in jobs.iter().enumerate() {
        for number in 0..=at as u64 {
            sent(job, || {
                job[0].post_am(Rank(1), &[at as u8; 50], name).tag(Tag(number)).try_submit()
            });
        }
    }
    for (at, job) in jobs.iter().enumerate() {
        until(job, || sinks[at].count() == at + 1);
    }
    // One job's end is nothing to the others.
    let mut jobs = jobs;
    jobs.remove(0);
    for (at, job) in jobs.iter().enumerate() {
        settle(job);
        assert_eq!(sinks[at + 1].count(), at + 2);
        assert!(
            sinks[at + 1].take().iter().all(|status| status.bytes().unwrap() == [at as u8 + 1; 50])
        );
        assert!(job[0].peer_down(Rank(1)).is_none());
    }
}

fn a_thread_takes_as_many_events_at_a_time_as_each_runtime_says<J: Job>() {
    for limit in [32, 1, 3] {
        let ranks = J::pair_with(J::settings().poll_batch(limit));
        let sink = Sink::keeping();
        let name = ranks[1].register_comp(&sink).unwrap();
        for number in 0..12 {
            sent(&ranks[..1], || {
                ranks[0].post_am(Rank(1), b"x", name).tag(Tag(number)).try_submit()
            });
        }
        let mut most = 0;
        let all_came = happens(&ranks[..1], LIMIT, || {
            let before = sink.count();
            ranks[1].progress().unwrap();
            most = most.max(sink.count() - before);
            sink.count() == 12
        });
        assert!(all_came && (1..=limit).contains(&most), "{most} at a time, not {limit}");
    }
}

fn packets_of_a_pool_of_the_users_own_return_to_it<J: Job>() {
    let ranks = J::pair();
    let sink = Sink::keeping();
    let name = ranks[1].register_comp(&sink).unwrap();
    let pool = PacketPool::new(Arc::new(HostAllocator), 8192, 16);
    let devices =
        [ranks[0].device().build().unwrap(), ranks[1].device().packet_pool(&pool).build().unwrap()];
    // A NIC gets packets at once, so that packets it cannot receive into are an error at the
    // start.
    assert_eq!(pool.allocated() > 0, J::IS_RDMA);
    // A NIC needs some of them for the receives that stand.
    let most = if J::IS_RDMA { 8 } else { 16 };
    for round in 0..5_u64 {
        let mut kept = Vec::new();
        for at in 0..most {
            let message = pattern(round * 16 + at, 6000);
            sent(&ranks, || {
                ranks[0].post_am(Rank(1), &message[..], name).device(&devices[0]).try_submit()
            });
            kept.push(sink.one(&ranks));
        }
        assert!(pool.take_with_len(1).is_none(), "all packets of the pool are out");
        for (at, status) in kept.iter().enumerate() {
            assert_eq!(status.bytes().unwrap(), pattern(round * 16 + at as u64, 6000));
        }
        drop(kept);
        let all: Vec<_> = std::iter::from_fn(|| pool.take_with_len(1)).collect();
        assert_eq!(all.len(), most as usize, "and come back");
    }
}

/// Runs `body` on a thread for each rank, and gives their answers, in order; a rank that hangs is
/// named.
fn on_each<J: Job, T: Send + 'static>(
    size: u32,
    body: impl Fn(Runtime) -> T + Send + Sync + Clone + 'static,
) -> Vec<T> {
    let (give, take) = channel();
    let ranks = J::ranks(size);
    for rank in ranks.clone() {
        let (give, body) = (give.clone(), body.clone());
        std::thread::spawn(move || {
            let at = rank.rank().0;
            let answer = body(rank);
            let _ = give.send((at, answer));
        });
    }
    let mut answers: Vec<Option<T>> = (0..size).map(|_| None).collect();
    for _ in 0..size {
        match take.recv_timeout(Duration::from_secs(20)) {
            Ok((at, answer)) => answers[at as usize] = Some(answer),
            Err(_) => {
                let hang: Vec<usize> =
                    (0..answers.len()).filter(|&at| answers[at].is_none()).collect();
                panic!("of {size} ranks, ranks {hang:?} hang (or have panicked)");
            }
        }
    }
    answers.into_iter().flatten().collect()
}

fn no_rank_passes_a_barrier_before_all_have_reached_it<J: Job>() {
    for size in 1..=8 {
        let reached = Arc::new(AtomicU32::new(0));
        on_each::<J, _>(size, move |rank| {
            for round in 1..=20 {
                reached.fetch_add(1, Ordering::SeqCst);
                rank.barrier().unwrap();
                assert!(reached.load(Ordering::SeqCst) >= size * round, "passed too early");
            }
        });
    }
}

fn an_allgather_gives_everybody_everything_whatever_its_length<J: Job>() {
    for size in [1, 2, 3, 5, 8_u32] {
        on_each::<J, _>(size, move |rank| {
            for len in [0, 41, 8184, 8185, 20_000] {
                let all: Vec<_> = (0..u64::from(size)).map(|rank| pattern(rank, len)).collect();
                let mine = &all[rank.rank().0 as usize];
                for _ in 0..2 {
                    let got = rank.allgather(mine).unwrap();
                    assert!(got == all, "{size} ranks, {len} bytes");
                    rank.barrier().unwrap();
                }
            }
        });
    }
}

fn an_allgather_of_unequal_lengths_is_an_error_on_all_ranks<J: Job>() {
    for size in 2..=6_u32 {
        let errors = on_each::<J, _>(size, move |rank| {
            let len = if rank.rank().0 == 1 { 3 } else { 4 };
            let error = rank.allgather(&vec![1; len]).expect_err("the lengths differ");
            // Held until all have their answer: a rank that goes would end the others' waiting.
            (error, rank)
        });
        for (error, rank) in &errors {
            assert!(matches!(error, CollectiveError::Uneven { .. }), "{rank:?}: {error}");
        }
    }
}

fn messages_to_oneself_arrive_as_others_do<J: Job>() {
    let mut rng = rng();
    let ranks = J::ranks(1);
    let me = &ranks[0];
    let sink = Sink::keeping();
    let name = me.register_comp(&sink).unwrap();
    let mut sizes = [0, 1, 8, 40, 41, 208, 209, 8192];
    sizes.shuffle(&mut rng);
    for size in sizes {
        let message = random(&mut rng, size);
        sent(&ranks, || me.post_am(Rank(0), &message[..], name).try_submit());
        assert_eq!(sink.one(&ranks).bytes().unwrap(), message);
        for policy in [Matching::None, Matching::RankOnly, Matching::TagOnly, Matching::RankTag] {
            sent(&ranks, || {
                me.post_send(Rank(0), &message[..], Tag(3)).matching(policy).try_submit()
            });
            let mut recv = me.post_recv(Rank(0), vec![0; size], Tag(3)).matching(policy);
            assert_eq!(recv.wait().unwrap().bytes().unwrap(), message);
        }
    }
    me.barrier().unwrap();
    assert_eq!(me.allgather(b"me").unwrap(), [b"me"]);
}

fn collectives_of_several_threads_meet_one_after_another<J: Job>() {
    let ranks = J::pair();
    std::thread::scope(|scope| {
        for rank in &ranks {
            for _ in 0..2 {
                scope.spawn(move || (0..50).for_each(|_| rank.barrier().unwrap()));
            }
        }
    });
}

fn a_large_message_that_waits_is_received_by_way_of_another_device<J: Job>() {
    let ranks = J::pair();
    let devices = [0, 1].map(|at: usize| ranks[at].device().build().unwrap());
    let (done, arrived) = (Sink::keeping(), Sink::keeping());
    let payload = pattern(1, 20_000);
    let mut send = ranks[0].post_send(Rank(1), payload.clone(), Tag(1)).comp(&done);
    assert!(posted(&ranks, || send.try_submit()).is_posted());
    until(&ranks, || ranks[1].default_matching_engine().waiting().0 == 1);
    let mut recv =
        ranks[1].post_recv(Rank(0), vec![0; 20_000], Tag(1)).comp(&arrived).device(&devices[1]);
    assert!(recv.try_submit().unwrap().is_posted());
    let status = arrived.one(&ranks);
    assert_eq!(status.bytes().unwrap(), payload);
    assert!(done.one(&ranks).error.is_none());
}

fn a_bootstrap_may_make_progress_while_it_publishes_a_device<J: Job>() {
    let runtime = Arc::new(OnceLock::<Runtime>::new());
    let busy = runtime.clone();
    let started = start_hooked(unstarted(1).remove(0), J::settings(), move |call| {
        if let (BootstrapCall::Put, Some(runtime)) = (call, busy.get()) {
            runtime.progress_all().unwrap();
        }
        Ok(())
    });
    let started = runtime.get_or_init(|| started).clone();
    let (told, heard) = channel();
    std::thread::spawn(move || told.send(started.device().build().unwrap().index()));
    assert_eq!(heard.recv_timeout(LIMIT / 10).expect("the device is made"), 1);
}
