//! Completion objects without room, and packets that are all out: deliveries wait for their object,
//! in order and within the budget, and everything else passes.

use crate::support::sink::Sink;
use crate::support::*;
use crate::support::{over_each_transport, over_transport};
use carrack::settings::{AutoChoice, ProgressChoice};
use carrack::transports::mem::{HostAllocator, PacketPool};
use carrack::{
    AsCompletion, Buffer, CompQueue, Completion, Handler, OpError, Outcome, PeerState,
    ProgressError, Rank, RemoteComp, RetryReason, Runtime, Status, Synchronizer, Tag,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

over_each_transport!(
    what_a_full_queue_has_no_room_for_waits_in_order_and_holds_up_nothing_else,
    each_episode_of_a_full_queue_is_reported_once,
    collectives_end_while_a_queue_is_full,
    collectives_end_while_all_packets_are_out,
    beyond_the_budget_messages_for_a_full_queue_wait_with_their_senders,
    receives_and_puts_for_a_full_queue_end_in_order,
    beyond_the_budget_puts_that_notify_a_full_queue_are_a_retry,
    a_queue_that_its_users_have_dropped_gives_the_budget_back,
    a_sender_that_dies_takes_back_what_it_has_offered_to_a_full_queue,
    errors_of_progress_in_a_barrier_are_returned_by_the_next_calls,
    an_error_that_comes_with_what_is_waited_for_is_returned_by_the_next_call,
    messages_that_their_sender_holds_come_in_the_order_of_those_that_come_whole,
    offers_for_a_queue_that_its_users_have_dropped_end,
    what_waits_for_a_full_queue_is_pending,
    the_end_of_a_rank_is_told_behind_its_messages,
    receives_into_lists_wait_in_order_and_are_told_once,
    lists_for_a_queue_that_was_dropped_give_the_budget_back,
    a_receive_into_a_packet_keeps_its_place,
    a_message_that_is_fetched_holds_up_its_own_sender_only,
    a_synchronizer_that_was_dropped_gives_the_budget_back,
    a_queue_that_was_dropped_and_is_still_registered_is_not_complained_of,
    what_waits_behind_does_not_keep_the_packets,
    a_packet_that_a_user_gave_for_a_large_message_comes_back_from_a_full_object,
    collectives_end_when_all_that_may_be_offered_is_held,
    a_shortage_that_has_ended_in_barriers_is_no_error_of_a_later_call,
);
over_transport!(
    shm_with_a_thread,
    OverShm,
    [],
    a_progress_thread_listens_for_a_sender_that_only_posts
);

fn number(status: &Status) -> u64 {
    let bytes = status.buffer.to_vec().unwrap();
    assert_eq!(bytes, pattern(status.tag.0, status.size), "message {:?}", status.tag);
    status.tag.0
}

/// Sends messages of a few sizes, numbered from `from` on.
fn send_to(ranks: &[Runtime; 2], name: RemoteComp, numbers: std::ops::Range<u64>, sizes: &[usize]) {
    for at in numbers {
        let message = pattern(at, sizes[at as usize % sizes.len()]);
        let mut am = ranks[0].post_am(Rank(1), message, name).tag(Tag(at));
        let begun = Instant::now();
        while am.try_submit().unwrap().is_retry() {
            ranks.iter().for_each(|rank| _ = rank.progress());
            assert!(begun.elapsed() < patience(LIMIT / 2), "message {at} does not go");
        }
    }
}

/// Takes all that a queue gets, making progress, until as many have come.
fn take_all(ranks: &[Runtime], queue: &CompQueue, expected: std::ops::Range<u64>) {
    let mut next = expected.start;
    until_with_errors(ranks, || {
        while let Some(status) = queue.pop() {
            assert_eq!(number(&status), next, "in the order in which they were sent");
            next += 1;
        }
        next == expected.end
    });
    settle(ranks);
    assert!(queue.pop().is_none(), "one came twice");
}

/// Runs something on a thread for each rank, and tells what the ranks got.
fn on_each<R: Send>(ranks: &[Runtime], work: impl Fn(&Runtime) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = ranks.iter().map(|rank| scope.spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn what_a_full_queue_has_no_room_for_waits_in_order_and_holds_up_nothing_else<J: Job>() {
    let ranks = J::pair();
    let (narrow, free) = (CompQueue::new(2), Sink::keeping());
    let (one, other) =
        (ranks[1].register_comp(&narrow).unwrap(), ranks[1].register_comp(&free).unwrap());
    let sizes = [8, 300, 0, 4000, 100_000];
    for at in 0..20 {
        send_to(&ranks, one, at..at + 1, &sizes);
        send_to(&ranks, other, at..at + 1, &sizes);
    }
    // Large messages come in any order. All must arrive, though the queue is full.
    until_with_errors(&ranks, || free.count() == 20);
    // What is matched passes, too.
    let received = Sink::keeping();
    let mut receive = ranks[1].post_recv(Rank(0), vec![0; 1000], Tag(1)).comp(&received);
    receive.submit().unwrap();
    sent(&ranks, || ranks[0].post_send(Rank(1), &pattern(5, 1000)[..], Tag(1)).try_submit());
    assert_eq!(received.one(&ranks).bytes().unwrap(), pattern(5, 1000));
    assert_eq!(narrow.len(), narrow.capacity());
    let mut came = Vec::new();
    until_with_errors(&ranks, || {
        came.extend(std::iter::from_fn(|| narrow.pop()).map(|status| number(&status)));
        came.len() == 20
    });
    // Those that travel whole come in order; large ones are fetched, and may end later.
    let whole: Vec<u64> = came.iter().copied().filter(|at| at % 5 != 4).collect();
    assert!(whole.is_sorted(), "{came:?}");
    came.sort_unstable();
    assert_eq!(came, (0..20).collect::<Vec<_>>());
    settle(&ranks);
    assert!(narrow.pop().is_none());
    assert_eq!(ranks[1].unexpected_bytes(), 0);
}

fn each_episode_of_a_full_queue_is_reported_once<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    for episode in 0..3 {
        let first = episode * 10;
        send_to(&ranks, name, first..first + 10, &[8]);
        let mut told = 0;
        let mut quiet = 0;
        while quiet < 300 {
            quiet += 1;
            match ranks[1].progress() {
                Ok(moved) => quiet = if moved { 0 } else { quiet },
                Err(error) => {
                    assert!(matches!(error, ProgressError::CompletionFull(..)), "{error}");
                    assert!(error.to_string().contains("a queue of 2 entries"), "{error}");
                    told += 1;
                }
            }
            ranks[0].progress().unwrap();
            nics_go_on();
        }
        // The sender's calls may have made progress on the receiver, and heard of it.
        assert!(told <= 1, "told {told} times in episode {episode}");
        assert!(!ranks[1].pending().to_string().contains(" 0 deliveries ("));
        take_all(&ranks, &narrow, first..first + 10);
    }
}

fn collectives_end_while_a_queue_is_full<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    send_to(&ranks, name, 0..10, &[8, 2000]);
    for _ in 0..3 {
        on_each(&ranks, |rank| rank.barrier().unwrap());
        let all = on_each(&ranks, |rank| rank.allgather(&[rank.rank().0 as u8; 3000]).unwrap());
        assert!(all.iter().all(|all| all[0] == [0; 3000] && all[1] == [1; 3000]));
    }
    let error = ranks[1].wait(|| false).unwrap_err().to_string();
    assert!(error.contains("a queue of 2 entries"), "kept for the next wait: {error}");
    take_all(&ranks, &narrow, 0..10);
}

fn collectives_end_while_all_packets_are_out<J: Job>() {
    const COUNT: u64 = 200;
    for sizes in [&[1000][..], &[100], &[100, 1000]] {
        let ranks = J::pair_with(J::settings().packets_max(16).setting("shm_chunks", 4));
        let wide = CompQueue::new(1024);
        let name = ranks[1].register_comp(&wide).unwrap();
        send_to(&ranks, name, 0..COUNT, sizes);
        for _ in 0..3 {
            on_each(&ranks, |rank| rank.barrier().unwrap());
            let all = on_each(&ranks, |rank| rank.allgather(&[rank.rank().0 as u8; 3000]).unwrap());
            assert!(all.iter().all(|all| all[0] == [0; 3000] && all[1] == [1; 3000]));
        }
        let waiting = wide.len();
        assert!(
            waiting <= 16,
            "a status has a packet, of which there are 16: {waiting}, {sizes:?}"
        );
        take_all(&ranks, &wide, 0..COUNT);
    }
}

fn beyond_the_budget_messages_for_a_full_queue_wait_with_their_senders<J: Job>() {
    const BUDGET: usize = 64 << 10;
    // What a sender may send before it hears that it is to hold (`peer/hold.rs`), and one batch.
    const SLACK: usize = (1 << 20) + (256 << 10);
    let ranks = J::pair_with(J::settings().unexpected(BUDGET).offers(64));
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    let ended = Sink::keeping();
    let (mut posted, mut done) = (0, 0);
    let mut most = 0;
    let begun = Instant::now();
    // The sender goes on until it may not although all has come: then its messages are with it.
    let mut refused = 0;
    while refused < 3 {
        let message = pattern(posted, [8, 1000][posted as usize % 2]);
        let mut am = ranks[0].post_am(Rank(1), message, name).tag(Tag(posted)).comp(&ended);
        match am.try_submit().unwrap() {
            Outcome::Retry(_) => {
                refused += 1;
                settle(&ranks);
            }
            outcome => {
                done += u64::from(outcome.is_done());
                posted += 1;
                refused = 0;
            }
        }
        ranks.iter().for_each(|rank| _ = rank.progress());
        most = most.max(ranks[1].unexpected_bytes());
        assert!(begun.elapsed() < patience(LIMIT / 2), "it accepts without end");
    }
    assert!(most > BUDGET / 2 && most < BUDGET + SLACK, "{most} bytes were kept");
    assert!(ended.count() as u64 + done < posted, "some are with their sender");
    on_each(&ranks, |rank| rank.barrier().unwrap());
    take_all(&ranks, &narrow, 0..posted);
    until_with_errors(&ranks, || ended.count() as u64 + done == posted);
    assert_eq!(ended.failed(), 0);
    assert_eq!(ranks[1].unexpected_bytes(), 0);
    // The window is open again: a message is sent whole.
    settle(&ranks);
    assert!(ranks[0].post_am(Rank(1), b"whole", name).try_submit().unwrap().is_done());
}

fn receives_and_puts_for_a_full_queue_end_in_order<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    for at in 0..10 {
        ranks[1].post_recv(Rank(0), vec![0; 100], Tag(at)).comp(&narrow).submit().unwrap();
    }
    for at in 0..10 {
        sent(&ranks[..1], || {
            ranks[0].post_send(Rank(1), &pattern(at, 100)[..], Tag(at)).try_submit()
        });
    }
    take_all(&ranks, &narrow, 0..10);
    // Notifications of puts have no bytes, and are told in the order in which they came.
    let region = carrack::buffer::Region::host(4096);
    let mr = ranks[1].register_memory(&region).unwrap();
    let rmr = mr.remote_key();
    let name = ranks[1].register_comp(&narrow).unwrap();
    for at in 0..10 {
        let ended = Sink::keeping();
        let bytes = [at as u8; 64];
        let put = ranks[0].post_put(Rank(1), &bytes, &rmr, 64 * at).remote_comp(name);
        let mut put = put.tag(Tag(at)).comp(&ended);
        let begun = Instant::now();
        let is_done = loop {
            match put.try_submit().unwrap() {
                Outcome::Retry(_) => ranks.iter().for_each(|rank| _ = rank.progress()),
                outcome => break outcome.is_done(),
            }
            assert!(begun.elapsed() < patience(LIMIT / 2));
        };
        until_with_errors(&ranks, || ended.count() == usize::from(!is_done));
    }
    let mut tags = Vec::new();
    until_with_errors(&ranks, || {
        tags.extend(narrow.pop().map(|status| (status.tag.0, status.size)));
        tags.len() == 10
    });
    tags.sort_unstable();
    assert_eq!(tags, (0..10).map(|at| (at, 64)).collect::<Vec<_>>());
}

fn beyond_the_budget_puts_that_notify_a_full_queue_are_a_retry<J: Job>() {
    let ranks = J::pair_with(J::settings().unexpected(64 << 10));
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    let region = carrack::buffer::Region::host(4096);
    let mr = ranks[1].register_memory(&region).unwrap();
    let rmr = mr.remote_key();
    let ended = Sink::keeping();
    let (mut posted, mut refused, mut done) = (0_u64, 0, 0);
    let begun = Instant::now();
    while refused < 2000 || ranks[1].unexpected_bytes() <= 32 << 10 {
        let bytes = posted.to_ne_bytes();
        let put = ranks[0].post_put(Rank(1), &bytes, &rmr, 0).remote_comp(name).tag(Tag(posted));
        let outcome = put.comp(&ended).try_submit().unwrap();
        if outcome.is_retry() {
            refused += 1;
        } else {
            done += u64::from(outcome.is_done());
            (posted, refused) = (posted + 1, 0);
        }
        ranks.iter().for_each(|rank| _ = rank.progress());
        assert!(begun.elapsed() < patience(LIMIT / 2), "it accepts without end: {posted}");
    }
    // Messages go on, and so do puts without a notification.
    let mut plain = ranks[0].post_put(Rank(1), &[1; 8], &rmr, 8).comp(&ended);
    plain.submit().unwrap();
    on_each(&ranks, |rank| rank.barrier().unwrap());
    let mut tags = Vec::new();
    until_with_errors(&ranks, || {
        tags.extend(std::iter::from_fn(|| narrow.pop()).map(|status| status.tag.0));
        tags.len() as u64 == posted && ended.count() as u64 + done == posted + 1
    });
    tags.sort_unstable();
    assert!(tags.iter().copied().eq(0..posted));
    settle(&ranks);
    sent(&ranks, || ranks[0].post_put(Rank(1), &[1; 8], &rmr, 8).remote_comp(name).try_submit());
    until(&ranks, || narrow.pop().is_some());
}

fn a_queue_that_its_users_have_dropped_gives_the_budget_back<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    send_to(&ranks, name, 0..50, &[1000]);
    until_with_errors(&ranks, || ranks[1].unexpected_bytes() > 10_000);
    ranks[1].deregister_comp(name).unwrap();
    let gone = Arc::downgrade(narrow.as_completion());
    drop(narrow);
    let other = Sink::keeping();
    let name = ranks[1].register_comp(&other).unwrap();
    // Threads that make progress have the last handles until they next hear something.
    until_with_errors(&ranks, || {
        if ranks[1].unexpected_bytes() > 0 {
            sent(&ranks[..1], || ranks[0].post_am(Rank(1), b"x", name).tag(Tag(0)).try_submit());
        }
        ranks[1].unexpected_bytes() == 0 && gone.strong_count() == 0
    });
    assert_eq!(ranks[1].pending().deferred, 0);
}

fn a_sender_that_dies_takes_back_what_it_has_offered_to_a_full_queue<J: Job>() {
    let [zero, one] = J::pair();
    let narrow = CompQueue::new(2);
    let name = one.register_comp(&narrow).unwrap();
    let ranks = [zero, one];
    send_to(&ranks, name, 0..4, &[8]);
    until_with_errors(&ranks, || ranks[1].pending().deferred == 2);
    let ended = Sink::keeping();
    for at in 4..8 {
        let am = ranks[0]
            .post_am(Rank(1), pattern(at, 100_000), name)
            .tag(Tag(at))
            .comp(&ended)
            .try_submit();
        assert!(am.unwrap().is_posted());
    }
    until_with_errors(&ranks, || ranks[1].pending().deferred == 6);
    assert_eq!(ended.count(), 0, "their bytes are with the sender");
    let [zero, one] = ranks;
    drop(zero);
    assert_eq!((ended.count(), ended.failed()), (4, 4));
    let ranks = [one];
    until_with_errors(&ranks, || matches!(ranks[0].peer_state(Rank(0)), PeerState::Down(_)));
    let mut came = Vec::new();
    until_with_errors(&ranks, || {
        came.extend(std::iter::from_fn(|| narrow.pop()).map(|status| number(&status)));
        ranks[0].pending().deferred == 0
    });
    assert_eq!(came, [0, 1, 2, 3], "what was sent whole is here");
}

fn errors_of_progress_in_a_barrier_are_returned_by_the_next_calls<J: Job>() {
    let ranks = J::pair();
    let fragile = Handler::new(|status| assert_ne!(status.size, 1, "on purpose"));
    let name = ranks[1].register_comp(&fragile).unwrap();
    connect(&ranks);
    for name in [name, name, RemoteComp(77)] {
        sent(&ranks[..1], || ranks[0].post_am(Rank(1), b"x", name).try_submit());
    }
    on_each(&ranks, |rank| rank.barrier().unwrap());
    let mut told: Vec<String> = Vec::new();
    for _ in 0..3 {
        // `wait` and `progress` alike.
        let error = ranks[1].wait_for(Duration::from_millis(200), || false).unwrap_err();
        told.push(error.to_string());
    }
    assert_eq!(told.iter().filter(|error| error.contains("on purpose")).count(), 2, "{told:?}");
    assert_eq!(
        told.iter().filter(|error| error.contains("not registered here")).count(),
        1,
        "{told:?}"
    );
    assert!(ranks[1].progress().is_ok());
    // A future that is awaited keeps them as well.
    sent(&ranks[..1], || ranks[0].post_am(Rank(1), b"x", name).try_submit());
    sent(&ranks[..1], || ranks[0].post_send(Rank(1), b"behind it", Tag(1)).try_submit());
    let status = ranks[1].block_on(ranks[1].post_recv(Rank(0), vec![0; 9], Tag(1)).start());
    assert_eq!(status.unwrap().unwrap().bytes().unwrap(), b"behind it");
    let error = ranks[1].progress_all().unwrap_err();
    assert!(matches!(error, ProgressError::HandlerPanicked { .. }), "{error}");
}

fn an_error_that_comes_with_what_is_waited_for_is_returned_by_the_next_call<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    send_to(&ranks, name, 0..2, &[8]);
    until(&ranks, || narrow.len() == 2);
    let before = narrow.len();
    send_to(&[ranks[0].clone(), ranks[0].clone()], name, 2..3, &[8]);
    // The operation ends as soon as the third is refused, which is an error.
    ranks[1].wait(|| ranks[1].pending().deferred == 1).unwrap();
    assert_eq!(narrow.len(), before);
    let error = ranks[1].wait_for(Duration::from_millis(200), || false).unwrap_err();
    assert!(error.to_string().contains("a queue of 2 entries"), "{error}");
}

fn messages_that_their_sender_holds_come_in_the_order_of_those_that_come_whole<J: Job>() {
    let ranks = J::pair_with(J::settings().unexpected(64 << 10));
    let sink = Sink::keeping();
    let name = ranks[1].register_comp(&sink).unwrap();
    // What has no receive makes the receiver tell the sender to hold.
    let mut held = 0;
    let begun = Instant::now();
    while ranks[0].post_am(Rank(1), b"", name).tag(Tag(u64::MAX)).try_submit().unwrap().is_done() {
        sent(&ranks, || ranks[0].post_send(Rank(1), &[7; 1000], Tag(held)).try_submit());
        held += 1;
        settle(&ranks);
        assert!(begun.elapsed() < patience(LIMIT / 2), "it is never told to hold");
    }
    until(&ranks, || ranks[0].test_drained(ranks[0].default_device()).unwrap());
    drop(sink.take());
    send_to(&ranks, name, 0..30, &[8, 300, 0, 3000]);
    // The send window opens while these receives are posted.
    for tag in 0..held {
        let receive = ranks[1]
            .post_recv(Rank(0), vec![0; 1000], Tag(tag))
            .comp(&Sink::keeping())
            .try_submit();
        drop(receive.unwrap());
        send_to(&ranks, name, 30 + tag..31 + tag, &[8, 300, 0, 3000]);
    }
    let mut came = Vec::new();
    until(&ranks, || {
        came.extend(sink.take().iter().map(number));
        came.len() as u64 == 30 + held
    });
    assert!(came.iter().copied().eq(0..30 + held), "{came:?}");
}

fn offers_for_a_queue_that_its_users_have_dropped_end<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    send_to(&ranks, name, 0..4, &[8]);
    let ended = Sink::keeping();
    let am =
        ranks[0].post_am(Rank(1), pattern(4, 100_000), name).tag(Tag(4)).comp(&ended).try_submit();
    assert!(am.unwrap().is_posted());
    until_with_errors(&ranks, || ranks[1].pending().deferred == 3);
    drop(narrow);
    until_with_errors(&ranks, || ended.count() == 1);
    assert_eq!(
        (ended.failed(), ranks[1].pending().deferred, ranks[1].unexpected_bytes()),
        (0, 0, 0)
    );
}

fn what_waits_for_a_full_queue_is_pending<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    send_to(&ranks, name, 0..7, &[8]);
    until_with_errors(&ranks, || ranks[1].pending().deferred == 5);
    let pending = ranks[1].pending();
    assert_eq!((pending.unexpected, pending.unexpected_bytes), (0, 0));
    assert_eq!(pending.deferred_bytes, ranks[1].unexpected_bytes());
    assert!(pending.deferred_bytes > 5 * 8, "{pending}");
    assert!(!ranks[1].test_drained(ranks[1].default_device()).unwrap());
    // A rank that ends now tells its own operations' ends, and what peers have sent goes with it.
    let sent_back = Sink::keeping();
    let receive = ranks[1].post_recv(Rank(0), vec![7; 8], Tag(1)).comp(&sent_back).try_submit();
    assert!(receive.unwrap().is_posted());
    drop(ranks);
    let status = sent_back.take().pop().unwrap();
    assert!(matches!(status.error.as_deref(), Some(OpError::Closed)));
    assert_eq!(status.buffer.len(), 8);
}

fn the_end_of_a_rank_is_told_behind_its_messages<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    send_to(&ranks, name, 0..10, &[8]);
    until_with_errors(&ranks, || ranks[1].pending().deferred == 8);
    let [zero, one] = ranks;
    drop(zero);
    let (ranks, mut came) = ([one], 0);
    until_with_errors(&ranks, || {
        let is_gone = ranks[0].peer_down(Rank(0)).is_some();
        came += std::iter::from_fn(|| narrow.pop()).count();
        is_gone
    });
    assert_eq!(came, 10);
}

/// Receives of which every other one goes to a list, all told to one queue.
fn posted_lists(ranks: &[Runtime; 2], narrow: &CompQueue) {
    for at in 0..10 {
        let buffer: Buffer = match at % 2 {
            0 => vec![0; 8].into(),
            _ => vec![Buffer::Vec(vec![0; 4]), Buffer::Vec(vec![0; 4])].into(),
        };
        let mut recv = ranks[1].post_recv(Rank(0), buffer, Tag(at)).comp(narrow);
        recv.submit().unwrap();
    }
    for at in 0..10 {
        sent(&ranks[..1], || {
            ranks[0].post_send(Rank(1), &pattern(at, 8)[..], Tag(at)).try_submit()
        });
    }
}

fn receives_into_lists_wait_in_order_and_are_told_once<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    posted_lists(&ranks, &narrow);
    let mut told = 0;
    let begun = Instant::now();
    while ranks[1].pending().deferred < 8 {
        told += u32::from(ranks[1].progress().is_err());
        assert!(begun.elapsed() < patience(LIMIT / 2), "they do not come");
    }
    for _ in 0..300 {
        told += u32::from(ranks[1].progress().is_err());
    }
    assert_eq!(told, 1);
    let mut next = 0;
    until_with_errors(&ranks, || {
        while let Some(status) = narrow.pop() {
            assert_eq!((status.tag.0, status.size), (next, 8));
            next += 1;
        }
        next == 10
    });
}

fn lists_for_a_queue_that_was_dropped_give_the_budget_back<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    posted_lists(&ranks, &narrow);
    until_with_errors(&ranks, || ranks[1].pending().deferred == 8);
    drop(narrow);
    until_with_errors(&ranks, || ranks[1].pending().deferred == 0);
    assert_eq!(ranks[1].unexpected_bytes(), 0);
}

fn a_receive_into_a_packet_keeps_its_place<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    let packet = ranks[1].default_device().take_packet(300).unwrap();
    let mut recv = ranks[1].post_recv(Rank(0), packet, Tag(5)).comp(&narrow);
    recv.submit().unwrap();
    send_to(&ranks, name, 0..5, &[300]);
    until_with_errors(&ranks, || ranks[1].pending().deferred == 3);
    sent(&ranks[..1], || ranks[0].post_send(Rank(1), &pattern(5, 300)[..], Tag(5)).try_submit());
    until_with_errors(&ranks, || ranks[1].pending().deferred == 4);
    take_all(&ranks, &narrow, 0..6);
}

fn a_message_that_is_fetched_holds_up_its_own_sender_only<J: Job>() {
    let ranks = J::ranks_with(3, J::settings().setting("kernel_copy", AutoChoice::Off));
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    let send = |from: usize, tag: u64, size: usize| {
        let mut am = ranks[from].post_am(Rank(1), pattern(tag, size), name).tag(Tag(tag));
        while am.try_submit().unwrap().is_retry() {
            ranks.iter().for_each(|rank| _ = rank.progress());
        }
    };
    (0..3).for_each(|tag| send(0, tag, 8));
    until_with_errors(&ranks, || ranks[1].pending().deferred == 1);
    send(0, 3, 100_000);
    (4..304).for_each(|tag| send(0, tag, 8));
    until_with_errors(&ranks, || ranks[1].pending().deferred == 302);
    send(2, 9999, 8);
    until_with_errors(&ranks, || ranks[1].pending().deferred == 303);
    // Rank 0 does not go on, and rank 1 cannot fetch its large message.
    let mut tags = Vec::new();
    until_with_errors(&ranks[1..], || {
        tags.extend(std::iter::from_fn(|| narrow.pop()).map(|status| status.tag.0));
        tags.contains(&9999)
    });
    until_with_errors(&ranks, || {
        tags.extend(std::iter::from_fn(|| narrow.pop()).map(|status| status.tag.0));
        tags.len() == 305
    });
    tags.retain(|tag| *tag != 9999);
    assert!(tags.iter().copied().eq(0..304), "{tags:?}");
}

fn a_synchronizer_that_was_dropped_gives_the_budget_back<J: Job>() {
    let ranks = J::pair();
    let one = Synchronizer::new(1);
    let name = ranks[1].register_comp(&one).unwrap();
    send_to(&ranks, name, 0..20, &[1000]);
    until_with_errors(&ranks, || ranks[1].pending().deferred == 19);
    ranks[1].deregister_comp(name).unwrap();
    drop(one);
    until_with_errors(&ranks, || ranks[1].unexpected_bytes() == 0);
}

fn a_queue_that_was_dropped_and_is_still_registered_is_not_complained_of<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    send_to(&ranks, name, 0..2, &[8]);
    settle(&ranks);
    drop(narrow);
    for at in 2..12 {
        send_to(&ranks, name, at..at + 1, &[8]);
        settle(&ranks);
    }
    assert_eq!(ranks[1].unexpected_bytes(), 0);
}

fn what_waits_behind_does_not_keep_the_packets<J: Job>() {
    let ranks = J::pair_with(J::settings().packets_max(16));
    let (one, two) = (CompQueue::new(2), CompQueue::new(2));
    let names = [&one, &two].map(|queue| ranks[1].register_comp(queue).unwrap());
    let waits = |count| until_with_errors(&ranks, || ranks[1].pending().deferred == count);
    // Half of the packets wait with the first queue, where what comes for the second finds none.
    send_to(&ranks, names[0], 0..2, &[8]);
    send_to(&ranks, names[0], 2..10, &[1000]);
    waits(8);
    send_to(&ranks, names[1], 0..3, &[8]);
    send_to(&ranks, names[1], 3..4, &[1000]);
    waits(10);
    take_all(&ranks, &one, 0..10);
    send_to(&ranks, names[1], 4..12, &[1000]);
    waits(10);
    take_all(&ranks, &two, 0..12);
}

/// Has large messages come to packets of the user's.
struct PlacingInPackets(PacketPool, Arc<dyn Completion>);

impl Completion for PlacingInPackets {
    fn signal(&self, status: Status) -> Result<(), Status> {
        self.1.signal(status)
    }

    fn place(&self, _: Rank, _: Tag, size: usize) -> Option<Buffer> {
        self.0.take_with_len(size).map(Buffer::Packet)
    }
}

fn a_packet_that_a_user_gave_for_a_large_message_comes_back_from_a_full_object<J: Job>() {
    let ranks = J::pair_with(J::settings().packets_max(16));
    let (narrow, other) = (CompQueue::new(2), CompQueue::new(2));
    let pool = PacketPool::new(Arc::new(HostAllocator), 128 << 10, 16);
    let placing: Arc<dyn Completion> =
        Arc::new(PlacingInPackets(pool.clone(), narrow.as_completion().clone()));
    let (name, rest) =
        (ranks[1].register_comp(&placing).unwrap(), ranks[1].register_comp(&other).unwrap());
    // Half of the runtime's packets wait, so that no more are kept.
    send_to(&ranks, rest, 0..2, &[8]);
    send_to(&ranks, rest, 2..10, &[1000]);
    until_with_errors(&ranks, || ranks[1].pending().deferred == 8);
    send_to(&ranks, name, 0..2, &[8]);
    let large = pattern(2, 100_000);
    sent(&ranks, || ranks[0].post_am(Rank(1), large.clone(), name).tag(Tag(2)).try_submit());
    until_with_errors(&ranks, || ranks[1].pending().deferred == 9);
    take_all(&ranks, &other, 0..10);
    let mut statuses = Vec::new();
    until_with_errors(&ranks, || {
        statuses.extend(std::iter::from_fn(|| narrow.pop()));
        statuses.len() == 3
    });
    let Some(Status { buffer: Buffer::Packet(packet), .. }) = statuses.pop() else {
        panic!("no packet")
    };
    // The runtime's own packets are smaller.
    assert!(packet.capacity() == 128 << 10 && packet.as_slice() == Some(&large[..]));
}

fn collectives_end_when_all_that_may_be_offered_is_held<J: Job>() {
    let ranks = J::pair_with(J::settings().unexpected(64 << 10).offers(16));
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    let mut sent = 0;
    let begun = Instant::now();
    loop {
        let bytes = pattern(sent, 1000);
        match ranks[0].post_am(Rank(1), &bytes[..], name).tag(Tag(sent)).try_submit().unwrap() {
            Outcome::Retry(RetryReason::Unanswered) => break,
            Outcome::Retry(_) => {}
            Outcome::Done(_) | Outcome::Posted => sent += 1,
        }
        ranks.iter().for_each(|rank| _ = rank.progress());
        assert!(begun.elapsed() < patience(LIMIT / 2), "it accepts without end: {sent}");
    }
    // One more that waits at its sender: what a collective sends passes it.
    let last = pattern(sent, 1000);
    ranks[0].post_am(Rank(1), last, name).tag(Tag(sent)).submit().unwrap();
    for size in [1, 100, 100_000] {
        let all = on_each(&ranks, |rank| {
            let all = rank.allgather(&vec![rank.rank().0 as u8; size]).unwrap();
            // The last word on a message may still be with its sender, who has to make progress.
            rank.barrier().unwrap();
            all
        });
        assert!(all.iter().all(|all| all[0] == vec![0; size] && all[1] == vec![1; size]));
    }
    take_all(&ranks, &narrow, 0..sent + 1);
}

fn a_shortage_that_has_ended_in_barriers_is_no_error_of_a_later_call<J: Job>() {
    let ranks = J::pair();
    let narrow = CompQueue::new(2);
    let name = ranks[1].register_comp(&narrow).unwrap();
    send_to(&ranks, name, 0..6, &[8]);
    let mut came = 0;
    let begun = Instant::now();
    while came < 6 {
        on_each(&ranks, |rank| rank.barrier().unwrap());
        came += std::iter::from_fn(|| narrow.pop()).count();
        assert!(begun.elapsed() < patience(LIMIT / 2), "{came} have come");
    }
    on_each(&ranks, |rank| rank.barrier().unwrap());
    assert_eq!(ranks[1].pending().deferred, 0);
    settle(&ranks);
}

fn a_progress_thread_listens_for_a_sender_that_only_posts<J: Job>() {
    let ranks = J::ranks_with(2, J::settings().progress(ProgressChoice::Thread));
    let count = carrack::Counter::new();
    let name = ranks[1].register_comp(&count).unwrap();
    let message = [1; 4096];
    // A share of the budget is 1 MiB, and a thread sleeps for half a second if nothing wakes it.
    let begun = Instant::now();
    for _ in 0..8192 {
        while ranks[0].post_am(Rank(1), &message, name).try_submit().unwrap().is_retry() {
            std::thread::yield_now();
        }
    }
    assert!(begun.elapsed() < patience(Duration::from_secs(5)), "{:?}", begun.elapsed());
}
