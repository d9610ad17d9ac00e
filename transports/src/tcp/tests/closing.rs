//! Devices that close while their peers read, close too, or do nothing.

use super::*;

/// Closes two devices at once, with as many messages of this length unsent on each side: more than
/// the sockets hold.
fn close_both(packets: usize, messages: u64, len: usize) {
    let [mut here, mut there] = [0, 1].map(|me| TestRank::with(me, packets, 64 << 20));
    let (out, back) = (here.connect(&there, 1), there.connect(&here, 0));
    bring_up(&[&out, &back], &mut [&mut here, &mut there]);
    for number in 0..messages {
        for link in [&out, &back] {
            // The flusher may hold the link at this moment.
            while !send(link, number, len) {}
        }
    }
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| here.device.close());
        there.device.close();
    });
    assert!(begin.elapsed() < TIMEOUT / 2, "{:?}", begin.elapsed());
}

#[test]
fn two_devices_that_close_at_once_with_much_unsent_do_not_wait_for_each_other() {
    close_both(usize::MAX, 6000, PACKET);
}

#[test]
fn two_devices_that_close_at_once_while_their_users_keep_all_packets_do_not_take_long() {
    close_both(0, 24_000, 1000);
}

#[test]
fn a_device_that_closes_does_not_dial_one_that_has_closed() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let (out, back) = (here.connect(&there, 1), there.connect(&here, 0));
    bring_up(&[&out, &back], &mut [&mut here, &mut there]);
    here.device.close();
    // The kernel of a device that is closed answers by a reset.
    while !send(&back, 0, 8) {}
    std::thread::sleep(Duration::from_millis(10));
    let ends = there.device.shared.outgoing.lock().clone();
    let dialled = || ends.iter().flatten().map(|end| end.sending.lock().attempts).sum::<u64>();
    let before = dialled();
    there.device.close();
    assert_eq!(dialled(), before);
}

#[test]
fn a_peer_that_reads_nothing_keeps_no_other_from_the_end_of_a_device_that_closes() {
    // Longer than anything here takes.
    let closes = TestRank::within(Duration::from_secs(40), 0, usize::MAX, 64 << 20);
    let (mut closes, mut stuck, mut other) = (closes, TestRank::new(1), TestRank::new(2));
    let [to_stuck, to_other] =
        [(&stuck, 1), (&other, 2)].map(|(to, peer)| closes.connect(to, peer));
    bring_up(&[&to_stuck, &to_other], &mut [&mut closes, &mut stuck, &mut other]);
    // More than the kernels of both sides hold.
    for number in 0..8000 {
        // The flusher may hold the link at this moment.
        while !send(&to_stuck, number, PACKET) {}
    }
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| closes.device.close());
        let start = Instant::now();
        while !other.poll().iter().any(is_closed) {
            assert!(start.elapsed() < Duration::from_secs(20), "its end is not told");
        }
        assert!(!closing.is_finished(), "nothing was left for the peer that reads nothing");
        while !closing.is_finished() {
            stuck.poll();
        }
    });
}

#[test]
fn a_device_whose_peer_takes_nothing_does_not_delay_the_end_of_another() {
    // Longer than anything here takes.
    let delayed = TestRank::within(Duration::from_secs(40), 0, usize::MAX, 64 << 20);
    let (mut delayed, mut closes) = (delayed, TestRank::new(0));
    let (mut stuck, mut other) = (TestRank::new(1), TestRank::new(2));
    let (to_stuck, to_other) = (delayed.connect(&stuck, 1), closes.connect(&other, 2));
    bring_up(&[&to_stuck], &mut [&mut delayed, &mut stuck]);
    bring_up(&[&to_other], &mut [&mut closes, &mut other]);
    // More than the kernels of both sides hold.
    (0..8000).for_each(|number| while !send(&to_stuck, number, PACKET) {});
    while !send(&to_other, 0, PACKET) {}
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| close_all(&[&*delayed.device, &*closes.device]));
        let start = Instant::now();
        let mut came = Vec::new();
        while !came.iter().any(is_closed) {
            came.extend(other.poll());
            assert!(start.elapsed() < Duration::from_secs(20), "its end is not told");
        }
        assert!(came.iter().any(|event| arrival(event).is_some()), "{came:?}");
        assert!(!closing.is_finished(), "nothing was left for the peer that reads nothing");
        while !closing.is_finished() {
            stuck.poll();
        }
    });
}

#[test]
fn two_ranks_with_two_devices_each_that_close_at_once_do_not_wait_for_each_other() {
    let pair = || [0, 1].map(|me| TestRank::with(me, usize::MAX, 64 << 20));
    let [[mut one, mut to_one], [mut to_two, mut two]] = [pair(), pair()];
    // On one device this rank has much to send, on the other one that rank.
    let (out, from_one) = (one.connect(&to_one, 1), to_one.connect(&one, 0));
    let (back, from_two) = (two.connect(&to_two, 0), to_two.connect(&two, 1));
    bring_up(&[&out, &from_one], &mut [&mut one, &mut to_one]);
    bring_up(&[&back, &from_two], &mut [&mut to_two, &mut two]);
    for link in [&out, &back] {
        (0..6000).for_each(|number| while !send(link, number, PACKET) {});
    }
    let begin = Instant::now();
    std::thread::scope(|scope| {
        scope.spawn(|| close_all(&[&*one.device, &*to_two.device]));
        close_all(&[&*to_one.device, &*two.device]);
    });
    assert!(begin.elapsed() < TIMEOUT / 2, "{:?}", begin.elapsed());
}

#[test]
fn all_comes_to_a_peer_that_takes_it_slowly_from_a_device_that_closes() {
    const MESSAGES: u64 = 8000;
    let limit = Duration::from_secs(1);
    let mut closes = TestRank::within(limit, 0, usize::MAX, 64 << 20);
    let mut slow = TestRank::new(1);
    let link = closes.connect(&slow, 1);
    bring_up(&[&link], &mut [&mut closes, &mut slow]);
    (0..MESSAGES).for_each(|number| while !send(&link, number, PACKET) {});
    let start = Instant::now();
    let mut came = Vec::new();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| closes.device.close());
        // A part at a time, until the device has waited longer than for one that takes nothing.
        while start.elapsed() < 2 * limit {
            (0..50).for_each(|_| came.extend(slow.poll()));
            std::thread::sleep(limit / 8);
        }
        assert!(!closing.is_finished(), "nothing was left");
        while !came.last().is_some_and(is_down) {
            came.extend(slow.poll());
            assert!(start.elapsed() < Duration::from_secs(60), "its end is not told");
        }
    });
    let numbers = came.iter().filter_map(arrival).map(|it| it.1);
    assert!(numbers.eq(0..MESSAGES), "{} came, then {:?}", came.len(), came.last());
}

#[test]
fn a_peer_that_takes_nothing_is_given_up_while_another_takes_bytes() {
    const MESSAGES: u64 = 8000;
    let mut closes = TestRank::within(Duration::from_secs(2), 0, usize::MAX, 64 << 20);
    let (mut slow, mut stuck) = (TestRank::new(1), TestRank::new(2));
    let [to_slow, to_stuck] = [(&slow, 1), (&stuck, 2)].map(|(to, peer)| closes.connect(to, peer));
    bring_up(&[&to_slow, &to_stuck], &mut [&mut closes, &mut slow, &mut stuck]);
    for link in [&to_slow, &to_stuck] {
        (0..MESSAGES).for_each(|number| while !send(link, number, PACKET) {});
    }
    let stuck_end = closes.device.shared.link(1).unwrap();
    assert_eq!(stuck_end.peer, PeerId(2));
    let start = Instant::now();
    let mut came = Vec::new();
    std::thread::scope(|scope| {
        let closing = scope.spawn(|| closes.device.close());
        while !stuck_end.has_ended() {
            (0..20).for_each(|_| came.extend(slow.poll()));
            std::thread::sleep(Duration::from_millis(250));
        }
        assert!(!closing.is_finished(), "nothing was left for the slow peer");
        while !came.last().is_some_and(is_down) {
            came.extend(slow.poll());
            assert!(start.elapsed() < Duration::from_secs(60), "its end is not told");
        }
    });
    let numbers = came.iter().filter_map(arrival).map(|it| it.1);
    assert!(numbers.eq(0..MESSAGES), "{} came, then {:?}", came.len(), came.last());
}

#[test]
fn a_device_that_has_closed_is_not_reached_where_a_forked_child_has_its_listener() {
    let mut here = TestRank::new(0);
    let there = TestRank::new(1);
    let _childs = there.device.polling.lock().listener.as_ref().unwrap().try_clone().unwrap();
    there.device.close();
    let start = Instant::now();
    let _link = here.connect(&there, 1);
    while !here.poll().iter().any(is_down) {
        assert!(start.elapsed() < TIMEOUT / 2, "no side says that the peer is gone");
        std::thread::sleep(Duration::from_micros(100));
    }
}

#[test]
fn a_device_that_closes_hangs_up_on_those_that_have_not_proved_themselves() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let _link = here.device.connect(&there.device.address(), PeerId(1)).unwrap();
    // It is taken in, and says no more.
    here.poll_for(Duration::from_millis(50));
    there.poll_for(Duration::from_millis(5));
    there.device.close();
    let start = Instant::now();
    while !here.poll().iter().any(is_down) {
        assert!(start.elapsed() < TIMEOUT / 2, "no side says that the peer is gone");
    }
}

#[test]
fn a_device_that_has_closed_tells_of_no_peers_end() {
    let [mut here, mut there] = [0, 1].map(TestRank::new);
    let (out, back) = (here.connect(&there, 1), there.connect(&here, 0));
    bring_up(&[&out, &back], &mut [&mut here, &mut there]);
    here.device.close();
    while !send(&back, 0, 8) {}
    std::thread::sleep(Duration::from_millis(10));
    there.device.close();
    let events = there.poll_for(Duration::from_millis(20));
    assert!(!events.iter().any(|event| matches!(event, Event::PeerDown { .. })), "{events:?}");
}

#[test]
fn messages_of_a_device_that_closes_come_to_a_peer_that_has_dropped_its_own_link() {
    const MESSAGES: u64 = 6000;
    let [mut here, mut there] = [0, 1].map(|me| TestRank::with(me, usize::MAX, 64 << 20));
    let (out, back) = (here.connect(&there, 1), there.connect(&here, 0));
    bring_up(&[&out, &back], &mut [&mut here, &mut there]);
    until_shared(&mut [&mut here, &mut there]);
    // More than the sockets hold.
    (0..MESSAGES).for_each(|number| while !send(&out, number, PACKET) {});
    drop(back);
    let came = close_while_polled(&here, &mut there, false);
    let numbers: Vec<_> = came.iter().filter_map(arrival).map(|it| it.1).collect();
    assert!(numbers.iter().copied().eq(0..MESSAGES), "{} came, {:?}", numbers.len(), came.last());
}
