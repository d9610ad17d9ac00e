//! The places where operations wait, one by one. Each hears of deadlines, of its peer's end and of
//! the end of its runtime. It tells which operations wait there, and counts them.

use super::*;
use carrack::packet::{GpuAllocator, PacketPool};
use carrack::transports::gpu::{EventState, Flavour, Gpu, GpuError, GpuEvent};
use carrack::{AsCompletion, Completion, Device, OpError, Rank, Status, StreamCounter, Tag};
use carrack_simulators::gpu::{FakeConfig, FakeDriver, HeldCopies};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::AtomicUsize;
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

const AM: u64 = 1;
const LONG: usize = 100_000;
const SOON: Duration = Duration::from_millis(20);
const NEVER: Duration = Duration::from_secs(10_000);

/// The reasons why operations end early.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Why {
    Late,
    Down,
    Closed,
}
use Why::{Closed, Down, Late};

/// One place.
struct Place {
    /// A line of the list of pending operations.
    listed: &'static str,
    /// The device is not drained meanwhile.
    counts: bool,
    /// The reasons that end the operation; the others leave it there.
    ends: &'static [Why],
    /// Brings an operation there that ends once at `Scene::over`.
    begin: fn(&mut Scene),
}

const PLACES: [Place; 9] = [
    Place {
        listed: "receive, rank 1, tag 1, 8 B: waits for its message",
        counts: false,
        ends: &[Late, Down, Closed],
        begin: |scene| scene.receive(vec![0; 8].into(), None),
    },
    Place {
        listed: "receive, rank 1, tag 1, 8 B: waits for the event",
        counts: false,
        ends: &[Late, Down, Closed],
        begin: |scene| scene.receive(vec![0; 8].into(), Some(never())),
    },
    Place {
        listed: "flush, rank 1, tag 0, 0 B: waits for what was posted before",
        counts: true,
        ends: &[Late, Down, Closed],
        begin: |scene| {
            let flush = scene.runtime().post_flush(Rank(1)).after(&never()).comp(&scene.done);
            flush.deadline(scene.deadline).submit().unwrap();
        },
    },
    Place {
        listed: "message in the backlog, rank 1, tag 1, 8 B: waits for its turn",
        counts: true,
        ends: &[Late, Down, Closed],
        begin: |scene| {
            scene.play.peer.takes(|_| Ok(Submit::Busy(Busy::Full)));
            scene.send(vec![7; 8].into());
        },
    },
    Place {
        listed: "message that was offered, rank 1, tag 1, 100000 B: waits for its receive",
        counts: true,
        ends: &[Late, Down, Closed],
        begin: |scene| scene.send(vec![7; LONG].into()),
    },
    Place {
        listed: "message that a link holds",
        counts: true,
        ends: &[Closed],
        begin: |scene| scene.send(scene.on_gpu()),
    },
    Place {
        listed: "copy, rank 1, tag 1, 8 B: waits for an engine",
        counts: true,
        ends: &[Closed],
        begin: |scene| {
            scene.receive(scene.on_gpu(), None);
            scene.play.peer.sends([SEND | 3 << 8, 1], &[7]);
        },
    },
    Place {
        listed: "copy, rank 1, tag 5, 8 B: waits for an engine",
        counts: true,
        ends: &[Closed],
        begin: |scene| {
            let pool = GpuAllocator::on(scene.driver.gpu(0).unwrap());
            let pool = PacketPool::new(Arc::new(pool), 4096, 4);
            scene.device = scene.runtime().device().packet_pool(&pool).build().unwrap();
            // The first name that a runtime gives.
            scene.runtime().register_comp(&scene.done).unwrap();
            scene.play.peer.sends([AM | 1 << 32, 5], &[7]);
            scene.runtime().progress_device(&scene.device).unwrap();
        },
    },
    Place {
        listed: "0 messages (0 B) without a receive, 1 deliveries (",
        counts: true,
        ends: &[Closed],
        begin: |scene| {
            scene.gate.0.is_shut.store(true, Ordering::SeqCst);
            scene.send(vec![7; 8].into());
        },
    },
];

/// Refuses statuses while it is shut.
struct Gate {
    is_shut: AtomicBool,
    sink: Arc<dyn Completion>,
}

impl Completion for Gate {
    fn signal(&self, status: Status) -> Result<(), Status> {
        if self.is_shut.load(Ordering::SeqCst) { Err(status) } else { self.sink.signal(status) }
    }
}

struct Gated(Arc<Gate>, Arc<dyn Completion>);

impl AsCompletion for Gated {
    fn as_completion(&self) -> &Arc<dyn Completion> {
        &self.1
    }
}

struct NotYet;

impl EventState for NotYet {
    fn query(&self) -> Result<bool, GpuError> {
        Ok(false)
    }

    fn wait(&self) -> Result<(), GpuError> {
        unreachable!("no caller waits for it")
    }
}

fn never() -> GpuEvent {
    GpuEvent::new(Arc::new(NotYet))
}

/// A rank whose peer takes everything, and a GPU whose engines stand still.
struct Scene {
    driver: FakeDriver,
    held: HeldCopies,
    play: Play,
    device: Device,
    done: Sink,
    gate: Gated,
    deadline: Duration,
}

impl Scene {
    fn new(deadline: Duration) -> Self {
        let driver = FakeDriver::new(FakeConfig::devices(1)).unwrap();
        let gpus = Arc::new(driver.clone());
        let play = Play::with(Arc::default(), |builder| builder.gpu_driver(gpus));
        let done = Sink::keeping();
        let gate =
            Arc::new(Gate { is_shut: AtomicBool::new(false), sink: done.as_completion().clone() });
        let (held, device) =
            (driver.faults().hold_copies(), play.runtime().default_device().clone());
        Self { held, device, done, gate: Gated(gate.clone(), gate), deadline, driver, play }
    }

    fn runtime(&self) -> &Runtime {
        self.play.runtime()
    }

    fn on_gpu(&self) -> Buffer {
        self.driver.gpu(0).unwrap().allocate(8, Flavour::Plain).unwrap().whole().into()
    }

    fn send(&self, buffer: Buffer) {
        let send = self.runtime().post_send(Rank(1), buffer, Tag(1)).comp(&self.gate);
        send.deadline(self.deadline).submit().unwrap();
    }

    fn receive(&self, buffer: Buffer, after: Option<GpuEvent>) {
        let mut recv = self.runtime().post_recv(Rank(1), buffer, Tag(1)).comp(&self.gate);
        if let Some(event) = &after {
            recv = recv.after(event);
        }
        assert!(recv.deadline(self.deadline).try_submit().unwrap().is_posted());
    }

    /// Makes progress for some time.
    fn go_on(&self) {
        let until = Instant::now() + 2 * SOON;
        while Instant::now() < until {
            let _ = self.runtime().progress_all();
        }
    }
}

#[track_caller]
fn assert_ended_by(why: Why, what: &str, status: &Status) {
    let is_by_it = match (why, status.error.as_deref()) {
        // Nothing was lost.
        (Down, error) if what.starts_with("flush") => error.is_none(),
        (Late, error) => matches!(error, Some(OpError::TimedOut(Rank(1)))),
        (Down, error) => matches!(error, Some(OpError::PeerDown { rank: Rank(1), .. })),
        // A status that was held up is told at last.
        (Closed, error) => matches!(error, Some(OpError::Closed) | None),
    };
    assert!(is_by_it, "{why:?}: {status:?}");
}

#[test]
fn whatever_waits_is_listed_and_counted_and_ends_once_for_the_first_reason() {
    let _watchdog = Watchdog::over("places where operations wait");
    for (place, why) in PLACES.iter().flat_map(|place| [Late, Down, Closed].map(|why| (place, why)))
    {
        let what = place.listed;
        let mut scene = Scene::new(if why == Late { SOON } else { NEVER });
        (place.begin)(&mut scene);
        if why != Late {
            until(&scene.play.ranks, || scene.runtime().pending().to_string().contains(what));
            let is_drained = scene.runtime().test_drained(&scene.device).unwrap();
            assert_eq!(is_drained, !place.counts, "{what}");
        }
        if why == Down {
            scene.play.peer.goes();
        }
        if why != Closed && place.ends.contains(&why) {
            until_with_errors(&scene.play.ranks, || scene.done.count() > 0);
        } else {
            scene.go_on();
        }
        let ended = scene.done.take();
        assert_eq!(ended.len(), usize::from(why != Closed && place.ends.contains(&why)), "{what}");
        ended.iter().for_each(|status| assert_ended_by(why, what, status));
        let Scene { held, play, done, gate, device, .. } = scene;
        gate.0.is_shut.store(false, Ordering::SeqCst);
        // What an engine is at ends before its runtime, but is not looked at.
        drop(held);
        drop((play, device));
        let left = done.take();
        assert_eq!(ended.len() + left.len(), 1, "{what}: {why:?}");
        left.iter().for_each(|status| assert_ended_by(Closed, what, status));
    }
}

/// Counts the calls of a future's waker.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn a_member_of_a_group_is_listed_and_looks_up_at_deadlines_and_at_the_end_of_a_rank() {
    let _watchdog = Watchdog::over("a member of a group");
    let scene = Scene::new(SOON);
    let (world, woken) = (scene.runtime().world(), Arc::new(Woken::default()));
    let waker = Waker::from(woken.clone());
    let mut barrier = pin!(world.barrier_async());
    let mut poll = || barrier.as_mut().poll(&mut Context::from_waker(&waker));
    assert!(poll().is_pending());
    let pending = scene.runtime().pending().to_string();
    assert!(pending.contains("barrier, any rank, tag 0, 0 B: waits for rank 1"), "{pending}");
    scene.go_on();
    let before = woken.0.load(Ordering::SeqCst);
    scene.receive(vec![0; 8].into(), None);
    until(&scene.play.ranks, || scene.done.count() > 0);
    assert!(woken.0.load(Ordering::SeqCst) > before, "a deadline has passed");
    assert!(poll().is_pending());
    scene.go_on();
    let before = woken.0.load(Ordering::SeqCst);
    scene.play.peer.goes();
    until_with_errors(&scene.play.ranks, || woken.0.load(Ordering::SeqCst) > before);
    assert!(matches!(poll(), Poll::Ready(Err(_))));
}

#[test]
fn a_stream_that_waits_for_operations_goes_on_when_they_cannot_end() {
    let _watchdog = Watchdog::over("a stream that waits");
    for why in [Down, Closed] {
        let Scene { driver, play, .. } = Scene::new(NEVER);
        let gpu: Arc<dyn Gpu> = driver.gpu(0).unwrap();
        let (stream, counter) =
            (gpu.stream().unwrap(), StreamCounter::new(play.runtime(), &gpu).unwrap());
        // The end of the peer is noticed on a link only.
        play.runtime().post_send(Rank(1), vec![7; 8], Tag(1)).submit().unwrap();
        counter.wait_on(&stream, 1).unwrap();
        if why == Down {
            play.peer.goes();
            until_with_errors(&play.ranks, || counter.error().is_some());
            assert!(matches!(counter.error(), Some(OpError::PeerDown { rank: Rank(1), .. })));
        } else {
            drop(play);
            assert!(matches!(counter.error(), Some(OpError::Closed)));
        }
        stream.synchronize().unwrap();
    }
}
