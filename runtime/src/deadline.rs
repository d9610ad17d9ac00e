//! Deadlines of operations.
//!
//! Each operation holds its deadline, in the list where it waits, and the runtime knows the
//! earliest one. Only after that one has passed does progress look at all operations that wait.
//! Nearly all operations end in time, so each costs one reading of the clock when it is posted.

use crate::chores::{Chore, Chores};
use carrack_transports::sync::Earliest;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// A point in time, in microseconds since this process first asked; or never.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Deadline(u64);

fn epoch() -> Instant {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    *EPOCH.get_or_init(Instant::now)
}

impl Deadline {
    pub(crate) const NEVER: Self = Self(Earliest::NEVER);

    pub(crate) fn after(span: Duration) -> Self {
        let elapsed = epoch().elapsed().saturating_add(span);
        Self(u64::try_from(elapsed.as_micros()).unwrap_or(u64::MAX))
    }

    #[inline]
    pub(crate) fn is_some(self) -> bool {
        self != Self::NEVER
    }

    pub(crate) fn has_passed(self, now: Self) -> bool {
        self <= now
    }

    pub(crate) fn now() -> Self {
        Self::after(Duration::ZERO)
    }

    fn span(self, now: Self) -> Duration {
        Duration::from_micros(self.0.saturating_sub(now.0))
    }
}

/// The earliest deadline of a runtime's operations.
pub(crate) struct Deadlines(Earliest);

impl Deadlines {
    pub(crate) fn new(chores: &Chores) -> Self {
        Self(Earliest::new(chores, Chore::Deadlines))
    }

    /// Notes the deadline of an operation that now waits.
    #[inline]
    pub(crate) fn note(&self, deadline: Deadline) {
        if deadline.is_some() {
            self.0.note(deadline.0);
        }
    }

    /// Returns `true` if a deadline has passed; else notes it.
    pub(crate) fn passes(&self, deadline: Deadline, now: Deadline) -> bool {
        let has_passed = deadline.has_passed(now);
        if !has_passed {
            self.note(deadline);
        }
        has_passed
    }

    /// Returns the time, if the earliest deadline has passed. The caller looks at everything that
    /// waits, and notes the remaining deadlines. Only one caller gets the time.
    pub(crate) fn due(&self) -> Option<Deadline> {
        self.0.due(|| Deadline::now().0).map(Deadline)
    }

    /// Returns the longest time that a thread may sleep.
    pub(crate) fn limit(&self, longest: Duration) -> Duration {
        match Deadline(self.0.get()) {
            Deadline::NEVER => longest,
            earliest => earliest.span(Deadline::now()).min(longest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_deadline_is_due_once() {
        let deadlines = Deadlines::new(&Chores::default());
        assert_eq!((deadlines.limit(Duration::MAX), deadlines.due()), (Duration::MAX, None));
        deadlines.note(Deadline::after(Duration::from_secs(1000)));
        deadlines.note(Deadline::NEVER);
        assert!(deadlines.due().is_none());
        assert!(deadlines.limit(Duration::MAX) <= Duration::from_secs(1000));
        deadlines.note(Deadline::now());
        assert_eq!(deadlines.limit(Duration::from_secs(1)), Duration::ZERO);
        assert!(deadlines.due().is_some());
        assert!(deadlines.due().is_none(), "the caller that was told looks at all that is left");
        assert_eq!(deadlines.limit(Duration::from_secs(1)), Duration::from_secs(1));
    }

    #[test]
    fn a_span_beyond_all_time_is_never() {
        assert_eq!(Deadline::after(Duration::MAX), Deadline::NEVER);
    }
}
