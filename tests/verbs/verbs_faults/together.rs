//! Short messages that go in one request, since their sender has said that more follow.

use crate::support::nics::{
    Side, bytes_of, fabric, identity, nic, options, submit, submit_with_more,
};
use crate::support::{Watchdog, pattern};
use carrack::transports::contract::{
    Armed, DownCause, Event, Header, Link, Payload, PeerId, Submit,
};
use carrack_simulators::nic::{Call, Config, Which};
use std::sync::Arc;

/// Two ranks, the first of which sends to the second.
struct GatherPair {
    // Before the devices that it is of.
    link: Arc<dyn Link>,
    sides: [Side; 2],
    sent: u64,
    got: u64,
    /// Payloads that the receiver keeps, if it does.
    kept: Option<Vec<Payload>>,
    down: Option<DownCause>,
}

impl GatherPair {
    fn new() -> Self {
        let fabric = fabric();
        let open =
            |me| Side::open(nic(Config::default(), &fabric), options(), identity(me, 2)).unwrap();
        let mut sides = [open(0), open(1)];
        let link = sides[0].device.connect(&sides[1].device.address(), PeerId(1)).unwrap();
        while !link.is_up() {
            sides.iter_mut().for_each(|side| drop(side.poll()));
        }
        Self { link, sides, sent: 0, got: 0, kept: None, down: None }
    }

    /// Sends one message, perhaps with word that more follow. Returns `false` if there is no room.
    fn send(&mut self, len: usize, more: bool) -> bool {
        let submit = if more { submit_with_more } else { submit };
        match submit(&self.link, [self.sent, len as u64], &pattern(self.sent, len)).unwrap() {
            Submit::Done => self.sent += 1,
            Submit::Busy(_) => return false,
            Submit::Posted => panic!("it is copied"),
        }
        true
    }

    /// Sends messages of which each says that more follow.
    fn gather(&mut self, count: u64) {
        for _ in 0..count {
            // The peer may have to open its send window again.
            while !self.send(8, true) {
                self.receive();
            }
        }
    }

    /// Polls the receiver once, and checks that what comes is whole, and in order.
    fn receive(&mut self) {
        for event in self.sides[1].poll() {
            match event {
                Event::Arrived { header: Header([number, len]), payload, .. } => {
                    assert_eq!(number, self.got);
                    assert!(
                        bytes_of(&payload) == pattern(number, len as usize),
                        "{number} is torn"
                    );
                    self.got += 1;
                    if let Some(kept) = &mut self.kept {
                        kept.push(payload);
                    }
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

    /// Polls the sender until everything has arrived.
    fn settle(&mut self) {
        while self.got < self.sent {
            self.sides[0].poll();
            self.receive();
        }
    }
}

#[test]
fn a_hundred_messages_go_in_two_requests_and_their_sender_need_not_poll() {
    let _watchdog = Watchdog::over("requests");
    // The third request does not come: a buffer holds some sixty of them.
    for more in [true, false] {
        let mut pair = GatherPair::new();
        pair.sides[0].faults().fail_call(Call::PostSend, Which::Nth(3), libc::EIO);
        let last = |number| number == 99;
        let all = (0..100).all(|number: u64| {
            let submit = if more && !last(number) { submit_with_more } else { submit };
            let sent = submit(&pair.link, [number, 8], &pattern(number, 8));
            pair.sent += u64::from(sent.is_ok());
            sent.is_ok()
        });
        assert_eq!(all, more);
        if all {
            pair.receive_until(100);
        }
    }
}

#[test]
fn what_waits_goes_with_the_next_message_or_poll() {
    let _watchdog = Watchdog::over("polls");
    let mut pair = GatherPair::new();
    for round in 1..=60 {
        pair.gather(9);
        match round % 3 {
            // Short, and so together with them; long, and so behind them.
            0 => {
                while !pair.send(8, false) {
                    pair.receive();
                }
            }
            1 => {
                while !pair.send(1000, false) {
                    pair.receive();
                }
            }
            _ => {
                while !pair.send(40, true) {
                    pair.receive();
                }
                pair.sides[0].poll();
            }
        }
        pair.receive_until(10 * round);
        pair.sides[0].poll();
    }
}

/// The receiver copies requests out of their packets while it has few packets.
#[test]
fn what_goes_together_arrives_when_the_receivers_packets_are_out() {
    let _watchdog = Watchdog::over("no packets");
    let mut pair = GatherPair::new();
    pair.kept = Some(Vec::new());
    let is_short = |pair: &GatherPair| {
        pair.kept.iter().flatten().any(|payload| matches!(payload, Payload::Aside(_)))
    };
    while !is_short(&pair) {
        pair.send(1000, false);
        pair.sides[0].poll();
        pair.receive();
    }
    pair.settle();
    for _ in 0..20 {
        pair.gather(30);
        pair.settle();
    }
    pair.kept = None;
    pair.gather(30);
    pair.settle();
}

#[test]
fn messages_of_all_lengths_arrive_whole_and_in_order() {
    let _watchdog = Watchdog::over("lengths");
    // How many say that more follow before one does not.
    for run in [1, 2, 5, 100, usize::MAX] {
        let mut pair = GatherPair::new();
        for number in 0..3000_usize {
            // Mostly short ones; a long one sends off those before it.
            let len = [0, 8, 40, 1, 39, 24, 8, 16, 41, 7, 8, 1000][number * number % 12];
            while !pair.send(len, number % run != run - 1) {
                pair.sides[0].poll();
                pair.receive();
            }
            // Now and then between two messages.
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
    let mut pair = GatherPair::new();
    for round in 1..=50 {
        loop {
            match pair.sides[0].device.arm() {
                Armed::Wait(_) => break,
                Armed::Ready => drop(pair.sides[0].poll()),
            }
        }
        pair.gather(10);
        // Though the sender does not poll.
        pair.receive_until(10 * round);
        pair.sides[0].device.disarm(true);
    }
}

#[test]
fn a_side_that_closes_has_sent_everything_before() {
    let _watchdog = Watchdog::over("closing");
    for closes in [false, true] {
        let mut pair = GatherPair::new();
        pair.gather(20);
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

/// Returns a link that takes nothing.
fn link_to_nowhere() -> Arc<dyn Link> {
    struct Nowhere;
    impl Link for Nowhere {
        fn submit(
            &self,
            _: carrack::transports::contract::Op<'_>,
        ) -> Result<Submit, carrack::transports::contract::SubmitError> {
            unreachable!("no caller sends")
        }

        fn is_up(&self) -> bool {
            false
        }
    }
    Arc::new(Nowhere)
}

#[test]
fn a_queue_that_is_full_for_a_moment_loses_nothing_of_what_waits() {
    let _watchdog = Watchdog::over("full queues");
    let mut pair = GatherPair::new();
    for round in 0..200 {
        pair.sides[0].faults().fail_call(Call::PostSend, Which::Nth(1 + round % 8), libc::ENOMEM);
        for number in 0..70 {
            // The longest fill a buffer sooner.
            while !pair.send(if number % 3 == 0 { 40 } else { 8 }, number % 7 != 0) {
                pair.sides[0].poll();
                pair.receive();
            }
        }
        pair.settle();
    }
    assert_eq!(pair.got, 200 * 70);
}

#[test]
fn what_waits_and_cannot_go_ends_its_connection_with_the_reason() {
    let _watchdog = Watchdog::over("refused requests");
    let mut pair = GatherPair::new();
    pair.gather(10);
    pair.sides[0].faults().fail_call(Call::PostSend, Which::Nth(1), libc::EIO);
    let cause = loop {
        if let Some(Event::PeerDown { cause, .. }) = pair.sides[0].poll().pop() {
            break cause.to_string();
        }
    };
    assert!(cause.contains("takes no request"), "{cause}");
}
