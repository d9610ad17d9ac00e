//! Operations that miss their deadline while something is at them.

use super::*;
use carrack::buffer::Region;
use carrack::transports::contract::PeerMemoryError;
use carrack::transports::gpu::{EventState, GpuError, GpuEvent};
use carrack::transports::mem::{MemRef, WeakRegion};
use carrack::{OpError, PeerState, Rank, Status, Tag};
use std::time::{Duration, Instant};

/// Deadlines to try: the first whose time does not pass before everything is in place.
const SPANS: [u64; 4] = [30, 300, 3000, 30_000];

/// Bytes for which help pays.
const LARGE: usize = 256 << 10;
/// Units of a message of that length: 32 KiB each.
const UNITS: u32 = 8;

/// The peer's memory. While the kernel copies from it for the first time, the peer takes a piece
/// from the back, and does not write it.
struct Helping {
    peer: std::sync::Weak<Peer>,
    splits: Arc<Splitting>,
    piece: Mutex<Option<carrack_transports::sync::split::Piece>>,
}

impl PeerMemory for Helping {
    fn read(&self, _: u64, to: MemMut<'_>) -> Result<(), PeerMemoryError> {
        let peer = self.peer.upgrade().unwrap();
        let help = peer.took(HELP);
        if let [help] = &help[..] {
            let turn = help.word(1) as u32;
            *self.piece.lock() = self.splits.0.take_back(turn, UNITS, 1);
        }
        let bytes = vec![7; to.len()];
        copy_now(to, MemRef::host(&bytes)).unwrap();
        Ok(())
    }

    fn is_ready(&self) -> bool {
        true
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn read_many(&self, _: &[(u64, MemMut<'_>)]) -> Result<usize, PeerMemoryError> {
        panic!("there is one message")
    }

    fn write(&self, _: u64, _: MemRef<'_>) -> Result<(), PeerMemoryError> {
        panic!("no peer asks this rank for help")
    }
}

/// A receive that has missed its deadline while the peer still writes a part of its message.
struct Late {
    play: Play,
    memory: Arc<Helping>,
    buffer: WeakRegion,
}

impl Late {
    fn new() -> Self {
        SPANS.into_iter().find_map(Self::within).expect("a deadline that is long enough")
    }

    fn within(span: u64) -> Option<Self> {
        let (play, done) = (Play::new(), Sink::keeping());
        let splits = Arc::new(Splitting(Split::new()));
        let memory = Arc::new(Helping {
            peer: Arc::downgrade(&play.peer),
            splits: splits.clone(),
            piece: Mutex::default(),
        });
        assert!(
            play.peer.memory.set(memory.clone()).is_ok() && play.peer.splits.set(splits).is_ok()
        );
        let region = Region::host(LARGE);
        let buffer = region.downgrade();
        let recv = play.runtime().post_recv(Rank(1), region.whole(), Tag(1)).comp(&done);
        let posted = recv.deadline(Duration::from_millis(span)).try_submit();
        assert!(posted.unwrap().is_posted());
        drop(region);
        play.peer.offers((5, 1), LARGE, 0x1000);
        play.until(|| done.count() > 0);
        is_late(&done.take().pop().unwrap());
        let has_begun = memory.piece.lock().is_some();
        has_begun.then_some(Self { play, memory, buffer })
    }

    fn has_ended(&self) -> bool {
        self.play.runtime().pending().operations.is_empty()
    }
}

#[track_caller]
fn is_late(status: &Status) {
    let error = status.error.as_deref();
    assert!(matches!(error, Some(OpError::TimedOut(Rank(1)))), "{error:?}");
}

#[test]
fn the_buffer_of_a_late_receive_is_freed_when_its_sender_is_done_with_it() {
    let _watchdog = Watchdog::over("a late receive");
    let late = Late::new();
    assert!(!late.has_ended() && !late.buffer.is_gone(), "its sender writes");
    late.memory.splits.0.note_written(late.memory.piece.lock().unwrap());
    late.play.until(|| late.has_ended());
    assert!(late.buffer.is_gone());
    assert!(late.play.peer.has_taken(FIN), "its sender is told");
}

#[test]
fn the_buffer_of_a_late_receive_stays_while_its_sender_may_write_to_it() {
    let _watchdog = Watchdog::over("a late receive, and its sender goes");
    for may_copy in [true, false] {
        let late = Late::new();
        late.play.peer.may_copy.store(may_copy, Ordering::SeqCst);
        late.play.peer.goes();
        late.play.until(|| late.has_ended());
        assert_eq!(late.buffer.is_gone(), !may_copy, "{may_copy}");
    }
}

#[test]
fn the_buffer_of_a_late_receive_outlives_its_runtime_if_need_be() {
    let _watchdog = Watchdog::over("a late receive, and its runtime ends");
    for may_copy in [true, false] {
        let Late { play, buffer, .. } = Late::new();
        play.peer.may_copy.store(may_copy, Ordering::SeqCst);
        drop(play);
        assert_eq!(buffer.is_gone(), !may_copy, "{may_copy}");
    }
}

/// Lets a deadline pass, and another thread look for operations that have missed theirs.
fn pass(runtime: &Runtime, until: Instant) {
    elsewhere(|| {
        while Instant::now() <= until {
            std::thread::yield_now();
        }
        runtime.progress().unwrap();
    });
}

/// The thread that sends a message's fragments hears of its deadline from another thread.
#[test]
fn a_peer_is_silent_if_a_message_to_it_is_late_whichever_thread_ends_that() {
    let _watchdog = Watchdog::over("a message that is late");
    let within = |span: u64| {
        let (play, done, span) = (Play::new(), Sink::keeping(), Duration::from_millis(span));
        let until = Instant::now() + span;
        let mut send = play.runtime().post_send(Rank(1), vec![7; 100_000], Tag(1)).comp(&done);
        send = send.deadline(span);
        assert!(send.try_submit().unwrap().is_posted());
        let tx = play.peer.took_one(RTS_SEND).word(1);
        let (runtime, was_in_time) = (play.runtime().clone(), Arc::new(AtomicBool::new(false)));
        let in_time = was_in_time.clone();
        play.peer.takes(move |message| {
            if message.kind() == FRAGMENT && Instant::now() < until {
                in_time.store(true, Ordering::SeqCst);
                // By the clock of the deadline, which began later.
                pass(&runtime, until + Duration::from_millis(1));
            }
            Ok(Submit::Busy(Busy::Full))
        });
        play.peer.sends([CTS, tx], &[42, 100_000]);
        play.until(|| done.count() > 0);
        is_late(&done.take().pop().unwrap());
        assert_eq!(play.runtime().peer_state(Rank(1)), PeerState::Suspect);
        was_in_time.load(Ordering::SeqCst)
    };
    assert!(SPANS.into_iter().any(within), "a deadline that is long enough");
}

/// The thread that prepares a buffer for the peer's NIC hears of the deadline from another thread.
#[test]
fn a_peer_is_silent_if_a_receive_from_it_is_late_whichever_thread_ends_that() {
    let _watchdog = Watchdog::over("a receive that is late");
    let within = |span: u64| {
        let peer = Arc::<Peer>::default();
        peer.exposes(|buffer| Err(("not yet".into(), buffer)));
        let play = Play::with(peer, |builder| builder);
        let (done, span) = (Sink::keeping(), Duration::from_millis(span));
        let until = Instant::now() + span;
        let recv = play.runtime().post_recv(Rank(1), vec![0; 100_000], Tag(1)).comp(&done);
        assert!(recv.deadline(span).try_submit().unwrap().is_posted());
        let (runtime, was_in_time) = (play.runtime().clone(), Arc::new(AtomicBool::new(false)));
        let in_time = was_in_time.clone();
        play.peer.exposes(move |buffer| {
            in_time.store(Instant::now() < until, Ordering::SeqCst);
            pass(&runtime, until + Duration::from_millis(1));
            Err(("it takes no buffer".into(), buffer))
        });
        play.peer.offers((5, 1), 100_000, 0);
        play.until(|| done.count() > 0);
        is_late(&done.take().pop().unwrap());
        let is_suspect = play.runtime().peer_state(Rank(1)) == PeerState::Suspect;
        let was_in_time = was_in_time.load(Ordering::SeqCst);
        assert!(is_suspect || !was_in_time, "it missed its deadline");
        was_in_time
    };
    assert!(SPANS.into_iter().any(within), "a deadline that is long enough");
}

/// An event that fires when it is told to. Who asks again then waits for a deadline to pass.
struct Slow {
    has_fired: AtomicBool,
    was_asked: AtomicBool,
    until: Instant,
}

impl EventState for Slow {
    fn query(&self) -> Result<bool, GpuError> {
        if !self.has_fired.load(Ordering::SeqCst) {
            return Ok(false);
        }
        if self.was_asked.swap(true, Ordering::SeqCst) {
            while Instant::now() <= self.until {
                std::thread::yield_now();
            }
        }
        Ok(true)
    }

    fn wait(&self) -> Result<(), GpuError> {
        unreachable!("no caller waits for it")
    }
}

#[test]
fn a_peer_is_silent_if_a_receive_is_late_when_its_event_has_fired() {
    let _watchdog = Watchdog::over("a receive that begins late");
    let within = |span: u64| {
        let (play, done, span) = (Play::new(), Sink::keeping(), Duration::from_millis(span));
        let (has_fired, was_asked) = (AtomicBool::new(false), AtomicBool::new(false));
        // By the clock of the deadline, which begins later.
        let until = Instant::now() + span + Duration::from_millis(1);
        let slow = Arc::new(Slow { has_fired, was_asked, until });
        let recv = play.runtime().post_recv(Rank(1), vec![0; 8], Tag(1)).comp(&done);
        let posted = recv.after(&GpuEvent::new(slow.clone())).deadline(span).try_submit();
        assert!(posted.unwrap().is_posted());
        slow.has_fired.store(true, Ordering::SeqCst);
        play.until(|| done.count() > 0);
        is_late(&done.take().pop().unwrap());
        assert_eq!(play.runtime().peer_state(Rank(1)), PeerState::Suspect);
        // By the receive itself, which was to begin.
        slow.was_asked.load(Ordering::SeqCst)
    };
    assert!(SPANS.into_iter().any(within), "a deadline that is long enough");
}
