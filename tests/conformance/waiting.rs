//! Threads that post, poll, and sleep.

use crate::support::over_each_transport;
use crate::support::*;
use carrack::settings::ProgressChoice;
use carrack::{CompQueue, Counter, Handler, Outcome, Rank, Runtime, Synchronizer, Tag, WaitError};
use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

over_each_transport!(
    four_threads_that_post_and_poll_one_device_deliver_each_message_once,
    four_threads_that_send_and_receive_meet_each_message_once,
    a_thread_that_sleeps_is_woken_by_a_message,
    a_thread_that_sleeps_is_woken_by_another_threads_progress,
    a_thread_that_sleeps_is_woken_by_a_post_that_ended_at_once,
    a_thread_that_waits_does_not_burn_its_core,
    a_queue_that_is_not_empty_gives_the_one_thread_that_takes_from_it_a_status,
    a_wait_ends_when_its_time_is_up,
    a_thread_that_keeps_runtimes_for_itself_ends_in_order,
);

/// Longer than any wake-up, and shorter than the longest sleep without a look around (500 ms).
const PROMPT: Duration = Duration::from_millis(200);

fn four_threads_that_post_and_poll_one_device_deliver_each_message_once<J: Job>() {
    const EACH: u64 = 2000;
    let ranks = J::pair();
    let seen: [Arc<Vec<AtomicU8>>; 2] =
        std::array::from_fn(|_| Arc::new((0..4 * EACH).map(|_| AtomicU8::new(0)).collect()));
    let count: [Arc<AtomicU64>; 2] = std::array::from_fn(|_| Arc::default());
    let names = [0, 1].map(|at| {
        let (seen, count) = (seen[at].clone(), count[at].clone());
        let handler = Handler::new(move |status| {
            let number = status.tag.0;
            assert_eq!(status.bytes().unwrap(), pattern(number, (number % 700) as usize));
            seen[number as usize].fetch_add(1, Ordering::Relaxed);
            count.fetch_add(1, Ordering::Relaxed);
        });
        ranks[at].register_comp(&handler).unwrap()
    });
    let ended = || count.iter().all(|count| count.load(Ordering::Relaxed) >= 4 * EACH);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (ranks, names) = (&ranks, &names);
            scope.spawn(move || {
                for at in 0..EACH {
                    let number = thread * EACH + at;
                    let message = pattern(number, (number % 700) as usize);
                    let from = (number % 2) as usize;
                    for from in [from, 1 - from] {
                        let mut am = ranks[from].post_am(
                            Rank(1 - from as u32),
                            &message[..],
                            names[1 - from],
                        );
                        am = am.tag(Tag(number));
                        loop {
                            let called = match number % 5 {
                                0 => am.try_submit(),
                                _ => am.submit().map(|()| Outcome::Posted),
                            };
                            match called {
                                Ok(Outcome::Retry(_))
                                | Err(carrack::PostError::BacklogFull { .. }) => {
                                    ranks.iter().for_each(|rank| _ = rank.progress().unwrap());
                                }
                                Ok(_) => break,
                                Err(error) => panic!("{error}"),
                            }
                        }
                    }
                    ranks[from].progress().unwrap();
                }
                while !ended() {
                    ranks.iter().for_each(|rank| _ = rank.progress().unwrap());
                    std::thread::yield_now();
                }
            });
        }
    });
    settle(&ranks);
    for seen in seen {
        assert!(seen.iter().all(|seen| seen.load(Ordering::Relaxed) == 1), "not each once");
    }
}

fn four_threads_that_send_and_receive_meet_each_message_once<J: Job>() {
    const EACH: u64 = 1000;
    let ranks = J::pair();
    let queue = CompQueue::new(8192);
    let got = AtomicU64::new(0);
    let sum = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..4_u64 {
            let (ranks, queue, got, sum) = (&ranks, &queue, &got, &sum);
            scope.spawn(move || {
                // All threads use one key, and each message meets the oldest receive.
                for at in 0..EACH {
                    let number = thread * EACH + at;
                    let mut recv = ranks[1].post_recv(Rank(0), vec![0; 300], Tag(1)).comp(queue);
                    recv.submit().unwrap();
                    let mut message = number.to_le_bytes().to_vec();
                    message.extend(pattern(number, (number % 290) as usize));
                    let mut send = ranks[0].post_send(Rank(1), &message[..], Tag(1));
                    while send.try_submit().unwrap().is_retry() {
                        ranks.iter().for_each(|rank| _ = rank.progress().unwrap());
                    }
                }
                while got.load(Ordering::Relaxed) < 4 * EACH {
                    ranks.iter().for_each(|rank| _ = rank.progress().unwrap());
                    while let Some(status) = queue.pop() {
                        let bytes = status.bytes().unwrap();
                        let (number, rest) = bytes.split_first_chunk().unwrap();
                        let number = u64::from_le_bytes(*number);
                        assert_eq!(rest, pattern(number, (number % 290) as usize));
                        sum.fetch_add(number, Ordering::Relaxed);
                        got.fetch_add(1, Ordering::Relaxed);
                    }
                    std::thread::yield_now();
                }
            });
        }
    });
    settle(&ranks);
    assert!(queue.is_empty());
    assert_eq!(got.load(Ordering::Relaxed), 4 * EACH);
    assert_eq!(sum.load(Ordering::Relaxed), (0..4 * EACH).sum::<u64>());
    assert_eq!(ranks[1].default_matching_engine().waiting(), (0, 0));
}

/// A thread that waits for `done` on `rank`; it tells its thread id first, and then how it went.
struct Waiter {
    thread: std::thread::JoinHandle<Result<(), WaitError>>,
    id: i32,
}

impl Waiter {
    fn start(rank: &Runtime, done: impl Fn() -> bool + Send + 'static) -> Self {
        let (tell, told) = mpsc::channel();
        let rank = rank.clone();
        let thread = std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get()).unwrap();
            rank.wait(done)
        });
        Self { thread, id: told.recv().unwrap() }
    }

    /// Returns once the kernel says that it sleeps, and has done so for a while.
    fn sleeps(&self) {
        let state = || {
            let stat =
                std::fs::read_to_string(format!("/proc/self/task/{}/stat", self.id)).unwrap();
            stat.rsplit_once(')').unwrap().1.trim_start().as_bytes()[0]
        };
        let mut asleep = 0;
        while asleep < 20 {
            asleep = if state() == b'S' { asleep + 1 } else { 0 };
            std::thread::yield_now();
        }
    }
}

/// Returns the time of the fastest wake-up. A lost one costs half a second each time, a slow
/// machine only now and then.
fn fastest(mut one: impl FnMut(u64) -> Duration) -> Duration {
    (0..4).map(&mut one).min().unwrap()
}

fn a_thread_that_sleeps_is_woken_by_a_message<J: Job>() {
    let ranks = J::pair_with(J::settings().spin(Duration::ZERO));
    let counter = Counter::new();
    let name = ranks[1].register_comp(&counter).unwrap();
    let took = fastest(|round| {
        let wanted = counter.clone();
        let waiter = Waiter::start(&ranks[1], move || wanted.get() > round);
        waiter.sleeps();
        let start = Instant::now();
        sent(&ranks[..1], || ranks[0].post_am(Rank(1), b"wake up", name).try_submit());
        waiter.thread.join().unwrap().unwrap();
        start.elapsed()
    });
    assert!(took < PROMPT, "{took:?}");
}

fn a_thread_that_sleeps_is_woken_by_another_threads_progress<J: Job>() {
    let ranks = J::pair_with(J::settings().spin(Duration::ZERO));
    let counter = Counter::new();
    let name = ranks[1].register_comp(&counter).unwrap();
    // Messages come on a second device, made after the sleeper has gone to sleep on the first
    // alone.
    let took = fastest(|round| {
        let wanted = counter.clone();
        let waiter = Waiter::start(&ranks[1], move || wanted.get() > round);
        waiter.sleeps();
        let [here, there] = [0, 1].map(|at: usize| ranks[at].device().build().unwrap());
        let mut am = ranks[0].post_am(Rank(1), b"wake up", name).device(&here);
        while am.try_submit().unwrap().is_retry() {
            ranks[0].progress_device(&here).unwrap();
            ranks[1].progress_device(&there).unwrap();
        }
        let start = Instant::now();
        while counter.get() == round {
            ranks[1].progress_device(&there).unwrap();
        }
        waiter.thread.join().unwrap().unwrap();
        start.elapsed()
    });
    assert!(took < PROMPT, "{took:?}");
}

fn a_thread_that_sleeps_is_woken_by_a_post_that_ended_at_once<J: Job>() {
    let ranks = J::pair_with(J::settings().spin(Duration::ZERO));
    for receives in [false, true] {
        let counter = Counter::new();
        let took = fastest(|round| {
            if receives {
                sent(&ranks, || ranks[0].post_send(Rank(1), b"early", Tag(1)).try_submit());
                until(&ranks, || ranks[1].default_matching_engine().waiting().0 == 1);
            }
            let wanted = counter.clone();
            let waiter = Waiter::start(&ranks[1], move || wanted.get() > round);
            waiter.sleeps();
            let start = Instant::now();
            let outcome = if receives {
                ranks[1].post_recv(Rank(0), vec![0; 5], Tag(1)).comp(&counter).submit()
            } else {
                posted_once(&ranks[1], &counter)
            };
            outcome.unwrap();
            waiter.thread.join().unwrap().unwrap();
            start.elapsed()
        });
        assert!(
            took < PROMPT,
            "{took:?} until a {} was noticed",
            if receives { "receive" } else { "send" }
        );
    }
}

fn posted_once(rank: &Runtime, counter: &Counter) -> Result<(), carrack::PostError> {
    rank.post_send(Rank(0), b"x", Tag(2)).comp(counter).submit()
}

fn a_thread_that_waits_does_not_burn_its_core<J: Job>() {
    let ranks = J::pair();
    let (start, stop) = (Instant::now(), AtomicBool::new(false));
    let burnt = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let before = burnt();
    let error =
        ranks[0].wait_for(Duration::from_secs(1), || stop.load(Ordering::Relaxed)).unwrap_err();
    let after = burnt();
    assert!(matches!(error, WaitError::TimedOut(_)), "{error}");
    assert!(start.elapsed() >= Duration::from_secs(1));
    let used = (after.tv_sec - before.tv_sec) * 1_000_000_000 + (after.tv_nsec - before.tv_nsec);
    assert!(used < 100_000_000, "{used} ns of a second");
}

/// The progress thread delivers, this thread takes. What a push that has not ended looks like, the
/// models of the queue try in every order.
fn a_queue_that_is_not_empty_gives_the_one_thread_that_takes_from_it_a_status<J: Job>() {
    let ranks = J::ranks_with(2, J::settings().progress(ProgressChoice::Thread));
    let inbox = CompQueue::new(16);
    let name = ranks[1].register_comp(&inbox).unwrap();
    for number in 0..2000 {
        sent(&ranks[..1], || {
            ranks[0].post_am(Rank(1), b"ahoy", name).tag(Tag(number)).try_submit()
        });
        ranks[1].wait(|| !inbox.is_empty()).unwrap();
        assert_eq!(inbox.len(), 1);
        assert_eq!(inbox.pop().expect("it was not empty").tag, Tag(number));
        assert!(inbox.is_empty());
    }
}

fn a_wait_ends_when_its_time_is_up<J: Job>() {
    let ranks = J::pair();
    for limit in [Duration::ZERO, Duration::from_millis(30)] {
        let start = Instant::now();
        assert!(matches!(
            ranks[0].wait_for(limit, || false),
            Err(WaitError::TimedOut(told)) if told == limit
        ));
        assert!(start.elapsed() >= limit);
    }
    ranks[0].wait_for(Duration::ZERO, || true).unwrap();
    let never = Synchronizer::new(1);
    assert!(!never.test());
}

/// Runtimes that a thread uses once more when it drops them: then its other thread-locals may be
/// gone.
struct Kept(Vec<Runtime>, Arc<AtomicU64>);

impl Drop for Kept {
    fn drop(&mut self) {
        let ranks = &self.0;
        sent(ranks, || ranks[0].post_send(Rank(1), b"last", Tag(2)).try_submit());
        until(ranks, || ranks[1].default_matching_engine().waiting().0 == 1);
        ranks[1].wait_for(Duration::from_millis(1), || false).unwrap_err();
        self.1.fetch_add(1, Ordering::SeqCst);
    }
}

thread_local! {
    static KEPT: RefCell<Option<Kept>> = const { RefCell::new(None) };
}

/// A message whose handler posts it again: each look finds something.
#[test]
fn a_wait_ends_when_its_time_is_up_also_where_messages_never_cease() {
    let _watchdog = Watchdog::over("an endless message");
    let rank = OverLoopback::ranks(1).remove(0);
    let name = Arc::new(OnceLock::new());
    let known = name.clone();
    let again = rank.handler(move |runtime, _| {
        runtime.post_am(Rank(0), b"again", *known.get().unwrap()).submit().unwrap();
    });
    let _ = name.set(rank.register_comp(&again).unwrap());
    rank.post_am(Rank(0), b"again", *name.get().unwrap()).submit().unwrap();
    let limit = Duration::from_millis(20);
    let waited = rank.wait_for(limit, || false);
    assert!(matches!(waited, Err(WaitError::TimedOut(span)) if span == limit), "{waited:?}");
}

fn a_thread_that_keeps_runtimes_for_itself_ends_in_order<J: Job>() {
    for progress in [ProgressChoice::Caller, ProgressChoice::Thread] {
        // The thread-local is made before the library's own, or after them.
        for is_first in [false, true] {
            let dropped = Arc::new(AtomicU64::new(0));
            let counts = dropped.clone();
            let thread = std::thread::spawn(move || {
                if is_first {
                    KEPT.with_borrow_mut(|_| {});
                }
                let ranks = J::ranks_with(2, J::settings().progress(progress));
                sent(&ranks, || ranks[0].post_send(Rank(1), b"first", Tag(1)).try_submit());
                let received = Synchronizer::new(1);
                let recv = ranks[1]
                    .post_recv(Rank(0), vec![0; 5], Tag(1))
                    .comp(&received)
                    .try_submit()
                    .unwrap();
                if let Outcome::Posted = recv {
                    until(&ranks, || received.test());
                }
                KEPT.set(Some(Kept(ranks, counts)));
            });
            thread.join().unwrap();
            assert_eq!(dropped.load(Ordering::SeqCst), 1, "the runtimes were not dropped");
        }
    }
}
