//! Within one process: the ends that operations come to which wait for events and streams.

use super::alone::Fixture;
use super::{KINDS, is_past, memory};
use crate::support::{rng, settle, until};
use carrack::transports::gpu::Flavour;
use carrack::{CompQueue, OpError, PostError, Rank, StreamCounter, Tag, UserContext};
use rand::Rng;
use std::collections::HashSet;
use std::time::Duration;

#[test]
fn a_receive_that_waits_for_an_event_is_cancelled_then_and_later() {
    let fixture = Fixture::new("cancel");
    let Fixture { ranks, .. } = &fixture;
    let (brake, ended) = (fixture.brake(), CompQueue::new(8));
    for begins in [false, true] {
        let event = fixture.held(&brake).record().unwrap();
        let mut recv = ranks[0].post_recv(Rank(1), vec![7; 4], Tag(1)).after(&event).comp(&ended);
        assert!(recv.try_submit().unwrap().is_posted());
        let ticket = recv.ticket().expect("it waits");
        if begins {
            brake.release();
            until(ranks, || is_past(&event));
            settle(ranks);
        }
        assert!(ranks[0].cancel(&ticket).unwrap());
        assert!(!ranks[0].cancel(&ticket).unwrap(), "once");
        let status = ended.pop().expect("it is told of at once");
        assert_eq!(status.buffer.to_vec().unwrap(), [7; 4]);
        assert!(matches!(status.ok().unwrap_err(), OpError::Cancelled));
        if !begins {
            brake.release();
        }
        settle(ranks);
        assert!(ended.is_empty());
    }
    assert_eq!(ranks[0].default_matching_engine().waiting(), (0, 0));
}

#[test]
fn an_operation_whose_event_does_not_fire_in_time_ends_by_its_deadline() {
    let fixture = Fixture::new("deadline");
    let Fixture { ranks, gpu, .. } = &fixture;
    let window = ranks[1].allocate(100).unwrap();
    let mr = ranks[1].register_memory(&window).unwrap();
    let (rmr, ended, brake) = (mr.remote_key(), CompQueue::new(8), fixture.brake());
    let held = fixture.held(&brake);
    let (event, soon) = (held.record().unwrap(), Duration::from_millis(10));
    let put = ranks[0]
        .post_put(Rank(1), vec![1; 4], &rmr, 0)
        .after(&event)
        .deadline(soon)
        .comp(&ended)
        .try_submit();
    assert!(put.unwrap().is_posted());
    let recv = ranks[0]
        .post_recv(Rank(1), vec![1; 4], Tag(1))
        .after(&event)
        .deadline(soon)
        .comp(&ended)
        .try_submit();
    assert!(recv.unwrap().is_posted());
    // A stream that waits for such an operation goes on as well.
    let waits = gpu.stream().unwrap();
    waits.wait(&event).unwrap();
    let add = ranks[0]
        .post_fetch_add(Rank(1), &rmr, 0, 1)
        .on_stream(&waits)
        .deadline(soon)
        .comp(&ended)
        .try_submit();
    assert!(add.unwrap().is_posted());
    until(ranks, || ended.len() == 3);
    while let Some(status) = ended.pop() {
        assert!(matches!(status.ok().unwrap_err(), OpError::TimedOut(Rank(1))));
    }
    brake.release();
    waits.synchronize().unwrap();
    settle(ranks);
    assert_eq!((ended.len(), window.whole().to_vec().unwrap()), (0, vec![0; 100]));
}

#[test]
fn a_runtime_that_ends_lets_streams_go_and_ends_each_operation_once() {
    let mut fixture = Fixture::new("shutdown");
    let gpu = fixture.gpu.clone();
    let window = gpu.allocate(100, Flavour::Plain).unwrap();
    let mr = fixture.ranks[1].register_memory(&window).unwrap();
    let (rmr, ended) = (mr.remote_key(), CompQueue::new(16));
    let (held, waits, arrived) = {
        let rank = &fixture.ranks[0];
        let arrived = StreamCounter::new(rank, &gpu).unwrap();
        let (held, waits) = (gpu.stream().unwrap(), gpu.stream().unwrap());
        arrived.wait_on(&held, 1).unwrap();
        let event = held.record().unwrap();
        let posts = [
            rank.post_put(Rank(1), vec![1; 4], &rmr, 0).after(&event).comp(&ended).try_submit(),
            // A copy on the stream that stands still, and behind it an operation that the stream
            // waits for.
            rank.post_put(Rank(1), memory(&gpu, 2, &[2; 4]), &rmr, 0)
                .on_stream(&held)
                .comp(&ended)
                .try_submit(),
            rank.post_put(Rank(1), vec![3; 4], &rmr, 0).on_stream(&held).comp(&ended).try_submit(),
            rank.post_get(Rank(1), memory(&gpu, 2, &[2; 4]), &rmr, 0)
                .on_stream(&held)
                .comp(&ended)
                .try_submit(),
            rank.post_recv(Rank::ANY, vec![1; 4], Tag(1))
                .on_stream(&waits)
                .comp(&ended)
                .try_submit(),
            rank.post_recv(Rank(1), vec![1; 4], Tag(2)).after(&event).comp(&ended).try_submit(),
            rank.post_flush(Rank(1)).comp(&ended).try_submit(),
            rank.post_send(Rank(1), vec![1; 4], Tag(3)).after(&event).comp(&ended).try_submit(),
        ];
        assert!(posts.into_iter().all(|post| post.unwrap().is_posted()));
        (held, waits, arrived)
    };
    settle(&fixture.ranks);
    let ends = [held, waits].map(|stream| stream.record().unwrap());
    assert!(ends.iter().all(|event| !is_past(event)) && ended.is_empty());
    drop(fixture.ranks.remove(0));
    assert_eq!(ended.len(), 8, "each ends once");
    while let Some(status) = ended.pop() {
        assert!(matches!(status.ok().unwrap_err(), OpError::Closed));
    }
    assert!(matches!(arrived.error(), Some(OpError::Closed)));
    ends.into_iter().for_each(|event| event.wait().unwrap());
    // A counter that outlives its runtime holds nothing up.
    let stream = gpu.stream().unwrap();
    arrived.wait_on(&stream, 1 << 30).unwrap();
    stream.synchronize().unwrap();
}

/// Each waiting operation ends exactly once, with its buffer, in any order of events.
#[test]
fn operations_in_random_orders_end_exactly_once() {
    let fixture = Fixture::new("random");
    let Fixture { ranks, gpu, .. } = &fixture;
    let mut rng = rng();
    let windows = [ranks[1].allocate(1000).unwrap(), gpu.allocate(1000, Flavour::Plain).unwrap()];
    let registered = [0, 1].map(|at| ranks[1].register_memory(&windows[at]).unwrap());
    let rmrs = [0, 1].map(|at| registered[at].remote_key());
    let ended = CompQueue::new(4096);
    for round in 0..30 {
        let (brakes, mut posted_so_far) = ([fixture.brake(), fixture.brake()], 0_u64);
        let streams = [fixture.held(&brakes[0]), fixture.held(&brakes[1])];
        let (mut tickets, tag) = (Vec::new(), Tag(100 + round));
        let mut kept = HashSet::new();
        for _ in 0..40 {
            let (stream, rmr) = (&streams[rng.random_range(0..2)], &rmrs[rng.random_range(0..2)]);
            let (kind, event) = (rng.random_range(0..KINDS), stream.record().unwrap());
            let context = UserContext(posted_so_far);
            let buffer = memory(gpu, kind, &[9; 50]);
            kept.insert(posted_so_far);
            posted_so_far += 1;
            macro_rules! go {
                ($post:expr) => {{
                    let mut post = $post.comp(&ended).user_context(context);
                    if rng.random_bool(0.3) {
                        post = post.deadline(Duration::from_micros(rng.random_range(1..3000)));
                    }
                    match post.submit() {
                        Ok(()) => {}
                        Err(PostError::TimedOut(_)) => assert!(kept.remove(&context.0)),
                        Err(other) => panic!("{other}"),
                    }
                }};
            }
            match (rng.random_range(0..6), rng.random_bool(0.5)) {
                (0, true) => go!(ranks[0].post_put(Rank(1), buffer, rmr, 3).after(&event)),
                (0, false) => go!(ranks[0].post_put(Rank(1), buffer, rmr, 3).on_stream(stream)),
                (1, true) => go!(ranks[0].post_get(Rank(1), buffer, rmr, 3).after(&event)),
                (1, false) => go!(ranks[0].post_get(Rank(1), buffer, rmr, 3).on_stream(stream)),
                (2, true) => go!(ranks[0].post_fetch_add(Rank(1), &rmrs[0], 0, 1).after(&event)),
                (2, false) => {
                    go!(ranks[0].post_fetch_add(Rank(1), &rmrs[0], 0, 1).on_stream(stream))
                }
                (3, _) => go!(ranks[0].post_flush(Rank(1))),
                (4, _) => {
                    let mut recv =
                        ranks[0].post_recv(Rank(1), buffer, Tag(1)).after(&event).comp(&ended);
                    recv = recv.user_context(context);
                    assert!(recv.try_submit().unwrap().is_posted());
                    tickets.extend(recv.ticket());
                }
                _ => go!(ranks[0].post_send(Rank(1), buffer, tag).after(&event)),
            }
        }
        // What lies on a GPU is fetched by its receiver.
        let taken = CompQueue::new(64);
        let receive = || {
            let mut recv = ranks[1].post_recv(Rank(0), vec![0; 50], tag).comp(&taken);
            recv.submit().unwrap();
            recv.ticket()
        };
        let receives: Vec<_> = (0..40).filter_map(|_| receive()).collect();
        let mut seen = 0;
        for brake in &brakes {
            for ticket in tickets.extract_if(.., |_| rng.random_bool(0.5)) {
                let _ = ranks[0].cancel(&ticket).unwrap();
            }
            brake.release();
            settle(ranks);
        }
        for ticket in &tickets {
            assert!(ranks[0].cancel(ticket).unwrap(), "nothing was sent for it");
        }
        until(ranks, || {
            while let Some(status) = ended.pop() {
                assert!(kept.remove(&status.user_context.0), "round {round}: one ended twice");
                seen += 1;
            }
            kept.is_empty()
        });
        settle(ranks);
        for ticket in receives {
            ranks[1].cancel(&ticket).unwrap();
        }
        assert!(ended.is_empty() && seen > 0);
        assert!(ranks[0].test_drained(ranks[0].default_device()).unwrap());
        assert_eq!(ranks[0].pending().operations, []);
    }
}
