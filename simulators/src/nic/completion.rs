//! Completion queues.

use super::device::{AsyncEvent, AsyncEvents, Source};
use super::engine::Engine;
use super::events::{EventQueue, Unacknowledged};
use super::faults::Faults;
use super::wire::QueueNumber;
use carrack_transports::verbs::sys::bindings::{self as ibv, ibv_wc};
use parking_lot::{Mutex, MutexGuard};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Occupied places of a work queue. A place is free again when its completion has been polled, or
/// a later one of the same queue, as with real providers. An unsignalled request keeps its place
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

    /// Takes a place and returns its number; `None` if all are taken.
    pub(super) fn take(&self) -> Option<u64> {
        let posted = self.posted.load(Ordering::Relaxed);
        let free = posted.saturating_sub(self.freed.load(Ordering::Acquire)) < self.limit;
        free.then(|| self.posted.fetch_add(1, Ordering::Relaxed))
    }

    /// Frees all places.
    pub(super) fn clear(&self) {
        self.freed.store(self.posted.load(Ordering::Relaxed), Ordering::Release);
    }
}

/// Places that polling a completion frees.
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
pub(super) struct Completion {
    pub(super) what: ibv_wc,
    pub(super) frees: Frees,
    /// Set if it wakes threads that wait only for solicited completions.
    pub(super) solicited: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Armed {
    No,
    ForAll,
    ForSolicited,
}

#[derive(Debug)]
struct QueuedCompletions {
    entries: VecDeque<Completion>,
    /// Completions that are not visible yet, with their times.
    late: VecDeque<(Instant, Completion)>,
    capacity: usize,
    armed: Armed,
    /// Set once a completion has found no room: no more completions come.
    broken: bool,
    /// Set once the program has destroyed it: no more events are sent.
    closed: bool,
}

/// Outcome of adding a completion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pushed {
    /// The completion is visible.
    Visible,
    /// The completion becomes visible when the engine releases it.
    Late,
    /// The queue had no room, and is broken from now on.
    Overrun,
    /// The queue was broken before.
    Nowhere,
}

/// A completion queue.
#[derive(Debug)]
pub(super) struct CompletionQueue {
    inner: Mutex<QueuedCompletions>,
    /// Number of visible completions: a poll that finds none takes no lock.
    visible: AtomicUsize,
    /// The program's name of it: the address of its `ibv_cq`.
    pub(super) handle: AtomicUsize,
    pub(super) channel: Option<Arc<EventQueue<Arc<Self>>>>,
    pub(super) given: Unacknowledged,
    /// Queue for the event of its failure.
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
        let inner = QueuedCompletions {
            entries,
            late,
            capacity,
            armed: Armed::No,
            broken: false,
            closed: false,
        };
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

    /// Adds a completion, and tells the engine of further work.
    pub(super) fn push(self: &Arc<Self>, completion: Completion, engine: &Engine) {
        match self.try_push(completion) {
            Pushed::Visible | Pushed::Nowhere => {}
            Pushed::Late => engine.completions_are_late(self),
            Pushed::Overrun => engine.completion_queue_overrun(self),
        }
    }

    fn try_push(self: &Arc<Self>, completion: Completion) -> Pushed {
        let mut inner = self.inner.lock();
        if inner.broken {
            return Pushed::Nowhere;
        }
        if inner.entries.len() + inner.late.len() >= inner.capacity || self.faults.overruns() {
            inner.broken = true;
            return Pushed::Overrun;
        }
        let delay = self.faults.completion_delay();
        if delay.is_zero() && inner.late.is_empty() && !self.faults.holds_completions() {
            self.show(&mut inner, completion);
            return Pushed::Visible;
        }
        inner.late.push_back((Instant::now() + delay, completion));
        Pushed::Late
    }

    fn show(
        self: &Arc<Self>,
        inner: &mut MutexGuard<'_, QueuedCompletions>,
        completion: Completion,
    ) {
        let wakes = match inner.armed {
            Armed::No => false,
            Armed::ForAll => true,
            Armed::ForSolicited => {
                completion.solicited || completion.what.status != ibv::IBV_WC_SUCCESS
            }
        };
        inner.entries.push_back(completion);
        self.visible.store(inner.entries.len(), Ordering::Release);
        if wakes {
            inner.armed = Armed::No;
            if let Some(channel) = &self.channel {
                channel.push(Arc::clone(self));
            }
        }
    }

    /// Makes due completions visible. If more are left, returns the time of the next look, or
    /// `None` while completions are held.
    pub(super) fn release(self: &Arc<Self>, now: Instant) -> Option<Option<Instant>> {
        let mut inner = self.inner.lock();
        if self.faults.holds_completions() {
            return (!inner.late.is_empty()).then_some(None);
        }
        while let Some((due, _)) = inner.late.front() {
            if *due > now {
                return Some(Some(*due));
            }
            if let Some((_, completion)) = inner.late.pop_front() {
                self.show(&mut inner, completion);
            }
        }
        None
    }

    /// Hands out completions, up to the number of places, and returns their number.
    pub(super) fn poll(&self, mut put: impl FnMut(usize, ibv_wc), places: usize) -> usize {
        if self.visible.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut inner = self.inner.lock();
        let count = places.min(inner.entries.len());
        for (at, completion) in inner.entries.drain(..count).enumerate() {
            completion.frees.free();
            put(at, completion.what);
        }
        self.visible.store(inner.entries.len(), Ordering::Release);
        count
    }

    /// Requests an event on the channel for the next completion, or the next solicited one.
    pub(super) fn arm(&self, solicited_only: bool) {
        let mut inner = self.inner.lock();
        // A request for all widens one for solicited completions; the opposite does not narrow.
        inner.armed = match (solicited_only, inner.armed) {
            (true, Armed::ForAll) | (false, _) => Armed::ForAll,
            (true, _) => Armed::ForSolicited,
        };
    }

    /// Resizes the queue. Returns `true` if its content fits.
    pub(super) fn resize(&self, capacity: usize) -> bool {
        let mut inner = self.inner.lock();
        let fits = inner.entries.len() + inner.late.len() <= capacity;
        if fits {
            inner.capacity = capacity;
        }
        fits
    }

    pub(super) fn tell_that_it_broke(self: &Arc<Self>) {
        let inner = self.inner.lock();
        if !inner.closed {
            let source = Source::Completions(Arc::clone(self));
            self.events.push(AsyncEvent { kind: ibv::IBV_EVENT_CQ_ERR, source });
        }
    }

    /// Closes the queue as the program destroys it: no later event is about it. Waits until
    /// earlier events are acknowledged.
    pub(super) fn close(self: &Arc<Self>) {
        let mut inner = self.inner.lock();
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

    /// Removes the completions of a queue pair that is destroyed or reset, as drivers do.
    pub(super) fn forget(&self, number: QueueNumber) {
        let mut inner = self.inner.lock();
        let others = |completion: &Completion| {
            let stays = completion.what.qp_num != number.0;
            if !stays {
                completion.frees.free();
            }
            stays
        };
        inner.entries.retain(others);
        inner.late.retain(|(_, completion)| others(completion));
        self.visible.store(inner.entries.len(), Ordering::Release);
    }
}
