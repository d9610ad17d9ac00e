//! Operations as futures, the progress thread, and the list of pending operations.

use crate::support::sink::Sink;
use crate::support::*;
use carrack::settings::ProgressChoice;
use carrack::{
    AwaitError, Counter, Handler, OpError, Outcome, PostError, ProgressError, Rank, Runtime,
    Status, Synchronizer, Tag, WaitError,
};
use parking_lot::Mutex;
use std::future::{Future, IntoFuture};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

crate::support::over_each_transport!(
    operations_of_every_kind_can_be_awaited,
    started_operations_are_in_flight_together,
    a_future_that_is_dropped_lets_its_operation_go_on,
    a_future_fails_as_its_operation_does,
    a_full_backlog_makes_a_future_wait_and_not_fail,
    a_future_is_woken_by_any_thread_that_makes_progress,
    a_future_that_wakes_itself_does_not_keep_progress_from_being_made,
    an_executor_that_runs_drive_awaits_operations_and_sleeps_between_them,
    a_handler_that_gets_the_runtime_replies_and_does_not_keep_it_alive,
    blocking_on_a_future_in_a_handler_is_an_error,
    a_progress_thread_delivers_while_the_program_makes_no_progress,
    a_runtime_with_a_progress_thread_ends_when_its_last_handle_goes,
    a_device_is_drained_when_everything_that_was_sent_has_ended,
    a_device_of_another_runtime_is_refused_where_it_should_be_drained,
    what_is_pending_is_told_in_words,
);

/// Drives a future on the first rank, and makes progress on all.
#[track_caller]
fn drive<F: Future>(ranks: &[Runtime], future: F) -> F::Output {
    let mut future = pin!(future);
    let mut context = Context::from_waker(Waker::noop());
    let mut output = None;
    until(ranks, || {
        if output.is_none()
            && let Poll::Ready(ready) = future.as_mut().poll(&mut context)
        {
            output = Some(ready);
        }
        output.is_some()
    });
    output.unwrap()
}

/// Polls all tasks, as an executor of one thread, when one of them was woken, until the first is
/// complete. Returns its output, and the number of polls.
fn execute<T>(first: impl Future<Output = T>, others: Vec<carrack::Drive>) -> (T, usize) {
    struct Unpark(std::thread::Thread, AtomicBool);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.1.store(true, Ordering::Release);
            self.0.unpark();
        }
    }
    let unpark = Arc::new(Unpark(std::thread::current(), AtomicBool::new(false)));
    let waker = Waker::from(unpark.clone());
    let mut context = Context::from_waker(&waker);
    let (mut first, mut others, mut polls) = (pin!(first), others, 0);
    loop {
        polls += 1;
        others.retain_mut(|other| pin!(other).poll(&mut context).is_pending());
        if let Poll::Ready(output) = first.as_mut().poll(&mut context) {
            return (output, polls);
        }
        // A task may have parked this thread, too, and used up its token.
        while !unpark.1.swap(false, Ordering::AcqRel) {
            std::thread::park_timeout(LIMIT);
        }
    }
}

fn an_executor_that_runs_drive_awaits_operations_and_sleeps_between_them<J: Job>() {
    let ranks = J::pair();
    let [zero, one] = &ranks;
    let late = Duration::from_millis(300);
    let (received, _) = execute(
        async {
            let receive = one.post_recv(Rank(0), vec![0; 100_000], Tag(1));
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(late);
                    let mut send = zero.post_send(Rank(1), pattern(1, 100_000), Tag(1));
                    send.submit().unwrap();
                });
            });
            receive.await
        },
        vec![zero.drive(), one.drive()],
    );
    assert_eq!(received.unwrap().bytes().unwrap(), pattern(1, 100_000));
    // A sender that takes its time: the executor sleeps meanwhile, and does not look on and on.
    let (zero, one) = (zero.clone(), one.clone());
    let drives = vec![zero.drive(), one.drive()];
    let sender = std::thread::spawn(move || {
        std::thread::sleep(late);
        zero.post_send(Rank(1), b"late", Tag(2)).submit().unwrap();
    });
    let (received, polls) =
        execute(async { one.post_recv(Rank(0), vec![0; 8], Tag(2)).await }, drives);
    sender.join().unwrap();
    assert_eq!(received.unwrap().bytes().unwrap(), b"late");
    assert!(polls < 10_000, "{polls} polls in {late:?}");
}

#[test]
fn an_operation_that_nothing_drives_is_an_error_when_it_is_awaited() {
    // A pair may have made progress to meet.
    let ranks = Runtime::in_process(2).unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let recv = || ranks[1].post_recv(Rank(0), vec![0; 8], Tag(1)).into_future();
    let Poll::Ready(Err(AwaitError::Post(PostError::Undriven))) = pin!(recv()).poll(&mut context)
    else {
        panic!("nothing has made progress")
    };
    assert_eq!(ranks[1].default_matching_engine().waiting(), (0, 0), "it was not posted");
    let to_itself = async { ranks[0].post_send(Rank(0), b"x", Tag(1)).await };
    ranks[0].block_on(to_itself).unwrap().expect("block_on makes progress");
    ranks[1].progress().unwrap();
    assert!(pin!(recv()).poll(&mut context).is_pending());
}

#[test]
fn an_operation_that_was_refused_is_not_posted_even_after_its_end() {
    let ranks = Runtime::in_process(2).unwrap();
    ranks[0].progress().unwrap();
    let mut context = Context::from_waker(Waker::noop());
    let mut refused = ranks[0].post_send(Rank(9), b"x", Tag(1)).start();
    assert!(!refused.is_posted());
    let ended = pin!(&mut refused).poll(&mut context);
    assert!(matches!(ended, Poll::Ready(Err(AwaitError::Post(PostError::NoSuchRank { .. })))));
    assert!(!refused.is_posted());
    assert!(pin!(&mut refused).poll(&mut context).is_pending(), "it has no second end");
    let mut posted = ranks[0].post_send(Rank(0), b"x", Tag(1)).start();
    assert!(pin!(&mut posted).poll(&mut context).is_ready() && posted.is_posted());
}

#[test]
fn an_executor_may_poll_an_operation_before_the_drive_that_it_has() {
    let ranks = Runtime::in_process(2).unwrap();
    let drive = ranks[1].drive();
    let recv = ranks[1].post_recv(Rank(0), vec![0; 8], Tag(1)).into_future();
    let mut context = Context::from_waker(Waker::noop());
    assert!(pin!(recv).poll(&mut context).is_pending());
    drop(drive);
}

fn a_handler_that_gets_the_runtime_replies_and_does_not_keep_it_alive<J: Job>() {
    let ranks = J::pair();
    let replies = Sink::keeping();
    let name = ranks[0].register_comp_named("replies", &replies).unwrap();
    let echo = ranks[1].handler(move |runtime, status| {
        let size = status.size;
        let mut reply = runtime.post_am(status.rank, status.buffer, name);
        reply = reply.tag(Tag(size as u64));
        reply.submit().unwrap();
    });
    ranks[1].register_comp_named("echo", &echo).unwrap();
    for size in [0, 8, 5000, 50_000] {
        sent(&ranks, || {
            ranks[0]
                .post_am(Rank(1), pattern(3, size), carrack::RemoteComp::named("echo"))
                .try_submit()
        });
        let reply = replies.one(&ranks);
        assert_eq!((reply.tag, reply.bytes().unwrap()), (Tag(size as u64), &pattern(3, size)[..]));
    }
    // It is held by its completion object alone.
    drop(ranks);
    drop(echo);
}

fn operations_of_every_kind_can_be_awaited<J: Job>() {
    let ranks = J::pair();
    let [zero, one] = &ranks;
    let heard = Sink::keeping();
    let name = one.register_comp(&heard).unwrap();
    let region = one.allocate(64).unwrap();
    let mr = one.register_memory(&region).unwrap();
    let rmr = mr.remote_key();
    for size in [0, 8, 100, 9000, 100_000] {
        let payload = pattern(1, size);
        let talk = async {
            let mut receive = pin!(one.post_recv(Rank(0), vec![0; size], Tag(1)).into_future());
            let mut send = pin!(zero.post_send(Rank(1), payload.clone(), Tag(1)).into_future());
            let (mut sent, mut received) = (None, None);
            let both = std::future::poll_fn(|context| {
                if sent.is_none()
                    && let Poll::Ready(ended) = send.as_mut().poll(context)
                {
                    sent = Some(ended);
                }
                if received.is_none()
                    && let Poll::Ready(ended) = receive.as_mut().poll(context)
                {
                    received = Some(ended);
                }
                if sent.is_some() && received.is_some() { Poll::Ready(()) } else { Poll::Pending }
            });
            both.await;
            (sent.unwrap().unwrap(), received.unwrap().unwrap())
        };
        let (sent, received) = drive(&ranks, talk);
        assert_eq!(sent.buffer.to_vec().unwrap(), payload, "the buffer comes back");
        assert_eq!(received.bytes().unwrap(), payload);
    }
    let rest = async {
        zero.post_am(Rank(1), b"hello", name).tag(Tag(4)).await?;
        zero.post_put(Rank(1), &7_u64.to_le_bytes()[..], &rmr, 8).await?;
        assert_eq!(zero.post_fetch_add(Rank(1), &rmr, 8, 3).await?.value(), Some(7));
        assert_eq!(zero.post_compare_swap(Rank(1), &rmr, 8, 10, 20).await?.value(), Some(10));
        zero.post_flush(Rank(1)).await?;
        let got = zero.post_get(Rank(1), vec![0; 8], &rmr, 8).await?;
        assert_eq!(got.bytes().unwrap(), 20_u64.to_le_bytes());
        Ok::<(), AwaitError>(())
    };
    drive(&ranks, rest).unwrap();
    assert_eq!(heard.one(&ranks).tag, Tag(4));
}

fn started_operations_are_in_flight_together<J: Job>() {
    let ranks = J::pair();
    let receives: Vec<_> =
        (0..8).map(|tag| ranks[1].post_recv(Rank(0), vec![0; 100], Tag(tag)).start()).collect();
    assert_eq!(
        ranks[1].default_matching_engine().waiting(),
        (0, 8),
        "they are posted before they are awaited"
    );
    for tag in (0..8).rev() {
        sent(&ranks, || ranks[0].post_send(Rank(1), pattern(tag, 100), Tag(tag)).try_submit());
    }
    let all = async {
        for (tag, receive) in (0..).zip(receives) {
            assert_eq!(receive.await.unwrap().bytes().unwrap(), pattern(tag, 100));
        }
    };
    drive(&ranks, all);
}

fn a_future_that_is_dropped_lets_its_operation_go_on<J: Job>() {
    let ranks = J::pair();
    drop(ranks[1].post_recv(Rank(0), vec![0; 4], Tag(1)).start());
    drop(ranks[1].post_recv(Rank(0), vec![0; 4], Tag(1)));
    assert_eq!(ranks[1].default_matching_engine().waiting(), (0, 1), "only what was started waits");
    sent(&ranks, || ranks[0].post_send(Rank(1), b"gone", Tag(1)).try_submit());
    until(&ranks, || ranks[1].default_matching_engine().waiting() == (0, 0));
    let payload = pattern(1, 50_000);
    drop(ranks[0].post_send(Rank(1), payload.clone(), Tag(2)).start());
    let status = drive(&ranks, ranks[1].post_recv(Rank(0), vec![0; 50_000], Tag(2)).into_future());
    assert_eq!(status.unwrap().bytes().unwrap(), payload);
}

fn a_future_fails_as_its_operation_does<J: Job>() {
    let ranks = J::pair();
    let refused = drive(&ranks, ranks[0].post_send(Rank(7), b"x", Tag(1)).into_future());
    assert!(matches!(refused, Err(AwaitError::Post(PostError::NoSuchRank { .. }))));
    sent(&ranks, || ranks[0].post_send(Rank(1), b"too long", Tag(1)).try_submit());
    let truncated = drive(&ranks, ranks[1].post_recv(Rank(0), vec![0; 3], Tag(1)).into_future());
    assert!(matches!(truncated, Err(AwaitError::Op(OpError::Truncated { message: 8, buffer: 3 }))));
    let late =
        ranks[1].post_recv(Rank(0), vec![0; 3], Tag(1)).deadline(Duration::from_millis(5)).start();
    assert!(matches!(drive(&ranks, late), Err(AwaitError::Op(OpError::TimedOut(Rank(0))))));
    let one = ranks[1].clone();
    let waits = one.post_recv(Rank(0), vec![0; 3], Tag(1)).start();
    drop(ranks);
    let gone = drive(std::slice::from_ref(&one), waits);
    assert!(
        matches!(gone, Err(AwaitError::Op(OpError::PeerDown { rank: Rank(0), .. }))),
        "{gone:?}"
    );
}

fn a_full_backlog_makes_a_future_wait_and_not_fail<J: Job>() {
    let ranks = J::pair_with(
        J::settings()
            .setting("shm_slots", 8)
            .setting("tcp_window", 2048)
            .setting("shm_chunks", 1)
            .backlog(2)
            .packets_max(16),
    );
    let arrived = Counter::new();
    let name = ranks[1].register_comp(&arrived).unwrap();
    let many: Vec<_> =
        (0..100).map(|_| ranks[0].post_am(Rank(1), &[1; 30], name).start()).collect();
    let are_posted = many.iter().map(|one| one.is_posted());
    assert!(are_posted.clone().is_sorted_by(|before, after| before >= after), "some wait for room");
    let posted = are_posted.filter(|is_posted| *is_posted).count();
    // The queues within this process have room for all.
    let has_room = J::NAME == OverLoopback::NAME;
    assert!(posted >= 2 && (posted < 100 || has_room), "{posted}");
    let all = async {
        for one in many {
            one.await.unwrap();
        }
    };
    drive(&ranks, all);
    until(&ranks, || arrived.get() == 100);
}

fn a_future_is_woken_by_any_thread_that_makes_progress<J: Job>() {
    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let ranks = J::pair();
    let count = Arc::new(Count(AtomicUsize::new(0)));
    let waker = Waker::from(count.clone());
    let mut receive = pin!(ranks[1].post_recv(Rank(0), vec![0; 4], Tag(1)).into_future());
    assert!(receive.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    settle(&ranks);
    assert_eq!(count.0.load(Ordering::SeqCst), 0, "nothing has happened");
    sent(&ranks, || ranks[0].post_send(Rank(1), b"wake", Tag(1)).try_submit());
    until(&ranks, || count.0.load(Ordering::SeqCst) == 1);
    assert!(receive.as_mut().poll(&mut Context::from_waker(&waker)).is_ready());
    // And a thread that blocks on one is woken by another's progress.
    let [zero, one] = &ranks;
    std::thread::scope(|scope| {
        let waiting =
            scope.spawn(|| one.block_on(one.post_recv(Rank(0), vec![0; 4], Tag(2)).into_future()));
        std::thread::sleep(Duration::from_millis(20));
        sent(std::slice::from_ref(zero), || zero.post_send(Rank(1), b"wake", Tag(2)).try_submit());
        assert_eq!(waiting.join().unwrap().unwrap().unwrap().bytes().unwrap(), b"wake");
    });
}

fn a_future_that_wakes_itself_does_not_keep_progress_from_being_made<J: Job>() {
    let ranks = J::pair();
    let arrived = Counter::new();
    let recv = ranks[1].post_recv(Rank(0), vec![0; 1], Tag(1)).comp(&arrived).try_submit().unwrap();
    assert!(recv.is_posted());
    sent(&ranks[..1], || ranks[0].post_send(Rank(1), b"x", Tag(1)).try_submit());
    let spins = std::future::poll_fn(|context| {
        context.waker().wake_by_ref();
        if arrived.get() == 1 { Poll::Ready(()) } else { Poll::Pending }
    });
    ranks[1].block_on(spins).unwrap();
}

fn blocking_on_a_future_in_a_handler_is_an_error<J: Job>() {
    let ranks = J::pair();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let (rank, seen) = (ranks[1].clone(), seen.clone());
        Handler::new(move |_| seen.lock().push(rank.block_on(async {}).unwrap_err().to_string()))
    };
    let name = ranks[1].register_comp(&handler).unwrap();
    sent(&ranks, || ranks[0].post_am(Rank(1), b"x", name).try_submit());
    until(&ranks, || seen.lock().len() == 1);
    assert!(seen.lock()[0].contains("handler"));
}

fn a_progress_thread_delivers_while_the_program_makes_no_progress<J: Job>() {
    let ranks = J::ranks_with(2, J::settings().progress(ProgressChoice::Thread));
    let (count, bytes) = (Counter::new(), Arc::new(Mutex::new(Vec::new())));
    let echo = {
        let bytes = bytes.clone();
        Handler::new(move |status: Status| bytes.lock().push(status.bytes().unwrap().to_vec()))
    };
    let name = ranks[1].register_comp(&echo).unwrap();
    let sent = |size: usize| {
        ranks[0].post_am(Rank(1), pattern(2, size), name).comp(&count).submit().unwrap();
    };
    let sizes = [8, 100, 8000, 100_000];
    sizes.into_iter().for_each(sent);
    // Only the two threads make progress.
    let start = std::time::Instant::now();
    while count.get() < 4 || bytes.lock().len() < 4 {
        assert!(start.elapsed() < LIMIT, "no thread makes progress");
        std::thread::sleep(Duration::from_millis(1));
    }
    let want: Vec<_> = sizes.into_iter().map(|size| pattern(2, size)).collect();
    assert_eq!(*bytes.lock(), want);
    // Calls of the program's are welcome, too.
    let arrived = Synchronizer::new(1);
    let recv = ranks[1].post_recv(Rank(0), vec![0; 2], Tag(1)).comp(&arrived).try_submit().unwrap();
    assert!(recv.is_posted());
    while ranks[0].post_send(Rank(1), b"me", Tag(1)).try_submit().unwrap().is_retry() {}
    assert_eq!(arrived.wait(&ranks[1]).unwrap()[0].bytes().unwrap(), b"me");
}

fn a_runtime_with_a_progress_thread_ends_when_its_last_handle_goes<J: Job>() {
    for _ in 0..20 {
        let ranks = J::ranks_with(2, J::settings().progress(ProgressChoice::Thread));
        let ended = Counter::new();
        let waits =
            ranks[0].post_recv(Rank(1), vec![0; 1], Tag(1)).comp(&ended).try_submit().unwrap();
        assert!(waits.is_posted());
        let other = ranks[0].clone();
        drop(ranks);
        drop(other);
        assert_eq!(ended.failed(), 1, "what waits ends before the last handle is gone");
    }
}

fn a_device_is_drained_when_everything_that_was_sent_has_ended<J: Job>() {
    let ranks = J::pair();
    let [zero, one] = &ranks;
    let device = zero.default_device();
    assert!(zero.test_drained(device).unwrap());
    let waits =
        zero.post_recv(Rank(1), vec![0; 1], Tag(9)).comp(&Counter::new()).try_submit().unwrap();
    assert!(waits.is_posted());
    assert!(zero.test_drained(device).unwrap(), "a receive that waits does not count");
    let payload = pattern(4, 100_000);
    sent(&ranks, || zero.post_send(Rank(1), payload.clone(), Tag(1)).try_submit());
    assert!(!zero.test_drained(device).unwrap());
    assert!(zero.wait_drained(device, Duration::from_millis(20)).is_err());
    let arrived = Sink::keeping();
    one.post_recv(Rank(0), vec![0; 100_000], Tag(1)).comp(&arrived).submit().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| arrived.one(std::slice::from_ref(one)));
        zero.wait_drained(device, LIMIT).unwrap();
    });
    assert!(zero.test_drained(device).unwrap());
}

fn a_device_of_another_runtime_is_refused_where_it_should_be_drained<J: Job>() {
    let [zero, one] = &J::pair();
    let device = one.default_device();
    assert!(matches!(zero.test_drained(device), Err(ProgressError::Foreign)));
    let waited = zero.wait_drained(device, LIMIT);
    assert!(matches!(waited, Err(WaitError::Progress(ProgressError::Foreign))), "{waited:?}");
}

fn what_is_pending_is_told_in_words<J: Job>() {
    let ranks = J::pair();
    let [zero, one] = &ranks;
    assert!(zero.pending().operations.is_empty());
    let (ended, payload) = (Counter::new(), pattern(4, 100_000));
    let posted = |outcome: Result<Outcome, PostError>| assert!(outcome.unwrap().is_posted());
    posted(zero.post_recv(Rank(1), vec![0; 33], Tag(55)).comp(&ended).try_submit());
    posted(zero.post_send(Rank(1), payload, Tag(77)).comp(&ended).try_submit());
    sent(&ranks, || one.post_send(Rank(0), b"none waits", Tag(1)).try_submit());
    until(&ranks, || zero.pending().unexpected == 1);
    let text = zero.pending().to_string();
    assert!(text.contains("rank 0 of 2: 2 operations pending, 1 messages"), "{text}");
    // A receive from any rank and a message by rank and tag do not meet.
    posted(zero.post_recv(Rank::ANY, vec![0; 33], Tag(1)).comp(&ended).try_submit());
    let text = zero.pending().to_string();
    for line in [
        "receive, rank 1, tag 55, 33 B: waits for its message (Matching::RankTag)\n",
        "receive, any rank, tag 1, 33 B: waits for its message (Matching::TagOnly)\n",
        "message, rank 1, tag 1, 10 B: waits for its receive (Matching::RankTag)\n",
    ] {
        assert!(text.contains(line), "{text}");
    }
    assert!(
        text.contains("message that was offered, rank 1, tag 77, 100000 B: waits for its receive"),
        "{text}"
    );
    let engine = ranks.iter().map(|rank| rank.matching_engine().unwrap()).collect::<Vec<_>>();
    for tag in 0..20 {
        let send =
            || one.post_send(Rank(0), b"x", Tag(tag)).matching_engine(&engine[1]).try_submit();
        sent(&ranks, send);
    }
    until(&ranks, || zero.pending().unexpected == 21);
    let pending = zero.pending();
    assert_eq!(pending.messages.len(), 8);
    let text = pending.to_string();
    assert!(text.contains("1 B: waits for its receive (Matching::RankTag, engine 2)\n"), "{text}");
    assert!(text.ends_with("  and 13 more\n"), "{text}");
}
