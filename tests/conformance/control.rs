//! Control of waiting operations: looking, cancelling, deadlines; and a rank's treatment of
//! messages without a receive.

use crate::support::guard::Guarded;
use crate::support::keys::without_keys;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::settings::{AutoChoice, TransportChoice};
use carrack::{
    AwaitError, Counter, Envelope, Matching, OpError, Outcome, PeerState, PostError, Rank,
    RetryReason, Runtime, Tag, UserContext,
};
use rand::Rng;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

crate::support::over_each_transport!(
    a_probe_sees_the_message_that_a_receive_would_take_and_leaves_it_there,
    a_receive_that_waits_can_be_cancelled_once_and_gets_its_buffer_back,
    a_ticket_takes_nothing_back_at_another_runtime,
    a_probe_refuses_an_engine_of_another_runtime,
    a_cancelled_receive_leaves_the_others_of_its_key_in_order,
    the_race_of_cancelling_and_arriving_has_one_winner,
    a_receive_without_a_message_ends_at_its_deadline,
    what_waits_for_a_peer_that_never_starts_ends_at_its_deadline,
    a_large_message_without_a_receive_ends_at_its_deadline_and_may_still_arrive,
    operations_on_memory_end_at_their_deadline_when_their_owner_is_silent,
    an_operation_that_ends_in_time_knows_nothing_of_its_deadline,
    a_peer_is_suspect_while_it_is_silent,
    unexpected_messages_stay_with_their_sender_beyond_the_budget,
    very_many_messages_wait_for_a_rank_that_is_late,
    a_receiver_that_takes_another_message_first_is_no_deadlock,
    a_sender_that_does_not_listen_is_told_to,
    too_many_offers_are_a_retry_and_go_on_when_some_are_taken,
);

const SOON: Duration = Duration::from_millis(20);
const LATE: Duration = Duration::from_secs(1000);

fn a_probe_sees_the_message_that_a_receive_would_take_and_leaves_it_there<J: Job>() {
    let ranks = J::pair();
    let probe = |tag| ranks[1].probe(Rank(0), Tag(tag)).look().unwrap();
    assert_eq!(probe(1), None);
    for (tag, size) in [(1, 3), (1, 100), (2, 50_000)] {
        sent(&ranks, || ranks[0].post_send(Rank(1), pattern(tag, size), Tag(tag)).try_submit());
    }
    until(&ranks, || ranks[1].default_matching_engine().waiting().0 == 3);
    let envelope = |tag, size| Some(Envelope { rank: Rank(0), tag: Tag(tag), size });
    for _ in 0..2 {
        assert_eq!(probe(1), envelope(1, 3), "the first of its key");
        assert_eq!(probe(2), envelope(2, 50_000), "one that was only offered");
        assert_eq!(probe(3), None);
    }
    let other = ranks[1].matching_engine().unwrap();
    assert_eq!(ranks[1].probe(Rank(0), Tag(1)).matching_engine(&other).look().unwrap(), None);
    let mut recv = ranks[1].post_recv(Rank(0), vec![0; 3], Tag(1));
    assert_eq!(recv.wait().unwrap().bytes().unwrap(), pattern(1, 3));
    assert_eq!(probe(1), envelope(1, 100), "and then the next");
    // With a wildcard, what was sent by that policy.
    assert_eq!(ranks[1].probe(Rank::ANY, Tag(1)).look().unwrap(), None);
    sent(&ranks, || {
        ranks[0].post_send(Rank(1), b"any", Tag(9)).matching(Matching::TagOnly).try_submit()
    });
    until(&ranks, || ranks[1].probe(Rank::ANY, Tag(9)).look().unwrap() == envelope(9, 3));
    assert!(matches!(ranks[1].probe(Rank(2), Tag(1)).look(), Err(PostError::NoSuchRank { .. })));
    let PeerState::Down(cause) = ranks[1].peer_state(Rank(2)) else { panic!("it is not there") };
    assert_eq!(cause.to_string(), "rank 2 does not exist: name one of the job's ranks, 0 to 1");
    assert_eq!(ranks[1].peer_down(Rank(2)), Some(cause));
    for (tag, size) in [(1, 100), (2, 50_000)] {
        let arrived = Sink::keeping();
        ranks[1].post_recv(Rank(0), vec![0; size], Tag(tag)).comp(&arrived).submit().unwrap();
        assert_eq!(arrived.one(&ranks).bytes().unwrap(), pattern(tag, size));
    }
}

fn a_receive_that_waits_can_be_cancelled_once_and_gets_its_buffer_back<J: Job>() {
    let ranks = J::pair();
    let arrived = Sink::keeping();
    let guarded = Guarded::new(10, 4);
    let mut recv = ranks[1].post_recv(Rank(0), guarded.slice(), Tag(1)).comp(&arrived);
    assert_eq!(recv.ticket(), None);
    recv = recv.user_context(UserContext(6));
    assert!(recv.try_submit().unwrap().is_posted());
    let ticket = recv.ticket().unwrap();
    assert!(!ranks[0].cancel(&ticket).unwrap(), "another rank has no such receive");
    assert!(ranks[1].cancel(&ticket).unwrap());
    assert!(!ranks[1].cancel(&ticket).unwrap(), "it has ended");
    let status = arrived.one(&ranks);
    assert_eq!((status.user_context, status.buffer.len()), (UserContext(6), 10));
    assert!(matches!(status.ok(), Err(OpError::Cancelled)));
    guarded.assert_untouched();
    // The message waits for another receive; and one that has met its message is not cancelled.
    sent(&ranks, || ranks[0].post_send(Rank(1), b"for later", Tag(1)).try_submit());
    let mut recv = ranks[1].post_recv(Rank(0), vec![0; 9], Tag(1)).comp(&arrived);
    recv.submit().unwrap();
    assert_eq!(arrived.one(&ranks).bytes().unwrap(), b"for later");
    if let Some(ticket) = recv.ticket() {
        assert!(!ranks[1].cancel(&ticket).unwrap());
    }
    settle(&ranks);
    assert_eq!(arrived.count(), 0);
}

fn a_ticket_takes_nothing_back_at_another_runtime<J: Job>() {
    let ranks = J::pair();
    let arrived = Sink::keeping();
    // The first receive of its key at each rank.
    let post = |rank: &Runtime| {
        let mut receive = rank.post_recv(Rank(0), vec![0; 8], Tag(7)).comp(&arrived);
        receive.submit().unwrap();
        receive.ticket().unwrap()
    };
    let (mine, theirs) = (post(&ranks[0]), post(&ranks[1]));
    assert!(!ranks[0].cancel(&theirs).unwrap());
    assert!(ranks[0].cancel(&mine).unwrap());
    assert!(ranks[1].cancel(&theirs).unwrap());
    // An awaited one has such a ticket, too.
    let awaited = ranks[1].post_recv(Rank(0), vec![0; 8], Tag(7)).start();
    let (mine, theirs) = (post(&ranks[0]), awaited.ticket().unwrap());
    assert!(!ranks[0].cancel(&theirs).unwrap());
    assert!(ranks[0].cancel(&mine).unwrap() && ranks[1].cancel(&theirs).unwrap());
}

fn a_probe_refuses_an_engine_of_another_runtime<J: Job>() {
    let ranks = J::pair();
    sent(&ranks, || ranks[0].post_send(Rank(1), b"theirs", Tag(5)).try_submit());
    let [mine, theirs] = [0, 1].map(|rank: usize| ranks[rank].default_matching_engine());
    until(&ranks, || ranks[1].probe(Rank(0), Tag(5)).look().unwrap().is_some());
    let probe = || ranks[0].probe(Rank(0), Tag(5)).matching_engine(theirs);
    assert!(matches!(probe().look(), Err(PostError::Foreign)));
    assert_eq!(probe().matching_engine(mine).look().unwrap(), None);
}

fn a_cancelled_receive_leaves_the_others_of_its_key_in_order<J: Job>() {
    let ranks = J::pair();
    for cancelled in 0..4 {
        let arrived = Sink::keeping();
        let tickets: Vec<_> = (0..4)
            .map(|context| {
                let mut recv = ranks[1].post_recv(Rank(0), vec![0; 8], Tag(1)).comp(&arrived);
                recv = recv.user_context(UserContext(context));
                assert!(recv.try_submit().unwrap().is_posted());
                recv.ticket().unwrap()
            })
            .collect();
        assert!(ranks[1].cancel(&tickets[cancelled]).unwrap());
        assert!(matches!(arrived.one(&ranks).ok(), Err(OpError::Cancelled)));
        for at in 0..3_u64 {
            sent(&ranks, || {
                ranks[0].post_send(Rank(1), &at.to_le_bytes()[..], Tag(1)).try_submit()
            });
        }
        until(&ranks, || arrived.count() == 3);
        let got: Vec<_> = arrived
            .take()
            .iter()
            .map(|status| (status.user_context.0, status.bytes().unwrap()[0]))
            .collect();
        let left: Vec<u64> = (0..4).filter(|&at| at != cancelled as u64).collect();
        assert_eq!(got, left.into_iter().zip(0..).collect::<Vec<_>>());
    }
    assert_eq!(ranks[1].default_matching_engine().waiting(), (0, 0));
}

fn the_race_of_cancelling_and_arriving_has_one_winner<J: Job>() {
    let ranks = J::pair();
    let mut rng = rng();
    let stop = AtomicBool::new(false);
    let (mut cancelled, mut received, rounds) = (0, 0, 2000);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                step(&ranks[1..]);
            }
        });
        for round in 0..rounds {
            let arrived = Sink::keeping();
            let mut recv = ranks[1].post_recv(Rank(0), vec![0; 8], Tag(round)).comp(&arrived);
            recv.submit().unwrap();
            sent(&ranks[..1], || {
                ranks[0].post_send(Rank(1), &round.to_le_bytes()[..], Tag(round)).try_submit()
            });
            for _ in 0..rng.random_range(0..200) {
                std::hint::spin_loop();
            }
            let won = recv.ticket().is_some_and(|ticket| ranks[1].cancel(&ticket).unwrap());
            let status = arrived.one(&ranks);
            if won {
                cancelled += 1;
                assert!(matches!(status.ok(), Err(OpError::Cancelled)));
                // The message is not lost with it.
                let mut again = ranks[1].post_recv(Rank(0), vec![0; 8], Tag(round)).comp(&arrived);
                again.submit().unwrap();
                assert_eq!(arrived.one(&ranks).bytes().unwrap(), round.to_le_bytes());
            } else {
                received += 1;
                assert_eq!(status.bytes().unwrap(), round.to_le_bytes());
            }
            assert_eq!(arrived.count(), 0, "ended twice");
        }
        stop.store(true, Ordering::Relaxed);
    });
    println!("{cancelled} cancelled, {received} received");
    assert_eq!(ranks[1].default_matching_engine().waiting(), (0, 0));
}

fn a_receive_without_a_message_ends_at_its_deadline<J: Job>() {
    let ranks = J::pair();
    let (late, early) = (Sink::keeping(), Sink::keeping());
    let guarded = Guarded::new(10, 4);
    let mut recv = ranks[1].post_recv(Rank(0), guarded.slice(), Tag(1)).comp(&early).deadline(SOON);
    assert!(recv.try_submit().unwrap().is_posted());
    let mut patient = ranks[1].post_recv(Rank(0), vec![0; 1], Tag(1)).comp(&late).deadline(LATE);
    assert!(patient.try_submit().unwrap().is_posted());
    let status = early.one(&ranks);
    assert_eq!(status.buffer.len(), 10, "the buffer comes back");
    assert!(matches!(status.ok(), Err(OpError::TimedOut(Rank(0)))));
    assert!(!ranks[1].cancel(&recv.ticket().unwrap()).unwrap(), "it has ended");
    assert_eq!(ranks[1].default_matching_engine().waiting(), (0, 1));
    sent(&ranks, || ranks[0].post_send(Rank(1), b"x", Tag(1)).try_submit());
    assert_eq!(late.one(&ranks).bytes().unwrap(), b"x");
    guarded.assert_untouched();
    // A call that waits for its end waits no longer, and sleeps meanwhile.
    let mut recv = ranks[1].post_recv(Rank(0), vec![0; 1], Tag(1)).deadline(SOON);
    assert!(matches!(recv.wait(), Err(AwaitError::Op(OpError::TimedOut(Rank(0))))));
    // And nothing is posted too late.
    let mut recv =
        ranks[1].post_recv(Rank(0), vec![0; 1], Tag(1)).comp(&late).deadline(Duration::ZERO);
    assert!(matches!(recv.try_submit(), Err(PostError::TimedOut(Rank(0)))));
    let mut send = ranks[0].post_send(Rank(1), vec![1], Tag(1)).deadline(Duration::ZERO);
    assert!(matches!(send.try_submit(), Err(PostError::TimedOut(Rank(1)))));
}

fn what_waits_for_a_peer_that_never_starts_ends_at_its_deadline<J: Job>() {
    let mut job = unstarted(2).into_iter();
    let zero = start(job.next().unwrap(), J::settings());
    let done = Sink::keeping();
    let post = |context, size, deadline| {
        let send = zero.post_send(Rank(1), pattern(context, size), Tag(context)).comp(&done);
        send.user_context(UserContext(context)).deadline(deadline).submit().unwrap();
    };
    post(0, 8, LATE);
    post(1, 8, SOON);
    post(2, 100_000, SOON);
    post(3, 8, LATE);
    let alone = std::slice::from_ref(&zero);
    until(alone, || done.count() == 2);
    for (context, status) in (1..).zip(done.take()) {
        assert_eq!(status.user_context, UserContext(context));
        assert_eq!(
            status.buffer.to_vec().unwrap(),
            pattern(context, status.size),
            "the buffer comes back"
        );
        assert!(matches!(status.ok(), Err(OpError::TimedOut(Rank(1)))));
    }
    // The others go when it comes.
    let one = start(job.next().unwrap(), J::settings());
    let ranks = [zero.clone(), one];
    for tag in [0, 3] {
        let arrived = Sink::keeping();
        ranks[1].post_recv(Rank(0), vec![0; 8], Tag(tag)).comp(&arrived).submit().unwrap();
        assert_eq!(arrived.one(&ranks).bytes().unwrap(), pattern(tag, 8));
    }
}

fn a_large_message_without_a_receive_ends_at_its_deadline_and_may_still_arrive<J: Job>() {
    for kernel_copy in [AutoChoice::Auto, AutoChoice::Off] {
        let ranks = J::pair_with(J::settings().setting("kernel_copy", kernel_copy));
        let (done, arrived) = (Sink::keeping(), Sink::keeping());
        let payload = pattern(3, 100_000);
        let mut send =
            ranks[0].post_send(Rank(1), payload.clone(), Tag(1)).comp(&done).deadline(SOON);
        assert!(send.try_submit().unwrap().is_posted());
        let status = done.one(&ranks);
        assert!(status.buffer.is_empty(), "the peer may still read it");
        assert!(matches!(status.ok(), Err(OpError::TimedOut(Rank(1)))));
        ranks[1].post_recv(Rank(0), vec![0; 100_000], Tag(1)).comp(&arrived).submit().unwrap();
        assert_eq!(arrived.one(&ranks).bytes().unwrap(), payload);
        settle(&ranks);
        assert_eq!(done.count(), 0, "ended once");
    }
}

fn operations_on_memory_end_at_their_deadline_when_their_owner_is_silent<J: Job>() {
    let ranks = J::pair();
    // Memory that cannot be mapped: its owner has to help, and does not.
    let region = carrack::region::Region::host(64);
    region.whole().write(&pattern(1, 64)).unwrap();
    let mr = ranks[1].register_memory(&region).unwrap();
    let rmr = without_keys(&mr.remote_key());
    let done = Sink::keeping();
    let to = Rank(1);
    let posted = |outcome: Result<Outcome, PostError>| assert!(outcome.unwrap().is_posted());
    posted(ranks[0].post_put(to, vec![7; 16], &rmr, 0).comp(&done).deadline(SOON).try_submit());
    posted(ranks[0].post_get(to, vec![0; 16], &rmr, 16).comp(&done).deadline(SOON).try_submit());
    posted(ranks[0].post_fetch_add(to, &rmr, 32, 1).comp(&done).deadline(SOON).try_submit());
    posted(ranks[0].post_flush(to).comp(&done).deadline(SOON).try_submit());
    until(&ranks[..1], || done.count() == 4);
    for status in done.take() {
        assert!(matches!(status.ok(), Err(OpError::TimedOut(Rank(1)))));
    }
    // When the owner goes on, it carries them out all the same, and signals no object again.
    until(&ranks, || region.whole().to_vec().unwrap()[..16] == [7; 16]);
    settle(&ranks);
    assert_eq!(done.count(), 0);
    ranks[0].post_flush(to).comp(&done).submit().unwrap();
    done.one(&ranks).ok().unwrap();
}

fn an_operation_that_ends_in_time_knows_nothing_of_its_deadline<J: Job>() {
    let ranks = J::pair();
    let (done, arrived) = (Sink::keeping(), Sink::keeping());
    // Long enough on a busy machine, and waited for below.
    let limit = Duration::from_secs(3);
    for (at, size) in (0..).zip([1, 100, 9000, 200_000]) {
        let recv = ranks[1]
            .post_recv(Rank(0), vec![0; size], Tag(at))
            .comp(&arrived)
            .deadline(limit)
            .try_submit();
        assert!(recv.unwrap().is_posted());
        let mut send =
            ranks[0].post_send(Rank(1), pattern(at, size), Tag(at)).comp(&done).deadline(limit);
        send.submit().unwrap();
        until(&ranks, || done.count() == 1 && arrived.count() == 1);
        done.take().remove(0).ok().unwrap();
        assert_eq!(arrived.take().remove(0).ok().unwrap().bytes().unwrap(), pattern(at, size));
    }
    std::thread::sleep(limit);
    assert!(!happens(&ranks, SOON, || done.count() + arrived.count() > 0));
    assert_eq!(ranks[0].peer_state(Rank(1)), PeerState::Up);
}

fn a_peer_is_suspect_while_it_is_silent<J: Job>() {
    let ranks = J::pair();
    let arrived = Sink::keeping();
    assert_eq!(ranks[1].peer_state(Rank(0)), PeerState::Up);
    let recv =
        ranks[1].post_recv(Rank(0), vec![0; 1], Tag(1)).comp(&arrived).deadline(SOON).try_submit();
    assert!(recv.unwrap().is_posted());
    assert!(arrived.one(&ranks).error.is_some());
    assert_eq!(ranks[1].peer_state(Rank(0)), PeerState::Suspect);
    settle(&ranks);
    assert_eq!(ranks[1].peer_state(Rank(0)), PeerState::Suspect);
    sent(&ranks, || ranks[0].post_send(Rank(1), b"here I am", Tag(2)).try_submit());
    until(&ranks, || ranks[1].peer_state(Rank(0)) == PeerState::Up);
    let [zero, one] = ranks;
    drop(zero);
    until(std::slice::from_ref(&one), || {
        let _ = one.post_send(Rank(0), b"x", Tag(2)).try_submit();
        matches!(one.peer_state(Rank(0)), PeerState::Down(_))
    });
}

/// Bytes and entries of what the receiver keeps stay within the budget and what a link holds.
fn unexpected_messages_stay_with_their_sender_beyond_the_budget<J: Job>() {
    let budget = 64 << 10;
    let settings = J::settings()
        .unexpected(budget)
        .packets_max(16)
        .setting("shm_slots", 8)
        .setting("tcp_window", 2048)
        .setting("shm_chunks", 1)
        .setting("verbs_depth", 16);
    let ranks = J::pair_with(settings);
    let entry = 128;
    let in_link = match J::TRANSPORT {
        TransportChoice::Shm => 8 * entry + 8192,
        // What a loopback link's queue holds, and a queue pair.
        TransportChoice::Loopback => 256 * (entry + 8192),
        _ => 16 * (entry + 8192),
    };
    let sizes = [8, 40, 500, 8192, 0, 3000];
    let done = Sink::keeping();
    let count = 3000;
    let mut owned = 0;
    for at in 0..count {
        let size = sizes[at as usize % sizes.len()];
        let mut send = ranks[0].post_send(Rank(1), pattern(at, size), Tag(at)).comp(&done);
        if posted(&ranks, || send.try_submit()).is_posted() {
            owned += 1;
        }
    }
    until(&ranks, || ranks[1].default_matching_engine().waiting().0 == count as usize);
    let kept = ranks[1].unexpected_bytes();
    assert!(kept > budget / 2 && kept <= budget + in_link, "{kept} B are kept of {budget}");
    assert!(owned > 2000, "only {owned} were offered");
    assert_eq!(done.count(), 0, "what is offered waits");
    // They are all there, and in order where they have one key.
    for at in 0..count {
        let size = sizes[at as usize % sizes.len()];
        let arrived = Sink::keeping();
        ranks[1].post_recv(Rank(0), vec![0; size], Tag(at)).comp(&arrived).submit().unwrap();
        let status = arrived.one(&ranks);
        assert_eq!(status.bytes().unwrap(), pattern(at, size), "message {at}");
    }
    until(&ranks, || done.count() == owned);
    assert!(done.take().into_iter().all(|status| status.error.is_none()));
    assert_eq!(ranks[1].unexpected_bytes(), 0);
    // And then messages go whole again.
    settle(&ranks);
    assert!(
        posted(&ranks, || ranks[0].post_send(Rank(1), b"whole", Tag(1)).try_submit()).is_done()
    );
}

fn very_many_messages_wait_for_a_rank_that_is_late<J: Job>() {
    let count = amount("TEST_WAITING", 24_000, 100_000);
    let ranks = J::pair();
    let budget = ranks[1].settings().unexpected();
    let (done, size) = (Counter::new(), |at: u64| [8, 60, 1000][at as usize % 3]);
    let payload = random(&mut rng(), 1000);
    let mut offered = 0;
    for at in 0..count {
        let mut bytes = payload[..size(at)].to_vec();
        bytes[..8].copy_from_slice(&at.to_le_bytes());
        // One key for all: they have to come in order.
        let mut send = ranks[0].post_send(Rank(1), bytes, Tag(1)).comp(&done);
        offered += u64::from(posted(&ranks, || send.try_submit()).is_posted());
    }
    until(&ranks, || ranks[1].default_matching_engine().waiting().0 as u64 == count);
    let kept = ranks[1].unexpected_bytes();
    assert!(kept <= budget, "{kept} B are kept, of a budget of {budget}");
    assert!(offered > count / 4, "{offered} were offered: the others fill the budget");
    // It is late, and then takes them all.
    let arrived = Sink::keeping();
    let mut next = 0;
    for at in 0..count {
        let recv = ranks[1].post_recv(Rank(0), vec![0; 1000], Tag(1)).comp(&arrived);
        recv.user_context(UserContext(at)).submit().unwrap();
        if at % 64 == 63 || at + 1 == count {
            until(&ranks, || arrived.count() as u64 == at + 1 - next);
            for status in arrived.take() {
                let at = status.user_context.0;
                let bytes = status.bytes().unwrap();
                assert_eq!(
                    (status.size, &bytes[..8]),
                    (size(at), &at.to_le_bytes()[..]),
                    "message {at}"
                );
                assert_eq!(bytes[8..], payload[8..size(at)]);
                next += 1;
            }
        }
    }
    until(&ranks, || done.get() == offered);
    assert_eq!((next, done.failed(), ranks[1].unexpected_bytes()), (count, 0, 0));
}

fn a_receiver_that_takes_another_message_first_is_no_deadlock<J: Job>() {
    let ranks = J::pair_with(
        J::settings()
            .unexpected(4 << 10)
            .packets_max(16)
            .setting("shm_slots", 8)
            .setting("tcp_window", 2048)
            .setting("shm_chunks", 1)
            .backlog(2),
    );
    let arrived = Sink::keeping();
    let last = ranks[1]
        .post_recv(Rank(0), vec![0; 6], Tag(u64::MAX - 5))
        .comp(&arrived)
        .try_submit()
        .unwrap();
    assert!(last.is_posted());
    for at in 0..5000_u64 {
        let payload = pattern(at, 60);
        sent(&ranks, || ranks[0].post_send(Rank(1), &payload[..], Tag(3)).try_submit());
    }
    sent(&ranks, || ranks[0].post_send(Rank(1), b"at end", Tag(u64::MAX - 5)).try_submit());
    assert_eq!(arrived.one(&ranks).bytes().unwrap(), b"at end");
    for at in 0..5000_u64 {
        ranks[1].post_recv(Rank(0), vec![0; 60], Tag(3)).comp(&arrived).submit().unwrap();
        assert_eq!(arrived.one(&ranks).bytes().unwrap(), pattern(at, 60), "in order");
    }
}

fn a_sender_that_does_not_listen_is_told_to<J: Job>() {
    let ranks = J::pair_with(J::settings().unexpected(4 << 10));
    let count = std::cell::Cell::new(0_u64);
    if J::IS_RDMA {
        // Nothing of a queue pair's is free again before its owner has looked: that bounds what it
        // can send without listening.
        let full = happens(&ranks[1..], LIMIT, || {
            let sent = ranks[0].post_send(Rank(1), &[1; 30], Tag(1)).try_submit().unwrap();
            count.set(count.get() + u64::from(!sent.is_retry()));
            matches!(sent, Outcome::Retry(RetryReason::Full | RetryReason::Unheard))
                && count.get() > 100
        });
        let depth = ranks[0].settings().of_transports().verbs().verbs_depth();
        assert!(full && count.get() < depth as u64, "{}", count.get());
        return;
    }
    // Only the receiver makes progress.
    let told = happens(&ranks[1..], LIMIT, || {
        for _ in 0..100 {
            match ranks[0].post_send(Rank(1), &[1; 30], Tag(1)).try_submit().unwrap() {
                Outcome::Retry(RetryReason::Unheard) => return true,
                Outcome::Retry(_) => return false,
                _ => count.set(count.get() + 1),
            }
        }
        false
    });
    assert!(told);
    assert!(count.get() < 200, "{}", count.get());
    // The last ones may be on their way for a millisecond.
    let waiting = || ranks[1].default_matching_engine().waiting().0 as u64;
    until(&ranks[1..], || waiting() == count.get());
    settle(&ranks[1..]);
    let hears = || {
        ranks[0].progress().unwrap();
        let outcome = ranks[0].post_send(Rank(1), &[1; 30], Tag(1)).try_submit().unwrap();
        outcome.is_posted()
    };
    // Over a network the word may wait some milliseconds for a poll that does not come.
    let tries = if J::TAKES_TIME { 10_000 } else { 1 };
    let hears = |_| {
        hears() || {
            std::thread::sleep(Duration::from_micros(100));
            false
        }
    };
    assert!((0..tries).any(hears), "it has heard that it is to hold");
    // Active messages are not matched, and go on.
    let free = Sink::keeping();
    let name = ranks[1].register_comp(&free).unwrap();
    sent(&ranks, || ranks[0].post_am(Rank(1), b"free", name).try_submit());
    assert_eq!(free.one(&ranks).bytes().unwrap(), b"free");
}

fn too_many_offers_are_a_retry_and_go_on_when_some_are_taken<J: Job>() {
    let ranks: [Runtime; 2] = J::pair_with(J::settings().offers(16));
    let done = Sink::keeping();
    let payload = pattern(1, 10_000);
    let mut posted = 0;
    loop {
        let mut send = ranks[0].post_send(Rank(1), payload.clone(), Tag(1)).comp(&done);
        match send.try_submit().unwrap() {
            Outcome::Posted => posted += 1,
            Outcome::Retry(RetryReason::Unanswered) => break,
            Outcome::Retry(_) => step(&ranks),
            Outcome::Done(_) => panic!("a large message is offered"),
        }
    }
    assert_eq!(posted, 16);
    let mr = ranks[1].register_memory(&carrack::region::Region::host(8)).unwrap();
    let rmr = without_keys(&mr.remote_key());
    let put = || ranks[0].post_put(Rank(1), vec![1], &rmr, 0).comp(&done);
    assert!(matches!(put().try_submit().unwrap(), Outcome::Retry(RetryReason::Unanswered)));
    let error = put().submit().unwrap_err();
    assert!(matches!(error, PostError::OffersFull { limit: 16, .. }), "{error}");
    assert!(error.to_string().contains("CARRACK_OFFERS"), "{error}");
    let mut recv = ranks[1].post_recv(Rank(0), vec![0; 10_000], Tag(1)).comp(&done);
    assert!(matches!(recv.try_submit().unwrap(), Outcome::Posted));
    until(&ranks, || done.count() == 2);
    assert!(put().try_submit().unwrap().is_posted());
}
