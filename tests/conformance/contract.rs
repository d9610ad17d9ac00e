//! The transport contract, below the runtime: the rules of `carrack_transports::contract`, one by
//! one.

use crate::support::over_each_transport;
use crate::support::*;
use carrack::settings::TransportChoice;
use carrack::transports::contract::{
    AddressBlob, Armed, Batch, Busy, Device, Domain, DownCause, Event, Header, Identity, Link, Op,
    Payload, PeerId, Polled, Reach, Submit, SubmitError, Transport,
};
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::transports::mem::GpuAllocator;
use carrack::transports::mem::{HostAllocator, MemMut, MemRef, PacketPool, copy::copy_now};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use carrack_transports::loopback::Loopback;
use carrack_transports::shm::{Geometry, Shm};
use carrack_transports::tcp::{Tcp, TcpOptions};
use carrack_transports::verbs::{Rdma, VerbsOptions};
use rustix::event::{PollFd, PollFlags, Timespec};
use std::sync::Arc;
use std::time::{Duration, Instant};

over_each_transport!(
    a_link_connects_without_blocking_and_says_when_it_is_up,
    messages_of_a_link_arrive_in_order_whole_and_with_their_headers,
    a_batch_is_never_filled_beyond_its_limit_and_nothing_is_skipped,
    the_end_of_a_peer_waits_for_room_in_the_batch,
    a_link_whose_receiver_stands_still_is_busy_and_goes_on_later,
    everything_that_was_sent_arrives_before_the_end_is_told_once,
    what_was_sent_arrives_before_the_end_also_when_links_lead_both_ways,
    a_link_that_is_dropped_lets_the_receiver_know,
    a_device_that_closes_is_told_to_those_who_send_to_it,
    a_caller_s_mistake_is_an_error_of_the_call,
    an_address_of_no_device_is_refused,
    what_a_peer_sent_before_it_went_comes_also_when_it_is_looked_for_too_late,
    only_one_thread_polls_at_a_time,
    a_sleeping_thread_is_woken_by_a_message_and_never_misses_one,
);

fn transport(choice: TransportChoice) -> Box<dyn Transport> {
    match choice {
        TransportChoice::Loopback => Box::new(Loopback::new(4096)),
        TransportChoice::Shm => {
            Box::new(Shm::new(Geometry { slots: 16, chunks: 4, chunk_size: 4096 }))
        }
        TransportChoice::VerbsSimulated => {
            Box::new(carrack_simulators::nic::transport(verbs_options()))
        }
        TransportChoice::Verbs => Box::new(Rdma::new(verbs_options())),
        TransportChoice::Tcp => {
            let options = TcpOptions { packet_size: 4096, window: 1024, ..Default::default() };
            Box::new(Tcp::new(options))
        }
        other => panic!("say here how {other:?} is opened"),
    }
}

/// Returns options as small as those of the other transports.
fn verbs_options() -> VerbsOptions {
    VerbsOptions { packet_size: 4096, receives: 32, ..VerbsOptions::default() }
}

/// A rank of a job of three, with one device.
pub(super) struct Side {
    pub(super) device: Arc<dyn Device>,
    pub(super) domain: Arc<dyn Domain>,
    pub(super) batch: Batch,
}

impl Side {
    pub(super) fn new<J: Job>(me: u32) -> Self {
        Self::with::<J>(me, PacketPool::new(Arc::new(HostAllocator), 4096, 64), 8)
    }

    fn with<J: Job>(me: u32, pool: PacketPool, limit: usize) -> Self {
        let transport = transport(J::TRANSPORT);
        assert_eq!(transport.name(), J::NAME);
        let mut devices = transport.devices().unwrap();
        let info = devices.remove(me as usize % devices.len());
        let identity = Identity { me: PeerId(me), ranks: 3, secret: [9; 16] };
        let domain = transport.open(&info, identity).unwrap();
        let device = domain.device(Arc::new(pool)).unwrap();
        Self { device, domain, batch: Batch::new(limit) }
    }

    pub(super) fn poll(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let polled = self
            .device
            .poll(&mut self.batch, &mut |batch: &mut Batch| events.extend(batch.drain()));
        assert_eq!(polled == Polled::Some, !events.is_empty());
        events
    }

    pub(super) fn connect(&self, to: &Self, peer: u32) -> Arc<dyn Link> {
        self.device.connect(&to.device.address(), PeerId(peer)).unwrap()
    }
}

/// Polls both until `done` has seen what it wants among the events of each.
fn poll_until(sides: &mut [&mut Side], mut done: impl FnMut(usize, Event) -> bool) {
    let start = Instant::now();
    loop {
        #[allow(clippy::needless_range_loop, reason = "the number is used for more than the index")]
        for at in 0..sides.len() {
            let mut ended = false;
            for event in sides[at].poll() {
                ended |= done(at, event);
            }
            if ended {
                return;
            }
        }
        assert!(start.elapsed() < LIMIT / 2, "it does not come");
        std::thread::yield_now();
    }
}

/// Polls until the link is up and that has been told.
pub(super) fn bring_up(link: &Arc<dyn Link>, sides: &mut [&mut Side]) {
    let start = Instant::now();
    let mut quiet = 0;
    while quiet < 100 {
        // The poll that finds the link up may leave its event to the next one.
        quiet = if link.is_up() { quiet + 1 } else { 0 };
        for side in sides.iter_mut() {
            for event in side.poll() {
                assert!(matches!(event, Event::Connected { .. }), "{event:?}");
                quiet = 0;
            }
        }
        assert!(start.elapsed() < LIMIT / 2);
    }
}

pub(super) fn am(link: &Arc<dyn Link>, number: u64, bytes: &[u8]) -> Result<Submit, SubmitError> {
    link.submit(Op::AmCopied { header: Header([number, !number]), bytes: MemRef::host(bytes) })
}

fn bytes_of(payload: &Payload) -> Vec<u8> {
    let mut bytes = vec![0; payload.len()];
    copy_now(MemMut::host(&mut bytes), payload.view()).unwrap();
    bytes
}

fn size(number: u64) -> usize {
    [0, 1, 8, 40, 41, 208, 209, 4095, 4096][number as usize % 9]
}

#[track_caller]
fn assert_message(event: &Event, from: u32, number: u64) {
    let Event::Arrived { from: who, header, payload, .. } = event else { panic!("{event:?}") };
    assert_eq!((*who, *header), (PeerId(from), Header([number, !number])));
    assert_eq!(bytes_of(payload), pattern(number, size(number)));
}

fn a_link_connects_without_blocking_and_says_when_it_is_up<J: Job>() {
    let [mut here, mut there] = [0, 1].map(Side::new::<J>);
    assert!(matches!(here.device.reach(&there.device.address()), Reach::Yes(_)));
    let link = here.connect(&there, 1);
    if !link.is_up() {
        assert_eq!(am(&link, 0, b"early"), Ok(Submit::Busy(Busy::Connecting)));
    }
    let mut told = 0;
    poll_until(&mut [&mut here, &mut there], |side, event| {
        told += usize::from(matches!(event, Event::Connected { peer: PeerId(1) }) && side == 0);
        told == 1
    });
    assert!(link.is_up());
    assert_eq!(am(&link, 0, &[]), Ok(Submit::Done));
    poll_until(&mut [&mut here, &mut there], |side, event| {
        assert_eq!(side, 1, "told once: {event:?}");
        assert_message(&event, 0, 0);
        true
    });
}

fn messages_of_a_link_arrive_in_order_whole_and_with_their_headers<J: Job>() {
    const COUNT: u64 = 5000;
    let [mut here, mut there] = [0, 1].map(Side::new::<J>);
    let mut third = Side::new::<J>(2);
    let links = [here.connect(&there, 1), third.connect(&there, 1)];
    for link in &links {
        bring_up(link, &mut [&mut here, &mut there, &mut third]);
    }
    let (mut sent, mut got) = ([0; 2], [0; 2]);
    while got != [COUNT; 2] {
        for (at, link) in links.iter().enumerate() {
            while sent[at] < COUNT {
                match am(link, sent[at], &pattern(sent[at], size(sent[at]))).unwrap() {
                    Submit::Done => sent[at] += 1,
                    Submit::Busy(_) => break,
                    Submit::Posted => panic!("a copied message is done or busy"),
                }
            }
        }
        for event in there.poll() {
            let Event::Arrived { from, .. } = &event else { panic!("{event:?}") };
            let at = [0, 2].iter().position(|rank| PeerId(*rank) == *from).unwrap();
            assert_message(&event, from.0, got[at]);
            got[at] += 1;
        }
        assert!(here.poll().is_empty() && third.poll().is_empty());
    }
    assert!(there.poll().is_empty());
}

fn a_batch_is_never_filled_beyond_its_limit_and_nothing_is_skipped<J: Job>() {
    let mut here = Side::new::<J>(0);
    let mut there = Side::with::<J>(1, PacketPool::new(Arc::new(HostAllocator), 4096, 64), 3);
    let link = here.connect(&there, 1);
    bring_up(&link, &mut [&mut here, &mut there]);
    for number in 0..10 {
        assert_eq!(am(&link, number * 9, &[]), Ok(Submit::Done));
    }
    let mut next = 0;
    while next < 10 {
        let events = there.poll();
        assert!(events.len() <= 3);
        for event in events {
            assert_message(&event, 0, next * 9);
            next += 1;
        }
    }
}

fn the_end_of_a_peer_waits_for_room_in_the_batch<J: Job>() {
    for polls in 0..8 {
        let [mut speaks, mut ends] = [1, 2].map(Side::new::<J>);
        let mut here = Side::with::<J>(0, PacketPool::new(Arc::new(HostAllocator), 4096, 64), 1);
        let links = [speaks.connect(&here, 0), ends.connect(&here, 0)];
        for link in &links {
            bring_up(link, &mut [&mut speaks, &mut ends, &mut here]);
        }
        // Another one is the first to be looked at.
        for _ in 0..polls {
            assert!(here.poll().is_empty());
        }
        assert_eq!(am(&links[0], 9, &[]), Ok(Submit::Done));
        ends.device.close();
        // The next poll finds both.
        if let Armed::Wait(_) = here.device.arm() {
            here.device.disarm(true);
        }
        let (mut has_come, mut has_ended, start) = (false, false, Instant::now());
        while !(has_come && has_ended) {
            let events = here.poll();
            assert!(events.len() <= 1, "{events:?}");
            for event in events {
                has_ended |= matches!(event, Event::PeerDown { .. });
                has_come |= matches!(event, Event::Arrived { .. });
            }
            assert!(start.elapsed() < LIMIT / 2);
        }
    }
}

fn a_link_whose_receiver_stands_still_is_busy_and_goes_on_later<J: Job>() {
    let mut here = Side::new::<J>(0);
    let mut there = Side::with::<J>(1, PacketPool::new(Arc::new(HostAllocator), 4096, 16), 8);
    let link = here.connect(&there, 1);
    bring_up(&link, &mut [&mut here, &mut there]);
    // A network's receiver has as much room for long messages as for short ones.
    let long = if J::TAKES_TIME { Busy::Full } else { Busy::NoPacket };
    for (number, want) in [(0, Busy::Full), (8, long)] {
        let message = pattern(number, size(number));
        let mut count = 0;
        let busy = loop {
            match am(&link, number, &message).unwrap() {
                Submit::Done => count += 1,
                Submit::Busy(why) => break why,
                Submit::Posted => panic!("posted"),
            }
        };
        assert_eq!(busy, want);
        assert_eq!(am(&link, number, &message), Ok(Submit::Busy(want)), "and stays so");
        let mut got = 0;
        while got < count {
            for event in there.poll() {
                assert_message(&event, 0, number);
                got += 1;
            }
        }
        assert!(there.poll().is_empty(), "what was busy was not sent");
        // A NIC may take its time to tell.
        let start = Instant::now();
        while am(&link, number, &message) != Ok(Submit::Done) {
            assert!(J::TAKES_TIME && start.elapsed() < LIMIT / 2);
            there.poll();
            here.poll();
        }
        poll_until(&mut [&mut there], |_, event| {
            assert_message(&event, 0, number);
            true
        });
    }
}

fn everything_that_was_sent_arrives_before_the_end_is_told_once<J: Job>() {
    let [mut here, mut there] = [0, 1].map(Side::new::<J>);
    let link = here.connect(&there, 1);
    bring_up(&link, &mut [&mut here, &mut there]);
    let mut sent = 0;
    while am(&link, sent, &pattern(sent, size(sent))) == Ok(Submit::Done) {
        sent += 1;
    }
    assert!(sent > 3);
    here.device.close();
    let last = am(&link, sent, &[]);
    assert!(matches!(last, Err(SubmitError::Down { peer: PeerId(1), .. })), "{last:?}");
    drop((link, here));
    let mut next = 0;
    poll_until(&mut [&mut there], |_, event| {
        if let Event::PeerDown { peer, cause } = &event {
            assert_eq!((*peer, cause, next), (PeerId(0), &DownCause::Closed, sent));
            return true;
        }
        assert_message(&event, 0, next);
        next += 1;
        false
    });
    for _ in 0..1000 {
        assert!(there.poll().is_empty());
    }
}

fn what_was_sent_arrives_before_the_end_also_when_links_lead_both_ways<J: Job>() {
    for count in (1..12).cycle().take(200) {
        let (mut stays, mut goes) = (Side::new::<J>(0), Side::new::<J>(1));
        let (out, back) = (stays.connect(&goes, 1), goes.connect(&stays, 0));
        if count % 2 == 0 {
            bring_up(&out, &mut [&mut stays, &mut goes]);
            bring_up(&back, &mut [&mut stays, &mut goes]);
        } else {
            // The one that stays hears of the other's link and of its end at the same time.
            while !back.is_up() {
                goes.poll();
                stays.poll();
            }
        }
        // A stream, and a pause after it, so that the one that stays may think it over.
        let mut arrived = 0;
        let mut sent = 0;
        for burst in [10, count] {
            while arrived < sent {
                arrived += stays
                    .poll()
                    .iter()
                    .filter(|event| matches!(event, Event::Arrived { .. }))
                    .count();
            }
            stays.poll();
            std::thread::sleep(Duration::from_micros(200));
            sent += (0..burst)
                .take_while(|&number| am(&back, number, &[1; 8]) == Ok(Submit::Done))
                .count();
        }
        goes.device.close();
        drop((back, goes));
        poll_until(&mut [&mut stays], |_, event| {
            arrived += usize::from(matches!(event, Event::Arrived { .. }));
            matches!(event, Event::PeerDown { .. })
        });
        assert_eq!(arrived, sent, "of {count}");
        drop(out);
    }
}

fn a_link_that_is_dropped_lets_the_receiver_know<J: Job>() {
    let [mut here, mut there] = [0, 1].map(Side::new::<J>);
    let link = here.connect(&there, 1);
    bring_up(&link, &mut [&mut here, &mut there]);
    drop(link);
    poll_until(&mut [&mut here, &mut there], |side, event| {
        assert!(
            matches!(event, Event::PeerDown { peer: PeerId(0), cause: DownCause::Closed }),
            "{event:?}"
        );
        assert_eq!(side, 1);
        true
    });
    // A new one is as good as the first.
    let link = here.connect(&there, 1);
    bring_up(&link, &mut [&mut here, &mut there]);
    assert_eq!(am(&link, 0, &[]), Ok(Submit::Done));
    poll_until(&mut [&mut there], |_, event| {
        assert_message(&event, 0, 0);
        true
    });
}

fn a_device_that_closes_is_told_to_those_who_send_to_it<J: Job>() {
    let [mut here, mut there] = [0, 1].map(Side::new::<J>);
    let link = here.connect(&there, 1);
    bring_up(&link, &mut [&mut here, &mut there]);
    there.device.close();
    there.device.close();
    let start = Instant::now();
    let mut told = 0;
    while told == 0 && start.elapsed() < LIMIT / 2 {
        for event in here.poll() {
            assert!(
                matches!(event, Event::PeerDown { peer: PeerId(1), cause: DownCause::Closed }),
                "{event:?}"
            );
            told += 1;
        }
    }
    assert_eq!(told, 1, "peers see it gone");
    let sent = am(&link, 0, &[]);
    assert!(
        matches!(sent, Err(SubmitError::Down { peer: PeerId(1), cause: DownCause::Closed })),
        "{sent:?}"
    );
    assert!(!link.is_up());
}

fn a_caller_s_mistake_is_an_error_of_the_call<J: Job>() {
    let [mut here, mut there] = [0, 1].map(Side::new::<J>);
    let link = here.connect(&there, 1);
    bring_up(&link, &mut [&mut here, &mut there]);
    let max = here.domain.caps().am_copied;
    assert_eq!(max, 4096);
    assert_eq!(am(&link, 0, &vec![0; max + 1]), Err(SubmitError::TooLong { len: max + 1, max }));
    let driver = FakeDriver::new(FakeConfig::default()).unwrap();
    let region = driver.gpu(0).unwrap().allocate(64, Flavour::Plain).unwrap();
    let slice = region.whole();
    let refused = link.submit(Op::AmCopied { header: Header([0; 2]), bytes: slice.view() });
    assert_eq!(refused, Err(SubmitError::Kind(region.kind())));
    for _ in 0..100 {
        assert!(there.poll().is_empty());
    }
    let gpu_pool = PacketPool::new(Arc::new(GpuAllocator::on(driver.gpu(0).unwrap())), 4096, 16);
    let device = here.domain.device(Arc::new(gpu_pool));
    assert!(device.is_err(), "devices receive into host memory");
}

fn an_address_of_no_device_is_refused<J: Job>() {
    let [mut here, there] = [0, 1].map(Side::new::<J>);
    let mut long = there.device.address().0;
    long.extend([0; 300]);
    for garbage in [vec![], vec![1; 5], vec![0xff; 24], long] {
        let blob = AddressBlob(garbage);
        assert!(here.device.connect(&blob, PeerId(1)).is_err());
    }
    assert!(matches!(here.device.reach(&AddressBlob(vec![1, 2, 3])), Reach::No(_)));
    let gone = there.device.address();
    drop(there);
    // At once, or by a poll.
    match here.device.connect(&gone, PeerId(1)) {
        Err(refused) => {
            assert!(matches!(refused, SubmitError::Down { peer: PeerId(1), .. }), "{refused:?}")
        }
        Ok(link) => {
            assert_eq!(am(&link, 0, &[]), Ok(Submit::Busy(Busy::Connecting)));
            poll_until(&mut [&mut here], |_, event| {
                matches!(event, Event::PeerDown { peer: PeerId(1), .. })
            });
            assert!(matches!(am(&link, 0, &[]), Err(SubmitError::Down { .. })));
        }
    }
}

fn what_a_peer_sent_before_it_went_comes_also_when_it_is_looked_for_too_late<J: Job>() {
    let [mut here, mut there] = [0, 1].map(Side::new::<J>);
    let back = there.connect(&here, 0);
    bring_up(&back, &mut [&mut there, &mut here]);
    assert_eq!(am(&back, 7, b"last words"), Ok(Submit::Done));
    let address = there.device.address();
    there.device.close();
    drop((back, there));
    // It may be refused at once; what is on its way comes all the same.
    let _link = here.device.connect(&address, PeerId(1));
    let mut arrived = 0;
    poll_until(&mut [&mut here], |_, event| {
        arrived += usize::from(matches!(event, Event::Arrived { .. }));
        matches!(event, Event::PeerDown { .. })
    });
    assert_eq!(arrived, 1);
}

fn only_one_thread_polls_at_a_time<J: Job>() {
    let [mut here, mut there] = [0, 1].map(Side::new::<J>);
    let link = here.connect(&there, 1);
    bring_up(&link, &mut [&mut here, &mut there]);
    for number in 0..2 {
        assert_eq!(am(&link, number * 9, &[]), Ok(Submit::Done));
    }
    let device = there.device.clone();
    let mut batch = Batch::new(1);
    let mut meanwhile = None;
    let mut ordered = |batch: &mut Batch| {
        batch.drain().for_each(drop);
        // Before another thread can poll: matching happens here.
        let other = there.device.clone();
        meanwhile =
            std::thread::spawn(move || other.poll(&mut Batch::new(1), &mut |_: &mut Batch| {}))
                .join()
                .ok();
    };
    let mut polled = device.poll(&mut batch, &mut ordered);
    while J::TAKES_TIME && polled == Polled::Idle {
        polled = device.poll(&mut batch, &mut ordered);
    }
    assert_eq!((polled, meanwhile), (Polled::Some, Some(Polled::Busy)));
}

fn a_sleeping_thread_is_woken_by_a_message_and_never_misses_one<J: Job>() {
    const ROUNDS: u64 = 300;
    let [mut here, mut there] = [0, 1].map(Side::new::<J>);
    let links = [here.connect(&there, 1), there.connect(&here, 0)];
    for link in &links {
        bring_up(link, &mut [&mut here, &mut there]);
    }
    // Two threads that answer each other and sleep in between: one wake-up lost is a wait without
    // end.
    let serve = |side: &mut Side, link: &Arc<dyn Link>, from: u32, begins: bool| {
        let mut next = 0;
        if begins {
            assert_eq!(am(link, 0, &pattern(0, 0)), Ok(Submit::Done));
        }
        let mut slept = 0;
        while next < ROUNDS {
            let events = side.poll();
            for event in &events {
                assert_message(event, from, next * 9);
                next += 1;
                let answer = if begins { next } else { next - 1 };
                if answer < ROUNDS {
                    while am(link, answer * 9, &[]) != Ok(Submit::Done) {}
                }
            }
            if !events.is_empty() || next == ROUNDS {
                continue;
            }
            match side.device.arm() {
                Armed::Ready => {}
                Armed::Wait(fd) => {
                    let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
                    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
                    assert_eq!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1), "never woken");
                    slept += 1;
                    side.device.disarm(true);
                }
            }
        }
        slept
    };
    let slept = std::thread::scope(|scope| {
        let one = scope.spawn(|| serve(&mut here, &links[0], 1, true));
        serve(&mut there, &links[1], 0, false) + one.join().unwrap()
    });
    assert!(slept > 0, "no thread ever slept");
    // With an event pending already, no thread may sleep.
    assert_eq!(am(&links[0], 0, &[]), Ok(Submit::Done));
    match there.device.arm() {
        Armed::Ready => {}
        // It may be on its way.
        Armed::Wait(fd) => {
            assert!(J::TAKES_TIME);
            let mut fds = [PollFd::from_borrowed_fd(fd, PollFlags::IN)];
            let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
            assert_eq!(rustix::event::poll(&mut fds, Some(&limit)), Ok(1), "slept over");
        }
    }
}
