//! Transfers whose peer, link, or other thread comes at the wrong moment.

use super::*;
use carrack::transports::gpu::{Flavour, Gpu};
use carrack::{OpError, PeerState, ProgressError, Rank, Tag};
use carrack_simulators::gpu::{FakeConfig, FakeDriver};
use std::sync::atomic::AtomicUsize;
use std::sync::mpsc::channel;

/// The peer's name for a message that it takes.
const RX: u64 = 42;
/// Two fragments, and some.
const LONG: usize = 2 * LONGEST + 100;
/// Bytes that an engine copies at a time.
const BLOCK: usize = 512 << 10;
const FULL: Result<Submit, SubmitError> = Ok(Submit::Busy(Busy::Full));

/// As another thread, which has begun to answer for the message, finds that it was not offered.
#[test]
fn an_offer_that_was_not_taken_ends_though_another_thread_is_at_it() {
    let _watchdog = Watchdog::over("an offer that was not taken");
    let (play, done) = (Play::new(), Sink::keeping());
    let ((at_it, is_at_it), (go, may_go)) = (channel(), channel());
    let (is_at_it, may_go) = (Mutex::new(is_at_it), Mutex::new(may_go));
    let (other, went) = (Arc::new(Mutex::new(None)), Arc::new(AtomicBool::new(false)));
    let (peer, runtime, thread) = (play.peer.clone(), play.runtime().clone(), other.clone());
    play.peer.takes(move |message| {
        match message.kind() {
            RTS_SEND => {
                peer.sends([CTS, message.word(1)], &[RX, LONG as u64]);
                let (runtime, went) = (runtime.clone(), went.clone());
                *thread.lock() = Some(std::thread::spawn(move || {
                    while !went.load(Ordering::SeqCst) {
                        runtime.progress().unwrap();
                    }
                }));
                is_at_it.lock().recv().unwrap();
            }
            FRAGMENT if !went.load(Ordering::SeqCst) => {
                at_it.send(()).unwrap();
                may_go.lock().recv().unwrap();
                went.store(true, Ordering::SeqCst);
            }
            _ => {}
        }
        FULL
    });
    let mut send = play.runtime().post_send(Rank(1), vec![7; LONG], Tag(1)).comp(&done);
    assert!(send.try_submit().unwrap().is_posted());
    go.send(()).unwrap();
    other.lock().take().unwrap().join().unwrap();
    let pending = play.runtime().pending().operations;
    assert!(pending.is_empty(), "kept for ever: {pending:?}");
    let status = done.take().pop().expect("it has ended");
    assert!(matches!(status.error.as_deref(), Some(OpError::Refused(_))), "{status:?}");
}

#[test]
fn a_receiver_hears_of_all_fragments_that_went_before_a_links_error() {
    let _watchdog = Watchdog::over("a link's error");
    let (play, done, fragments) = (Play::new(), Sink::keeping(), AtomicUsize::new(0));
    play.peer.takes(move |message| match message.kind() {
        FRAGMENT if fragments.fetch_add(1, Ordering::SeqCst) > 0 => {
            Err(SubmitError::Lacking("this link takes one fragment".into()))
        }
        _ => Ok(Submit::Done),
    });
    let mut send = play.runtime().post_send(Rank(1), vec![7; LONG], Tag(1)).comp(&done);
    assert!(send.try_submit().unwrap().is_posted());
    let tx = play.peer.took_one(RTS_SEND).word(1);
    play.peer.sends([CTS, tx], &[RX, LONG as u64]);
    play.until(|| done.count() > 0);
    let error = done.take().pop().unwrap().error.unwrap();
    assert!(matches!(*error, OpError::Link { .. }), "{error}");
    let taken = std::mem::take(&mut *play.peer.taken.lock());
    let [fragment, fin] = &taken[..] else { panic!("{} messages", taken.len()) };
    assert_eq!((fragment.kind(), fragment.bytes.len()), (FRAGMENT, LONGEST));
    assert_eq!(fin.header, [FIN, RX]);
    assert_eq!([fin.word(0), fin.word(1)], [BROKEN, LONGEST as u64], "what has gone");
}

/// A buffer that the peer's NIC may reach.
struct Window(Buffer);

impl Exposed for Window {
    fn place(&self) -> RemotePlace {
        RemotePlace { addr: 0x1000, key: 1 }
    }

    fn take_back(self: Box<Self>) -> Buffer {
        self.0
    }
}

#[test]
fn news_of_a_write_that_its_end_has_overtaken_break_nothing() {
    let _watchdog = Watchdog::over("late news");
    let peer = Arc::<Peer>::default();
    peer.exposes(|buffer| Ok(Box::new(Window(buffer))));
    let (play, done, next) =
        (Play::with(peer, |builder| builder), Sink::keeping(), Sink::keeping());
    let recv =
        play.runtime().post_recv(Rank(1), vec![0; 64 << 10], Tag(1)).comp(&done).try_submit();
    assert!(recv.unwrap().is_posted());
    play.peer.offers((5, 1), 64 << 10, 0);
    play.until(|| play.peer.has_taken(CTS_WRITE));
    let rx = play.peer.took_one(CTS_WRITE).word(0);
    let recv = play.runtime().post_recv(Rank(1), vec![0; 8], Tag(2)).comp(&next).try_submit();
    assert!(recv.unwrap().is_posted());
    // Two threads may receive them, so that the first is handled last.
    play.peer.sends([FIN, rx], &[BROKEN, 0, 0]);
    play.peer.sends([FIN_WRITE, rx], &[0]);
    play.peer.sends([UNWRITTEN, rx], &[0]);
    play.peer.sends([SEND | 3 << 8, 2], &[99]);
    let errors = until_with_errors(&play.ranks, || next.count() > 0);
    let status = next.take().pop().unwrap();
    assert_eq!(status.ok().expect("the peer is as it was").value(), Some(99_u64));
    assert_eq!(play.runtime().peer_state(Rank(1)), PeerState::Up);
    let error = done.take().pop().unwrap().error.unwrap();
    assert!(matches!(*error, OpError::Refused(_)), "{error}");
    let is_stray = |error: &ProgressError| error.to_string().contains("answers an offer");
    assert!(!errors.is_empty() && errors.iter().all(is_stray), "{errors:?}");
}

#[test]
fn a_message_that_breaks_off_while_an_engine_reads_it_is_ended_once() {
    let _watchdog = Watchdog::over("a message that breaks off");
    let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
    let gpus = Arc::new(driver.clone());
    let play = Play::with(Arc::default(), |builder| builder.gpu_driver(gpus));
    let (done, tried) = (Sink::keeping(), Arc::new(AtomicBool::new(false)));
    let breaks = Arc::new(AtomicBool::new(false));
    let (has_tried, is_broken) = (tried.clone(), breaks.clone());
    play.peer.takes(move |message| match message.kind() {
        FRAGMENT if is_broken.load(Ordering::SeqCst) => {
            Err(SubmitError::Lacking("this link takes no fragment".into()))
        }
        FRAGMENT => {
            has_tried.store(true, Ordering::SeqCst);
            FULL
        }
        _ => Ok(Submit::Done),
    });
    let bytes = driver.gpu(0).unwrap().allocate(2 * BLOCK, Flavour::Plain).unwrap();
    let mut send = play.runtime().post_send(Rank(1), bytes.whole(), Tag(1)).comp(&done);
    assert!(send.try_submit().unwrap().is_posted());
    let tx = play.peer.took_one(RTS_SEND).word(1);
    // The first block is copied, and waits; the engine is at the second when the link fails.
    play.peer.sends([CTS, tx], &[RX, BLOCK as u64]);
    play.until(|| tried.load(Ordering::SeqCst));
    let held = driver.faults().hold_copies();
    play.peer.sends([GRANT, tx], &[2 * BLOCK as u64]);
    play.runtime().progress().unwrap();
    breaks.store(true, Ordering::SeqCst);
    play.until(|| play.peer.has_taken(FIN));
    play.runtime().progress().unwrap();
    assert_eq!(done.count(), 0, "the engine has the buffer");
    drop(held);
    play.until(|| done.count() > 0);
    let status = done.take().pop().unwrap();
    assert!(matches!(status.error.as_deref(), Some(OpError::Link { .. })), "{status:?}");
    assert_eq!(status.buffer.len(), 2 * BLOCK, "it comes back");
    let fin = play.peer.took_one(FIN);
    assert_eq!((fin.header[1], fin.word(0), fin.word(1)), (RX, BROKEN, 0));
}

#[test]
fn a_message_whose_engine_has_its_bytes_gets_them_back_if_it_was_not_offered() {
    let _watchdog = Watchdog::over("bytes at an engine");
    let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
    let gpus = Arc::new(driver.clone());
    let play = Play::with(Arc::default(), |builder| builder.gpu_driver(gpus));
    let (done, peer, runtime) = (Sink::keeping(), play.peer.clone(), play.runtime().clone());
    let offers = AtomicUsize::new(0);
    play.peer.takes(move |message| match message.kind() {
        RTS_SEND if offers.fetch_add(1, Ordering::SeqCst) == 0 => {
            // An answer to what it has not been sent: the engine begins to copy.
            peer.sends([CTS, message.word(1)], &[RX, 2 * BLOCK as u64]);
            (0..2).for_each(|_| _ = elsewhere(|| runtime.progress().unwrap()));
            FULL
        }
        _ => Ok(Submit::Done),
    });
    let bytes = driver.gpu(0).unwrap().allocate(2 * BLOCK, Flavour::Plain).unwrap();
    let mut send = play.runtime().post_send(Rank(1), bytes.whole(), Tag(1)).comp(&done);
    assert!(send.try_submit().unwrap().is_retry());
    assert!(send.try_submit().unwrap().is_posted());
    let rts = play.peer.took_one(RTS_SEND);
    assert_eq!(rts.word(0), 2 * BLOCK as u64, "it is the same message");
    play.peer.sends([FIN, rts.word(1)], &[0, 0, 0]);
    play.until(|| done.count() > 0);
    let status = done.take().pop().unwrap();
    assert!(status.error.is_none() && status.buffer.len() == 2 * BLOCK, "{status:?}");
}

#[test]
fn the_end_of_a_peer_is_not_forgotten_for_a_verdict_that_comes_after_it() {
    let _watchdog = Watchdog::over("a verdict behind the end");
    let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
    let gpus = Arc::new(driver.clone());
    let play = Play::with(Arc::default(), |builder| builder.gpu_driver(gpus));
    let done = Sink::keeping();
    let place = driver.gpu(0).unwrap().allocate(2 * BLOCK, Flavour::Plain).unwrap();
    let recv = play.runtime().post_recv(Rank(1), place.whole(), Tag(1)).comp(&done).try_submit();
    assert!(recv.unwrap().is_posted());
    play.peer.offers((5, 1), 2 * BLOCK, 0);
    play.until(|| play.peer.has_taken(CTS));
    let rx = play.peer.took_one(CTS).word(0);
    // A block fills, and the engine is at it.
    let held = driver.faults().hold_copies();
    for at in (0..BLOCK as u64).step_by(LONGEST) {
        let header = Header([FRAGMENT | at << 8, rx]);
        play.peer.brings(Event::arrived(PEER, header, Payload::Aside(vec![7; LONGEST])));
    }
    play.until(|| play.peer.coming.lock().is_empty());
    step(&play.ranks);
    // As another thread takes it in, which has got it from the device before.
    play.peer.goes();
    play.peer.sends([FIN, rx], &[BROKEN, 2 * BLOCK as u64, 0]);
    play.until(|| play.peer.coming.lock().is_empty());
    assert_eq!(done.count(), 0, "the engine has the buffer");
    drop(held);
    play.until(|| done.count() > 0);
    let error = done.take().pop().unwrap().error.unwrap();
    assert!(matches!(*error, OpError::PeerDown { rank: Rank(1), .. }), "{error}");
    let pending = play.runtime().pending().operations;
    assert!(pending.is_empty(), "it waits for what will not come: {pending:?}");
}
