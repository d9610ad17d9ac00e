//! Short messages that go in one request: what is sent to a peer between two polls, beyond the first few.

use crate::ground::{Side, bytes_of, fabric, identity, nic, options, submit};
use crate::support::{Watchdog, pattern};
use carrack::transports::contract::{Armed, DownCause, Event, Header, Link, PeerId, Submit};
use carrack::transports::verbs::Options;
use carrack::transports::verbs::simulated::{Call, Config, Which};
use std::sync::Arc;

/// Two ranks, the first of which sends to the second.
struct Pair {
    // Before the devices that it is of.
    link: Arc<dyn Link>,
    sides: [Side; 2],
    sent: u64,
    got: u64,
    down: Option<DownCause>,
}

impl Pair {
    fn new(burst: u32) -> Self {
        let fabric = fabric();
        let open = |me| {
            let options = Options { burst, ..options() };
            Side::open(nic(Config::default(), &fabric), options, identity(me, 2)).unwrap()
        };
        let mut sides = [open(0), open(1)];
        let link = sides[0].device.connect(&sides[1].device.address(), PeerId(1)).unwrap();
        while !link.is_up() {
            sides.iter_mut().for_each(|side| drop(side.poll()));
        }
        Self { link, sides, sent: 0, got: 0, down: None }
    }

    /// Sends one message. Whether there was room.
    fn send(&mut self, len: usize) -> bool {
        match submit(&self.link, [self.sent, len as u64], &pattern(self.sent, len)).unwrap() {
            Submit::Done => self.sent += 1,
            Submit::Busy(_) => return false,
            Submit::Posted => panic!("it is copied"),
        }
        true
    }

    fn burst(&mut self, count: u64) {
        for _ in 0..count {
            assert!(self.send(8));
        }
    }

    /// The receiver polls once. What comes is whole, and in order.
    fn receive(&mut self) {
        for event in self.sides[1].poll() {
            match event {
                Event::Arrived { header: Header([number, len]), payload, .. } => {
                    assert_eq!(number, self.got);
                    assert!(bytes_of(&payload) == pattern(number, len as usize), "{number} is torn");
                    self.got += 1;
                }
                Event::PeerDown { cause, .. } => self.down = Some(cause),
                Event::Connected { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn receive_until(&mut self, count: u64) {
        while self.got < count {
            self.receive();
        }
    }

    /// Everything arrives if the sender polls.
    fn settle(&mut self) {
        while self.got < self.sent {
            self.sides[0].poll();
            self.receive();
        }
    }
}

#[test]
fn the_first_of_a_burst_go_at_once_and_the_others_in_one_request() {
    let _watchdog = Watchdog::over("bursts");
    // The seventh request does not come: a hundred messages are the four that go at once, and two requests of what a
    // buffer holds, some 60 of them.
    for (burst, ends) in [(4, false), (u32::MAX, true)] {
        let mut pair = Pair::new(burst);
        pair.sides[0].faults().fail_call(Call::PostSend, Which::Nth(7), libc::EIO);
        let all = (0..100).all(|number: u64| {
            let sent = submit(&pair.link, [number, 8], &pattern(number, 8));
            pair.sent += u64::from(sent.is_ok());
            sent.is_ok()
        });
        assert_eq!(all, !ends, "burst {burst}");
        if !ends {
            pair.receive_until(4);
            pair.settle();
        }
    }
}

#[test]
fn what_waits_goes_with_the_next_poll_or_when_it_is_sent_off() {
    let _watchdog = Watchdog::over("polls");
    let mut pair = Pair::new(4);
    for round in 0..20 {
        pair.burst(10);
        pair.receive_until(10 * round + 4);
        if round % 2 == 0 {
            pair.sides[0].device.send_off();
        } else {
            pair.sides[0].poll();
        }
        pair.receive_until(10 * round + 10);
        pair.sides[0].poll();
    }
}

#[test]
fn messages_of_all_lengths_in_bursts_arrive_whole_and_in_order() {
    let _watchdog = Watchdog::over("lengths");
    for burst in [0, 1, 4, 30] {
        let mut pair = Pair::new(burst);
        for number in 0..3000_usize {
            // Mostly short ones; a long one sends off those before it.
            let len = [0, 8, 40, 1, 39, 24, 8, 16, 41, 7, 8, 1000][number * number % 12];
            while !pair.send(len) {
                pair.sides[0].poll();
                pair.receive();
            }
            // Now and then in the midst of it.
            if number % 50 == 0 {
                pair.sides[0].poll();
            }
            if number % 17 == 0 {
                pair.receive();
            }
        }
        pair.settle();
        assert_eq!(pair.got, 3000);
    }
}

#[test]
fn nothing_waits_for_a_poller_that_sleeps() {
    let _watchdog = Watchdog::over("sleepers");
    let mut pair = Pair::new(4);
    for round in 1..=50 {
        loop {
            match pair.sides[0].device.arm() {
                Armed::Wait(_) => break,
                Armed::Ready => drop(pair.sides[0].poll()),
            }
        }
        pair.burst(10);
        // Though the sender does not poll.
        pair.receive_until(10 * round);
        pair.sides[0].device.disarm();
    }
}

#[test]
fn whoever_closes_has_sent_everything_before() {
    let _watchdog = Watchdog::over("closing");
    for closes in [false, true] {
        let mut pair = Pair::new(4);
        pair.burst(20);
        std::thread::scope(|scope| {
            let (device, link) = (pair.sides[0].device.clone(), pair.link.clone());
            scope.spawn(move || {
                if closes {
                    device.close()
                }
            });
            if !closes {
                pair.link = link_to_nowhere();
                drop(link);
            }
            while pair.down.is_none() {
                pair.receive();
                if !closes {
                    pair.sides[0].poll();
                }
            }
        });
        assert_eq!((pair.got, pair.down), (20, Some(DownCause::Closed)));
    }
}

/// A link that takes nothing.
fn link_to_nowhere() -> Arc<dyn Link> {
    struct Nowhere;
    impl Link for Nowhere {
        fn submit(
            &self,
            _: carrack::transports::contract::Op<'_>,
        ) -> Result<Submit, carrack::transports::contract::SubmitError> {
            unreachable!("nobody sends")
        }

        fn is_up(&self) -> bool {
            false
        }
    }
    Arc::new(Nowhere)
}

#[test]
fn a_queue_that_is_full_for_a_moment_loses_nothing_of_a_burst() {
    let _watchdog = Watchdog::over("full queues");
    let mut pair = Pair::new(4);
    for round in 0..200 {
        pair.sides[0].faults().fail_call(Call::PostSend, Which::Nth(1 + round % 8), libc::ENOMEM);
        for number in 0..70 {
            // The longest fill a buffer sooner.
            while !pair.send(if number % 3 == 0 { 40 } else { 8 }) {
                pair.sides[0].poll();
                pair.receive();
            }
        }
        pair.settle();
    }
    assert_eq!(pair.got, 200 * 70);
}

#[test]
fn a_burst_that_cannot_go_ends_its_connection_with_the_reason() {
    let _watchdog = Watchdog::over("refused bursts");
    let mut pair = Pair::new(0);
    pair.burst(10);
    pair.sides[0].faults().fail_call(Call::PostSend, Which::Nth(1), libc::EIO);
    let cause = loop {
        if let Some(Event::PeerDown { cause, .. }) = pair.sides[0].poll().pop() {
            break cause.to_string();
        }
    };
    assert!(cause.contains("takes no request"), "{cause}");
}
