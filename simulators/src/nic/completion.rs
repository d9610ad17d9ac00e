//! Completion queues.

use super::device::{AsyncEvent, AsyncEvents, Source};
use super::engine::Engine;
use super::events::{EventQueue, Unacknowledged};
use super::faults::Faults;
use super::lock;
use super::wire::QueueNumber;
use carrack_transports::verbs::sys::bindings::{self as ibv, ibv_wc};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// How much of a work queue is taken. A place is free again when its completion has been polled, or
/// a later one of the same queue, as with real providers: an unsignalled request keeps its place
/// until then.
#[derive(Debug)]
pub(super) struct Depth {
    limit: u64,
    posted: AtomicU64,
    freed: AtomicU64,
}

impl Depth {
    pub(super) fn new(limit: u32) -> Arc<Self> {
        Arc::new(Self {
            limit: u64::from(limit),
            posted: AtomicU64::new(0),
            freed: AtomicU64::new(0),
        })
    }

    /// Takes a place and returns its number; `None` when there is none.
    pub(super) fn take(&self) -> Option<u64> {
        let posted = self.posted.load(Ordering::Relaxed);
        let free = posted.saturating_sub(self.freed.load(Ordering::Acquire)) < self.limit;
        free.then(|| self.posted.fetch_add(1, Ordering::Relaxed))
    }

    /// Everything is free.
    pub(super) fn clear(&self) {
        self.freed.store(self.posted.load(Ordering::Relaxed), Ordering::Release);
    }
}

/// What polling a completion frees.
#[derive(Clone, Debug)]
pub(super) enum Frees {
    /// A send queue up to and with this number: it completes in order.
    UpTo(Arc<Depth>, u64),
    /// One place of a receive queue.
    One(Arc<Depth>),
}

impl Frees {
    fn free(&self) {
        match self {
            Self::UpTo(depth, number) => {
                depth.freed.fetch_max(number + 1, Ordering::Release);
            }
            Self::One(depth) => {
                depth.freed.fetch_add(1, Ordering::Release);
            }
        }
    }
}

/// A completion.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) what: ibv_wc,
    pub(super) frees: Frees,
    /// Whether it wakes somebody who waits for solicited completions only.
    pub(super) solicited: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Armed {
    No,
    ForAll,
    ForSolicited,
}

#[derive(Debug)]
struct Inner {
    entries: VecDeque<Entry>,
    /// Those that do not show yet, and when they will.
    late: VecDeque<(Instant, Entry)>,
    capacity: usize,
    armed: Armed,
    /// An entry has found no room: nothing comes any more.
    broken: bool,
    /// The program has destroyed it, and is told nothing any more.
    closed: bool,
}

/// How a completion went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pushed {
    /// It is there.
    Visible,
    /// It will be, when the engine releases it.
    Late,
    /// There was no room, and the queue is broken from now on.
    Overrun,
    /// The queue was broken before.
    Nowhere,
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    inner: Mutex<Inner>,
    /// How many entries show: a poll that finds none takes no lock.
    visible: AtomicUsize,
    /// What the program calls it: the address of its `ibv_cq`.
    pub(super) handle: AtomicUsize,
    pub(super) channel: Option<Arc<EventQueue<Arc<Self>>>>,
    pub(super) given: Unacknowledged,
    /// Where the program is told that the queue has broken.
    pub(super) events: AsyncEvents,
    pub(super) asynchronous: Unacknowledged,
    pub(super) faults: Arc<Faults>,
    /// Queue pairs that complete here.
    pub(super) users: AtomicUsize,
}

impl CompletionQueue {
    pub(super) fn new(
        capacity: usize,
        channel: Option<Arc<EventQueue<Arc<Self>>>>,
        events: AsyncEvents,
        faults: Arc<Faults>,
    ) -> Arc<Self> {
        let (entries, late) = (VecDeque::new(), VecDeque::new());
        let inner =
            Inner { entries, late, capacity, armed: Armed::No, broken: false, closed: false };
        Arc::new(Self {
            inner: Mutex::new(inner),
            visible: AtomicUsize::new(0),
            handle: AtomicUsize::new(0),
            channel,
            given: Unacknowledged::default(),
            events,
            asynchronous: Unacknowledged::default(),
            faults,
            users: AtomicUsize::new(0),
        })
    }

    /// Puts a completion in; the engine is told what there is to do about it.
    pub(super) fn push(self: &Arc<Self>, entry: Entry, engine: &Engine) {
        match self.try_push(entry) {
            Pushed::Visible | Pushed::Nowhere => {}
            Pushed::Late => engine.completions_are_late(self),
            Pushed::Overrun => engine.completion_queue_overrun(self),
        }
    }

    fn try_push(self: &Arc<Self>, entry: Entry) -> Pushed {
        let mut inner = lock(&self.inner);
        if inner.broken {
            return Pushed::Nowhere;
        }
        if inner.entries.len() + inner.late.len() >= inner.capacity || self.faults.overruns() {
            inner.broken = true;
            return Pushed::Overrun;
        }
        let delay = self.faults.completion_delay();
        if delay.is_zero() && inner.late.is_empty() && !self.faults.holds_completions() {
            self.show(&mut inner, entry);
            return Pushed::Visible;
        }
        inner.late.push_back((Instant::now() + delay, entry));
        Pushed::Late
    }

    fn show(self: &Arc<Self>, inner: &mut MutexGuard<'_, Inner>, entry: Entry) {
        let wakes = match inner.armed {
            Armed::No => false,
            Armed::ForAll => true,
            Armed::ForSolicited => entry.solicited || entry.what.status != ibv::IBV_WC_SUCCESS,
        };
        inner.entries.push_back(entry);
        self.visible.store(inner.entries.len(), Ordering::Release);
        if wakes {
            inner.armed = Armed::No;
            if let Some(channel) = &self.channel {
                channel.push(Arc::clone(self));
            }
        }
    }

    /// Shows what is due. When there is more: when that is to be looked at again, or `None` while
    /// completions are held.
    pub(super) fn release(self: &Arc<Self>, now: Instant) -> Option<Option<Instant>> {
        let mut inner = lock(&self.inner);
        if self.faults.holds_completions() {
            return (!inner.late.is_empty()).then_some(None);
        }
        while let Some((due, _)) = inner.late.front() {
            if *due > now {
                return Some(Some(*due));
            }
            if let Some((_, entry)) = inner.late.pop_front() {
                self.show(&mut inner, entry);
            }
        }
        None
    }

    /// Hands out up to as many completions as there are places, and returns how many.
    pub(super) fn poll(&self, mut put: impl FnMut(usize, ibv_wc), places: usize) -> usize {
        if self.visible.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut inner = lock(&self.inner);
        let count = places.min(inner.entries.len());
        for (at, entry) in inner.entries.drain(..count).enumerate() {
            entry.frees.free();
            put(at, entry.what);
        }
        self.visible.store(inner.entries.len(), Ordering::Release);
        count
    }

    /// Tells of the next completion through the channel, or the next solicited one.
    pub(super) fn arm(&self, solicited_only: bool) {
        let mut inner = lock(&self.inner);
        // Asking for all while asking for solicited ones widens, the other way round does not
        // narrow.
        inner.armed = match (solicited_only, inner.armed) {
            (true, Armed::ForAll) | (false, _) => Armed::ForAll,
            (true, _) => Armed::ForSolicited,
        };
    }

    /// Gives the queue another size. Whether what is in it fits.
    pub(super) fn resize(&self, capacity: usize) -> bool {
        let mut inner = lock(&self.inner);
        let fits = inner.entries.len() + inner.late.len() <= capacity;
        if fits {
            inner.capacity = capacity;
        }
        fits
    }

    pub(super) fn tell_that_it_broke(self: &Arc<Self>) {
        let inner = lock(&self.inner);
        if !inner.closed {
            let source = Source::Completions(Arc::clone(self));
            self.events.push(AsyncEvent { kind: ibv::IBV_EVENT_CQ_ERR, source });
        }
    }

    /// The program destroys it: from here on no event is about it. Waits until those that were
    /// given are acknowledged.
    pub(super) fn close(self: &Arc<Self>) {
        let mut inner = lock(&self.inner);
        (inner.broken, inner.closed) = (true, true);
        inner.entries.clear();
        inner.late.clear();
        drop(inner);
        if let Some(channel) = &self.channel {
            channel.forget(|event| Arc::ptr_eq(event, self));
        }
        self.events.forget(
            |event| matches!(&event.source, Source::Completions(of) if Arc::ptr_eq(of, self)),
        );
        self.given.wait();
        self.asynchronous.wait();
    }

    /// Takes out the completions of a queue pair that is gone or reset, as drivers do.
    pub(super) fn forget(&self, number: QueueNumber) {
        let mut inner = lock(&self.inner);
        let others = |entry: &Entry| {
            let stays = entry.what.qp_num != number.0;
            if !stays {
                entry.frees.free();
            }
            stays
        };
        inner.entries.retain(others);
        inner.late.retain(|(_, entry)| others(entry));
        self.visible.store(inner.entries.len(), Ordering::Release);
    }
}
