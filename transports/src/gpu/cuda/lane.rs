//! The library's own streams, and how far each has come.
//!
//! A copy is a number, counted up in the order in which its stream was given them. While it is the
//! last one, the stream itself is asked whether it has nothing to do; else an event is recorded
//! behind what there is, one for all copies in front of it, and the next one only when that has
//! fired. A record and a question each take about as long as an 8-byte copy: with both for each
//! copy, small copies back to back took a third longer (docs/adr/0011-thresholds.md).

use super::home::Home;
use super::sys::{EventHandle, StreamHandle};
use crate::gpu::{Event, GpuError, Sequence};
use crate::sync::TryLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Which way a copy goes. Each has a stream of its own, so that none waits for another's engine;
/// more streams for one way are slower (docs/gpu.md, "Measured": one copy split over four was, at
/// every size).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Way {
    FromHost,
    ToHost,
    Within,
    Peer,
}

impl Way {
    pub(super) const ALL: [Self; 4] = [Self::FromHost, Self::ToHost, Self::Within, Self::Peer];
}

/// One stream of the library's.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) stream: OnceLock<StreamHandle>,
    /// Copies that the stream was given; each is counted when the driver has it.
    given: AtomicU64,
    /// Of these, those that are known to be over.
    done: AtomicU64,
    /// The event that was recorded last, while nobody has seen it fire.
    mark: TryLock<Option<Mark>>,
}

/// The copies of all lanes.
#[derive(Debug, Default)]
pub(super) struct AllCopies {
    /// How many lanes were given. Counted behind its lane's.
    given: AtomicU64,
    /// So many were given when all were last known to be over.
    over: AtomicU64,
}

#[derive(Debug)]
struct Mark {
    event: EventHandle,
    /// The last copy that it is behind.
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

    /// Whether a copy is over. Never blocks.
    fn is_over(&self, home: &Home, number: u64) -> Result<bool, GpuError> {
        if self.done.load(Ordering::Acquire) >= number {
            return Ok(true);
        }
        // Whoever has it is asking just now.
        let Some(mut mark) = self.mark.try_lock() else { return Ok(false) };
        let given = self.given.load(Ordering::Acquire);
        if given != number {
            if let Some(Mark { event, covers }) = *mark {
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
                // The copy goes on without an event, so this is no answer. The stream has one.
                Err(why) => tracing::debug!(%why, "no event tells how far a stream is"),
            }
        }
        let Some(stream) = self.stream.get() else { return Ok(false) };
        Ok(home.is_idle(*stream)? && self.is_done_up_to(given, number))
    }

    /// The event that it has, when it is given up.
    pub(super) fn last_event(&mut self) -> Option<EventHandle> {
        self.mark.get_mut().take().map(|mark| mark.event)
    }

    /// Notes how far the stream has come; whether that is far enough.
    fn is_done_up_to(&self, covers: u64, number: u64) -> bool {
        self.done.fetch_max(covers, Ordering::Release).max(covers) >= number
    }

    /// An event behind all copies so far.
    fn record(&self, home: &Home) -> Result<Mark, GpuError> {
        // Loaded before it is recorded: what is counted then, the stream has been given.
        let covers = self.given.load(Ordering::Acquire);
        let _current = home.context.enter()?;
        let stream = *home.once(&self.stream, || home.new_stream())?;
        Ok(Mark { event: home.recorded(stream)?, covers })
    }
}

impl Home {
    /// The stream of a lane. The context is current.
    #[inline]
    pub(super) fn lane(&self, way: Way) -> Result<StreamHandle, GpuError> {
        self.once(&self.lane_of(way).stream, || self.new_stream()).copied()
    }

    /// Whether no copy of the library's own is under way. Never blocks.
    #[inline]
    pub(super) fn are_lanes_idle(&self) -> Result<bool, GpuError> {
        let given = self.copies.given.load(Ordering::Acquire);
        if self.copies.over.load(Ordering::Acquire) == given {
            return Ok(true);
        }
        for lane in &self.lanes {
            if !lane.is_over(self, lane.given.load(Ordering::Acquire))? {
                return Ok(false);
            }
        }
        self.copies.over.store(given, Ordering::Release);
        Ok(true)
    }

    /// The stream of a lane, if it has been needed.
    pub(super) fn lanes_stream(&self, way: Way) -> Option<StreamHandle> {
        self.lane_of(way).stream.get().copied()
    }

    #[inline]
    fn lane_of(&self, way: Way) -> &Lane {
        &self.lanes[way as usize]
    }
}

/// The copies of one lane. Made once: the event of a copy is its number here.
pub(super) struct Copies {
    home: Arc<Home>,
    way: Way,
}

impl Copies {
    pub(super) fn new(home: &Arc<Home>, way: Way) -> Arc<Self> {
        Arc::new(Self { home: Arc::clone(home), way })
    }

    /// Notes that the lane's stream was just given a copy. The event fires when that is over.
    #[inline]
    pub(super) fn given(self: &Arc<Self>) -> Event {
        let number = self.lane().given.fetch_add(1, Ordering::AcqRel) + 1;
        self.home.copies.given.fetch_add(1, Ordering::AcqRel);
        Event::numbered(Arc::clone(self) as Arc<dyn Sequence>, number)
    }

    #[inline]
    fn lane(&self) -> &Lane {
        self.home.lane_of(self.way)
    }

    /// An event of the driver's behind all of them, for a stream to wait for: a fresh one, since
    /// the lane's is recorded again and again. It is given back at once: a stream that waits has
    /// noted what it stood for.
    pub(super) fn with_event<T>(
        &self,
        use_it: impl FnOnce(EventHandle) -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        let Mark { event, .. } = self.lane().record(&self.home)?;
        let outcome = use_it(event);
        self.home.keep_event(event);
        outcome
    }
}

impl Sequence for Copies {
    #[inline]
    fn query(&self, number: u64) -> Result<bool, GpuError> {
        self.lane().is_over(&self.home, number)
    }

    fn wait(&self, number: u64) -> Result<(), GpuError> {
        if self.query(number)? {
            return Ok(());
        }
        let lane = self.lane();
        let Ok(Mark { event, covers }) = lane.record(&self.home) else {
            // Whoever waits frees the memory next: only the stream's own word ends this.
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
