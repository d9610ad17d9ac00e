//! Operations that a transport has accepted, when a side closes its device: each ends exactly once.

use super::contract::{Side, bring_up};
use crate::support::over_each_transport;
use crate::support::*;
use carrack::transports::contract::{
    Closing, Event, Header, Link, Op, OpFailure, OpToken, Submit, SubmitError,
};
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::transports::mem::{Buffer, MemRef, Region};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use std::sync::Arc;
use std::time::Instant;

over_each_transport!(
    a_device_that_closes_tells_how_every_operation_that_was_posted_ended,
    an_operation_that_is_posted_while_its_own_device_closes_ends_once,
    an_operation_that_was_posted_ends_once_also_when_a_side_closes,
    an_operation_that_is_posted_while_its_target_closes_ends_once,
    what_was_sent_arrives_at_a_peer_that_takes_it_while_the_devices_of_two_ranks_close,
);

/// Operations that a test posts at most: more than one poll tells of.
const MOST: u64 = 20;

/// A way to have an operation posted: a transport has one of these two, or none.
enum Posting {
    /// Bytes are written to the peer's memory.
    Put(Box<dyn carrack::transports::contract::Exposed>),
    /// A message is sent from memory of a GPU.
    Message(Region),
}

impl Posting {
    fn of(here: &Side, back: &Arc<dyn Link>, driver: &FakeDriver) -> Option<Self> {
        let caps = here.domain.caps();
        if caps.remote_memory {
            let exposed = back.expose(Buffer::Vec(vec![0; 1 << 20])).map_err(|(why, _)| why);
            return Some(Self::Put(exposed.unwrap()));
        }
        let region = || driver.gpu(0).unwrap().allocate(100, Flavour::Plain).unwrap();
        caps.am_from_device.then(|| Self::Message(region()))
    }

    fn submit(&self, link: &Arc<dyn Link>, token: u64) -> Result<Submit, SubmitError> {
        let token = OpToken(token);
        match self {
            Self::Put(exposed) => {
                let buffer = &mut Buffer::Vec(vec![7; 1 << 20]);
                link.submit(Op::Put { to: exposed.place(), buffer, token })
            }
            Self::Message(region) => {
                let buffer = &mut Buffer::from(region.whole());
                link.submit(Op::AmOwned { header: Header([0; 2]), buffer, token })
            }
        }
    }
}

/// Creates the two sides, and a link each way.
fn linked<J: Job>() -> ([Side; 2], [Arc<dyn Link>; 2]) {
    let [mut here, mut there] = [0, 1].map(Side::new::<J>);
    let to = here.connect(&there, 1);
    bring_up(&to, &mut [&mut here, &mut there]);
    let back = there.connect(&here, 0);
    bring_up(&back, &mut [&mut here, &mut there]);
    ([here, there], [to, back])
}

/// Returns the tokens of all operations that end at a side, until no event is left. Only this
/// thread polls.
fn ends_of(side: &mut Side) -> Vec<u64> {
    let mut tokens = Vec::new();
    loop {
        let events = side.poll();
        if events.is_empty() {
            return tokens;
        }
        for event in events {
            match event {
                Event::Completion { token, buffer, .. } => {
                    assert!(!buffer.is_empty(), "the buffer comes back");
                    tokens.push(token.0);
                }
                Event::Connected { .. } | Event::PeerDown { .. } => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

fn a_device_that_closes_tells_how_every_operation_that_was_posted_ended<J: Job>() {
    let driver = FakeDriver::new(FakeConfig::default()).unwrap();
    for _ in 0..20 {
        let ([mut here, there], [to, back]) = linked::<J>();
        let Some(posting) = Posting::of(&here, &back, &driver) else {
            // Its sends are done at once: there is nothing to be told.
            assert!(!J::IS_RDMA && J::NAME != "loopback");
            return;
        };
        let posted = (0..MOST).take_while(|&token| match posting.submit(&to, token) {
            Ok(Submit::Posted) => true,
            Ok(Submit::Busy(_)) => false,
            other => panic!("{other:?}"),
        });
        let posted = posted.count() as u64;
        assert!(posted >= 4, "only {posted} were posted");
        here.device.close();
        let mut ends = ends_of(&mut here);
        ends.sort_unstable();
        assert_eq!(ends, (0..posted).collect::<Vec<_>>());
        drop((posting, there));
    }
}

fn an_operation_that_is_posted_while_its_own_device_closes_ends_once<J: Job>() {
    let driver = FakeDriver::new(FakeConfig::default()).unwrap();
    for round in 0..100_u32 {
        let ([mut here, _there], [to, back]) = linked::<J>();
        let Some(posting) = Posting::of(&here, &back, &driver) else { return };
        let mut posted = 0;
        std::thread::scope(|scope| {
            let closes = here.device.clone();
            scope.spawn(move || {
                (0..round * 7 % 2000).for_each(|_| std::hint::spin_loop());
                closes.close();
            });
            loop {
                match posting.submit(&to, posted) {
                    Ok(Submit::Posted) => posted += 1,
                    Ok(_) => std::thread::yield_now(),
                    Err(_) => break,
                }
            }
        });
        let mut ends = ends_of(&mut here);
        ends.sort_unstable();
        assert_eq!(ends, (0..posted).collect::<Vec<_>>());
    }
}

fn an_operation_that_was_posted_ends_once_also_when_a_side_closes<J: Job>() {
    let driver = FakeDriver::new(FakeConfig::default()).unwrap();
    for sender_closes in [false, true] {
        let [mut here, mut there] = [0, 1].map(Side::new::<J>);
        let link = here.connect(&there, 1);
        bring_up(&link, &mut [&mut here, &mut there]);
        let region = driver.gpu(0).unwrap().allocate(100, Flavour::Plain).unwrap();
        let held = driver.faults().hold_copies();
        let mut buffer = Buffer::from(region.whole());
        let posted = link.submit(Op::AmOwned {
            header: Header([0; 2]),
            buffer: &mut buffer,
            token: OpToken(77),
        });
        if !here.domain.caps().am_from_device {
            assert_eq!(posted, Err(SubmitError::Kind(region.kind())), "as its caps say");
            assert_eq!(buffer.len(), 100, "and the buffer is the caller's");
            continue;
        }
        assert_eq!((posted, buffer.len()), (Ok(Submit::Posted), 0));
        for _ in 0..100 {
            assert!(here.poll().is_empty() && there.poll().is_empty());
        }
        // Closing may wait for the engine.
        let release = std::thread::spawn(move || drop(held));
        if sender_closes {
            here.device.close()
        } else {
            there.device.close()
        };
        release.join().unwrap();
        let start = Instant::now();
        let mut ends = Vec::new();
        while ends.is_empty() && start.elapsed() < LIMIT / 2 {
            for event in here.poll() {
                if let Event::Completion { token, buffer, outcome } = event {
                    ends.push((token, buffer.len(), outcome));
                }
            }
        }
        let who = if sender_closes { "sender" } else { "receiver" };
        assert_eq!(ends.len(), 1, "the {who} closed, and what it had posted does not end");
        let (token, len, outcome) = ends.remove(0);
        assert_eq!((token, len), (OpToken(77), 100));
        let outcome = outcome.map_err(|failure| *failure);
        assert!(matches!(outcome, Err(OpFailure::Down(_) | OpFailure::Closed)), "{outcome:?}");
        for _ in 0..1000 {
            assert!(!here.poll().iter().any(|event| matches!(event, Event::Completion { .. })));
        }
    }
}

fn an_operation_that_is_posted_while_its_target_closes_ends_once<J: Job>() {
    let driver = FakeDriver::new(FakeConfig::default()).unwrap();
    let region = driver.gpu(0).unwrap().allocate(100, Flavour::Plain).unwrap();
    for round in 0..300_u32 {
        let [mut here, mut there] = [0, 1].map(Side::new::<J>);
        if !here.domain.caps().am_from_device {
            return;
        }
        let link = here.connect(&there, 1);
        bring_up(&link, &mut [&mut here, &mut there]);
        let mut posted = 0;
        std::thread::scope(|scope| {
            let target = there.device.clone();
            scope.spawn(move || {
                (0..round * 7 % 2000).for_each(|_| std::hint::spin_loop());
                target.close();
            });
            loop {
                let mut buffer = Buffer::from(region.whole());
                let op = Op::AmOwned {
                    header: Header([0; 2]),
                    buffer: &mut buffer,
                    token: OpToken(posted),
                };
                match link.submit(op) {
                    Ok(Submit::Posted) => posted += 1,
                    Ok(_) => std::thread::yield_now(),
                    Err(_) => break,
                }
            }
        });
        let mut ended = 0;
        let start = Instant::now();
        while ended < posted {
            let events = here.poll();
            ended += events.iter().filter(|event| matches!(event, Event::Completion { .. })).count()
                as u64;
            assert!(start.elapsed() < LIMIT / 2, "{ended} of {posted} have ended");
        }
        for _ in 0..100 {
            assert!(
                !here.poll().iter().any(|event| matches!(event, Event::Completion { .. })),
                "twice"
            );
        }
    }
}

fn what_was_sent_arrives_at_a_peer_that_takes_it_while_the_devices_of_two_ranks_close<J: Job>() {
    let [mut taker, mut one, mut two] = [1, 0, 2].map(Side::new::<J>);
    let links = [&mut one, &mut two].map(|side| {
        let link = side.connect(&taker, 1);
        bring_up(&link, &mut [side, &mut taker]);
        link
    });
    // More together than the peer has room for, where the devices share that.
    let sent = links.each_ref().map(|link| {
        let takes = |number: &u64| {
            let (header, bytes) = (Header([*number, 0]), MemRef::host(&[7; 3000]));
            match link.submit(Op::AmCopied { header, bytes }) {
                Ok(Submit::Busy(_)) => false,
                taken => taken.is_ok(),
            }
        };
        (0..1000).take_while(takes).count() as u64
    });
    let closing = [&one, &two].map(|side| side.device.clone());
    let advance = || closing.iter().map(|device| device.advance_close()).max();
    (0..1000).for_each(|_| _ = advance());
    if J::IS_RDMA {
        assert_eq!(advance(), Some(Closing::Waiting), "the peer had room for all");
    }
    let start = Instant::now();
    let mut came = [0, 2].map(|_| Vec::new());
    while advance() != Some(Closing::Over) || came.each_ref().map(|it| it.len() as u64) != sent {
        for event in taker.poll() {
            if let Event::Arrived { from, header, .. } = event {
                came[from.0 as usize / 2].push(header.0[0]);
            }
        }
        assert!(start.elapsed() < LIMIT / 2, "{came:?} of {sent:?} have come");
    }
    for (came, sent) in came.iter().zip(sent) {
        assert!(came.iter().copied().eq(0..sent), "{came:?} of {sent} have come");
    }
}
