//! State behind an event of the simulated driver: an outcome that is set once.

use super::error::{DEINITIALIZED, error};
use carrack_transports::gpu::{EventState, GpuError, GpuEvent};
use parking_lot::{Condvar, Mutex};
use std::sync::{Arc, OnceLock};

/// An outcome, and the threads that wait for it.
#[derive(Default)]
struct FakeEvent {
    outcome: OnceLock<Result<(), GpuError>>,
    /// Lock that is held while the outcome is set, so that a thread that checks under it does not
    /// miss the wake-up.
    gate: Mutex<()>,
    fired: Condvar,
}

impl FakeEvent {
    fn fire(&self, outcome: Result<(), GpuError>) {
        {
            let _gate = self.gate.lock();
            // Only a `Promise` sets it, and at most once.
            let _ = self.outcome.set(outcome);
        }
        self.fired.notify_all();
    }
}

impl EventState for FakeEvent {
    fn query(&self) -> Result<bool, GpuError> {
        match self.outcome.get() {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(why)) => Err(why.clone()),
        }
    }

    fn wait(&self) -> Result<(), GpuError> {
        let mut gate = self.gate.lock();
        loop {
            if let Some(outcome) = self.outcome.get() {
                return outcome.clone();
            }
            self.fired.wait(&mut gate);
        }
    }
}

/// The side of an event that fires it. Dropped without having fired, it fails the event, so that
/// an operation ends also if its work is never done.
pub(super) struct Promise(Option<Arc<FakeEvent>>);

impl Promise {
    /// Creates an event, and the right to fire it.
    pub(super) fn new() -> (Self, GpuEvent) {
        let state = Arc::new(FakeEvent::default());
        (Self(Some(Arc::clone(&state))), GpuEvent::new(state))
    }

    /// Fires the event, or fails it.
    pub(super) fn fire(mut self, outcome: Result<(), GpuError>) {
        if let Some(event) = self.0.take() {
            event.fire(outcome);
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        if let Some(event) = self.0.take() {
            event.fire(Err(error(
                "event",
                DEINITIALIZED,
                "the stream ended before it came to this work",
            )));
        }
    }
}

/// Returns an event of work that has failed.
pub(super) fn failed(why: GpuError) -> GpuEvent {
    let (promise, event) = Promise::new();
    promise.fire(Err(why));
    event
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_fires_once_for_all_who_wait() {
        let (promise, event) = Promise::new();
        assert_eq!(event.query(), Ok(false));
        let waiting = event.clone();
        let thread = std::thread::spawn(move || waiting.wait());
        promise.fire(Ok(()));
        assert_eq!(thread.join().unwrap(), Ok(()));
        assert_eq!(event.query(), Ok(true));
    }

    #[test]
    fn a_promise_that_is_dropped_fails_its_event() {
        let (promise, event) = Promise::new();
        drop(promise);
        assert_eq!(event.query().unwrap_err().code, DEINITIALIZED);
        assert_eq!(event.wait().unwrap_err().code, DEINITIALIZED);
    }
}
