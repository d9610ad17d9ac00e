//! The transport contract, of threads that sleep: none sleeps over a message because another one
//! got up.

use crate::contract::{Side, am, bring_up};
use crate::support::over_each_transport;
use crate::support::*;
use carrack::transports::contract::{Armed, Batch, Link, Polled, Submit};
use carrack_simulators::nic::go_round;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

over_each_transport!(
    a_thread_that_gets_up_and_takes_a_message_leaves_others_to_be_woken_by_the_next,
    a_thread_that_only_gets_up_does_not_silence_what_was_rung_for_the_next_sleeper,
);

/// Returns `true` if the descriptor is readable by now, or within a time after which a sleeper
/// would have been woken.
fn is_woken(fd: BorrowedFd<'_>, within: Duration) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
    let limit = Timespec { tv_sec: within.as_secs() as i64, tv_nsec: within.subsec_nanos().into() };
    rustix::event::poll(&mut fds, Some(&limit)).unwrap() == 1
}

fn pair<J: Job>() -> (Side, Side, Arc<dyn Link>) {
    let [mut here, mut there] = [0, 1].map(Side::new::<J>);
    let link = here.connect(&there, 1);
    bring_up(&link, &mut [&mut here, &mut there]);
    (here, there, link)
}

/// Sends a message that has arrived when this returns, except over a real NIC.
fn send<J: Job>(side: &mut Side, link: &Arc<dyn Link>) {
    while am(link, 0, b"wake up") != Ok(Submit::Done) {
        side.poll();
    }
    if J::IS_RDMA {
        side.poll();
        go_round();
    }
}

fn a_thread_that_gets_up_and_takes_a_message_leaves_others_to_be_woken_by_the_next<J: Job>() {
    let (mut here, mut there, link) = pair::<J>();
    for round in 0..20 {
        while !there.poll().is_empty() {}
        let device = there.device.clone();
        // Two threads go to sleep, as far as the device can tell.
        let Armed::Wait(fd) = device.arm() else { continue };
        let Armed::Wait(_) = device.arm() else { panic!("nothing has come since") };
        send::<J>(&mut here, &link);
        assert!(is_woken(fd, LIMIT / 10), "round {round}: not woken by the first message");
        // One of them gets up, takes the message, and makes no progress from then on.
        device.disarm(true);
        let start = Instant::now();
        while there.poll().is_empty() {
            assert!(start.elapsed() < LIMIT / 10);
        }
        for _ in 0..10_000 {
            assert!(there.poll().is_empty());
        }
        send::<J>(&mut here, &link);
        assert!(
            is_woken(fd, LIMIT / 10),
            "round {round}: the other one sleeps over the second message"
        );
        device.disarm(true);
        let start = Instant::now();
        while there.poll().is_empty() {
            assert!(start.elapsed() < LIMIT / 10);
        }
    }
    // When all are up, and have looked, nothing rings any more.
    let device = there.device.clone();
    let is_silent = (0..1000).any(|_| {
        while there.device.poll(&mut there.batch, &mut |batch: &mut Batch| _ = batch.drain())
            == Polled::Some
        {}
        match device.arm() {
            Armed::Ready => false,
            Armed::Wait(fd) => {
                let rings = is_woken(fd, Duration::ZERO);
                device.disarm(true);
                !rings
            }
        }
    });
    assert!(is_silent, "threads are woken for ever");
}

fn a_thread_that_only_gets_up_does_not_silence_what_was_rung_for_the_next_sleeper<J: Job>() {
    let (mut here, mut there, link) = pair::<J>();
    let device = there.device.clone();
    let stop = AtomicBool::new(false);
    let mut slept = 0;
    std::thread::scope(|scope| {
        // It goes to sleep and gets up again, and never polls: what it waits for has come.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                if let Armed::Wait(_) = device.arm() {
                    device.disarm(true);
                }
            }
        });
        let start = Instant::now();
        let mut all_woken = true;
        // On a machine where the two threads take turns it sleeps seldom.
        while all_woken && slept < 1000 && (slept < 10 || start.elapsed() < Duration::from_secs(1))
        {
            assert!(start.elapsed() < LIMIT / 2, "it slept {slept} times only");
            while there.device.poll(&mut there.batch, &mut |batch: &mut Batch| _ = batch.drain())
                == Polled::Some
            {}
            let Armed::Wait(fd) = device.arm() else { continue };
            slept += 1;
            send::<J>(&mut here, &link);
            // The other one gets through what it was doing when the message came.
            std::thread::sleep(Duration::from_micros(200));
            all_woken = is_woken(fd, Duration::from_secs(10));
            device.disarm(true);
        }
        stop.store(true, Ordering::Relaxed);
        assert!(all_woken, "sleeper {slept} is not woken by a message that is there");
    });
}
