//! Events of the driver: the library's own, which are reused, and those that processes share.

use super::capture::Relaxed;
use super::copier::Launch;
use super::driver::{CudaDriver, OpenedLibrary};
use super::error::{INVALID_CONTEXT, INVALID_HANDLE, because, released};
use super::home::Home;
use super::lane::Copies;
use super::stream::stream_of;
use super::sys::{self, Bytes64, EventHandle, StreamHandle};
use crate::gpu::copier::Resident;
use crate::gpu::{EventState, GpuError, GpuEvent, Sequence, SharedEvent, Stream};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A driver's event, and its return to the pool or its end.
pub(super) struct Raw {
    home: Arc<Home>,
    raw: EventHandle,
    /// Set if the event returns to the home's pool when dropped; else it is destroyed.
    pooled: bool,
}

impl Raw {
    pub(super) fn pooled(home: Arc<Home>, raw: EventHandle) -> Self {
        Self { home, raw, pooled: true }
    }

    /// Records the event behind all work that a stream was given so far. The context is current.
    #[inline]
    pub(super) fn record(self, stream: StreamHandle) -> Result<GpuEvent, GpuError> {
        // SAFETY: an event of this context that has no other holder, and a stream of it.
        unsafe { self.home.calls().event_record(self.raw, stream) }?;
        Ok(GpuEvent::new(Arc::new(CudaEvent { event: self, fired: AtomicBool::new(false) })))
    }

    /// Returns the event, if its context has not been destroyed.
    fn living(&self) -> Result<EventHandle, GpuError> {
        self.home.context.check().map(|()| self.raw)
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        if !self.home.context.is_here() {
            return;
        }
        if self.pooled {
            self.home.keep_event(self.raw);
        } else if let Ok(_current) = self.home.context.enter() {
            // SAFETY: made or opened in this context, and this was its only holder.
            released("event", unsafe { self.home.calls().event_destroy(self.raw) });
        }
    }
}

/// A record of one of our events.
struct CudaEvent {
    event: Raw,
    /// Set once the event has fired: it fires once, so the driver is not asked again.
    fired: AtomicBool,
}

impl EventState for CudaEvent {
    fn query(&self) -> Result<bool, GpuError> {
        if self.fired.load(Ordering::Acquire) {
            return Ok(true);
        }
        let fired = self.event.home.has_fired(self.event.raw)?;
        if fired {
            self.fired.store(true, Ordering::Release);
        }
        Ok(fired)
    }

    fn wait(&self) -> Result<(), GpuError> {
        if self.query()? { Ok(()) } else { self.event.home.wait_for(self.event.raw) }
    }
}

/// An event that has fired from the start: a copy of no bytes.
pub(super) struct Fired;

impl EventState for Fired {
    fn query(&self) -> Result<bool, GpuError> {
        Ok(true)
    }

    fn wait(&self) -> Result<(), GpuError> {
        Ok(())
    }
}

impl CudaDriver {
    /// Wraps an event of the program's: a `CUevent` or `cudaEvent_t`, as a number. Dropping the
    /// result does not destroy it. Every answer is about its last record. Without a record it
    /// counts as fired. Recorded anew, it stands for the new record, also for operations that were
    /// ordered after it before and have not begun.
    ///
    /// # Safety
    /// It is an event, and stays one until the result and all work ordered after it are gone.
    ///
    /// # Errors
    /// CUDA has not been initialised, so that there is no event.
    pub unsafe fn event_from_raw(&self, raw: usize) -> Result<GpuEvent, GpuError> {
        let shared = self.ready("cuEventQuery")?;
        Ok(GpuEvent::new(Arc::new(UserEvent { shared, raw: EventHandle(raw) })))
    }
}

/// An event of the program's.
struct UserEvent {
    shared: &'static OpenedLibrary,
    raw: EventHandle,
}

impl UserEvent {
    /// Asks the driver; again within a context, if the driver wants one and this thread has none.
    fn ask<T>(&self, call: impl Fn() -> Result<T, GpuError>) -> Result<T, GpuError> {
        let _relaxed = Relaxed::enter(self.shared.calls);
        match call() {
            Err(error) if error.code == INVALID_CONTEXT => {
                let gpu = self.shared.gpus()?.first().ok_or(error)?;
                let home = gpu.home()?;
                let _current = home.context.enter()?;
                call()
            }
            answer => answer,
        }
    }
}

impl EventState for UserEvent {
    fn query(&self) -> Result<bool, GpuError> {
        // SAFETY: the promise of `event_from_raw`'s caller.
        self.ask(|| unsafe { self.shared.calls.event_query(self.raw) })
    }

    fn wait(&self) -> Result<(), GpuError> {
        // SAFETY: as above.
        self.ask(|| unsafe { self.shared.calls.event_synchronize(self.raw) })
    }
}

/// Has a stream wait for one of the library's events, by the driver's event behind it. Does
/// nothing if there is nothing to wait for.
pub(super) fn with_raw(
    event: &GpuEvent,
    wait_for: impl FnOnce(EventHandle) -> Result<(), GpuError>,
) -> Result<(), GpuError> {
    if let Some((sequence, number)) = event.piece() {
        let sequence: &dyn Any = sequence;
        if let Some(copies) = sequence.downcast_ref::<Copies>() {
            return if copies.query(number)? { Ok(()) } else { copies.with_event(wait_for) };
        }
        // A kernel's copy has no event of the driver's, and takes microseconds.
        if let Some(resident) = sequence.downcast_ref::<Resident<Launch>>() {
            return resident.wait(number);
        }
    }
    if let Some(state) = event.state() {
        let state: &dyn Any = state;
        if let Some(own) = state.downcast_ref::<CudaEvent>() {
            return own.event.living().and_then(wait_for);
        }
        if let Some(shared) = state.downcast_ref::<LastRecord>() {
            return shared.0.living().and_then(wait_for);
        }
        if let Some(user) = state.downcast_ref::<UserEvent>() {
            return wait_for(user.raw);
        }
        if state.is::<Fired>() {
            return Ok(());
        }
    }
    Err(because(
        "cuStreamWaitEvent",
        INVALID_HANDLE,
        "the event is another driver's: wait for it on the host",
    ))
}

/// An event that several processes share.
pub(super) struct IpcEvent {
    event: Arc<Raw>,
    handle: Bytes64,
}

impl IpcEvent {
    /// Creates an event.
    pub(super) fn make(home: &Arc<Home>) -> Result<Self, GpuError> {
        let _current = home.context.enter()?;
        let raw = home.new_event(sys::EVENT_DISABLE_TIMING | sys::EVENT_INTERPROCESS)?;
        let event = Arc::new(Raw { home: Arc::clone(home), raw, pooled: false });
        let mut handle = Bytes64([0; 64]);
        // SAFETY: the place for the answer is ours, and the event is alive.
        unsafe { home.calls().ipc_get_event_handle(&raw mut handle, raw) }?;
        Ok(Self { event, handle })
    }

    /// Opens an event that another process has created.
    pub(super) fn open(home: &Arc<Home>, handle: [u8; 64]) -> Result<Self, GpuError> {
        let _current = home.context.enter()?;
        let handle = Bytes64(handle);
        let mut raw = EventHandle::NULL;
        // SAFETY: the place for the answer is ours; the driver checks the bytes.
        unsafe { home.calls().ipc_open_event_handle(&raw mut raw, handle) }?;
        Ok(Self { event: Arc::new(Raw { home: Arc::clone(home), raw, pooled: false }), handle })
    }
}

impl SharedEvent for IpcEvent {
    fn handle(&self) -> Result<[u8; 64], GpuError> {
        Ok(self.handle.0)
    }

    fn record(&self, stream: &dyn Stream) -> Result<(), GpuError> {
        let stream = stream_of(stream)?;
        let home = &self.event.home;
        let _current = home.context.enter()?;
        // SAFETY: both are alive, being held; the driver refuses a stream of another context.
        unsafe { home.calls().event_record(self.event.raw, stream) }
    }

    fn event(&self) -> GpuEvent {
        GpuEvent::new(Arc::new(LastRecord(Arc::clone(&self.event))))
    }
}

impl fmt::Debug for IpcEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IpcEvent({:?})", self.event.raw)
    }
}

/// The last record of a shared event. A fired event may be recorded anew, so every query asks the
/// driver.
struct LastRecord(Arc<Raw>);

impl EventState for LastRecord {
    fn query(&self) -> Result<bool, GpuError> {
        self.0.home.has_fired(self.0.raw)
    }

    fn wait(&self) -> Result<(), GpuError> {
        self.0.home.wait_for(self.0.raw)
    }
}
