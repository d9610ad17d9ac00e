//! Runtimes and peers that end while operations are in flight. Each operation ends once, and gives
//! its reason.

use crate::support::guard::Guarded;
use crate::support::hooked::{BootstrapCall, start_hooked};
use crate::support::over_each_transport;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::buffer::Region;
use carrack::settings::AutoChoice;
use carrack::transports::contract::DownCause;
use carrack::{
    Buffer, CollectiveError, Completion, Handler, Matching, OpError, Outcome, PeerState, PostError,
    Rank, RemoteComp, Runtime, Status, Synchronizer, Tag, UserContext,
};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

over_each_transport!(
    a_runtime_that_is_dropped_ends_each_of_its_operations_once_with_an_error,
    a_status_that_found_no_room_is_tried_once_more_at_the_end,
    what_was_sent_before_a_peer_went_arrives_and_what_it_would_have_sent_fails,
    what_was_sent_before_a_peer_went_arrives_where_nothing_was_sent_to_it,
    what_came_on_one_device_is_not_lost_when_another_hears_of_the_end_first,
    what_came_on_one_device_is_not_lost_when_another_that_is_looked_for_is_gone,
    what_came_on_one_device_is_not_lost_when_another_finds_nobody,
    a_peer_that_goes_without_having_sent_fails_the_receives_that_wait_for_it,
    a_peer_that_goes_is_noticed_though_its_program_still_holds_its_device,
    what_waits_to_be_sent_to_a_peer_that_goes_fails_once_each,
    a_peer_that_ends_in_order_is_closed_though_one_of_its_devices_was_not_used,
    a_peer_that_operations_say_is_gone_is_down,
    a_peer_that_has_ended_is_gone_for_a_device_of_which_it_had_none,
    a_receive_and_a_barrier_end_with_a_peer_that_had_fewer_devices,
    a_receive_from_any_rank_outlives_a_peer,
    a_runtime_that_ends_in_order_says_so_to_the_bootstrap,
    a_barrier_that_failed_elsewhere_gives_the_reason_that_is_known_here,
    packets_and_buffers_outlive_their_runtime,
    the_offer_of_a_rank_that_has_gone_fails_the_receive_that_comes_later,
    a_buffer_that_comes_back_when_its_runtime_ends_is_read_by_no_peer_any_more,
);

const SOON: Duration = Duration::from_secs(1);

#[track_caller]
fn assert_down(status: Status, from: Rank) {
    let error = status.ok().expect_err("it cannot have succeeded");
    assert!(matches!(&error, OpError::PeerDown { rank, .. } if *rank == from), "{error}");
    assert!(error.to_string().contains(&from.to_string()));
}

fn a_runtime_that_is_dropped_ends_each_of_its_operations_once_with_an_error<J: Job>() {
    let [zero, one] =
        J::pair_with(J::settings().setting("shm_slots", 8).setting("tcp_window", 2048));
    let sink = Arc::new(Sink::keeping());
    let region = Guarded::new(100, 5);
    let mut context = 0;
    let mut next = || {
        context += 1;
        UserContext(context)
    };
    for (policy, buffer) in [
        (Matching::RankTag, Buffer::Vec(vec![1; 10])),
        (Matching::RankTag, Buffer::Vec(vec![2; 10])),
        (Matching::TagOnly, Buffer::BytesMut([3; 10][..].into())),
        (Matching::RankOnly, region.slice().into()),
        (Matching::None, Buffer::Vec(vec![4; 10])),
    ] {
        let mut recv = zero
            .post_recv(Rank(1), buffer, Tag(1))
            .matching(policy)
            .user_context(next())
            .comp(&*sink);
        assert!(recv.try_submit().unwrap().is_posted());
    }
    // Sends that wait: the ring is full.
    while !zero.post_send(Rank(1), b"12345678", Tag(1)).try_submit().unwrap().is_retry() {}
    for size in [0, 8, 100, 5000] {
        let mut send =
            zero.post_send(Rank(1), vec![9; size], Tag(2)).user_context(next()).comp(&*sink);
        send.submit().unwrap();
    }
    assert_eq!(sink.count(), 0);
    drop(zero);
    let mut statuses = sink.take();
    statuses.sort_by_key(|status| status.user_context.0);
    let contexts: Vec<u64> = statuses.iter().map(|status| status.user_context.0).collect();
    assert_eq!(contexts, (1..=9).collect::<Vec<_>>(), "each once");
    let lengths: Vec<usize> = statuses.iter().map(|status| status.buffer.len()).collect();
    assert_eq!(lengths, [10, 10, 10, 100, 10, 0, 8, 100, 5000], "and gives its buffer back");
    for status in statuses {
        assert!(matches!(status.ok(), Err(OpError::Closed)));
    }
    region.assert_untouched();
    drop(one);
    assert_eq!(sink.count(), 0);
}

/// Takes nothing until it is told to.
struct Stubborn {
    open: AtomicBool,
    taken: Mutex<Vec<Status>>,
}

impl Completion for Stubborn {
    fn signal(&self, status: Status) -> Result<(), Status> {
        if !self.open.load(Ordering::SeqCst) {
            return Err(status);
        }
        self.taken.lock().push(status);
        Ok(())
    }
}

fn a_status_that_found_no_room_is_tried_once_more_at_the_end<J: Job>() {
    let [zero, one] = J::pair();
    let stubborn = Arc::new(Stubborn { open: AtomicBool::new(false), taken: Mutex::default() });
    let object: Arc<dyn Completion> = stubborn.clone();
    // Two: the second is found behind the first, which is stuck.
    for tag in 1..=2 {
        let mut recv = one.post_recv(Rank(0), vec![0; 8], Tag(tag)).comp(&object);
        assert!(recv.try_submit().unwrap().is_posted());
        sent(std::slice::from_ref(&zero), || {
            zero.post_send(Rank(1), b"12345678", Tag(tag)).try_submit()
        });
    }
    // And an operation that is complete within its call.
    let mut own = one.post_send(Rank(0), b"x", Tag(3)).comp(&object);
    own.submit().unwrap();
    while one.progress().is_ok() {}
    stubborn.open.store(true, Ordering::SeqCst);
    drop(one);
    let taken = stubborn.taken.lock();
    let tags: Vec<u64> = taken.iter().map(|status| status.tag.0).collect();
    assert_eq!(tags.len(), 3, "each operation ends once, at the latest with its runtime: {tags:?}");
}

fn what_was_sent_before_a_peer_went_arrives_and_what_it_would_have_sent_fails<J: Job>() {
    let [zero, one] = J::pair();
    let sink = Sink::keeping();
    let size = |at: u64| [0, 8, 41, 209, 5000][at as usize % 5];
    for at in 0..30 {
        let recv = one
            .post_recv(Rank(0), vec![0; 5000], Tag(1))
            .user_context(UserContext(at))
            .comp(&sink)
            .try_submit();
        assert!(recv.unwrap().is_posted());
    }
    for at in 0..20 {
        let message = pattern(at, size(at));
        assert!(zero.post_send(Rank(1), &message[..], Tag(1)).try_submit().unwrap().is_done());
    }
    drop(zero);
    let ranks = [one];
    until(&ranks, || sink.count() == 30);
    for status in sink.take() {
        let at = status.user_context.0;
        if at < 20 {
            assert!(status.error.is_none(), "message {at}: {status:?}");
            assert_eq!(status.bytes().unwrap(), pattern(at, size(at)));
        } else {
            assert_eq!(status.buffer.len(), 5000);
            assert_down(status, Rank(0));
        }
    }
    assert!(matches!(ranks[0].peer_down(Rank(0)), Some(DownCause::Closed)));
    // What is posted now fails at once.
    let recv = ranks[0].post_recv(Rank(0), vec![0], Tag(1)).comp(&sink).try_submit();
    assert!(recv.unwrap().is_posted());
    assert_down(sink.one(&ranks), Rank(0));
    let mut send = ranks[0].post_send(Rank(0), b"x".to_vec(), Tag(1));
    for _ in 0..2 {
        let error = send.try_submit().unwrap_err();
        assert!(matches!(error, PostError::PeerDown { rank: Rank(0), .. }), "{error}");
    }
    settle(&ranks);
    assert_eq!(sink.count(), 0);
}

fn what_was_sent_before_a_peer_went_arrives_where_nothing_was_sent_to_it<J: Job>() {
    let ranks: [Runtime; 2] = J::ranks(2).try_into().unwrap();
    let sink = Sink::keeping();
    ranks[0].post_recv(Rank::ANY, vec![0; 2], Tag(0)).comp(&sink).submit().unwrap();
    let up = || ranks[1].post_send(Rank(0), b"up", Tag(0)).matching(Matching::TagOnly).try_submit();
    assert!(posted(&ranks, up).is_done());
    assert!(sink.one(&ranks).error.is_none());
    let [zero, one] = ranks;
    let mut send = one.post_send(Rank(0), b"in time!", Tag(1));
    while send.try_submit().unwrap().is_retry() {
        one.progress().unwrap();
    }
    drop(send);
    drop(one);
    // Only now the rank is called, or not any more.
    zero.post_recv(Rank(1), vec![0; 8], Tag(1)).comp(&sink).submit().unwrap();
    let status = sink.one(&[zero]);
    assert!(status.error.is_none(), "the message had been sent, and was lost: {status:?}");
    assert_eq!(status.bytes().unwrap(), b"in time!");
}

fn what_came_on_one_device_is_not_lost_when_another_hears_of_the_end_first<J: Job>() {
    let [zero, one] = J::pair();
    let devices = [&zero, &one].map(|rank| rank.device().build().unwrap());
    let sink = Sink::keeping();
    let mut recv = one.post_recv(Rank(0), vec![0; 8], Tag(1)).comp(&sink);
    assert!(recv.try_submit().unwrap().is_posted());
    // Progress on the second device of both until the message could be posted; it is not taken in.
    let mut send = zero.post_send(Rank(1), b"in time!", Tag(1)).device(&devices[0]);
    while send.try_submit().unwrap().is_retry() {
        zero.progress_device(&devices[0]).unwrap();
        one.progress_device(&devices[1]).unwrap();
    }
    drop(send);
    drop(zero);
    // The default device hears that the peer is gone.
    let start = std::time::Instant::now();
    while one.default_device().index() == 0 && one.peer_down(Rank(0)).is_none() {
        one.progress().unwrap();
        if start.elapsed() > SOON {
            break;
        }
    }
    let ranks = [one];
    let status = sink.one(&ranks);
    assert!(status.error.is_none(), "the message had been sent, and was lost: {status:?}");
    assert_eq!(status.bytes().unwrap(), b"in time!");
}

fn what_came_on_one_device_is_not_lost_when_another_that_is_looked_for_is_gone<J: Job>() {
    let [zero, one]: [Runtime; 2] = J::ranks(2).try_into().unwrap();
    let [late, told] = [(); 2].map(|()| [&zero, &one].map(|rank| rank.device().build().unwrap()));
    let sink = Sink::keeping();
    for ([from, to], tag) in [(&late, Tag(1)), (&told, Tag(2))] {
        one.post_recv(Rank(0), vec![0; 8], tag).device(to).comp(&sink).submit().unwrap();
        let mut send = zero.post_send(Rank(1), b"in time!", tag).device(from);
        while send.try_submit().unwrap().is_retry() {
            zero.progress_device(from).unwrap();
            one.progress_device(to).unwrap();
        }
    }
    drop(zero);
    // The default device had no link. It is looked for, since another device has closed.
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(400) {
        one.progress_device(&told[1]).unwrap();
        one.progress_device(one.default_device()).unwrap();
    }
    until(&[one], || sink.count() == 2);
    for status in sink.take() {
        assert!(status.error.is_none(), "the message had been sent, and was lost: {status:?}");
        assert_eq!(status.bytes().unwrap(), b"in time!");
    }
}

fn what_came_on_one_device_is_not_lost_when_another_finds_nobody<J: Job>() {
    let [zero, one] = J::pair();
    let [mine, _theirs] = [&one, &zero].map(|rank| rank.device().build().unwrap());
    let sink = Sink::keeping();
    one.post_recv(Rank(0), vec![0; 8], Tag(1)).comp(&sink).submit().unwrap();
    let mut send = zero.post_send(Rank(1), b"in time!", Tag(1));
    while send.try_submit().unwrap().is_retry() {
        zero.progress().unwrap();
    }
    drop(send);
    drop((zero, _theirs));
    // The first use of the second device, after the peer's has closed.
    let recv = one.post_recv(Rank(0), vec![0; 8], Tag(2)).device(&mine).comp(&sink);
    recv.user_context(UserContext(2)).submit().unwrap();
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_millis(400) {
        one.progress_device(&mine).unwrap();
    }
    let ranks = [one];
    until(&ranks, || sink.count() == 2);
    let [status, other] = <[_; 2]>::try_from(sink.take()).unwrap();
    assert!(status.error.is_none(), "the message had been sent, and was lost: {status:?}");
    assert_eq!(status.bytes().unwrap(), b"in time!");
    assert_eq!(other.user_context, UserContext(2));
    let why = other.ok().expect_err("nothing was sent to it").to_string();
    assert!(why.contains("closed its device"), "it ended in order: {why}");
}

fn a_peer_that_goes_without_having_sent_fails_the_receives_that_wait_for_it<J: Job>() {
    let ranks: [Runtime; 2] = J::ranks(2).try_into().unwrap();
    let sink = Sink::keeping();
    sent(&ranks, || ranks[0].post_send(Rank(1), b"hello", Tag(1)).try_submit());
    let mut recv = ranks[0].post_recv(Rank(1), vec![0], Tag(1)).comp(&sink);
    assert!(recv.try_submit().unwrap().is_posted());
    drop(recv);
    let [zero, one] = ranks;
    drop(one);
    let ranks = [zero];
    assert!(
        happens(&ranks, LIMIT / 2, || sink.count() > 0),
        "rank 0 has a link to rank 1 and did not notice its end"
    );
    assert_down(sink.one(&ranks), Rank(1));
}

fn a_peer_that_goes_is_noticed_though_its_program_still_holds_its_device<J: Job>() {
    let [zero, one] = J::pair();
    let sink = Sink::keeping();
    let mut recv = zero.post_recv(Rank(1), vec![0], Tag(1)).comp(&sink);
    assert!(recv.try_submit().unwrap().is_posted());
    drop(recv);
    let held = one.default_device().clone();
    drop(one);
    let ranks = [zero];
    assert!(happens(&ranks, LIMIT / 2, || sink.count() > 0), "the peer's end was not noticed");
    assert_down(sink.one(&ranks), Rank(1));
    drop(held);
}

fn a_peer_that_ends_in_order_is_closed_though_one_of_its_devices_was_not_used<J: Job>() {
    let ranks: [Runtime; 2] = J::ranks(2).try_into().unwrap();
    let _unused = ranks.each_ref().map(|rank| rank.device().build().unwrap());
    let sink = Sink::keeping();
    sent(&ranks, || ranks[0].post_send(Rank(1), b"hello", Tag(1)).try_submit());
    sent(&ranks, || ranks[1].post_send(Rank(0), b"hello", Tag(1)).try_submit());
    let mut recv = ranks[0].post_recv(Rank(1), vec![0], Tag(2)).comp(&sink);
    assert!(recv.try_submit().unwrap().is_posted());
    drop(recv);
    let [zero, one] = ranks;
    drop(one);
    let ranks = [zero];
    let error = sink.one(&ranks).ok().expect_err("it cannot have succeeded");
    let is_closed = matches!(error, OpError::PeerDown { rank: Rank(1), cause: DownCause::Closed });
    assert!(is_closed, "{error:?}");
}

/// A second device that these ranks do not use hears nothing of the end.
fn a_peer_that_operations_say_is_gone_is_down<J: Job>() {
    let [zero, one] = J::pair();
    let _unused = [&zero, &one].map(|rank| rank.device().build().unwrap());
    let ranks = [one];
    let one = &ranks[0];
    assert_eq!(one.peer_state(Rank(0)), PeerState::Up);
    let told = Arc::new(Mutex::new(None));
    let (weak, tell) = (one.clone(), told.clone());
    let ended = Handler::new(move |status: Status| {
        *tell.lock() = Some((weak.peer_state(Rank(0)), status));
    });
    let mut offer = one.post_send(Rank(0), vec![1; 100_000], Tag(1)).comp(&ended);
    assert!(posted(&ranks, || offer.try_submit()).is_posted());
    drop(offer);
    drop(zero);
    let is_down = |state: &PeerState| matches!(state, PeerState::Down(_));
    let is_refused = |what: &str, result: Result<Outcome, PostError>| match result {
        Err(PostError::PeerDown { rank: Rank(0), .. }) => {
            let state = one.peer_state(Rank(0));
            assert!(is_down(&state), "{what} was told that it is gone, and it is {state:?}");
            true
        }
        Err(error) => panic!("{error}"),
        Ok(_) => false,
    };
    until(&ranks, || {
        is_refused("a message", one.post_am(Rank(0), b"x", RemoteComp(0)).try_submit())
    });
    until(&ranks, || told.lock().is_some());
    let (state, status) = told.lock().take().unwrap();
    assert_down(status, Rank(0));
    assert!(is_down(&state), "its handler was told that it is gone, and it is {state:?}");
    assert_eq!(one.pending().down, [Rank(0)]);
}

fn what_waits_to_be_sent_to_a_peer_that_goes_fails_once_each<J: Job>() {
    let [zero, one] =
        J::pair_with(J::settings().setting("shm_slots", 8).setting("tcp_window", 2048));
    let sink = Sink::keeping();
    while !zero.post_send(Rank(1), b"12345678", Tag(1)).try_submit().unwrap().is_retry() {}
    for at in 0..20 {
        let mut send = zero
            .post_send(Rank(1), vec![7; at as usize * 30], Tag(at))
            .user_context(UserContext(at))
            .comp(&sink);
        send.submit().unwrap();
    }
    drop(one);
    let ranks = [zero];
    until(&ranks, || sink.count() == 20);
    let mut seen = [false; 20];
    for status in sink.take() {
        let at = status.user_context.0 as usize;
        assert!(!std::mem::replace(&mut seen[at], true));
        assert_eq!((status.buffer.len(), status.tag), (at * 30, Tag(at as u64)));
        assert_down(status, Rank(1));
    }
    settle(&ranks);
    assert_eq!(sink.count(), 0);
}

fn a_peer_that_has_ended_is_gone_for_a_device_of_which_it_had_none<J: Job>() {
    let [zero, one] = J::pair();
    let (device, sink, peer) = (zero.device().build().unwrap(), Sink::keeping(), one.rank());
    let region = Region::host(8);
    let owned = one.register_memory(&region).unwrap();
    let key = owned.remote_key();
    let posts = [
        zero.post_recv(peer, vec![0; 8], Tag(1)).device(&device).comp(&sink).submit(),
        zero.post_send(peer, vec![1; 8], Tag(1)).device(&device).comp(&sink).submit(),
        zero.post_send(peer, vec![1; 100_000], Tag(2)).device(&device).comp(&sink).submit(),
        zero.post_put(peer, vec![1; 8], &key, 0).device(&device).comp(&sink).submit(),
        zero.post_flush(peer).device(&device).comp(&sink).submit(),
    ];
    for post in posts {
        post.unwrap();
    }
    drop((owned, one));
    until(std::slice::from_ref(&zero), || sink.count() == 5);
    let lost = sink.take().into_iter().filter(|status| status.error.is_some()).count();
    // A region of this process can be written without a link.
    assert!(lost >= 3, "{lost}");
    let late = zero.post_send(peer, vec![1; 8], Tag(1)).device(&device).try_submit();
    assert!(matches!(late, Err(PostError::PeerDown { .. })), "{late:?}");
}

fn a_receive_and_a_barrier_end_with_a_peer_that_had_fewer_devices<J: Job>() {
    for (has_contact, is_further) in [(true, false), (true, true), (false, true), (false, false)] {
        let [zero, one]: [Runtime; 2] = J::ranks(2).try_into().unwrap();
        let (further, sink) = (zero.device().build().unwrap(), Sink::keeping());
        let device = if is_further { further } else { zero.default_device().clone() };
        let ranks = [zero, one];
        if has_contact {
            connect(&ranks);
        }
        let receive = ranks[0].post_recv(Rank(1), vec![0; 8], Tag(1)).device(&device);
        receive.comp(&sink).submit().unwrap();
        let [zero, one] = ranks;
        let barrier = std::thread::spawn({
            let zero = zero.clone();
            move || zero.barrier().is_err()
        });
        drop(one);
        until(std::slice::from_ref(&zero), || sink.count() == 1 && barrier.is_finished());
        assert_down(sink.take().pop().unwrap(), Rank(1));
        assert!(barrier.join().unwrap());
    }
}

fn a_receive_from_any_rank_outlives_a_peer<J: Job>() {
    let mut ranks = J::ranks(3);
    connect(&ranks);
    let sink = Sink::keeping();
    for rank in [Rank::ANY, Rank(2)] {
        let mut recv = ranks[0].post_recv(rank, vec![0; 4], Tag(1)).comp(&sink);
        assert!(recv.try_submit().unwrap().is_posted());
    }
    drop(ranks.pop());
    assert_down(sink.one(&ranks), Rank(2));
    let send =
        || ranks[1].post_send(Rank(0), b"here", Tag(1)).matching(Matching::TagOnly).try_submit();
    sent(&ranks, send);
    let status = sink.one(&ranks);
    assert_eq!((status.rank, status.bytes().unwrap()), (Rank(1), &b"here"[..]));
}

fn a_runtime_that_ends_in_order_says_so_to_the_bootstrap<J: Job>() {
    let mut job = unstarted(3).into_iter();
    let told = Arc::new(AtomicU32::new(0));
    let counted = told.clone();
    let zero = start_hooked(job.next().unwrap(), J::settings(), move |call| {
        counted.fetch_add(u32::from(call == BootstrapCall::Finish), Ordering::SeqCst);
        Ok(())
    });
    let one = start(job.next().unwrap(), J::settings());
    assert_eq!(told.load(Ordering::SeqCst), 0);
    drop(zero);
    assert_eq!(
        told.load(Ordering::SeqCst),
        1,
        "else a launcher takes the rank for one that failed"
    );
    // And a rank that starts late is still waited for.
    let mut early = one.post_send(Rank(2), b"x", Tag(1));
    assert!(matches!(early.try_submit(), Ok(Outcome::Retry(_))));
    let two = start(job.next().unwrap(), J::settings());
    sent(&[one.clone(), two], || early.try_submit());
}

#[test]
fn a_rank_that_is_lost_keeps_no_other_from_being_reached() {
    let _watchdog = Watchdog::over("lost");
    let mut job = unstarted(4).into_iter();
    let mut next = || job.next().unwrap();
    let zero = start(next(), OverShm::settings());
    // A bootstrap that ends without a farewell.
    drop(next());
    let mut early = zero.post_send(Rank(2), b"x", Tag(1));
    assert!(matches!(early.try_submit(), Ok(Outcome::Retry(_))));
    let two = start(next(), OverShm::settings());
    sent(&[zero.clone(), two], || early.try_submit());
    // One that is lost later is noticed, too.
    let mut never = zero.post_send(Rank(3), b"x", Tag(1));
    assert!(matches!(never.try_submit(), Ok(Outcome::Retry(_))));
    drop(next());
    let error = never.try_submit().unwrap_err();
    assert!(matches!(&error, PostError::PeerDown { rank: Rank(3), .. }), "{error}");
    assert_eq!(error.to_string().matches("look for its own messages").count(), 1, "{error}");
    assert!(matches!(zero.peer_state(Rank(3)), PeerState::Down(_)));
}

/// A member that hears of a failure from another one knows more about the end than that tells.
fn a_barrier_that_failed_elsewhere_gives_the_reason_that_is_known_here<J: Job>() {
    let mut ranks = J::ranks(3);
    std::thread::scope(|scope| {
        ranks.iter().for_each(|rank| drop(scope.spawn(|| rank.barrier().unwrap())));
    });
    drop(ranks.pop());
    until(&ranks, || ranks.iter().all(|rank| rank.peer_down(Rank(2)).is_some()));
    // The first waits for the rank that has gone, the second for the first.
    for rank in &ranks {
        let error = rank.barrier().unwrap_err();
        let CollectiveError::Op { cause: OpError::PeerDown { rank: Rank(2), cause }, .. } = &error
        else {
            panic!("{error}")
        };
        assert_eq!(cause, &DownCause::Closed, "{error}");
    }
}

fn packets_and_buffers_outlive_their_runtime<J: Job>() {
    let [zero, one] = J::pair();
    let sink = Sink::keeping();
    let name = one.register_comp(&sink).unwrap();
    let ranks = [zero, one];
    let message = pattern(1, 8192);
    sent(&ranks, || ranks[0].post_am(Rank(1), &message[..], name).try_submit());
    let status = sink.one(&ranks);
    drop(ranks);
    assert_eq!(status.bytes().unwrap(), message);
    let after = Synchronizer::new(1);
    assert!(!after.test());
}

/// Over shared memory only: a loopback link to a device that has closed fails at once
/// (docs/roadmap.md).
fn the_offer_of_a_rank_that_has_gone_fails_the_receive_that_comes_later<J: Job>() {
    for choice in [AutoChoice::Auto, AutoChoice::Off] {
        let [zero, one] = J::pair_with(J::settings().setting("kernel_copy", choice));
        let done = Sink::keeping();
        let mut send = zero.post_send(Rank(1), vec![1; 100_000], Tag(1)).comp(&done);
        assert!(posted(&[zero.clone(), one.clone()], || send.try_submit()).is_posted());
        drop(send);
        let ones = [one.clone()];
        until(&ones, || one.default_matching_engine().waiting().0 == 1);
        drop(zero);
        let status = done.take().pop().expect("it has ended");
        assert!(matches!(status.error.as_deref(), Some(OpError::Closed)), "{status:?}");
        until(&ones, || one.peer_down(Rank(0)).is_some());
        // The buffer belongs to the sender again, and has other bytes by now. No receiver may get
        // those.
        let Buffer::Vec(mut buffer) = status.buffer else { panic!("another buffer") };
        buffer.fill(0xee);
        let (arrived, guarded) = (Sink::keeping(), Guarded::new(100_000, 1));
        let receive =
            one.post_recv(Rank(0), guarded.slice(), Tag(1)).comp(&arrived).try_submit().unwrap();
        let status = match receive {
            Outcome::Done(status) => status,
            _ => arrived.one(&ones),
        };
        assert_down(status, Rank(0));
        guarded.assert_untouched();
        assert_eq!(buffer, vec![0xee; 100_000]);
    }
}

/// Bytes of a buffer as long as it is a put's or a send's, and afterwards.
const SENT: u8 = 0x11;
const LATER: u8 = 0xee;

fn a_buffer_that_comes_back_when_its_runtime_ends_is_read_by_no_peer_any_more<J: Job>() {
    const LEN: usize = 8 << 20;
    let (mut cut, mut came_back) = (0, 0);
    for round in 0..40_u64 {
        let ranks: [Runtime; 2] = J::ranks(2).try_into().unwrap();
        connect(&ranks);
        let [zero, one] = ranks;
        let region = Region::host(LEN);
        region.whole().write(&vec![0; LEN]).unwrap();
        let registered = one.register_memory(&region).unwrap();
        let rmr = registered.remote_key();
        let received = Sink::keeping();
        let mut receive = one.post_recv(Rank(0), vec![0; LEN], Tag(1)).comp(&received);
        assert!(receive.try_submit().unwrap().is_posted());
        let done = Sink::keeping();
        let mut put = zero.post_put(Rank(1), vec![SENT; LEN], &rmr, 0).comp(&done);
        let mut send = zero.post_send(Rank(1), vec![SENT; LEN], Tag(1)).comp(&done);
        if round % 2 == 0 {
            put.submit().unwrap();
            send.submit().unwrap();
        } else {
            send.submit().unwrap();
            put.submit().unwrap();
        }
        drop((put, send));
        let ended = &AtomicBool::new(false);
        let statuses = std::thread::scope(|scope| {
            let one = &one;
            scope.spawn(move || {
                while !ended.load(Ordering::SeqCst) {
                    one.progress().unwrap();
                }
            });
            std::thread::sleep(Duration::from_micros(round * 100));
            drop(zero);
            // The buffers are the program's again, which has another use for them.
            let mut statuses = done.take();
            for status in &mut statuses {
                if let Buffer::Vec(buffer) = &mut status.buffer {
                    buffer.fill(LATER);
                    came_back += 1;
                }
            }
            std::thread::sleep(Duration::from_millis(1));
            ended.store(true, Ordering::SeqCst);
            statuses
        });
        let ones = [one];
        assert_eq!(statuses.len(), 2, "each operation ends once");
        until(&ones, || ones[0].peer_down(Rank(0)).is_some() && received.count() == 1);
        settle(&ones);
        let held = region.whole().to_vec().unwrap();
        assert!(
            !held.contains(&LATER),
            "round {round}: a put has brought what its buffer held later"
        );
        let received = received.take().remove(0);
        if received.error.is_none() {
            assert!(received.bytes().unwrap().iter().all(|&byte| byte == SENT), "round {round}");
        }
        cut += usize::from(held.contains(&SENT) && held.contains(&0));
    }
    println!("{came_back} buffers came back, {cut} puts were cut off in their midst");
    assert!(came_back > 0);
}

#[test]
fn the_last_message_of_a_rank_that_has_gone_meets_a_receive_that_comes_later() {
    let [zero, one]: [Runtime; 2] = OverShm::ranks(2).try_into().unwrap();
    let both = [zero.clone(), one.clone()];
    // Rank 0 has heard of rank 1, and has no link to it.
    sent(&both, || one.post_send(Rank(0), b"first", Tag(1)).try_submit());
    settle(&both);
    assert!(one.post_send(Rank(0), b"last", Tag(2)).try_submit().unwrap().is_done());
    drop((both, one));
    let arrived = Sink::keeping();
    let mut receive = zero.post_recv(Rank(1), vec![0; 4], Tag(2)).comp(&arrived);
    assert!(receive.try_submit().unwrap().is_posted());
    let status = arrived.one(std::slice::from_ref(&zero));
    assert!(status.error.is_none(), "{status:?}");
    assert_eq!(status.bytes().unwrap(), b"last");
}
