//! Messages come in the order in which they were sent.

use crate::support::over_each_transport;
use crate::support::sink::{Sink, Sort};
use crate::support::*;
use carrack::{
    AsCompletion, CompQueue, Handler, Matching, Outcome, Rank, RetryReason, Tag, UserContext,
};
use parking_lot::Mutex;
use rand::Rng;
use rand::seq::SliceRandom;
use std::sync::Arc;

over_each_transport!(
    ten_thousand_messages_of_one_key_meet_receives_in_the_order_in_which_they_were_sent,
    ten_thousand_active_messages_arrive_in_the_order_in_which_they_were_sent,
    messages_that_waited_in_the_backlog_are_not_overtaken,
    unexpected_messages_meet_receives_in_the_order_in_which_they_came,
    thousands_of_receives_each_get_the_message_of_their_own_tag,
    messages_of_several_ranks_are_told_apart,
    short_messages_of_one_tag_end_receives_of_all_sorts_in_order,
);

/// Returns a random size, so that messages go inline in one slot or several, or through chunks.
fn mixed(rng: &mut rand::rngs::SmallRng) -> usize {
    match rng.random_range(0..4) {
        0 => rng.random_range(0..=40),
        1 => rng.random_range(41..=208),
        2 => rng.random_range(209..=1000),
        _ => [0, 8, 40, 41, 208, 209][rng.random_range(0..6)],
    }
}

fn ten_thousand_messages_of_one_key_meet_receives_in_the_order_in_which_they_were_sent<J: Job>() {
    const COUNT: u64 = 10_000;
    let mut rng = rng();
    let ranks = J::pair();
    let sizes: Vec<usize> = (0..COUNT).map(|_| mixed(&mut rng)).collect();
    let (mut sent, mut wanted, mut got) = (0_u64, 0_u64, 0_u64);
    let queue = CompQueue::new(256);
    // Sometimes the receives are ahead, sometimes the messages. The sender is never told to keep
    // messages, since receives of messages that are fetched later end later.
    while got < COUNT {
        for _ in 0..rng.random_range(0..40) {
            if sent == COUNT || sent >= wanted + 200 {
                break;
            }
            let message = pattern(sent, sizes[sent as usize]);
            // Some wait for those that follow.
            let more = rng.random();
            match ranks[0].post_send(Rank(1), &message[..], Tag(5)).more(more).try_submit().unwrap()
            {
                Outcome::Retry(_) => break,
                _ => sent += 1,
            }
        }
        for _ in 0..rng.random_range(0..40) {
            if wanted == COUNT || wanted - got >= 200 {
                break;
            }
            ranks[1]
                .post_recv(Rank(0), vec![0; 1000], Tag(5))
                .user_context(UserContext(wanted))
                .comp(&queue)
                .submit()
                .unwrap();
            wanted += 1;
        }
        step(&ranks);
        while let Some(status) = queue.pop() {
            // Several may be done within one call of progress, and matching is what keeps order:
            // the n-th receive gets the n-th message.
            let at = status.user_context.0;
            assert_eq!(status.bytes().unwrap(), pattern(at, sizes[at as usize]), "message {at}");
            assert_eq!(at, got, "receives of one key end in order, with one thread");
            got += 1;
        }
    }
    settle(&ranks);
    assert!(queue.pop().is_none());
    assert_eq!(ranks[1].default_matching_engine().waiting(), (0, 0));
}

fn ten_thousand_active_messages_arrive_in_the_order_in_which_they_were_sent<J: Job>() {
    const COUNT: u64 = 10_000;
    let mut rng = rng();
    let ranks = J::pair();
    let sizes: Vec<usize> = (0..COUNT).map(|_| mixed(&mut rng)).collect();
    let next = Arc::new(Mutex::new(0_u64));
    let handler = {
        let (next, sizes) = (next.clone(), sizes.clone());
        Handler::new(move |status| {
            let mut next = next.lock();
            assert_eq!(status.tag, Tag(*next));
            assert_eq!(status.bytes().unwrap(), pattern(*next, sizes[*next as usize]));
            *next += 1;
        })
    };
    let name = ranks[1].register_comp(&handler).unwrap();
    for at in 0..COUNT {
        let message = pattern(at, sizes[at as usize]);
        let more = rng.random();
        sent(&ranks, || {
            ranks[0].post_am(Rank(1), &message[..], name).tag(Tag(at)).more(more).try_submit()
        });
    }
    until(&ranks, || *next.lock() == COUNT);
    settle(&ranks);
    assert_eq!(*next.lock(), COUNT);
}

fn messages_that_waited_in_the_backlog_are_not_overtaken<J: Job>() {
    let mut rng = rng();
    let ranks = J::pair_with(
        J::settings()
            .setting("shm_slots", 8)
            .setting("tcp_window", 2048)
            .setting("shm_chunks", 1)
            .packets_max(16)
            .backlog(4096),
    );
    let arrived = CompQueue::new(4096);
    let name = ranks[1].register_comp(&arrived).unwrap();
    let (mut parked, mut next) = (0, 0);
    // Taken out as they come: packets are few.
    let mut check = || {
        while let Some(status) = arrived.pop() {
            assert_eq!(status.tag, Tag(next));
            assert_eq!(status.bytes().unwrap(), pattern(next, status.size));
            next += 1;
        }
        next
    };
    for at in 0..2000_u64 {
        let message = pattern(at, mixed(&mut rng));
        let patient = rng.random_bool(0.3);
        let mut am = ranks[0].post_am(Rank(1), &message[..], name).tag(Tag(at));
        loop {
            let called = match patient {
                true => am.try_submit(),
                false => am.submit().map(|()| Outcome::Posted),
            };
            match called.unwrap() {
                Outcome::Retry(_) => {
                    step(&ranks);
                    check();
                }
                outcome => break parked += usize::from(outcome.is_posted()),
            }
        }
    }
    assert!(parked > 100, "only {parked} were parked");
    until(&ranks, || check() == 2000);
    settle(&ranks);
    assert!(arrived.is_empty());
}

fn unexpected_messages_meet_receives_in_the_order_in_which_they_came<J: Job>() {
    let mut rng = rng();
    let ranks = J::pair();
    let sizes: Vec<usize> = (0..300).map(|_| mixed(&mut rng)).collect();
    for (at, &size) in sizes.iter().enumerate() {
        let (message, tag) = (pattern(at as u64, size), Tag(at as u64 % 3));
        sent(&ranks, || ranks[0].post_send(Rank(1), &message[..], tag).try_submit());
    }
    until(&ranks, || ranks[1].default_matching_engine().waiting().0 == 300);
    for tag in [2, 0, 1] {
        for at in (tag..300).step_by(3) {
            let sink = Sink::keeping();
            let mut recv = ranks[1].post_recv(Rank(0), vec![0; 1000], Tag(tag as u64)).comp(&sink);
            let status = done(recv.try_submit().unwrap());
            assert_eq!(status.bytes().unwrap(), pattern(at as u64, sizes[at]));
            assert_eq!(sink.count(), 0, "done, and not signalled");
        }
    }
    assert_eq!(ranks[1].default_matching_engine().waiting(), (0, 0));
}

fn thousands_of_receives_each_get_the_message_of_their_own_tag<J: Job>() {
    const COUNT: u64 = 3000;
    let mut rng = rng();
    let ranks = J::pair();
    let queue = CompQueue::new(COUNT as usize);
    // Tags that differ only in their upper or only in their lower half.
    let tag = |at: u64| Tag(if at.is_multiple_of(2) { at << 32 } else { at });
    for at in 0..COUNT {
        let recv = ranks[1]
            .post_recv(Rank(0), vec![0; 300], tag(at))
            .user_context(UserContext(at))
            .comp(&queue)
            .try_submit();
        assert!(recv.unwrap().is_posted());
    }
    assert_eq!(ranks[1].default_matching_engine().waiting(), (0, COUNT as usize));
    let mut shuffled: Vec<u64> = (0..COUNT).collect();
    shuffled.shuffle(&mut rng);
    for at in shuffled {
        let message = pattern(at, (at % 300) as usize);
        sent(&ranks, || ranks[0].post_send(Rank(1), &message[..], tag(at)).try_submit());
    }
    let mut seen = vec![false; COUNT as usize];
    let mut got = 0;
    until(&ranks, || {
        while let Some(status) = queue.pop() {
            let at = status.user_context.0;
            assert_eq!(status.tag, tag(at));
            assert_eq!(status.bytes().unwrap(), pattern(at, (at % 300) as usize));
            assert!(!std::mem::replace(&mut seen[at as usize], true), "receive {at} ended twice");
            got += 1;
        }
        got == COUNT
    });
    settle(&ranks);
    assert!(queue.pop().is_none());
}

fn messages_of_several_ranks_are_told_apart<J: Job>() {
    let ranks = J::ranks(4);
    connect(&ranks);
    let (by_rank, by_tag, by_nothing) = (Sink::keeping(), Sink::keeping(), Sink::keeping());
    for from in 0..3 {
        let receive = |policy, rank, tag, sink: &Sink| {
            let recv =
                ranks[3].post_recv(rank, vec![0; 8], tag).matching(policy).comp(sink).try_submit();
            assert!(recv.unwrap().is_posted());
        };
        receive(Matching::RankOnly, Rank(from), Tag(77), &by_rank);
        receive(Matching::TagOnly, Rank::ANY, Tag(u64::from(from)), &by_tag);
        receive(Matching::None, Rank::ANY, Tag::ANY, &by_nothing);
    }
    for from in [2, 0, 1_u32] {
        for policy in [Matching::None, Matching::TagOnly, Matching::RankOnly] {
            let bytes = u64::from(from).to_le_bytes();
            let outcome = posted(&ranks, || {
                let mut send = ranks[from as usize]
                    .post_send(Rank(3), &bytes, Tag(u64::from(from)))
                    .matching(policy);
                send.try_submit()
            });
            assert!(!matches!(outcome, Outcome::Retry(RetryReason::Full)));
        }
    }
    for sink in [&by_rank, &by_tag, &by_nothing] {
        until(&ranks, || sink.count() == 3);
        let mut statuses = sink.take();
        statuses.sort_by_key(|status| status.rank);
        for (from, status) in statuses.iter().enumerate() {
            assert_eq!(status.rank, Rank(from as u32));
            assert_eq!(status.tag, Tag(from as u64), "a status tells the sender's tag");
            assert_eq!(status.bytes().unwrap(), (from as u64).to_le_bytes());
        }
    }
}

/// Queues with and without room, synchronizers, other objects, and buffers that are too short take
/// turns at random; sometimes the messages are ahead of their receives.
fn short_messages_of_one_tag_end_receives_of_all_sorts_in_order<J: Job>() {
    const COUNT: u64 = 3000;
    let mut rng = rng();
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    let sinks = [Sort::Queue, Sort::Queue, Sort::Synchronizer, Sort::User].map(Sink::new);
    let objects: Vec<_> = sinks.iter().map(AsCompletion::as_completion).collect();
    let objects = [&objects[..], &[narrow.as_completion()]].concat();
    let (mut sent, mut wanted, mut got) = (0, 0, 0);
    let mut last = vec![None; objects.len()];
    let mut is_short = Vec::new();
    while got < COUNT {
        for _ in 0..rng.random_range(0..40) {
            if sent == COUNT || sent >= wanted + 100 {
                break;
            }
            let message = u64::to_ne_bytes(sent);
            match ranks[0].post_send(Rank(1), &message, Tag(5)).try_submit().unwrap() {
                Outcome::Retry(_) => break,
                _ => sent += 1,
            }
        }
        // Receives of one object stand in rows of any length.
        let mut object = rng.random_range(0..objects.len());
        for _ in 0..rng.random_range(0..40) {
            if wanted == COUNT || wanted - got >= 200 {
                break;
            }
            if rng.random_ratio(1, 8) {
                object = rng.random_range(0..objects.len());
            }
            is_short.push(rng.random_ratio(1, 20));
            let room = if is_short[wanted as usize] { 4 } else { 8 };
            let receive = ranks[1].post_recv(Rank(0), vec![0; room], Tag(5)).comp(objects[object]);
            receive.user_context(UserContext(wanted)).submit().unwrap();
            wanted += 1;
        }
        ranks.iter().for_each(|rank| _ = rank.progress_all());
        let taken = sinks.iter().map(Sink::take).chain([narrow.pop().into_iter().collect()]);
        for (statuses, last) in taken.zip(&mut last) {
            for status in statuses {
                let number = status.user_context.0;
                assert!(*last < Some(number), "{number} after {last:?}");
                *last = Some(number);
                match status.error {
                    Some(error) => assert!(is_short[number as usize], "{number}: {error}"),
                    None => assert_eq!(status.value(), Some(number)),
                }
                got += 1;
            }
        }
    }
    assert_eq!((sent, wanted), (COUNT, COUNT));
}
