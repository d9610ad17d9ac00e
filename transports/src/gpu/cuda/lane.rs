//! The library's own streams, and their progress.
//!
//! A copy is a number, counted in the order in which its stream was given the copies. A query for
//! the last copy asks whether the stream is idle. For an earlier copy an event is recorded behind
//! all copies so far, and the next event only when that has fired. A record and a query each take
//! about as long as an 8-byte copy. With both for each copy, small copies back to back took a
//! third longer (docs/adr/0011-thresholds.md).

use super::home::Home;
use super::sys::{EventHandle, StreamHandle};
use crate::gpu::{GpuError, GpuEvent, Sequence};
use crate::sync::TryLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Direction of a copy. Each direction has a stream of its own, so that none waits for another's
/// engine. More streams for one direction are slower: one copy split over four was, at every size
/// (docs/gpu.md, "Measured").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CopyDirection {
    FromHost,
    ToHost,
    Within,
    Peer,
}

impl CopyDirection {
    pub(super) const ALL: [Self; 4] = [Self::FromHost, Self::ToHost, Self::Within, Self::Peer];
}

/// One stream of the library's.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) stream: OnceLock<StreamHandle>,
    /// Copies that the stream was given. Each is counted once the driver has it.
    given: AtomicU64,
    /// Copies among these that are known to have ended.
    done: AtomicU64,
    /// The event that was recorded last, until it is seen to have fired.
    mark: TryLock<Option<LaneMark>>,
}

/// The copies of all lanes.
#[derive(Debug, Default)]
pub(super) struct AllCopies {
    /// Copies that all lanes were given. Counted after the lane's own count.
    given: AtomicU64,
    /// Value of `given` when all lanes were last seen idle.
    idle_at: AtomicU64,
}

#[derive(Debug)]
struct LaneMark {
    event: EventHandle,
    /// Number of the last copy in front of the event.
    covers: u64,
}

impl Lane {
    pub(super) fn new() -> Self {
        Self {
            stream: OnceLock::new(),
            given: AtomicU64::new(0),
            done: AtomicU64::new(0),
            mark: TryLock::new(None),
        }
    }

    /// Returns `true` if a copy has ended. Never blocks.
    fn has_ended(&self, home: &Home, number: u64) -> Result<bool, GpuError> {
        if self.done.load(Ordering::Acquire) >= number {
            return Ok(true);
        }
        // Another thread holds the mark and asks at this moment.
        let Some(mut mark) = self.mark.try_lock() else { return Ok(false) };
        let given = self.given.load(Ordering::Acquire);
        if given != number {
            if let Some(LaneMark { event, covers }) = *mark {
                if !home.has_fired(event)? {
                    return Ok(false);
                }
                *mark = None;
                home.keep_event(event);
                if self.is_done_up_to(covers, number) {
                    return Ok(true);
                }
            }
            match self.record(home) {
                Ok(next) => {
                    *mark = Some(next);
                    return Ok(false);
                }
                // The copy goes on without an event: ask the stream instead.
                Err(why) => tracing::debug!(%why, "no event tells how far a stream is"),
            }
        }
        let Some(stream) = self.stream.get() else { return Ok(false) };
        Ok(home.is_idle(*stream)? && self.is_done_up_to(given, number))
    }

    /// Takes the lane's event out, for the end of the home.
    pub(super) fn last_event(&mut self) -> Option<EventHandle> {
        self.mark.get_mut().take().map(|mark| mark.event)
    }

    /// Notes the stream's progress. Returns `true` if that covers `number`.
    fn is_done_up_to(&self, covers: u64, number: u64) -> bool {
        self.done.fetch_max(covers, Ordering::Release).max(covers) >= number
    }

    /// Records an event behind all copies so far.
    fn record(&self, home: &Home) -> Result<LaneMark, GpuError> {
        // Loaded before the record: the stream has been given all copies counted by then.
        let covers = self.given.load(Ordering::Acquire);
        let _current = home.context.enter()?;
        let stream = *home.once(&self.stream, || home.new_stream())?;
        Ok(LaneMark { event: home.recorded(stream)?, covers })
    }
}

impl Home {
    /// Returns the stream of a lane. The context is current.
    #[inline]
    pub(super) fn lane(&self, direction: CopyDirection) -> Result<StreamHandle, GpuError> {
        self.once(&self.lane_of(direction).stream, || self.new_stream()).copied()
    }

    /// Returns `true` if no copy of the library's own is in flight. Never blocks.
    #[inline]
    pub(super) fn are_lanes_idle(&self) -> Result<bool, GpuError> {
        let given = self.copies.given.load(Ordering::Acquire);
        if self.copies.idle_at.load(Ordering::Acquire) == given {
            return Ok(true);
        }
        for lane in &self.lanes {
            if !lane.has_ended(self, lane.given.load(Ordering::Acquire))? {
                return Ok(false);
            }
        }
        self.copies.idle_at.store(given, Ordering::Release);
        Ok(true)
    }

    /// Returns the stream of a lane, if it was needed before.
    pub(super) fn lanes_stream(&self, direction: CopyDirection) -> Option<StreamHandle> {
        self.lane_of(direction).stream.get().copied()
    }

    #[inline]
    fn lane_of(&self, direction: CopyDirection) -> &Lane {
        &self.lanes[direction as usize]
    }
}

/// The copies of one lane: one sequence, in which the event of a copy is its number.
pub(super) struct Copies {
    home: Arc<Home>,
    direction: CopyDirection,
}

impl Copies {
    pub(super) fn new(home: &Arc<Home>, direction: CopyDirection) -> Arc<Self> {
        Arc::new(Self { home: Arc::clone(home), direction })
    }

    /// Counts a copy that the lane's stream was just given. The event fires when the copy has
    /// ended.
    #[inline]
    pub(super) fn given(self: &Arc<Self>) -> GpuEvent {
        let number = self.lane().given.fetch_add(1, Ordering::AcqRel) + 1;
        self.home.copies.given.fetch_add(1, Ordering::AcqRel);
        GpuEvent::numbered(Arc::clone(self) as Arc<dyn Sequence>, number)
    }

    #[inline]
    fn lane(&self) -> &Lane {
        self.home.lane_of(self.direction)
    }

    /// Lends a driver's event behind all of them, for a stream to wait for. It is a fresh one,
    /// since the lane's is recorded again and again. It may be reused at once: a waiting stream
    /// has noted the record.
    pub(super) fn with_event<T>(
        &self,
        use_it: impl FnOnce(EventHandle) -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        let LaneMark { event, .. } = self.lane().record(&self.home)?;
        let outcome = use_it(event);
        self.home.keep_event(event);
        outcome
    }
}

impl Sequence for Copies {
    #[inline]
    fn query(&self, number: u64) -> Result<bool, GpuError> {
        self.lane().has_ended(&self.home, number)
    }

    fn wait(&self, number: u64) -> Result<(), GpuError> {
        if self.query(number)? {
            return Ok(());
        }
        let lane = self.lane();
        let Ok(LaneMark { event, covers }) = lane.record(&self.home) else {
            // The waiter frees the memory next: only the stream's own answer may end the wait.
            while !self.query(number)? {
                std::thread::yield_now();
            }
            return Ok(());
        };
        let outcome = self.home.wait_for(event);
        self.home.keep_event(event);
        outcome?;
        lane.is_done_up_to(covers, number);
        Ok(())
    }
}
