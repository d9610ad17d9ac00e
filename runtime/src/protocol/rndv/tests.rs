//! A sender and a receiver in one test, without a device. In random orders of events, refusals,
//! failures, deadlines and deaths, each ends once, and the bytes are where they belong.

use super::*;
use crate::error::OpError;
use crate::names::{Rank, RemoteComp, Tag};
use crate::protocol::wire::{Control, Request, TransferVerdict, Window};
use carrack_transports::contract::{DownCause, RemotePlace};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::VecDeque;

const TX: u64 = 3;
const RX: u64 = 8;
const LIMITS: Limits = Limits { chunk: 10, nics: 1 };
const POISON: u8 = 0xee;

/// The kind of an operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RndvOp {
    Message,
    Put,
    Get,
}

/// Method that the receiver tries first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum First {
    Fragments,
    Staged,
    Whole,
    Chunks,
    Copied,
}

/// Troubles of a run: each happens when the random choices say so.
#[derive(Clone, Copy, Debug)]
struct Troubles {
    /// A chunk, or a message as a whole, that the sender's NIC does not reach.
    unregistered: Option<u8>,
    /// A chunk that the receiver's NIC does not take.
    not_shown: Option<u8>,
    /// The kernel does not copy.
    no_copy: bool,
    /// The receiver's engine fails.
    lost: bool,
    /// The receiver's deadline passes.
    expires: bool,
    /// The sender's bytes cannot be read.
    breaks: bool,
    /// Both sides hear that the other is gone.
    dies: bool,
    /// Chunks travel apart from messages.
    apart: bool,
}

/// A thing on its way to the receiver, in order.
#[derive(Debug)]
enum OnWire {
    Control(Control),
    Fragment(usize, Vec<u8>),
    Write(usize, Vec<u8>),
}

struct World {
    op: RndvOp,
    troubles: Troubles,
    message: Vec<u8>,
    place: Vec<u8>,
    tx: Option<RndvSender>,
    rx: Option<RndvReceiver>,
    to_rx: VecDeque<OnWire>,
    to_tx: VecDeque<Control>,
    /// Chunks that travel apart: beginning, bytes, window.
    chunks: Vec<(usize, Vec<u8>, usize)>,
    /// Fragments that an engine has to copy.
    blocks: Vec<(usize, Vec<u8>)>,
    granted: usize,
    /// The sender's NIC reaches the buffer.
    is_exposed: bool,
    sent: Vec<Result<(), OpError>>,
    received: Vec<bool>,
    given: u8,
    shown: u8,
}

fn gone() -> OpError {
    OpError::PeerDown { rank: Rank(1), cause: DownCause::Closed }
}

impl World {
    fn new(op: RndvOp, size: usize, troubles: Troubles) -> Self {
        let message: Vec<u8> = (0..size).map(|at| (at % 200) as u8).collect();
        let (tx, ask) = match op {
            RndvOp::Message => {
                (Some(RndvSender::offered(TX, size, Duty::Message, false)), Ask::Rts(TX))
            }
            RndvOp::Put => (Some(RndvSender::offered(TX, size, Duty::Memory, false)), Ask::Rts(TX)),
            RndvOp::Get => {
                let request = Request { name: 0, region: 5, offset: 0, first: 9, second: 0 };
                (None, Ask::Get { comp: RemoteComp(1), tag: Tag(2), request })
            }
        };
        Self {
            op,
            troubles,
            place: vec![POISON; size],
            message,
            tx,
            rx: Some(RndvReceiver::new(RX, size, ask)),
            to_rx: VecDeque::new(),
            to_tx: VecDeque::new(),
            chunks: Vec::new(),
            blocks: Vec::new(),
            granted: 0,
            is_exposed: false,
            sent: Vec::new(),
            received: Vec::new(),
            given: 0,
            shown: 0,
        }
    }

    fn tx_on(&mut self, event: TxEvent) {
        let Some(mut tx) = self.tx.take() else { return };
        let (mut actions, mut next) = (Actions::new(), Some(event));
        loop {
            if let Some(event) = next.take() {
                tx.on(event, &LIMITS, &mut actions).expect("an honest peer");
            }
            let Some(action) = actions.pop_front() else { break };
            next = match action {
                TxAction::Send(control) => {
                    self.to_rx.push_back(OnWire::Control(control));
                    None
                }
                TxAction::Fragments { rx, from, to } => {
                    assert_eq!(rx, RX);
                    // As much as a link takes at once.
                    let to = to.min(from + 7);
                    self.to_rx.push_back(OnWire::Fragment(from, self.message[from..to].to_vec()));
                    Some(TxEvent::Left(to - from))
                }
                TxAction::Whole { place } => {
                    assert_eq!(place.addr, 1000);
                    Some(if self.troubles.unregistered.is_some() {
                        TxEvent::Unregistered
                    } else {
                        self.to_rx.push_back(OnWire::Write(0, self.message.clone()));
                        TxEvent::WholeGiven
                    })
                }
                TxAction::Chunk { place, at, len, window } => {
                    assert_eq!(place.addr, 1000 + at as u64);
                    self.given += 1;
                    let bytes = self.message[at..at + len].to_vec();
                    Some(if self.troubles.unregistered == Some(self.given) {
                        TxEvent::Unregistered
                    } else if self.troubles.apart {
                        self.chunks.push((at, bytes, window));
                        TxEvent::ChunkGiven { len, in_order: false }
                    } else {
                        self.to_rx.push_back(OnWire::Write(at, bytes));
                        // The link's own completion comes later.
                        self.chunks.push((at, Vec::new(), window));
                        TxEvent::ChunkGiven { len, in_order: true }
                    })
                }
                TxAction::Judge(verdict) => {
                    self.sent.push(verdict.error(Rank(1)).map_or(Ok(()), Err));
                    return;
                }
                TxAction::End(outcome) => {
                    assert!(self.chunks.is_empty(), "the NIC still reads");
                    assert!(
                        self.op != RndvOp::Put || outcome.is_err(),
                        "its owner says when it ends"
                    );
                    self.sent.push(outcome);
                    return;
                }
                TxAction::Leave => {
                    self.sent.push(Ok(()));
                    return;
                }
            };
        }
        self.tx = Some(tx);
    }

    fn rx_on(&mut self, event: RxEvent, fragment: &[u8]) {
        let Some(mut rx) = self.rx.take() else { return };
        self.is_exposed |= matches!(event, RxEvent::Begin(Scheme::Whole(_) | Scheme::Chunks(..)));
        let (mut actions, mut next) = (Actions::new(), Some(event));
        loop {
            if let Some(event) = next.take() {
                rx.on(event, &LIMITS, &mut actions).expect("an honest peer");
            }
            let Some(action) = actions.pop_front() else { break };
            match action {
                RxAction::Send(control) => self.to_tx.push_back(control),
                RxAction::Store(_) if rx.has_ended() => panic!("the operation has ended"),
                RxAction::Store(at) if rx.is_staged() => {
                    assert!(at + fragment.len() <= self.granted, "it was not granted");
                    self.blocks.push((at, fragment.to_vec()));
                }
                RxAction::Store(at) => self.place[at..][..fragment.len()].copy_from_slice(fragment),
                RxAction::Show { at, len } => {
                    self.shown += 1;
                    let place = RemotePlace { addr: 1000 + at as u64, key: 1 };
                    next = Some(match self.troubles.not_shown == Some(self.shown) {
                        true => RxEvent::NotShown,
                        false => RxEvent::Shown { at, len, place },
                    });
                }
                RxAction::Hide(_) | RxAction::Flush => {}
                RxAction::TakeBack => self.is_exposed = false,
                RxAction::Choose => {
                    let staged = self.message.len().is_multiple_of(2);
                    let scheme = if staged { Scheme::Staged } else { Scheme::Fragments };
                    next = Some(RxEvent::Begin(scheme));
                }
                RxAction::Arrived => {
                    assert!(!self.is_exposed, "the NIC still has the buffer");
                    self.received.push(!self.troubles.lost || !rx.wants_to_go());
                    if self.op == RndvOp::Put {
                        let fin = Control::Fin { name: TX, verdict: TransferVerdict::Done };
                        self.to_tx.push_back(fin);
                    }
                    return;
                }
                RxAction::Fail => self.received.push(false),
                RxAction::Leave => {
                    assert!(!self.is_exposed, "the NIC still has the buffer");
                    return;
                }
            }
        }
        self.rx = Some(rx);
    }

    /// Gives the sender a control message of the receiver. A request to get makes the sender.
    fn hear(&mut self, control: Control) {
        let fits = |limit: u64| usize::try_from(limit).unwrap();
        let event = match control {
            Control::Get { request, .. } => {
                assert_eq!((self.op, request.name), (RndvOp::Get, RX));
                let (name, limit) = (name_of_answer(RX), fits(request.second));
                self.tx = Some(RndvSender::answer(name, self.message.len(), RX, limit));
                return;
            }
            Control::Cts { rx, limit, .. } => TxEvent::Cts { rx, limit: fits(limit) },
            Control::CtsWrite { rx, place, .. } => TxEvent::CtsWrite { rx, place },
            Control::CtsChunk { rx, window, .. } => TxEvent::CtsChunk { rx, window },
            Control::Grant { limit, .. } => TxEvent::Grant { limit: fits(limit) },
            Control::Fin { verdict, .. } => TxEvent::Fin(verdict),
            other => panic!("{other:?}"),
        };
        self.tx_on(event);
    }

    fn arrive(&mut self, thing: OnWire) {
        match thing {
            OnWire::Write(at, bytes) => self.place[at..][..bytes.len()].copy_from_slice(&bytes),
            OnWire::Fragment(at, bytes) => {
                let event = RxEvent::Fragment { offset: at as u64, len: bytes.len() };
                self.rx_on(event, &bytes);
            }
            OnWire::Control(control) => {
                let event = match control {
                    Control::FinWrite { at, .. } => RxEvent::FinWrite { at },
                    Control::Unwritten { at, .. } => RxEvent::Unwritten { at },
                    Control::Fin { verdict, .. } => RxEvent::Fin(verdict),
                    other => panic!("{other:?}"),
                };
                self.rx_on(event, &[]);
            }
        }
    }

    /// Does one of the things that can happen now. Returns `false` if nothing can.
    fn step(&mut self, choice: u32) -> bool {
        let wants = |wants: Option<bool>| wants.unwrap_or(false);
        let can = [
            !self.to_rx.is_empty(),
            !self.to_tx.is_empty(),
            wants(self.tx.as_ref().map(RndvSender::wants_to_go)),
            !self.chunks.is_empty(),
            wants(self.rx.as_ref().map(RndvReceiver::wants_to_go)),
            wants(self.rx.as_ref().map(RndvReceiver::is_copied)),
        ];
        let count = can.iter().filter(|can| **can).count();
        if count == 0 {
            return false;
        }
        let nth = choice as usize % count;
        let what = can.iter().enumerate().filter(|(_, can)| **can).nth(nth).unwrap().0;
        match what {
            0 => {
                let thing = self.to_rx.pop_front().unwrap();
                self.arrive(thing);
            }
            1 => {
                let control = self.to_tx.pop_front().unwrap();
                self.hear(control);
            }
            2 => self.tx_on(TxEvent::Go),
            3 => {
                let at = choice as usize / 8 % self.chunks.len();
                let (at, bytes, window) = self.chunks.swap_remove(at);
                self.place[at..][..bytes.len()].copy_from_slice(&bytes);
                self.tx_on(TxEvent::ChunkEnded { at: window, failed: None });
            }
            4 => {
                for (at, bytes) in std::mem::take(&mut self.blocks) {
                    self.place[at..][..bytes.len()].copy_from_slice(&bytes);
                }
                let size = self.message.len();
                let is_whole = self.rx.as_ref().is_some_and(|rx| rx.got() >= size);
                let drops = !self.rx.as_ref().is_some_and(RndvReceiver::is_staged);
                // There are no blocks for bytes that are dropped.
                self.granted = if drops { 0 } else { size.min(self.granted + 8) };
                let event = match is_whole && !drops {
                    true => RxEvent::Placed,
                    false => RxEvent::Blocks(self.granted),
                };
                self.rx_on(event, &[]);
            }
            _ if self.troubles.no_copy => self.rx_on(RxEvent::Begin(Scheme::Fragments), &[]),
            _ => {
                self.place.copy_from_slice(&self.message);
                // The kernel's copy ends the transfer by itself: now, or after its deadline.
                let is_late = self.rx.take().is_some_and(|rx| rx.has_ended());
                if self.op == RndvOp::Message || !is_late {
                    self.to_tx.push_back(Control::Fin { name: TX, verdict: TransferVerdict::Done });
                }
                if !is_late {
                    self.received.push(true);
                }
            }
        }
        true
    }

    fn trouble(&mut self, first: First) {
        let Troubles { lost, expires, breaks, dies, .. } = self.troubles;
        if lost && first == First::Staged && self.rx.as_ref().is_some_and(RndvReceiver::is_staged) {
            self.rx_on(RxEvent::Lost, &[]);
        }
        // The owner of memory has no deadline for a put.
        if expires && self.op != RndvOp::Put {
            self.rx_on(RxEvent::Expired, &[]);
        }
        if breaks && self.tx.as_ref().is_some_and(|tx| !tx.is_offered()) {
            self.tx_on(TxEvent::Failed(OpError::Refused(Rank(1))));
        }
        if dies {
            self.to_rx.clear();
            self.to_tx.clear();
            self.tx_on(TxEvent::Down(gone()));
            self.rx_on(RxEvent::Down, &[]);
        }
    }
}

fn scheme(first: First, size: usize) -> Option<Scheme> {
    let place = RemotePlace { addr: 1000, key: 1 };
    Some(match first {
        First::Fragments => Scheme::Fragments,
        First::Staged => Scheme::Staged,
        First::Whole => Scheme::Whole(place),
        First::Chunks => Scheme::Chunks(place, LIMITS.chunk.min(size)),
        First::Copied => return None,
    })
}

prop_compose! {
    fn troubles()(
        unregistered in proptest::option::of(1_u8..6), not_shown in proptest::option::of(1_u8..6),
        no_copy: bool, lost: bool, apart: bool, serious in 0_u8..12,
    ) -> Troubles {
        let (expires, breaks, dies) = (serious == 1, serious == 2, serious == 3);
        Troubles { unregistered, not_shown, no_copy, lost, expires, breaks, dies, apart }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn each_side_ends_once_and_the_bytes_are_where_they_belong(
        op in prop_oneof![Just(RndvOp::Message), Just(RndvOp::Put), Just(RndvOp::Get)],
        first in prop_oneof![
            Just(First::Fragments), Just(First::Staged), Just(First::Whole),
            Just(First::Chunks), Just(First::Copied),
        ],
        size in 1_usize..80, troubles in troubles(),
        choices in vec(0_u32..1000, 300), when in 0_usize..60,
    ) {
        // A NIC writes messages only, and the kernel copies what was offered.
        let first = match (op, first) {
            (RndvOp::Put, First::Whole | First::Chunks) => First::Fragments,
            (RndvOp::Get, First::Whole | First::Chunks | First::Copied) => First::Staged,
            (RndvOp::Message, First::Chunks) if size <= LIMITS.chunk => First::Whole,
            (_, first) => first,
        };
        let mut world = World::new(op, size, troubles);
        match scheme(first, size) {
            Some(scheme) => world.rx_on(RxEvent::Begin(scheme), &[]),
            None => world.rx = Some(RndvReceiver::copied(RX, size, TX)),
        }
        for (step, choice) in choices.into_iter().enumerate() {
            if step == when {
                world.trouble(first);
            }
            if !world.step(choice) {
                break;
            }
        }
        let mut steps = 0;
        while world.step(0) {
            steps += 1;
            prop_assert!(steps < 10_000, "it goes on for ever");
        }
        let Troubles { lost, expires, breaks, dies, .. } = troubles;
        prop_assert_eq!(world.received.len(), 1, "the receiver ends once");
        if dies || expires || breaks {
            // A get that the owner has not heard of has no sender.
            prop_assert!(world.sent.len() == 1 || op == RndvOp::Get && world.tx.is_none());
        } else {
            prop_assert_eq!(world.sent.len(), 1, "the sender ends once");
            prop_assert!(world.sent[0].is_ok(), "{:?}", world.sent);
        }
        prop_assert!(world.rx.is_none() && world.tx.is_none(), "nothing is left");
        if world.received[0] && !lost {
            prop_assert!(world.place == world.message, "the bytes are there");
            prop_assert!(!dies || world.sent.len() <= 1);
        }
    }
}

#[test]
fn a_sender_that_breaks_the_protocol_is_found_out() {
    let on = |scheme: Option<Scheme>, event: RxEvent| {
        let copied = || RndvReceiver::copied(RX, 100, TX);
        let mut rx = scheme.map_or_else(copied, |_| RndvReceiver::new(RX, 100, Ask::Rts(TX)));
        let mut actions = Actions::new();
        for event in scheme.map(RxEvent::Begin).into_iter().chain([event]) {
            rx.on(event, &LIMITS, &mut actions)?;
        }
        Ok(())
    };
    let place = RemotePlace { addr: 1000, key: 1 };
    let (whole, chunks) = (Some(Scheme::Whole(place)), Some(Scheme::Chunks(place, 10)));
    let fragment = |offset, len| RxEvent::Fragment { offset, len };
    let broken = |outcome| matches!(outcome, Err(Violation::Broken(_)));
    assert_eq!(on(Some(Scheme::Fragments), fragment(90, 10)), Ok(()));
    for (offset, len) in [(91, 10), (0, 101), (100, 1), (0, 0), (u64::MAX, 2)] {
        assert!(broken(on(Some(Scheme::Fragments), fragment(offset, len))), "{offset} {len}");
    }
    for scheme in [whole, chunks, None] {
        assert!(broken(on(scheme, fragment(0, 10))), "{scheme:?}");
    }
    for (scheme, at) in [(whole, 10), (chunks, 20), (Some(Scheme::Fragments), 0), (None, 0)] {
        assert!(broken(on(scheme, RxEvent::FinWrite { at })), "{scheme:?}");
        assert!(broken(on(scheme, RxEvent::Unwritten { at })), "{scheme:?}");
    }
    let fin = |verdict| on(Some(Scheme::Fragments), RxEvent::Fin(verdict));
    assert_eq!(
        (fin(TransferVerdict::Done), fin(TransferVerdict::Failed)),
        (Err(Violation::Stray), Ok(()))
    );
}

#[test]
fn a_receiver_that_breaks_the_protocol_is_found_out() {
    let on = |duty, events: &[TxEvent]| {
        let (mut tx, mut actions) = (RndvSender::offered(TX, 100, duty, false), Actions::new());
        events.iter().try_for_each(|event| tx.on(event.clone(), &LIMITS, &mut actions))
    };
    let place = RemotePlace { addr: 1000, key: 1 };
    let cts = TxEvent::Cts { rx: RX, limit: 50 };
    let chunk = |rx, at| TxEvent::CtsChunk { rx, window: Window { at, len: 10, place } };
    let message = |events: &[TxEvent]| on(Duty::Message, events);
    assert_eq!(message(&[cts.clone(), cts.clone()]), Err(Violation::Stray));
    assert_eq!(message(&[cts.clone(), TxEvent::CtsWrite { rx: RX, place }]), Err(Violation::Stray));
    assert_eq!(message(&[cts.clone(), TxEvent::Fin(TransferVerdict::Done)]), Err(Violation::Stray));
    assert_eq!(message(&[cts.clone(), chunk(RX, 10)]), Ok(()), "it is late");
    assert!(message(&[cts, chunk(RX, 0)]).is_err());
    assert_eq!(message(&[chunk(RX, 10), chunk(RX, 0)]), Ok(()));
    assert!(message(&[chunk(RX, 0), chunk(RX + 1, 10)]).is_err(), "two names");
    assert!(on(Duty::Memory, &[chunk(RX, 0)]).is_err(), "no NIC writes a put here");
}

#[test]
fn the_owners_name_for_an_answer_is_that_of_no_transfer() {
    assert!(name_of_answer(RX) != RX && name_of_answer(RX) > 1 << 60);
}
