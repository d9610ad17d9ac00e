//! What tells that work of a GPU is over.

use super::GpuError;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// Something that will have happened: an engine's copy, or all work of a stream up to a point.
#[derive(Clone)]
pub struct Event(Stands);

/// By what an event is told apart.
#[derive(Clone)]
enum Stands {
    Alone(Arc<dyn EventState>),
    /// One of many, of which none needs memory of its own.
    In(Arc<dyn Sequence>, u64),
}

/// What stands behind an [`Event`]. Any thread may ask.
pub trait EventState: Any + Send + Sync {
    /// Whether it has fired. Never blocks.
    ///
    /// # Errors
    /// The work failed: it will never fire otherwise.
    fn query(&self) -> Result<bool, GpuError>;

    /// Blocks until it has fired.
    ///
    /// # Errors
    /// As [`query`](Self::query).
    fn wait(&self) -> Result<(), GpuError>;

    /// Whether it cannot fire before another one of the same driver: who waits for both need not
    /// ask for that. Never asks the driver; `false` where nothing is known.
    fn is_behind(&self, earlier: &dyn EventState) -> bool {
        let _ = earlier;
        false
    }
}

/// Work that ends in the order in which it was begun: each piece of it is a number, counted up. Any
/// thread may ask.
pub trait Sequence: Any + Send + Sync {
    /// Whether that piece is over. Never blocks.
    ///
    /// # Errors
    /// The work failed: it will never be over otherwise.
    fn query(&self, number: u64) -> Result<bool, GpuError>;

    /// Blocks until that piece is over.
    ///
    /// # Errors
    /// As [`query`](Self::query).
    fn wait(&self, number: u64) -> Result<(), GpuError>;
}

impl Event {
    /// An event over a driver's own.
    pub fn new(state: Arc<dyn EventState>) -> Self {
        Self(Stands::Alone(state))
    }

    /// The end of a piece of work.
    pub fn numbered(sequence: Arc<dyn Sequence>, number: u64) -> Self {
        Self(Stands::In(sequence, number))
    }

    /// What stands behind it, for the driver that made it, unless it is a piece of a sequence.
    pub fn state(&self) -> Option<&dyn EventState> {
        match &self.0 {
            Stands::Alone(state) => Some(&**state),
            Stands::In(..) => None,
        }
    }

    /// The sequence that it is a piece of, and which one, for the driver that made it.
    pub fn piece(&self) -> Option<(&dyn Sequence, u64)> {
        match &self.0 {
            Stands::Alone(_) => None,
            Stands::In(sequence, number) => Some((&**sequence, *number)),
        }
    }

    /// Whether it has fired. Never blocks. An error means that the work failed.
    #[inline]
    pub fn query(&self) -> Result<bool, GpuError> {
        match &self.0 {
            Stands::Alone(state) => state.query(),
            Stands::In(sequence, number) => sequence.query(*number),
        }
    }

    /// Whether it cannot fire before `earlier`, as far as is known without asking.
    #[inline]
    pub fn is_behind(&self, earlier: &Self) -> bool {
        match (&self.0, &earlier.0) {
            (Stands::Alone(state), Stands::Alone(earlier)) => state.is_behind(&**earlier),
            (Stands::In(sequence, number), Stands::In(other, earlier)) => {
                number >= earlier && Arc::ptr_eq(sequence, other)
            }
            _ => false,
        }
    }

    /// Blocks until it has fired.
    pub fn wait(&self) -> Result<(), GpuError> {
        match &self.0 {
            Stands::Alone(state) => state.wait(),
            Stands::In(sequence, number) => sequence.wait(*number),
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({:?})", self.query())
    }
}
