//! Operations in the order of events and of streams.

use super::options::Post;
use crate::comp::{Completion, Status};
use crate::error::PostError;
use crate::names::Rank;
use crate::progress::Core;
use carrack_transports::gpu::words::Gate;
use carrack_transports::gpu::{EventState, Gpu, GpuError, GpuEvent, Stream};
use carrack_transports::mem::copy::goes_on_a_stream;
use carrack_transports::mem::{MemKind, Region};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};

/// The order of an operation: events and a stream before it, and the stream after it.
#[derive(Clone, Default)]
pub(crate) struct Order {
    after: Vec<GpuEvent>,
    stream: Option<Arc<dyn Stream>>,
}

impl<K> Post<'_, K> {
    /// Begins the operation only once `event` has fired: after the kernel that writes the buffer,
    /// say. Given several times, all have to have fired. Progress polls the events. Until then the
    /// operation waits on this rank and keeps its buffer. Its deadline or the peer's end can end
    /// it, and a receive can be cancelled.
    ///
    /// A message keeps its place among those to the same peer: what is sent later waits behind it.
    /// A receive takes part in the matching from when its event has fired, so one that is posted
    /// later may come before it. Each put, get and atomic operation waits by itself; a flush waits
    /// for all that were posted before it.
    pub fn after(mut self, event: &GpuEvent) -> Self {
        self.order.get_or_insert_default().after.push(event.clone());
        self
    }

    /// Carries the operation out in the order of a stream. It begins when all work given to the
    /// stream so far has finished. Work that the stream is given later begins when the operation
    /// has ended on this rank; the status has its error if it failed. Progress raises the word
    /// that the stream waits for.
    ///
    /// A put or get between GPU memory, and pinned or GPU memory that is mapped, is a copy on the
    /// stream itself. The stream then waits for no word. Everything else makes the stream wait for
    /// a word: then the rules of [`StreamCounter`](crate::StreamCounter) hold, with its limit of
    /// waiting streams.
    ///
    /// # Errors
    /// When it is posted: [`PostError::OtherGpu`] if the buffer is memory of another GPU than the
    /// stream's. [`PostError::OwnStream`] for a message from or to a rank of this process, whose
    /// other side could stand behind it on the same stream. Order that one by
    /// `.after(&stream.record()?)`, and have the stream wait for a
    /// [`StreamCounter`](crate::StreamCounter) when both are posted. [`PostError::Stream`] if the
    /// stream cannot be used, is being captured into a graph, or must not wait because too many
    /// do.
    pub fn on_stream(mut self, stream: &Arc<dyn Stream>) -> Self {
        self.order.get_or_insert_default().stream = Some(stream.clone());
        self
    }
}

impl Order {
    /// Returns the order after one event.
    pub(super) fn after(event: GpuEvent) -> Self {
        Self { after: vec![event], stream: None }
    }

    /// Returns `true` if all events have fired and no stream waits.
    ///
    /// # Errors
    /// An event has failed.
    pub(super) fn is_met(&self) -> Result<bool, PostError> {
        Ok(self.stream.is_none() && All(self.after.clone()).query().map_err(PostError::Stream)?)
    }

    pub(super) fn stream(&self) -> Option<&Arc<dyn Stream>> {
        self.stream.as_ref()
    }

    /// Returns the GPU of the stream.
    pub(super) fn gpu(&self) -> Result<Option<Arc<dyn Gpu>>, PostError> {
        self.stream.as_ref().map(|stream| stream.gpu()).transpose().map_err(PostError::Stream)
    }

    /// Checks that memory of this kind can be used in the order of the stream.
    pub(super) fn check_memory(&self, memory: MemKind) -> Result<(), PostError> {
        match (self.gpu()?.map(|gpu| gpu.info().uuid), memory.gpu()) {
            (Some(stream), Some(owner)) if stream != owner => {
                Err(PostError::OtherGpu { stream, memory })
            }
            _ => Ok(()),
        }
    }

    /// Returns the stream if it can do a copy between these two: the order has no events, and the
    /// stream's engine reaches both.
    pub(super) fn stream_for(&self, region: &Region, buffer: MemKind) -> Option<&Arc<dyn Stream>> {
        let stream = self.stream.as_ref().filter(|_| self.after.is_empty())?;
        let is_reached =
            goes_on_a_stream(region.kind(), buffer) && stream.gpu().ok()?.reaches_region(region);
        is_reached.then_some(stream)
    }

    /// Checks that a message from or to a rank can be matched in the order of the stream.
    pub(super) fn check_peer(&self, runtime: &Core, rank: Rank) -> Result<(), PostError> {
        match self.stream.is_some() && runtime.here.has(rank) {
            true => Err(PostError::OwnStream(rank)),
            false => Ok(()),
        }
    }

    /// Returns the event before the operation. The stream waits from now on, until the returned
    /// object is signaled with the end, or dropped.
    pub(super) fn begin(
        &self,
        runtime: &Core,
        comp: Option<&Arc<dyn Completion>>,
    ) -> Result<(GpuEvent, Option<Arc<dyn Completion>>), PostError> {
        let mut events = self.after.clone();
        let Some(stream) = &self.stream else {
            return Ok((all(events), comp.cloned()));
        };
        let mut gated = || {
            events.push(stream.record()?);
            let mut gate = runtime.streams.words(&stream.gpu()?).gate()?;
            gate.shut(&**stream)?;
            Ok(gate)
        };
        let gate = gated().map_err(PostError::Stream)?;
        let released = Released { inner: comp.cloned(), gate: Mutex::new(Some(gate)) };
        Ok((all(events), Some(Arc::new(released))))
    }
}

/// Joins several events into one.
fn all(mut events: Vec<GpuEvent>) -> GpuEvent {
    match (events.pop(), events.is_empty()) {
        (Some(one), true) => one,
        (last, _) => {
            events.extend(last);
            GpuEvent::new(Arc::new(All(events)))
        }
    }
}

/// Event that fires when all of these have.
struct All(Vec<GpuEvent>);

impl EventState for All {
    fn query(&self) -> Result<bool, GpuError> {
        for event in &self.0 {
            if !event.query()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn wait(&self) -> Result<(), GpuError> {
        self.0.iter().try_for_each(GpuEvent::wait)
    }
}

/// Completion object that lets a stream go on when the operation has ended.
struct Released {
    inner: Option<Arc<dyn Completion>>,
    gate: Mutex<Option<Gate>>,
}

impl Completion for Released {
    fn signal(&self, status: Status) -> Result<(), Status> {
        // The bytes of a list are spread first: the object's receiver may act on the stream as
        // soon as it has the signal.
        let told = match (&self.inner, &status.error) {
            (Some(inner), _) => inner.signal(status),
            (None, Some(error)) => {
                tracing::warn!(%error, "an operation on a stream, without a completion object, \
                    failed");
                Ok(())
            }
            (None, None) => Ok(()),
        };
        drop(self.gate.lock().take());
        told
    }

    fn describe(&self) -> String {
        self.inner.as_ref().map_or_else(|| "a stream".into(), |inner| inner.describe())
    }
}

/// Completion object of a receive that has a number, which is forgotten when this is dropped.
pub(super) struct Renamed {
    inner: Option<Arc<dyn Completion>>,
    number: u64,
    runtime: Weak<Core>,
}

impl Renamed {
    /// Returns the completion object of a receive that has a number from now on.
    pub(super) fn of(
        inner: Option<Arc<dyn Completion>>,
        number: u64,
        runtime: &Arc<Core>,
    ) -> Arc<dyn Completion> {
        runtime.streams.name(number);
        Arc::new(Self { inner, number, runtime: Arc::downgrade(runtime) })
    }
}

impl Drop for Renamed {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.upgrade() {
            runtime.streams.forget(self.number);
        }
    }
}

impl Completion for Renamed {
    fn signal(&self, status: Status) -> Result<(), Status> {
        match &self.inner {
            Some(inner) => inner.signal(status),
            None => Ok(()),
        }
    }

    fn passes_on_to(&self) -> Option<&Arc<dyn Completion>> {
        self.inner.as_ref()
    }

    fn runs_user_code(&self) -> bool {
        self.inner.as_ref().is_some_and(|inner| inner.runs_user_code())
    }

    fn describe(&self) -> String {
        self.inner.as_ref().map_or_else(|| "nothing".into(), |inner| inner.describe())
    }
}
