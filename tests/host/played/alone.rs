//! A message that is copied in the call that finds it, while something else happens.

use super::*;
use crate::support::keys::{forged, without_keys};
use carrack::buffer::Region;
use carrack::transports::contract::PeerMemoryError;
use carrack::transports::mem::MemRef;
use carrack::{OpError, PeerState, Rank, Tag};
use carrack_transports::sync::split::Piece;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

type Outcome = Result<(), PeerMemoryError>;
type Reading = dyn Fn(usize) -> Outcome + Send + Sync;

/// The peer's memory, all sevens. Each read is told its number, before it ends.
struct Told(Box<Reading>, AtomicUsize);

impl PeerMemory for Told {
    fn read(&self, _: u64, to: MemMut<'_>) -> Outcome {
        let bytes = vec![7; to.len()];
        copy_now(to, MemRef::host(&bytes)).unwrap();
        (self.0)(self.1.fetch_add(1, Ordering::SeqCst))
    }

    fn is_ready(&self) -> bool {
        true
    }

    fn is_gone(&self) -> bool {
        false
    }

    fn read_many(&self, many: &[(u64, MemMut<'_>)]) -> Result<usize, PeerMemoryError> {
        Err(PeerMemoryError::Failed(format!("{} together", many.len())))
    }

    fn write(&self, _: u64, _: MemRef<'_>) -> Outcome {
        panic!("no peer asks this rank for help")
    }
}

fn reads(play: &Play, reading: impl Fn(usize) -> Outcome + Send + Sync + 'static) {
    let told = Arc::new(Told(Box::new(reading), AtomicUsize::new(0)));
    assert!(play.peer.memory.set(told).is_ok());
}

/// Gives the runtime once, so that the peer does not keep it.
fn once(play: &Play) -> impl Fn() -> Option<Runtime> + Send + Sync + 'static {
    let kept = Mutex::new(Some(play.runtime().clone()));
    move || kept.lock().take()
}

fn receives(play: &Play, size: usize, tag: u64, done: &Sink) {
    let mut recv = play.runtime().post_recv(Rank(1), vec![0; size], Tag(tag)).comp(done);
    assert!(recv.try_submit().unwrap().is_posted());
}

#[test]
fn a_message_that_is_being_copied_counts() {
    let _watchdog = Watchdog::over("a message that is being copied");
    let (play, done) = (Play::new(), Sink::keeping());
    let (runtime, found) = (once(&play), Arc::new(Mutex::new(None)));
    let note = found.clone();
    reads(&play, move |_| {
        if let Some(runtime) = runtime() {
            let device = runtime.default_device();
            *note.lock() = Some(elsewhere(|| runtime.test_drained(device).unwrap()));
        }
        Ok(())
    });
    receives(&play, 20_000, 1, &done);
    play.peer.offers((5, 1), 20_000, 0x1000);
    play.until(|| done.count() > 0);
    assert_eq!(*found.lock(), Some(false), "it has completed, says the other thread");
}

#[test]
fn a_message_that_is_being_copied_when_its_peer_goes_ends_once() {
    let _watchdog = Watchdog::over("a peer that goes");
    let gone = || Err(PeerMemoryError::Gone(DownCause::Closed));
    let failed = || Err(PeerMemoryError::Failed("EFAULT".into()));
    let refused = || Err(PeerMemoryError::Refused("EPERM".into()));
    let outcomes: [fn() -> Outcome; 4] = [|| Ok(()), gone, failed, refused];
    for size in [1000, 20_000, 100_000, (1 << 20) + 1, 3 << 20] {
        for (what, outcome) in outcomes.into_iter().enumerate() {
            for at in [0, 1] {
                let (play, done) = (Play::new(), Sink::keeping());
                let (runtime, peer) = (once(&play), Arc::downgrade(&play.peer));
                reads(&play, move |number| {
                    if number < at {
                        return Ok(());
                    }
                    if let Some(runtime) = runtime() {
                        let peer = peer.upgrade().unwrap();
                        elsewhere(|| {
                            peer.goes();
                            while !matches!(runtime.peer_state(Rank(1)), PeerState::Down(_)) {
                                runtime.progress().unwrap();
                            }
                        });
                    }
                    outcome()
                });
                receives(&play, size, 1, &done);
                play.peer.offers((5, 1), size, 0x1000);
                play.until(|| done.count() > 0);
                step(&play.ranks);
                step(&play.ranks);
                let mut ended = done.take();
                assert_eq!(ended.len(), 1, "{size} {what} {at}");
                let status = ended.pop().unwrap();
                let ok = status.error.is_none();
                assert_eq!(status.buffer.len(), size, "{size} {what} {at}: it comes back");
                if ok {
                    assert_eq!(status.bytes().unwrap(), vec![7; size]);
                }
                assert!(play.runtime().pending().operations.is_empty(), "{size} {what} {at}");
                assert!(play.runtime().test_drained(play.runtime().default_device()).unwrap());
            }
        }
    }
}

#[test]
fn a_message_that_is_being_copied_when_its_deadline_passes_ends_once() {
    let _watchdog = Watchdog::over("a deadline");
    for size in [20_000, (1 << 20) + 1, 3 << 20] {
        let (play, done) = (Play::new(), Sink::keeping());
        let (span, runtime) = (Duration::from_millis(300), once(&play));
        let until = Instant::now() + span + Duration::from_millis(50);
        reads(&play, move |_| {
            if let Some(runtime) = runtime() {
                elsewhere(|| {
                    while Instant::now() <= until {
                        runtime.progress().unwrap();
                    }
                });
            }
            Ok(())
        });
        let region = Region::host(size);
        let buffer = region.downgrade();
        let mut recv = play.runtime().post_recv(Rank(1), region.whole(), Tag(1)).comp(&done);
        recv = recv.deadline(span);
        assert!(recv.try_submit().unwrap().is_posted());
        drop(recv);
        drop(region);
        play.peer.offers((5, 1), size, 0x1000);
        play.until(|| done.count() > 0);
        for _ in 0..10 {
            step(&play.ranks);
        }
        let ended = done.take();
        assert_eq!(ended.len(), 1, "{size}");
        drop(ended);
        assert!(play.runtime().pending().operations.is_empty(), "{size}");
        assert!(buffer.is_gone(), "{size}");
        assert!(play.peer.has_taken(FIN), "{size}: its sender is told");
        assert_eq!(play.peer.took(FIN).len(), 1, "{size}: once");
    }
}

/// The bytes of the list stay taken for ever, since the peer may be copying them.
#[test]
fn a_flush_waits_for_no_list_of_pieces_whose_bytes_stay_with_a_peer_that_has_gone() {
    const PIECES: u64 = 19;
    let _watchdog = Watchdog::over("a list that stays");
    for is_late in [false, true] {
        let (play, done, flushed) = (Play::new(), Sink::keeping(), Sink::keeping());
        play.peer.may_copy.store(true, Ordering::SeqCst);
        let [local, region] = [(); 2].map(|()| Region::host(128));
        let mr = play.runtime().register_memory(&region).unwrap();
        let rmr = forged(&without_keys(&mr.remote_key()), |bytes| {
            bytes[..4].copy_from_slice(&1_u32.to_le_bytes());
        });
        let pieces = [0, 64].map(|at: usize| carrack::Piece {
            local: &local,
            range: at..at + 8,
            rmr: &rmr,
            offset: at as u64,
        });
        let mut put = play.runtime().post_put_batch(Rank(1), &pieces).comp(&done);
        if is_late {
            put = put.deadline(Duration::from_millis(20));
        }
        put.submit().unwrap();
        play.until(|| play.peer.has_taken(PIECES) && done.count() == usize::from(is_late));
        play.runtime().post_flush(Rank(1)).comp(&flushed).submit().unwrap();
        step(&play.ranks);
        assert_eq!(flushed.count(), 0, "the peer may still carry it out");
        play.peer.goes();
        play.until(|| flushed.count() == 1 && done.count() == 1);
        let outcome = flushed.take().pop().unwrap().ok();
        assert!(matches!(outcome, Err(OpError::PeerDown { .. })), "{is_late}: {outcome:?}");
        assert!(play.runtime().test_drained(play.runtime().default_device()).unwrap());
    }
}

#[test]
fn the_buffer_of_a_message_that_its_sender_writes_stays_when_the_sender_goes() {
    const LARGE: usize = 256 << 10;
    let _watchdog = Watchdog::over("a sender that helps and goes");
    for (may_copy, early) in [(true, true), (true, false), (false, true), (false, false)] {
        let (play, done) = (Play::new(), Sink::keeping());
        play.peer.may_copy.store(may_copy, Ordering::SeqCst);
        let splits = Arc::new(Splitting(Split::new()));
        assert!(play.peer.splits.set(splits.clone()).is_ok());
        let piece: Arc<Mutex<Option<Piece>>> = Arc::default();
        let (runtime, peer, took) = (once(&play), Arc::downgrade(&play.peer), piece.clone());
        reads(&play, move |_| {
            if let Some(runtime) = runtime() {
                let peer = peer.upgrade().unwrap();
                let turn = peer.took_one(HELP).word(1) as u32;
                *took.lock() = splits.0.take_back(turn, 8, 1);
                if early {
                    elsewhere(|| {
                        peer.goes();
                        while !matches!(runtime.peer_state(Rank(1)), PeerState::Down(_)) {
                            runtime.progress().unwrap();
                        }
                    });
                }
            }
            Ok(())
        });
        let region = Region::host(LARGE);
        let buffer = region.downgrade();
        let mut recv = play.runtime().post_recv(Rank(1), region.whole(), Tag(1)).comp(&done);
        assert!(recv.try_submit().unwrap().is_posted());
        drop(region);
        play.peer.offers((5, 1), LARGE, 0x1000);
        if !early {
            play.until(|| piece.lock().is_some());
            step(&play.ranks);
            assert_eq!(done.count(), 0, "its sender writes");
            play.peer.goes();
        }
        play.until(|| done.count() > 0);
        let mut ended = done.take();
        assert_eq!(ended.len(), 1);
        let status = ended.pop().unwrap();
        assert!(piece.lock().is_some(), "it has not begun");
        let error = status.error.as_deref();
        assert!(matches!(error, Some(OpError::PeerDown { .. })), "{error:?}");
        drop(status);
        assert_eq!(buffer.is_gone(), !may_copy, "{may_copy} {early}");
        assert!(play.runtime().pending().operations.is_empty());
    }
}

#[test]
fn messages_that_two_threads_find_alone_both_end() {
    let _watchdog = Watchdog::over("two threads");
    for size in [20_000, 3 << 20] {
        let (play, done) = (Play::new(), Sink::keeping());
        let (runtime, peer) = (once(&play), Arc::downgrade(&play.peer));
        reads(&play, move |_| {
            if let Some(runtime) = runtime() {
                let peer = peer.upgrade().unwrap();
                elsewhere(|| {
                    for number in 2..4 {
                        peer.offers((4 + number, number), size, 0x1000);
                        runtime.progress().unwrap();
                    }
                });
            }
            Ok(())
        });
        (1..4).for_each(|tag| receives(&play, size, tag, &done));
        play.peer.offers((5, 1), size, 0x1000);
        play.until(|| done.count() == 3);
        for status in done.take() {
            assert_eq!(status.ok().unwrap().bytes().unwrap(), vec![7; size]);
        }
        let mut told: Vec<_> = play.peer.took(FIN).iter().map(|fin| fin.header[1]).collect();
        told.sort_unstable();
        assert_eq!(told, [5, 6, 7]);
    }
}

#[test]
fn a_handler_of_a_message_that_came_alone_receives_another_that_waits() {
    let _watchdog = Watchdog::over("a receive in a handler");
    let (play, done) = (Play::new(), Arc::new(Sink::keeping()));
    reads(&play, |_| Ok(()));
    play.peer.offers((6, 2), 50_000, 0x1000);
    play.until(|| play.peer.coming.lock().is_empty());
    step(&play.ranks);
    let (runtime, sink) = (once(&play), done.clone());
    let handler = carrack::Handler::new(move |status: carrack::Status| {
        assert!(status.error.is_none());
        if let Some(runtime) = runtime() {
            let mut recv = runtime.post_recv(Rank(1), vec![0; 50_000], Tag(2)).comp(&*sink);
            assert!(recv.try_submit().unwrap().is_posted());
        }
    });
    let mut recv = play.runtime().post_recv(Rank(1), vec![0; 50_000], Tag(1)).comp(&handler);
    assert!(recv.try_submit().unwrap().is_posted());
    play.peer.offers((5, 1), 50_000, 0x1000);
    play.until(|| done.count() == 1);
    assert_eq!(done.take().pop().unwrap().ok().unwrap().bytes().unwrap(), vec![7; 50_000]);
}

#[test]
fn a_message_that_the_kernel_refuses_to_copy_at_once_comes_in_fragments() {
    let _watchdog = Watchdog::over("a refusal");
    let (play, done) = (Play::new(), Sink::keeping());
    reads(&play, |number| {
        assert_eq!(number, 0, "it is asked again");
        Err(PeerMemoryError::Refused("EPERM".into()))
    });
    for (tx, size) in [(5, 8000), (6, 8000)] {
        receives(&play, size, tx, &done);
        play.peer.offers((tx, tx), size, 0x1000);
        play.until(|| play.peer.has_taken(CTS));
        let rx = play.peer.took_one(CTS).word(0);
        for at in (0..size).step_by(4000) {
            let header = Header([FRAGMENT | (at as u64) << 8, rx]);
            play.peer.brings(Event::arrived(PEER, header, Payload::Aside(vec![3; 4000])));
        }
        play.until(|| done.count() == 1);
        assert_eq!(done.take().pop().unwrap().ok().unwrap().bytes().unwrap(), vec![3; size]);
        assert!(play.runtime().pending().operations.is_empty());
    }
}
