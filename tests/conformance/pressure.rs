//! Each reason for a retry, forced by tiny resources. The caller gets the reason and its operation
//! back, and nothing is lost.

use crate::support::over_each_transport;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::settings::SettingsBuilder;
use carrack::{OpError, Outcome, PostError, ProgressError, Rank, RetryReason, Runtime, Tag};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

over_each_transport!(
    a_full_ring_is_a_retry_and_goes_on_once_the_peer_does,
    a_message_without_a_packet_is_a_retry_and_goes_on_once_one_is_back,
    a_peer_that_has_not_started_is_a_retry_and_is_reached_once_it_has,
    what_waits_for_a_peer_that_has_not_started_arrives_in_order,
    what_waits_for_a_peer_that_has_not_started_takes_the_path_that_it_demands_or_none,
    nothing_overtakes_the_backlog_and_a_full_one_is_an_error,
    a_link_that_another_thread_uses_is_a_retry_where_locks_are_tried,
    a_receiver_that_keeps_its_packets_is_told_and_loses_nothing,
    unexpected_messages_do_not_hold_up_others_for_want_of_chunks,
    ranks_that_both_offer_as_much_as_they_may_do_not_wait_for_each_other,
    the_tiniest_resources_carry_everything_in_both_directions,
);

fn tiny<J: Job>() -> SettingsBuilder {
    J::settings()
        .setting("shm_slots", 8)
        .setting("tcp_window", 2048)
        .setting("shm_chunks", 1)
        .packets_max(16)
        .backlog(4)
        .poll_batch(1)
}

/// Posts active messages without progress until one returns a retry. Returns the number that went,
/// and the reason of the retry.
fn fill(ranks: &[Runtime; 2], name: carrack::RemoteComp, size: usize) -> (u64, RetryReason) {
    for at in 0..100_000 {
        let message = pattern(at, size);
        match ranks[0].post_am(Rank(1), &message[..], name).tag(Tag(at)).try_submit().unwrap() {
            Outcome::Done(_) => {}
            Outcome::Retry(reason) => return (at, reason),
            Outcome::Posted => panic!("nothing was said of the backlog"),
        }
    }
    panic!("room for everything");
}

fn check(ranks: &[Runtime], arrived: &Sink, count: u64, size: usize) {
    let mut all = Vec::new();
    until_with_errors(ranks, || {
        // Taken out as they come, so that their packets are free again.
        for status in arrived.take() {
            assert_eq!(status.bytes().unwrap(), pattern(status.tag.0, size));
            all.push(status.tag.0);
        }
        all.len() as u64 >= count
    });
    settle(ranks);
    assert_eq!(arrived.count(), 0, "more than was sent");
    assert_eq!(all, (0..count).collect::<Vec<_>>());
}

fn retry_reason<J: Job>(size: usize, want: RetryReason) {
    let ranks = J::pair_with(tiny::<J>());
    let arrived = Sink::keeping();
    let name = ranks[1].register_comp(&arrived).unwrap();
    let (count, reason) = fill(&ranks, name, size);
    assert_eq!(reason, want);
    assert!(count > 0);
    // It stays so until the peer goes on, and the operation stays the caller's.
    let last = pattern(count, size);
    let mut owned = ranks[0].post_am(Rank(1), last.clone(), name).tag(Tag(count));
    for _ in 0..10 {
        assert!(matches!(owned.try_submit().unwrap(), Outcome::Retry(reason) if reason == want));
        ranks[0].progress().unwrap();
    }
    // Statuses are dropped as they come, so that their packets are free again.
    let mut next = 0;
    let mut check = || {
        for status in arrived.take() {
            assert_eq!(status.tag, Tag(next));
            assert_eq!(status.bytes().unwrap(), pattern(next, size));
            next += 1;
        }
        next
    };
    let status = loop {
        match owned.try_submit().unwrap() {
            Outcome::Done(status) => break status,
            Outcome::Retry(_) => {
                ranks[1].progress().unwrap();
                check();
            }
            Outcome::Posted => panic!("posted"),
        }
    };
    assert_eq!(status.buffer.to_vec().unwrap(), last);
    until_with_errors(&ranks, || check() == count + 1);
    settle(&ranks);
    assert_eq!(arrived.count(), 0);
}

fn a_full_ring_is_a_retry_and_goes_on_once_the_peer_does<J: Job>() {
    retry_reason::<J>(8, RetryReason::Full);
}

fn a_message_without_a_packet_is_a_retry_and_goes_on_once_one_is_back<J: Job>() {
    // A network's receiver has as much room for long messages as for short ones.
    let reason = if J::TAKES_TIME { RetryReason::Full } else { RetryReason::NoPacket };
    retry_reason::<J>(1000, reason);
}

fn a_peer_that_has_not_started_is_a_retry_and_is_reached_once_it_has<J: Job>() {
    let mut job = unstarted(2).into_iter();
    let zero = start(job.next().unwrap(), J::settings());
    let mut send = zero.post_send(Rank(1), b"early".to_vec(), Tag(1));
    for _ in 0..100 {
        assert!(matches!(send.try_submit().unwrap(), Outcome::Retry(RetryReason::Connecting)));
        zero.progress().unwrap();
    }
    let one = start(job.next().unwrap(), J::settings());
    let ranks = [zero.clone(), one];
    sent(&ranks, || send.try_submit());
    let status = ranks[1].post_recv(Rank(0), vec![0; 5], Tag(1)).wait().unwrap();
    assert_eq!(status.bytes().unwrap(), b"early");
}

fn what_waits_for_a_peer_that_has_not_started_takes_the_path_that_it_demands_or_none<J: Job>() {
    let mut job = unstarted(2).into_iter();
    let zero = start(job.next().unwrap(), J::settings());
    let other = if J::PATH == carrack_transports::shm::NAME {
        carrack_transports::loopback::NAME
    } else {
        carrack_transports::shm::NAME
    };
    let sinks = [other, J::PATH].map(|path| {
        let ended = Sink::keeping();
        let mut send = zero.post_send(Rank(1), b"late", Tag(1)).require(path).comp(&ended);
        send.submit().unwrap();
        ended
    });
    let ranks = [zero, start(job.next().unwrap(), J::settings())];
    let error = sinks[0].one(&ranks).ok().unwrap_err();
    assert!(
        matches!(&error, OpError::Begin(why) if matches!(**why, PostError::Path { .. })),
        "{error}"
    );
    assert!(sinks[1].one(&ranks).error.is_none());
    settle(&ranks);
    assert_eq!(
        ranks[1].default_matching_engine().waiting(),
        (1, 0),
        "by the path that was demanded"
    );
}

fn what_waits_for_a_peer_that_has_not_started_arrives_in_order<J: Job>() {
    let mut job = unstarted(2).into_iter();
    let zero = start(job.next().unwrap(), J::settings());
    let ended = Sink::keeping();
    for at in 0..50 {
        let message = pattern(at, at as usize * 10);
        zero.post_send(Rank(1), &message[..], Tag(1)).comp(&ended).submit().unwrap();
        zero.progress().unwrap();
    }
    assert_eq!(ended.count(), 0);
    let one = start(job.next().unwrap(), J::settings());
    let ranks = [zero, one];
    until(&ranks, || ended.count() == 50);
    for at in 0..50 {
        let status = ranks[1].post_recv(Rank(0), vec![0; 500], Tag(1)).wait().unwrap();
        assert_eq!(status.bytes().unwrap(), pattern(at, at as usize * 10));
    }
    settle(&ranks);
    assert_eq!((ended.count(), ended.failed()), (50, 0));
}

fn nothing_overtakes_the_backlog_and_a_full_one_is_an_error<J: Job>() {
    let ranks = J::pair_with(tiny::<J>());
    let (arrived, ended) = (Sink::keeping(), Sink::keeping());
    let name = ranks[1].register_comp(&arrived).unwrap();
    let (count, _) = fill(&ranks, name, 8);
    let tagged = |at: u64| pattern(count + at, 8);
    for at in 0..4 {
        let bytes = tagged(at);
        let mut am = ranks[0].post_am(Rank(1), &bytes[..], name).tag(Tag(count + at)).comp(&ended);
        if at > 0 {
            let outcome = am.try_submit().unwrap();
            assert!(matches!(outcome, Outcome::Retry(RetryReason::Backlog)), "{outcome:?}");
        }
        am.submit().unwrap();
    }
    let fifth = tagged(4);
    let mut am = ranks[0].post_am(Rank(1), fifth.clone(), name).tag(Tag(count + 4)).comp(&ended);
    for _ in 0..2 {
        let error = am.submit().unwrap_err();
        assert!(matches!(error, PostError::BacklogFull { rank: Rank(1), limit: 4 }), "{error}");
        assert!(error.to_string().contains("CARRACK_BACKLOG"));
    }
    assert_eq!(ended.count(), 0, "nothing of the backlog has gone");
    check(&ranks, &arrived, count + 4, 8);
    assert_eq!((ended.count(), ended.failed()), (4, 0));
    let status = done(posted(&ranks, || am.try_submit()));
    assert_eq!(status.buffer.to_vec().unwrap(), fifth, "the error gave the buffer back");
    assert_eq!(arrived.one(&ranks).tag, Tag(count + 4));
}

fn a_link_that_another_thread_uses_is_a_retry_where_locks_are_tried<J: Job>() {
    if !J::TRIES_LOCKS {
        // Over a transport whose links wait for each other's few instructions there is nothing to
        // see.
        return;
    }
    let ranks = J::pair();
    let name = ranks[1].register_comp(&carrack::Counter::new()).unwrap();
    let (seen, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !seen.load(Ordering::Relaxed) {
                    match ranks[0].post_am(Rank(1), &[0; 8000], name).try_submit().unwrap() {
                        Outcome::Retry(RetryReason::Lock) => seen.store(true, Ordering::Relaxed),
                        Outcome::Done(_) => _ = sent.fetch_add(1, Ordering::Relaxed),
                        _ => step(&ranks),
                    }
                }
            });
        }
    });
    assert!(sent.load(Ordering::Relaxed) > 0);
}

fn a_receiver_that_keeps_its_packets_is_told_and_loses_nothing<J: Job>() {
    let ranks = J::pair_with(
        tiny::<J>().setting("shm_slots", 64).setting("tcp_window", 4096).setting("shm_chunks", 64),
    );
    let arrived = Sink::keeping();
    let name = ranks[1].register_comp(&arrived).unwrap();
    let (mut kept, mut sent, mut told) = (Vec::new(), 0_u64, false);
    // The sender goes on until nothing moves any more.
    let mut still = 0;
    while still < 1000 {
        let message = pattern(sent, 1000);
        let went = ranks[0]
            .post_am(Rank(1), &message[..], name)
            .tag(Tag(sent))
            .try_submit()
            .unwrap()
            .is_done();
        sent += u64::from(went);
        match ranks[1].progress() {
            Ok(_) => {}
            Err(error) => {
                assert!(matches!(error, ProgressError::NoPacket(_)), "{error}");
                assert!(error.to_string().contains("CARRACK_PACKETS_MAX"));
                told = true;
            }
        }
        let before = kept.len();
        kept.extend(arrived.take());
        still = if went || kept.len() > before { 0 } else { still + 1 };
        if J::IS_RDMA {
            nics_go_on();
        }
    }
    // A NIC needs some of its packets for the receives that stand.
    assert!(
        kept.len() == 16 || J::IS_RDMA && (8..16).contains(&kept.len()),
        "{} of 16 packets",
        kept.len()
    );
    assert!(told);
    let mut next = 0;
    let check = |status: carrack::Status, next: &mut u64| {
        assert_eq!(status.tag, Tag(*next));
        assert_eq!(status.bytes().unwrap(), pattern(*next, 1000));
        *next += 1;
    };
    kept.drain(..).for_each(|status| check(status, &mut next));
    until_with_errors(&ranks, || {
        arrived.take().into_iter().for_each(|status| check(status, &mut next));
        next == sent
    });
    settle(&ranks);
    assert_eq!(arrived.count(), 0);
}

fn unexpected_messages_do_not_hold_up_others_for_want_of_chunks<J: Job>() {
    let ranks = J::pair_with(J::settings().setting("shm_chunks", 1));
    for at in 0..100 {
        let message = pattern(at, 1000);
        sent(&ranks, || ranks[0].post_send(Rank(1), &message[..], Tag(at)).try_submit());
    }
    until(&ranks, || ranks[1].default_matching_engine().waiting() == (100, 0));
    for at in (0..100).rev() {
        let status = ranks[1].post_recv(Rank(0), vec![0; 1000], Tag(at)).wait().unwrap();
        assert_eq!(status.bytes().unwrap(), pattern(at, 1000));
    }
}

fn the_tiniest_resources_carry_everything_in_both_directions<J: Job>() {
    const COUNT: u64 = 500;
    let ranks = J::pair_with(tiny::<J>());
    let sinks = [Sink::keeping(), Sink::keeping()];
    let names = [0, 1].map(|at| ranks[at].register_comp(&sinks[at]).unwrap());
    let size = |at: u64| [0, 8, 41, 208, 209, 3000][at as usize % 6];
    let (mut posted, mut got) = ([0; 2], [0; 2]);
    while got != [COUNT; 2] {
        for at in 0..2 {
            let to = 1 - at;
            if posted[at] < COUNT {
                let message = pattern(posted[at], size(posted[at]));
                let mut am = ranks[at]
                    .post_am(Rank(to as u32), &message[..], names[to])
                    .tag(Tag(posted[at]));
                posted[at] += u64::from(!am.try_submit().unwrap().is_retry());
            }
            let _ = ranks[at].progress();
            for status in sinks[at].take() {
                assert_eq!(status.tag, Tag(got[at]));
                assert_eq!(status.bytes().unwrap(), pattern(got[at], size(got[at])));
                got[at] += 1;
            }
        }
    }
}

/// Each has as many large messages on offer as there may be, and one more in its backlog. What ends
/// an offer is said by its receiver, whose backlog has such a message in front.
fn ranks_that_both_offer_as_much_as_they_may_do_not_wait_for_each_other<J: Job>() {
    const OFFERS: u64 = 16;
    const MORE: u64 = 3;
    const SIZE: usize = 20_000;
    let ranks = J::pair_with(J::settings().offers(OFFERS as usize));
    let (sent, received) = (Sink::keeping(), Sink::keeping());
    let peers = || ranks.iter().zip([Rank(1), Rank(0)]);
    for (rank, to) in peers() {
        for number in 0..OFFERS + MORE {
            let bytes = pattern(number + 100 * u64::from(to.0), SIZE);
            let mut send = rank.post_send(to, bytes, Tag(number)).comp(&sent);
            match number < OFFERS {
                true => assert!(posted(&ranks, || send.try_submit()).is_posted()),
                false => send.submit().unwrap(),
            }
        }
    }
    for (rank, from) in peers() {
        for number in 0..OFFERS + MORE {
            let mut receive = rank.post_recv(from, vec![0; SIZE], Tag(number)).comp(&received);
            receive.submit().unwrap();
        }
    }
    let count = 2 * (OFFERS + MORE) as usize;
    until(&ranks, || sent.count() == count && received.count() == count);
    assert_eq!((sent.failed(), received.failed()), (0, 0));
    for status in received.take() {
        let to = 1 - status.rank.0;
        assert_eq!(status.bytes().unwrap(), pattern(status.tag.0 + 100 * u64::from(to), SIZE));
    }
}
