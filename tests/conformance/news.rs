//! The end of a rank becomes known on one device, while another one has its last messages.

use crate::support::hooked::{BootstrapCall, start_hooked};
use crate::support::over_each_transport;
use crate::support::sink::Sink;
use crate::support::*;
use carrack::bootstrap::{BootstrapError, Departure};
use carrack::{Rank, Tag};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

over_each_transport!(
    messages_that_have_come_are_not_overtaken_by_news_on_a_device_without_a_link,
    a_peer_that_ends_is_noticed_within_few_calls_though_a_device_was_not_used,
);

fn messages_that_have_come_are_not_overtaken_by_news_on_a_device_without_a_link<J: Job>() {
    const SENT: u64 = 40;
    let mut job = unstarted(2).into_iter();
    let is_killed = Arc::new(AtomicBool::new(false));
    let is_told = is_killed.clone();
    let zero = start_hooked(job.next().unwrap(), J::settings(), move |call| {
        match call == BootstrapCall::Get && is_told.load(Ordering::SeqCst) {
            true => Err(BootstrapError::RankGone { rank: 1, how: Departure::Killed(9) }),
            false => Ok(()),
        }
    });
    let ranks = [zero, start(job.next().unwrap(), J::settings())];
    connect(&ranks);
    let [zero, one] = ranks;
    let second = zero.device().build().unwrap();
    let (received, never) = (Sink::keeping(), Sink::keeping());
    for number in 0..SENT {
        let recv = zero.post_recv(Rank(1), vec![0; 8], Tag(number));
        recv.comp(&received).submit().unwrap();
    }
    for number in 0..SENT {
        one.post_send(Rank(0), &number.to_le_bytes(), Tag(number)).submit().unwrap();
        one.progress_all().unwrap();
    }
    let mut send = zero.post_send(Rank(1), vec![0; 8], Tag(0)).device(&second).comp(&never);
    send.submit().unwrap();
    is_killed.store(true, Ordering::SeqCst);
    until(&[], || {
        zero.progress_device(&second).unwrap();
        never.count() == 1
    });
    assert!(never.take().pop().unwrap().error.is_some());
    assert!(zero.peer_down(Rank(1)).is_none(), "its link has not told yet");
    let ranks = [zero, one];
    until(&ranks, || received.count() == SENT as usize);
    assert!(received.take().into_iter().all(|status| status.error.is_none()));
    let [zero, one] = ranks;
    drop(one);
    until(std::slice::from_ref(&zero), || zero.peer_down(Rank(1)).is_some());
}

/// Progress looks for it at intervals of time, since a program may seldom call progress.
fn a_peer_that_ends_is_noticed_within_few_calls_though_a_device_was_not_used<J: Job>() {
    let ranks = J::pair();
    connect(&ranks);
    let [zero, one] = ranks;
    let _second = zero.device().build().unwrap();
    let received = Sink::keeping();
    zero.post_recv(Rank(1), vec![0; 8], Tag(1)).comp(&received).submit().unwrap();
    drop(one);
    let mut calls = 0;
    while received.count() == 0 {
        zero.progress_all().unwrap();
        std::thread::sleep(Duration::from_millis(5));
        calls += 1;
        assert!(calls < 1000, "it ended {calls} calls ago");
    }
    assert!(received.take().pop().unwrap().error.is_some());
}
