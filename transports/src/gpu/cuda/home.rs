//! Objects of the library in one context: streams, reusable events, peers with access, a pool.

use super::calls::Calls;
use super::capture::Relaxed;
use super::context::CudaContext;
use super::copier::Copier;
use super::course::CourseWords;
use super::ends::Kept;
use super::error::{INVALID_CONTEXT, released};
use super::event::Raw;
use super::lane::{AllCopies, Lane};
use super::peer::Peers;
use super::sys::{self, EventHandle, StreamHandle};
use crate::gpu::copier::GpuClaim;
use crate::gpu::waits::Waits;
use crate::gpu::{GpuError, GpuEvent};
use parking_lot::Mutex;
use std::cell::Cell;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

thread_local! {
    /// Set if this thread had no context at its last query, on a driver that requires one for
    /// queries.
    static HAS_NO_CONTEXT: Cell<bool> = const { Cell::new(false) };
}

/// Objects of one context. Fields are dropped in this order: the objects before the context.
#[derive(Debug)]
pub(super) struct Home {
    pub(super) lanes: [Lane; 4],
    pub(super) copies: AllCopies,
    /// Stream for work that the legacy default stream refuses.
    stand_in: OnceLock<StreamHandle>,
    events: Mutex<Vec<EventHandle>>,
    pub(super) pool: OnceLock<super::memory::CudaPool>,
    pub(super) peers: Peers,
    /// Streams that wait for words in this context.
    pub(super) waits: Arc<Waits>,
    /// Words that tell how far waiting streams have come.
    pub(super) courses: CourseWords,
    /// This process's claim to have the only copier on the GPU, or the reason for its refusal. Set
    /// once a copier was asked for.
    pub(super) claim: OnceLock<Result<Arc<GpuClaim>, String>>,
    /// The copier for small copies, or the reason why there is none. Set once it was asked for.
    pub(super) copier: OnceLock<Result<Copier, String>>,
    /// Set once the set-up of the copier has been started.
    pub(super) is_copier_begun: AtomicBool,
    /// Device memory that the library keeps here, and that kernels of this context reach.
    pub(super) kept: Kept,
    /// Set if the device has pinned and registered host memory under the host's addresses.
    same_addresses: OnceLock<bool>,
    /// Lock that is held while one of the above is created, so that none is created twice.
    setup: Mutex<()>,
    pub(super) context: CudaContext,
}

impl Home {
    pub(super) fn new(context: CudaContext, devices: usize, waits: Arc<Waits>) -> Self {
        Self {
            lanes: std::array::from_fn(|_| Lane::new()),
            copies: AllCopies::default(),
            stand_in: OnceLock::new(),
            events: Mutex::default(),
            pool: OnceLock::new(),
            peers: Peers::new(devices),
            waits,
            courses: CourseWords::default(),
            claim: OnceLock::new(),
            copier: OnceLock::new(),
            is_copier_begun: AtomicBool::new(false),
            kept: Kept::default(),
            same_addresses: OnceLock::new(),
            setup: Mutex::default(),
            context,
        }
    }

    pub(super) fn calls(&self) -> &'static Calls {
        self.context.calls
    }

    /// Creates a stream that waits for no other, the legacy default stream included (gpu.md,
    /// streams rule 1).
    pub(super) fn new_stream(&self) -> Result<StreamHandle, GpuError> {
        let mut stream = StreamHandle::NULL;
        // SAFETY: the place for the answer is ours.
        unsafe { self.calls().stream_create(&raw mut stream, sys::STREAM_NON_BLOCKING) }?;
        Ok(stream)
    }

    /// Returns a stream for work that the legacy default stream refuses. It is no lane: it may
    /// stand still for as long as the default stream does, and other copies of the library must
    /// not. The context is current.
    pub(super) fn stand_in(&self) -> Result<StreamHandle, GpuError> {
        self.once(&self.stand_in, || self.new_stream()).copied()
    }

    /// Makes later work of a stream wait for the work that another was given so far. The context
    /// is current.
    pub(super) fn put_behind(
        &self,
        stream: StreamHandle,
        other: StreamHandle,
    ) -> Result<(), GpuError> {
        let event = self.recorded(other)?;
        // SAFETY: streams of this context and an event of it. The driver notes the event's present
        // record, so the event may be reused.
        let given = unsafe { self.calls().stream_wait_event(stream, event, 0) };
        self.keep_event(event);
        given
    }

    /// Returns `true` if the device has pinned and registered host memory under the host's
    /// addresses. The driver is asked once.
    pub(super) fn has_same_addresses(&self) -> bool {
        *self.same_addresses.get_or_init(|| {
            let (attribute, mut same) = (sys::device::HOST_POINTER_FOR_REGISTERED, 0);
            // SAFETY: the place for the answer is ours.
            let asked = unsafe {
                self.calls().device_get_attribute(&raw mut same, attribute, self.context.device)
            };
            asked.is_ok() && same != 0
        })
    }

    /// Returns the content of a slot, which is created once, if it is empty.
    pub(super) fn once<'a, T>(
        &self,
        slot: &'a OnceLock<T>,
        make: impl FnOnce() -> Result<T, GpuError>,
    ) -> Result<&'a T, GpuError> {
        if let Some(made) = slot.get() {
            return Ok(made);
        }
        let _setup = self.setup.lock();
        if let Some(made) = slot.get() {
            return Ok(made);
        }
        let made = make()?;
        Ok(slot.get_or_init(|| made))
    }

    /// Returns an event behind all work that a stream was given so far. The context is current.
    #[inline]
    pub(super) fn record(self: &Arc<Self>, stream: StreamHandle) -> Result<GpuEvent, GpuError> {
        self.spare_event()?.record(stream)
    }

    /// Takes an event to record later. The driver may have none left, so it is asked before the
    /// stream is given the work that the event is for. The context is current.
    #[inline]
    pub(super) fn spare_event(self: &Arc<Self>) -> Result<Raw, GpuError> {
        Ok(Raw::pooled(Arc::clone(self), self.take_event()?))
    }

    /// Records an event as [`record`](Self::record) does, for a caller that returns the event
    /// itself: [`keep_event`](Self::keep_event).
    pub(super) fn recorded(&self, stream: StreamHandle) -> Result<EventHandle, GpuError> {
        let raw = self.take_event()?;
        // SAFETY: an event of this context, and a stream of it.
        unsafe { self.calls().event_record(raw, stream) }.inspect_err(|_| self.keep_event(raw))?;
        Ok(raw)
    }

    /// Takes an event of the pool, or a new one.
    fn take_event(&self) -> Result<EventHandle, GpuError> {
        // The lock is released before anything can fail.
        let kept = self.events.lock().pop();
        match kept {
            Some(raw) => Ok(raw),
            None => self.new_event(sys::EVENT_DISABLE_TIMING),
        }
    }

    /// Creates an event. The context is current.
    pub(super) fn new_event(&self, flags: u32) -> Result<EventHandle, GpuError> {
        let mut raw = EventHandle::NULL;
        // SAFETY: the place for the answer is ours.
        unsafe { self.calls().event_create(&raw mut raw, flags) }?;
        Ok(raw)
    }

    /// Takes an event back. It may not have fired: a new record replaces the old one, and streams
    /// that wait for the old one go on waiting for that.
    pub(super) fn keep_event(&self, raw: EventHandle) {
        self.events.lock().push(raw);
    }

    /// Returns `true` if an event has fired.
    #[inline]
    pub(super) fn has_fired(&self, raw: EventHandle) -> Result<bool, GpuError> {
        // SAFETY: an event that is alive: its holder asks.
        self.ask(|| unsafe { self.calls().event_query(raw) })
    }

    /// Returns `true` if a stream of the library's has ended all its work.
    #[inline]
    pub(super) fn is_idle(&self, stream: StreamHandle) -> Result<bool, GpuError> {
        // SAFETY: a stream of this home, which lives as long.
        self.ask(|| unsafe { self.calls().stream_query(stream) })
    }

    /// Queries the driver, within the context only if necessary: some drivers require one, and
    /// this thread may have none.
    #[inline]
    fn ask(&self, question: impl Fn() -> Result<bool, GpuError>) -> Result<bool, GpuError> {
        let _relaxed = Relaxed::enter(self.calls());
        if HAS_NO_CONTEXT.get() {
            let current = self.context.enter()?;
            HAS_NO_CONTEXT.set(!current.was_there());
            return question();
        }
        self.context.check()?;
        match question() {
            Err(error) if error.code == INVALID_CONTEXT => {
                HAS_NO_CONTEXT.set(true);
                let _current = self.context.enter()?;
                question()
            }
            answer => answer,
        }
    }

    /// Waits for an event, which blocks this thread and no stream.
    pub(super) fn wait_for(&self, raw: EventHandle) -> Result<(), GpuError> {
        let _current = self.context.enter()?;
        // SAFETY: as above.
        unsafe { self.calls().event_synchronize(raw) }
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if !self.context.is_here() {
            return;
        }
        // A destroyed context of the user's has freed all of it.
        let Ok(_current) = self.context.enter() else { return };
        let events = std::mem::take(self.events.get_mut());
        for event in events.into_iter().chain(self.lanes.iter_mut().filter_map(Lane::last_event)) {
            // SAFETY: the event was in the pool, so it has no other holder; made in this context.
            released("event", unsafe { self.context.calls.event_destroy(event) });
        }
        let lanes = self.lanes.iter().filter_map(|lane| lane.stream.get());
        for stream in lanes.chain(self.stand_in.get()) {
            // SAFETY: made in this context, and used through this home only.
            released("stream", unsafe { self.context.calls.stream_destroy(*stream) });
        }
    }
}
