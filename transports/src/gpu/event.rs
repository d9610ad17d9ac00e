//! Events, which tell that work of a GPU has ended.

use super::GpuError;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A future point: the end of an engine's copy, or of all work of a stream so far.
#[derive(Clone)]
pub struct GpuEvent(Stands);

/// Identity of an event.
#[derive(Clone)]
enum Stands {
    Alone(Arc<dyn EventState>),
    /// One of a sequence, without memory of its own.
    In(Arc<dyn Sequence>, u64),
}

/// State behind a [`GpuEvent`]. Any thread may query it.
pub trait EventState: Any + Send + Sync {
    /// Returns `true` if it has fired. Never blocks.
    ///
    /// # Errors
    /// The work failed: it will never fire otherwise.
    fn query(&self) -> Result<bool, GpuError>;

    /// Blocks until it has fired.
    ///
    /// # Errors
    /// As [`query`](Self::query).
    fn wait(&self) -> Result<(), GpuError>;

    /// Returns `true` if it cannot fire before another event of the same driver, so that a waiter
    /// for both need not query that one. Never asks the driver; `false` if unknown.
    fn is_behind(&self, earlier: &dyn EventState) -> bool {
        let _ = earlier;
        false
    }
}

/// Work that ends in the order in which it was begun: each piece of it has the next number. Any
/// thread may query it.
pub trait Sequence: Any + Send + Sync {
    /// Returns `true` if that piece has ended. Never blocks.
    ///
    /// # Errors
    /// The work failed: it will never end otherwise.
    fn query(&self, number: u64) -> Result<bool, GpuError>;

    /// Blocks until that piece has ended.
    ///
    /// # Errors
    /// As [`query`](Self::query).
    fn wait(&self, number: u64) -> Result<(), GpuError>;
}

impl GpuEvent {
    /// Wraps a driver's own event.
    pub fn new(state: Arc<dyn EventState>) -> Self {
        Self(Stands::Alone(state))
    }

    /// Returns the event of the end of a piece of work.
    pub fn numbered(sequence: Arc<dyn Sequence>, number: u64) -> Self {
        Self(Stands::In(sequence, number))
    }

    /// Returns the state behind it, for the driver that made it, unless it is a piece of a
    /// sequence.
    pub fn state(&self) -> Option<&dyn EventState> {
        match &self.0 {
            Stands::Alone(state) => Some(&**state),
            Stands::In(..) => None,
        }
    }

    /// Returns its sequence and number, for the driver that made it.
    pub fn piece(&self) -> Option<(&dyn Sequence, u64)> {
        match &self.0 {
            Stands::Alone(_) => None,
            Stands::In(sequence, number) => Some((&**sequence, *number)),
        }
    }

    /// Returns `true` if it has fired. Never blocks. An error means that the work failed.
    #[inline]
    pub fn query(&self) -> Result<bool, GpuError> {
        match &self.0 {
            Stands::Alone(state) => state.query(),
            Stands::In(sequence, number) => sequence.query(*number),
        }
    }

    /// Returns `true` if it is known without a query that it cannot fire before `earlier`.
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

impl fmt::Debug for GpuEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GpuEvent({:?})", self.query())
    }
}
