//! Tests of the kernel's copies.

use super::*;
use crate::Runtime;
use crate::datapath::Target;
use crate::datapath::rx::Means;
use crate::error::OpError;
use crate::names::Tag;
use crate::op::OpContext;
use crate::peer::shares::Shares;
use crate::protocol::rndv::RndvReceiver;
use bytes::Bytes;
use carrack_transports::contract::DownCause;
use carrack_transports::contract::Splits;
use carrack_transports::mem::MemRef;
use carrack_transports::mem::copy::copy_now;
use carrack_transports::sync::Split;
use std::sync::atomic::{AtomicBool, Ordering};

const ME: Rank = Rank(0);

/// Memory that is full of sevens, once it is ready.
struct Sevens {
    is_ready: AtomicBool,
    fails: bool,
    /// Messages that one call copies.
    together: usize,
}

impl Sevens {
    fn new(is_ready: bool, fails: bool) -> Arc<Self> {
        Arc::new(Self { is_ready: is_ready.into(), fails, together: usize::MAX })
    }
}

/// Returns the pull of 8 bytes from `memory` into a receive.
fn pull_of(name: u64, memory: &Arc<Sevens>) -> RxOp {
    pull_from(ME, name, memory)
}

fn pull_from(from: Rank, name: u64, memory: &Arc<Sevens>) -> RxOp {
    let op = OpContext::of_runtime(from, Tag(1), 8, None);
    let target = Target::Receive { buffer: Buffer::Vec(vec![0; 8]), op };
    let means = Means::Pull(Pull::new(0x1000, memory.clone()));
    RxOp::new(from, target, RndvReceiver::copied(name, 8, 5), means)
}

impl PeerMemory for Sevens {
    fn read(&self, _: u64, to: MemMut<'_>) -> Result<(), PeerMemoryError> {
        if self.fails {
            return Err(PeerMemoryError::Gone(DownCause::Closed));
        }
        let bytes = vec![7; to.len()];
        copy_now(to, MemRef::host(&bytes)).map_err(|_| unreachable!("host memory"))
    }

    fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::SeqCst)
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn read_many(&self, places: &[(u64, MemMut<'_>)]) -> Result<usize, PeerMemoryError> {
        // It leaves the bytes, by which the test tells these copies from others.
        Ok(places.len().min(self.together))
    }

    fn write(&self, _: u64, _: MemRef<'_>) -> Result<(), PeerMemoryError> {
        unreachable!("no helper is asked")
    }
}

#[test]
fn a_pull_that_another_thread_carries_on_has_its_turn_when_that_is_done() {
    let ranks = Runtime::in_process(1).unwrap();
    let (core, device) = (&ranks[0].0, &ranks[0].default_device().0);
    let at = (ME, device.transfers.now());
    let mut run = Run::new(core, device);
    run.pull_later(pull_of(at.1, &Sevens::new(true, false)), None);
    let turn = |out: Option<Box<InFlight>>| {
        let mut run = Run::new(core, device);
        match out {
            Some(transfer) => run.give_back(at, transfer, Flow::Stays),
            None => run.move_pulls(),
        }
        run.into_ended()
    };
    let elsewhere = device.transfers.take_out(at);
    assert!(elsewhere.is_some() && turn(None).is_empty());
    assert!(turn(elsewhere).is_empty());
    let (_, status) = turn(None).pop().expect("it was forgotten");
    assert_eq!((status.error.is_none(), status.bytes()), (true, Some(&[7; 8][..])));
    assert!(turn(None).is_empty() && device.transfers.pulls.is_empty(), "it has ended");
}

#[test]
fn a_message_that_comes_alone_is_in_the_table_only_if_it_is_not_there_at_once() {
    let ranks = Runtime::in_process(1).unwrap();
    let (core, device) = (&ranks[0].0, &ranks[0].default_device().0);
    let pull = |memory: &Arc<Sevens>| {
        let (name, mut run) = (device.transfers.now(), Run::new(core, device));
        run.pull_alone(pull_of(name, memory));
        (run.into_ended(), device.transfers.table.count(), device.transfers.pulls.count())
    };
    let bytes = |ended: &[crate::op::Ended]| match ended {
        [(_, status)] => status.bytes().map(<[u8]>::to_vec),
        _ => None,
    };
    let (ended, in_table, pulls) = pull(&Sevens::new(true, false));
    assert_eq!((bytes(&ended), in_table, pulls), (Some(vec![7; 8]), 0, 0));

    let late = Sevens::new(false, false);
    let (ended, in_table, pulls) = pull(&late);
    assert_eq!((ended.len(), in_table, pulls), (0, 1, 1));
    late.is_ready.store(true, Ordering::SeqCst);
    let mut run = Run::new(core, device);
    run.move_pulls();
    assert_eq!(bytes(&run.into_ended()), Some(vec![7; 8]));
    assert_eq!((device.transfers.table.count(), device.transfers.pulls.count()), (0, 0));

    let (ended, in_table, pulls) = pull(&Sevens::new(true, true));
    let [(_, status)] = &ended[..] else { panic!("it has not ended") };
    assert!(matches!(status.error.as_deref(), Some(OpError::PeerDown { .. })));
    assert_eq!((in_table, pulls), (0, 0));
}

#[test]
fn messages_of_a_batch_are_copied_together_and_those_that_cannot_be_have_a_turn_of_their_own() {
    let ranks = Runtime::in_process(2).unwrap();
    let (core, device) = (&ranks[0].0, &ranks[0].default_device().0);
    let (whole, late) = (Sevens::new(true, false), Sevens::new(false, false));
    let parted = Arc::new(Sevens { is_ready: true.into(), fails: false, together: 1 });
    let mut gathering = Gathering::default();
    let gather = |gathering: &mut Gathering, from, memory| {
        gathering.take(&device.transfers, pull_from(Rank(from), device.transfers.now(), memory))
    };
    gathering.begin(1);
    assert!(gathering.is_alone);
    gathering.begin(9);
    assert!(gather(&mut gathering, 0, &late).is_some(), "its memory is not ready");
    for (from, memory) in [(0, &whole), (0, &whole), (1, &parted), (1, &parted), (0, &whole)] {
        assert!(gather(&mut gathering, from, memory).is_none());
    }
    let alone = || device.transfers.alone.load(Ordering::SeqCst);
    assert_eq!((alone(), device.transfers.table.count()), (1, 0));

    let ended = |run: Run<'_>| -> Vec<_> {
        let ended = run.into_ended().into_iter();
        ended.map(|(_, status)| (status.rank.0, status.bytes().unwrap()[0])).collect()
    };
    let mut run = Run::new(core, device);
    run.pull_gathered(&mut gathering);
    // The last one is alone.
    assert_eq!(ended(run), [(0, 0), (0, 0), (1, 0), (0, 7)]);
    assert!(gathering.is_empty() && alone() == 0);
    let mut run = Run::new(core, device);
    run.move_pulls();
    assert_eq!((ended(run), device.transfers.table.count()), (vec![(1, 7)], 0));

    gathering.begin(2);
    assert!(gather(&mut gathering, 0, &whole).is_none());
    let mut run = Run::new(core, device);
    run.pull_gathered(&mut gathering);
    assert_eq!(ended(run), [(0, 7)], "by its own copy, for which its sender may be asked to help");

    device.route(Rank(1)).unwrap().set_down(DownCause::Closed);
    device.transfers.table.fail(Rank(1), &DownCause::Closed);
    for count in [1, 2] {
        gathering.begin(3);
        (0..count).for_each(|_| assert!(gather(&mut gathering, 1, &whole).is_none()));
        let mut run = Run::new(core, device);
        run.pull_gathered(&mut gathering);
        let lost = run.into_ended();
        assert!(lost.len() == count && lost.iter().all(|(_, status)| status.error.is_some()));
        assert!(alone() == 0 && device.transfers.table.count() == 0);
    }

    gathering.begin(99);
    let taken = (0..99).filter(|_| gather(&mut gathering, 0, &whole).is_none()).count();
    assert_eq!(taken, 2 * TOGETHER);
    let mut run = Run::new(core, device);
    run.pull_gathered(&mut gathering);
    assert_eq!(ended(run).len(), taken);
}

struct SingleSplit(Split);

impl Splits for SingleSplit {
    fn count(&self) -> u32 {
        1
    }

    fn get(&self, _: u32) -> Option<&Split> {
        Some(&self.0)
    }
}

/// Notes, when it is freed, whether the sender of the message could still take a piece.
struct Freed(Arc<SingleSplit>, u32, Arc<AtomicBool>);

impl AsRef<[u8]> for Freed {
    fn as_ref(&self) -> &[u8] {
        &[0; 8]
    }
}

impl Drop for Freed {
    fn drop(&mut self) {
        self.2.store(self.0.0.take_back(self.1, 1, 1).is_some(), Ordering::SeqCst);
    }
}

#[test]
fn no_sender_takes_a_piece_of_a_buffer_that_is_being_freed() {
    let (split, is_late) = (Arc::new(SingleSplit(Split::new())), Arc::new(AtomicBool::new(true)));
    let share = Arc::new(Shares::new(split.clone())).take(8).unwrap();
    let mut pull = Pull::new(0x1000, Sevens::new(true, false));
    let freed = Freed(split, share.turn, is_late.clone());
    pull.share = Some(Box::new(share));
    pull.keep(Some(Buffer::Bytes(Bytes::from_owner(freed))));
    drop(pull);
    assert!(!is_late.load(Ordering::SeqCst), "it takes a piece, and writes to freed memory");
}
