//! Outcomes of operations, and errors.

use crate::support::guard::Guarded;
use crate::support::over_each_transport;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::buffer::Buffer;
use carrack::transports::gpu::{EventState, GpuError, GpuEvent};
use carrack::{
    AsCompletion, AwaitError, CompQueue, Handler, Matching, OpError, Outcome, PostError,
    ProgressError, Rank, Runtime, Synchronizer, Tag, UserContext,
};
use parking_lot::Mutex;
use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

over_each_transport!(
    a_message_longer_than_its_receive_fails_there_and_writes_nothing,
    an_operation_that_is_done_or_posted_is_spent_and_does_nothing_more_by_itself,
    a_receive_that_is_posted_again_takes_the_options_that_it_has_then,
    a_receive_that_is_posted_again_ends_if_its_sender_has_gone_meanwhile,
    long_borrowed_bytes_are_refused_unless_the_call_waits,
    an_operation_that_would_end_unseen_is_refused_and_keeps_its_buffer,
    a_submit_tells_a_queue_at_once_and_a_handler_in_progress,
    a_borrowed_buffer_can_be_sent_again_and_an_owned_one_is_spent,
    an_operation_that_is_refilled_carries_the_new_buffer,
    wildcards_and_ranks_that_do_not_exist_are_refused,
    devices_and_engines_of_another_runtime_are_refused,
    the_last_device_and_the_last_engine_that_an_operation_names_count,
    a_policy_that_is_named_is_kept_and_a_wildcard_for_what_it_looks_at_is_an_error,
    a_receive_into_immutable_bytes_is_refused_and_gives_them_back,
    a_path_that_is_demanded_is_taken_or_refused_with_the_reason,
    a_handler_may_post_and_may_neither_call_progress_nor_block,
    a_handler_that_panics_fails_its_delivery_and_nothing_else,
    a_queue_that_its_user_has_dropped_goes_with_the_next_progress_or_with_the_runtime,
);

/// The two runtimes of a pair are of one job, and yet two.
fn devices_and_engines_of_another_runtime_are_refused<J: Job>() {
    let [zero, one] = &J::pair();
    let (device, engine) = (one.default_device(), one.default_matching_engine());
    let done = CompQueue::new(1);
    let refused = |error: Option<PostError>| assert!(matches!(error, Some(PostError::Foreign)));
    let send = || zero.post_send(Rank(1), b"x", Tag(1));
    refused(send().device(device).try_submit().err());
    refused(send().device(device).submit().err());
    refused(send().matching_engine(engine).submit().err());
    let waited = send().device(device).wait();
    assert!(matches!(waited, Err(AwaitError::Post(PostError::Foreign))), "{waited:?}");
    let awaited = zero.block_on(send().device(device).into_future()).unwrap();
    assert!(matches!(awaited, Err(AwaitError::Post(PostError::Foreign))), "{awaited:?}");
    let receive = zero.post_recv(Rank(1), vec![0], Tag(1)).comp(&done);
    refused(receive.matching_engine(engine).submit().err());
    refused(zero.post_flush(Rank(1)).device(device).comp(&done).submit().err());
    assert!(matches!(zero.progress_device(device), Err(ProgressError::Foreign)));
    send().device(zero.default_device()).wait().unwrap();
}

fn the_last_device_and_the_last_engine_that_an_operation_names_count<J: Job>() {
    let [zero, one] = &J::pair();
    let (own, other) = (zero.default_device(), one.default_device());
    let (mine, theirs) = (zero.default_matching_engine(), one.default_matching_engine());
    let send = || zero.post_send(Rank(1), b"x", Tag(1));
    send().device(other).device(own).submit().unwrap();
    send().matching_engine(theirs).matching_engine(mine).submit().unwrap();
    for mut mixed in [
        send().device(own).device(other),
        send().device(other).matching_engine(mine),
        send().matching_engine(theirs).device(own),
    ] {
        assert!(matches!(mixed.submit(), Err(PostError::Foreign)));
    }
}

fn a_message_longer_than_its_receive_fails_there_and_writes_nothing<J: Job>() {
    let mut rng = rng();
    let ranks = J::pair();
    for (size, room) in [(1, 0), (9, 8), (41, 40), (209, 208), (8192, 8191), (8192, 0), (40, 1)] {
        for expected in [true, false] {
            let payload = random(&mut rng, size);
            let guarded = Guarded::new(room, 3);
            let sink = Sink::keeping();
            let (tag, context) = (Tag(9), UserContext(4));
            let post = || {
                ranks[1]
                    .post_recv(Rank(0), guarded.slice(), tag)
                    .user_context(context)
                    .comp(&sink)
                    .submit()
                    .unwrap()
            };
            if expected {
                post();
            }
            sent(&ranks, || ranks[0].post_send(Rank(1), &payload[..], tag).try_submit());
            if !expected {
                until(&ranks, || ranks[1].default_matching_engine().waiting().0 == 1);
                post();
            }
            let status = sink.one(&ranks);
            assert_eq!((status.rank, status.tag, status.user_context), (Rank(0), tag, context));
            assert_eq!(status.buffer.len(), room, "the buffer comes back");
            assert_eq!(
                (status.bytes(), status.value()),
                (None, None),
                "what it holds is not the message"
            );
            let error = status.ok().unwrap_err();
            assert!(
                matches!(
                    error,
                    OpError::Truncated { message, buffer } if (message, buffer) == (size, room)
                ),
                "{error}"
            );
            guarded.assert_untouched();
        }
    }
    // And the link goes on.
    let mut recv = ranks[1].post_recv(Rank(0), vec![0; 2], Tag(1));
    sent(&ranks, || ranks[0].post_send(Rank(1), b"ok", Tag(1)).try_submit());
    assert_eq!(recv.wait().unwrap().bytes().unwrap(), b"ok");
}

fn an_operation_that_is_done_or_posted_is_spent_and_does_nothing_more_by_itself<J: Job>() {
    let ranks = J::pair();
    let arrived = Sink::keeping();
    let name = ranks[1].register_comp(&arrived).unwrap();
    let region = ranks[1].allocate(8).unwrap();
    let registered = ranks[1].register_memory(&region).unwrap();
    let rmr = registered.remote_key();
    let ended = Sink::keeping();
    let (zero, spent) = (&ranks[0], |result| matches!(result, Err(PostError::Spent)));
    let mut am = zero.post_am(Rank(1), b"once", name);
    let mut large = zero.post_am(Rank(1), vec![1; 20_000], name);
    let mut send = zero.post_send(Rank(1), b"once", Tag(1));
    let mut parked = zero.post_send(Rank(1), b"once", Tag(1));
    let mut put = zero.post_put(Rank(1), &[2; 8], &rmr, 0);
    let mut get = zero.post_get(Rank(1), vec![0; 8], &rmr, 0).comp(&ended);
    let mut add = zero.post_fetch_add(Rank(1), &rmr, 0, 1).comp(&ended);
    let mut flush = zero.post_flush(Rank(1)).comp(&ended);
    let mut recv = zero.post_recv(Rank(1), vec![0; 4], Tag(1)).comp(&ended);
    let calls: [&mut dyn FnMut() -> Result<Outcome, PostError>; 9] = [
        &mut || am.try_submit(),
        &mut || large.try_submit(),
        &mut || send.try_submit(),
        &mut || parked.submit().map(|()| Outcome::Posted),
        &mut || put.try_submit(),
        &mut || get.try_submit(),
        &mut || add.try_submit(),
        &mut || flush.try_submit(),
        &mut || recv.try_submit(),
    ];
    for (at, call) in calls.into_iter().enumerate() {
        let _ = posted(&ranks, &mut *call);
        settle(&ranks);
        assert!(spent(call()) && spent(call()), "operation {at}");
    }
    let error = recv.submit().unwrap_err().to_string();
    assert!(error.contains("refill()"), "{error}");
    // Awaited, too.
    assert!(matches!(zero.block_on(am.into_future()), Ok(Err(AwaitError::Post(PostError::Spent)))));
    settle(&ranks);
    assert_eq!((arrived.count(), ranks[1].default_matching_engine().waiting().0), (2, 2));
    let word = region.whole().to_vec().unwrap();
    assert_eq!(u64::from_le_bytes(word.try_into().unwrap()), u64::from_le_bytes([2; 8]) + 1);
}

/// A receive remembers where it waits: an option that is set later counts nevertheless.
fn a_receive_that_is_posted_again_takes_the_options_that_it_has_then<J: Job>() {
    let ranks = J::pair();
    let [zero, one] = &ranks;
    let (engines, ended) =
        ([zero, one].map(|rank| rank.matching_engine().unwrap()), Sink::keeping());
    let numbers: [[u8; 8]; 7] = std::array::from_fn(|at| (at as u64).to_le_bytes());
    let send = |number: usize| zero.post_send(Rank(1), &numbers[number], Tag(1));
    let arrives = |number: usize| {
        let status = ended.one(&ranks);
        assert_eq!((status.rank, status.bytes()), (Rank(0), Some(&numbers[number][..])));
    };
    let mut receive = one.post_recv(Rank(0), vec![0; 8], Tag(1)).comp(&ended);
    for number in [1, 2] {
        receive.submit().unwrap();
        let ticket = receive.ticket().expect("it waits");
        sent(&ranks, || send(number).try_submit());
        arrives(number);
        assert!(!one.cancel(&ticket).unwrap(), "it has ended");
        receive.refill(vec![0; 8]);
    }
    sent(&ranks, || send(3).try_submit());
    settle(&ranks);
    receive.submit().unwrap();
    assert_eq!(receive.ticket(), None, "its message was there");
    arrives(3);

    let mut receive = receive.matching(Matching::TagOnly);
    receive.refill(vec![0; 8]).submit().unwrap();
    sent(&ranks, || send(4).matching(Matching::TagOnly).try_submit());
    arrives(4);

    let mut receive = receive.matching_engine(&engines[1]);
    receive.refill(vec![0; 8]).submit().unwrap();
    sent(&ranks, || send(5).matching(Matching::TagOnly).matching_engine(&engines[0]).try_submit());
    arrives(5);

    // A policy that does not look at the rank takes any.
    let mut receive = one.post_recv(Rank(7), vec![0; 8], Tag(1)).comp(&ended);
    receive = receive.matching(Matching::TagOnly);
    receive.submit().unwrap();
    sent(&ranks, || send(6).matching(Matching::TagOnly).try_submit());
    arrives(6);
    receive = receive.matching(Matching::RankTag);
    let refused = receive.refill(vec![0; 8]).submit();
    assert!(matches!(refused, Err(PostError::NoSuchRank { .. })), "{refused:?}");
}

fn a_receive_that_is_posted_again_ends_if_its_sender_has_gone_meanwhile<J: Job>() {
    let [zero, one] = J::pair();
    let ended = Sink::keeping();
    let mut receive = one.post_recv(Rank(0), vec![0; 8], Tag(1)).comp(&ended);
    let ranks = [zero, one.clone()];
    for number in [1_u64, 2] {
        receive.submit().unwrap();
        sent(&ranks, || ranks[0].post_send(Rank(1), &number.to_le_bytes(), Tag(1)).try_submit());
        assert_eq!(ended.one(&ranks).value(), Some(number));
        receive.refill(vec![0; 8]);
    }
    let [zero, one] = ranks;
    drop(zero);
    let ranks = [one];
    until(&ranks, || ranks[0].peer_down(Rank(0)).is_some());
    receive.submit().unwrap();
    assert!(matches!(ended.one(&ranks).error.as_deref(), Some(OpError::PeerDown { .. })));
}

fn long_borrowed_bytes_are_refused_unless_the_call_waits<J: Job>() {
    let ranks = J::pair();
    let [zero, one] = &ranks;
    let bytes = pattern(1, 100_000);
    let (arrived, heard) = (Sink::keeping(), Sink::keeping());
    zero.register_comp(&heard).unwrap();
    let name = one.register_comp(&heard).unwrap();
    let region = one.allocate(bytes.len()).unwrap();
    let registered = one.register_memory(&region).unwrap();
    let rmr = registered.remote_key();
    one.post_recv(Rank(0), vec![0; bytes.len()], Tag(1)).comp(&arrived).submit().unwrap();
    let ended = &AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                let _ = one.progress().unwrap();
                std::thread::yield_now();
            }
        });
        macro_rules! only_by_wait {
            ($post:expr) => {{
                let mut post = $post;
                for refused in [post.try_submit().err(), post.submit().err()] {
                    let max = zero.max_eager();
                    let is_it = matches!(
                        &refused,
                        Some(PostError::Borrowed { len: 100_000, max: packet }) if *packet == max
                    );
                    assert!(is_it, "{refused:?}");
                }
                assert_eq!(post.wait().unwrap().size, bytes.len());
                assert!(matches!(post.wait(), Err(AwaitError::Post(PostError::Spent))));
            }};
        }
        only_by_wait!(zero.post_send(Rank(1), &bytes[..], Tag(1)));
        only_by_wait!(zero.post_am(Rank(1), &bytes[..], name));
        only_by_wait!(zero.post_put(Rank(1), &bytes[..], &rmr, 0));
        ended.store(true, Ordering::Relaxed);
    });
    for sink in [arrived, heard] {
        assert_eq!(sink.one(&ranks).bytes().unwrap(), bytes);
    }
    assert_eq!(region.whole().to_vec().unwrap(), bytes);
}

fn an_operation_that_would_end_unseen_is_refused_and_keeps_its_buffer<J: Job>() {
    let ranks = J::pair();
    let mut receive = ranks[1].post_recv(Rank(0), vec![7; 4], Tag(1));
    for refused in [receive.try_submit().err(), receive.submit().err()] {
        assert!(matches!(refused, Some(PostError::NoCompletion("a receive"))), "{refused:?}");
    }
    sent(&ranks, || ranks[0].post_send(Rank(1), b"ok", Tag(1)).try_submit());
    assert_eq!(receive.wait().unwrap().buffer.to_vec().unwrap(), b"ok\x07\x07");
    let mut flush = ranks[0].post_flush(Rank(1));
    assert!(matches!(flush.submit(), Err(PostError::NoCompletion("a flush"))));
}

fn a_submit_tells_a_queue_at_once_and_a_handler_in_progress<J: Job>() {
    let ranks = J::pair();
    let (queue, calls) = (CompQueue::new(4), Arc::new(AtomicUsize::new(0)));
    let handler = {
        let calls = calls.clone();
        Handler::new(move |_| _ = calls.fetch_add(1, Ordering::Relaxed))
    };
    let heard = Sink::keeping();
    ranks[0].register_comp(&heard).unwrap();
    let name = ranks[1].register_comp(&heard).unwrap();
    connect(&ranks);
    ranks[0].post_am(Rank(1), b"1", name).comp(&queue).submit().unwrap();
    assert_eq!(queue.pop().unwrap().size, 1);
    ranks[0].post_am(Rank(1), b"2", name).comp(&handler).submit().unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 0, "a post runs no handler");
    until(&ranks, || calls.load(Ordering::Relaxed) == 1);
    until(&ranks, || heard.count() == 2);
}

fn a_borrowed_buffer_can_be_sent_again_and_an_owned_one_is_spent<J: Job>() {
    let ranks = J::pair();
    let arrived = Sink::keeping();
    let name = ranks[1].register_comp(&arrived).unwrap();
    let mut borrowed = ranks[0].post_am(Rank(1), b"again", name);
    let mut owned = ranks[0].post_am(Rank(1), b"once".to_vec(), name);
    for _ in 0..3 {
        borrowed.again();
        assert!(posted(&ranks, || borrowed.try_submit()).is_done());
    }
    let status = done(posted(&ranks, || owned.try_submit()));
    assert_eq!(status.buffer.to_vec().unwrap(), b"once", "the buffer comes back with the status");
    assert!(matches!(owned.again().try_submit(), Err(PostError::Spent)));
    until(&ranks, || arrived.count() == 4);
    let texts: Vec<Vec<u8>> =
        arrived.take().iter().map(|status| status.bytes().unwrap().to_vec()).collect();
    assert_eq!(texts, [&b"again"[..], b"again", b"again", b"once"]);
}

fn an_operation_that_is_refilled_carries_the_new_buffer<J: Job>() {
    let ranks = J::pair();
    let (arrived, ended) = (Sink::keeping(), Sink::keeping());
    let name = ranks[1].register_comp(&arrived).unwrap();
    for len in [8, 20_000] {
        let region = ranks[1].allocate(len).unwrap();
        let registered = ranks[1].register_memory(&region).unwrap();
        let rmr = registered.remote_key();
        let mut am = ranks[0].post_am(Rank(1), vec![0; len], name).comp(&ended);
        let mut send = ranks[0].post_send(Rank(1), vec![0; len], Tag(1)).comp(&ended);
        let mut put = ranks[0].post_put(Rank(1), vec![0; len], &rmr, 0).comp(&ended);
        let mut get = ranks[0].post_get(Rank(1), vec![0; len], &rmr, 0).comp(&ended);
        let mut recv = ranks[1].post_recv(Rank(0), vec![0; len], Tag(1)).comp(&arrived);
        for round in 1..=3 {
            let bytes = vec![round; len];
            am.refill(bytes.clone()).submit().unwrap();
            assert_eq!(arrived.one(&ranks).bytes().unwrap(), bytes);
            recv.refill(vec![0; len]).submit().unwrap();
            send.refill(bytes.clone()).submit().unwrap();
            assert_eq!(arrived.one(&ranks).bytes().unwrap(), bytes);
            put.refill(bytes.clone()).submit().unwrap();
            until(&ranks, || ended.count() == 3);
            assert!(ended.take().into_iter().all(|status| status.error.is_none()));
            get.refill(vec![0; len]).submit().unwrap();
            assert_eq!(ended.one(&ranks).bytes().unwrap(), bytes);
            assert!(matches!(put.try_submit(), Err(PostError::Spent)));
        }
    }
}

fn wildcards_and_ranks_that_do_not_exist_are_refused<J: Job>() {
    let ranks = J::pair();
    let rank = &ranks[0];
    let comp = Synchronizer::new(1);
    let name = ranks[1].register_comp(&Sink::keeping()).unwrap();
    let missing = |result: Result<Outcome, PostError>| {
        let error = result.unwrap_err();
        assert!(matches!(error, PostError::NoSuchRank { rank: Rank(2), last: 1 }), "{error}");
    };
    let wildcard = |result: Result<Outcome, PostError>| {
        let error = result.unwrap_err();
        assert!(matches!(error, PostError::Wildcard(_)), "{error}");
        assert!(error.to_string().contains("receives and probes"), "{error}");
    };
    missing(rank.post_send(Rank(2), b"x", Tag(1)).try_submit());
    missing(rank.post_am(Rank(2), b"x", name).try_submit());
    missing(rank.post_recv(Rank(2), vec![0], Tag(1)).comp(&comp).try_submit());
    wildcard(rank.post_send(Rank::ANY, b"x", Tag(1)).try_submit());
    wildcard(rank.post_flush(Rank::ANY).comp(&comp).try_submit());
    wildcard(rank.post_am(Rank::ANY, b"x", name).try_submit());
    wildcard(rank.post_send(Rank(1), b"x", Tag::ANY).try_submit());
    wildcard(rank.post_send(Rank(1), b"x", Tag::ANY).matching(Matching::TagOnly).try_submit());
    // Without matching by tag, any tag is allowed.
    let free = || rank.post_send(Rank(1), b"x", Tag::ANY).matching(Matching::RankOnly).try_submit();
    assert!(posted(&ranks, free).is_done());
    let mut recv = ranks[1].post_recv(Rank(0), vec![0], Tag::ANY);
    let status = recv.wait().unwrap();
    assert_eq!((status.rank, status.tag), (Rank(0), Tag::ANY));
}

/// An event that does not fire.
struct NotYet;

impl EventState for NotYet {
    fn query(&self) -> Result<bool, GpuError> {
        Ok(false)
    }

    fn wait(&self) -> Result<(), GpuError> {
        unreachable!("a receive does not wait for it")
    }
}

fn a_policy_that_is_named_is_kept_and_a_wildcard_for_what_it_looks_at_is_an_error<J: Job>() {
    let ranks = J::pair();
    let comp = Synchronizer::new(1);
    let event = GpuEvent::new(Arc::new(NotYet));
    let one = &ranks[1];
    for policy in [Matching::None, Matching::RankOnly, Matching::TagOnly, Matching::RankTag] {
        let (looks_at_rank, looks_at_tag) = (
            matches!(policy, Matching::RankOnly | Matching::RankTag),
            matches!(policy, Matching::TagOnly | Matching::RankTag),
        );
        for (rank, tag) in [Rank(0), Rank::ANY]
            .into_iter()
            .flat_map(|rank| [Tag(7), Tag::ANY].map(|tag| (rank, tag)))
        {
            let is_refused = looks_at_rank && rank == Rank::ANY || looks_at_tag && tag == Tag::ANY;
            let mut recv = one.post_recv(rank, vec![0; 4], tag).matching(policy).comp(&comp);
            let probe = one.probe(rank, tag).matching(policy).look();
            if is_refused {
                let mut ordered =
                    one.post_recv(rank, vec![0; 4], tag).matching(policy).after(&event).comp(&comp);
                for error in [
                    recv.try_submit().unwrap_err(),
                    ordered.try_submit().unwrap_err(),
                    probe.unwrap_err(),
                ] {
                    let named =
                        matches!(error, PostError::Policy { policy: named, .. } if named == policy);
                    let wildcard =
                        if looks_at_rank && rank == Rank::ANY { "Rank::ANY" } else { "Tag::ANY" };
                    assert!(named && error.to_string().contains(wildcard), "{error}");
                }
                continue;
            }
            assert_eq!(probe.unwrap(), None);
            let tag = if looks_at_tag { tag } else { Tag(9) };
            sent(&ranks, || {
                ranks[0].post_send(Rank(1), b"kept", tag).matching(policy).try_submit()
            });
            until(&ranks, || one.default_matching_engine().waiting().0 == 1);
            assert_eq!(
                done(recv.try_submit().unwrap()).bytes().unwrap(),
                b"kept",
                "{policy:?} {rank} {tag:?}"
            );
        }
    }
    assert_eq!(one.default_matching_engine().waiting(), (0, 0), "what was refused does not wait");
}

fn a_receive_into_immutable_bytes_is_refused_and_gives_them_back<J: Job>() {
    let ranks = J::pair();
    let comp = Synchronizer::new(1);
    let mut recv =
        ranks[0].post_recv(Rank(1), Buffer::Bytes(vec![1, 2].into()), Tag(1)).comp(&comp);
    for _ in 0..2 {
        assert!(
            matches!(recv.try_submit(), Err(PostError::ReadOnly(_))),
            "and it still holds them"
        );
    }
    assert_eq!(ranks[0].default_matching_engine().waiting(), (0, 0));
}

fn a_path_that_is_demanded_is_taken_or_refused_with_the_reason<J: Job>() {
    let ranks = J::pair();
    let other = if J::PATH == carrack_transports::shm::NAME {
        carrack_transports::loopback::NAME
    } else {
        carrack_transports::shm::NAME
    };
    assert!(
        posted(&ranks, || ranks[0].post_send(Rank(1), b"x", Tag(1)).require(J::PATH).try_submit())
            .is_done()
    );
    for to in [Rank(0), Rank(1)] {
        let mut send = ranks[0].post_send(to, b"x".to_vec(), Tag(1)).require(other);
        for _ in 0..2 {
            let error = send.try_submit().unwrap_err();
            assert!(matches!(error, PostError::Path { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(J::NAME) && text.contains(other), "{text}");
            assert!(text.contains("CARRACK_TRANSPORT"), "{text}");
        }
    }
    // What has no link of its own takes the rank's.
    for path in [J::PATH, other] {
        let is_kept = |refused: Option<PostError>| match refused {
            None => path == J::PATH,
            Some(error) => path == other && matches!(error, PostError::Path { .. }),
        };
        let comp = Synchronizer::new(1);
        let recv =
            ranks[0].post_recv(Rank(1), vec![0; 1], Tag(2)).comp(&comp).require(path).try_submit();
        assert!(is_kept(recv.err()), "a receive, {path:?}");
        assert!(
            is_kept(ranks[0].post_flush(Rank(1)).comp(&comp).require(path).submit().err()),
            "a flush, {path:?}"
        );
    }
    let any = ranks[0].post_recv(Rank::ANY, vec![0; 1], Tag(2)).require(J::PATH).wait();
    assert!(matches!(any, Err(AwaitError::Post(PostError::Wildcard("Rank::ANY")))), "{any:?}");
    let explained = ranks[0].explain(LIMIT);
    assert_eq!(explained.len(), 2);
    for peer in explained {
        assert_eq!(peer.chosen(), Some(J::NAME));
        let all = Runtime::all_transports(ranks[0].settings());
        assert_eq!(peer.paths.len(), all.len(), "each transport has a verdict");
    }
}

fn a_handler_may_post_and_may_neither_call_progress_nor_block<J: Job>() {
    let ranks = J::pair();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let back = Sink::keeping();
    let answer = ranks[0].register_comp(&back).unwrap();
    ranks[1].register_comp(&Sink::keeping()).unwrap();
    let handler = {
        let (rank, seen) = (ranks[1].clone(), seen.clone());
        Handler::new(move |status| {
            let mut seen = seen.lock();
            seen.push(rank.progress().unwrap_err().to_string());
            let blocking = rank.post_send(Rank(0), b"x", Tag(1)).wait();
            seen.push(blocking.unwrap_err().to_string());
            seen.push(rank.post_recv(Rank(0), vec![0], Tag(1)).wait().unwrap_err().to_string());
            rank.post_am(status.rank, status.bytes().unwrap(), answer)
                .tag(Tag(status.tag.0 + 1))
                .submit()
                .unwrap();
        })
    };
    let question = ranks[1].register_comp(&handler).unwrap();
    sent(&ranks, || ranks[0].post_am(Rank(1), b"ping", question).tag(Tag(41)).try_submit());
    let status = back.one(&ranks);
    assert_eq!(
        (status.rank, status.tag, status.bytes().unwrap()),
        (Rank(1), Tag(42), &b"ping"[..])
    );
    let seen = seen.lock();
    assert_eq!(seen[0], ProgressError::InHandler.to_string());
    assert_eq!(seen[1], PostError::WouldBlock.to_string());
    assert_eq!(seen[2], PostError::WouldBlock.to_string());
}

fn a_handler_that_panics_fails_its_delivery_and_nothing_else<J: Job>() {
    let ranks = J::pair();
    let fragile =
        Handler::new(|status| assert_ne!(status.tag, Tag(2), "the second is one too many"));
    let sturdy = Sink::keeping();
    let (one, other) =
        (ranks[1].register_comp(&fragile).unwrap(), ranks[1].register_comp(&sturdy).unwrap());
    for tag in 1..=3 {
        for name in [one, other] {
            sent(&ranks, || ranks[0].post_am(Rank(1), b"x", name).tag(Tag(tag)).try_submit());
        }
    }
    let errors = until_with_errors(&ranks, || sturdy.count() == 3);
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(
        matches!(
            &errors[0],
            ProgressError::HandlerPanicked { from: Rank(0), message }
                if message.contains("one too many")
        ),
        "{errors:?}"
    );
    step(&ranks);
}

fn a_queue_that_its_user_has_dropped_goes_with_the_next_progress_or_with_the_runtime<J: Job>() {
    let ranks = J::pair();
    let leave_one_untaken = || {
        let queue = CompQueue::new(2);
        let receive = ranks[1].post_recv(Rank(0), vec![0; 8], Tag(1)).comp(&queue).try_submit();
        assert!(receive.unwrap().is_posted());
        sent(&ranks, || ranks[0].post_send(Rank(1), &[7; 8], Tag(1)).try_submit());
        until(&ranks, || queue.len() == 1);
        Arc::downgrade(queue.as_completion())
    };
    let queue = leave_one_untaken();
    step(&ranks);
    assert!(queue.upgrade().is_none(), "gone with the message that was not taken");
    let queue = leave_one_untaken();
    drop(ranks);
    assert!(queue.upgrade().is_none(), "gone with the runtime");
}
