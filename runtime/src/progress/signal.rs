//! The only place that calls users' code.

use crate::comp::{Completion, Status};
use crate::error::ProgressError;
use crate::names::Rank;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

thread_local! {
    static IN_HANDLER: Cell<bool> = const { Cell::new(false) };
}

/// Returns `true` if this thread is inside a completion object's `signal`.
pub(crate) fn in_handler() -> bool {
    IN_HANDLER.get()
}

/// The reason why a status could not be given to its completion object.
pub(crate) enum SignalError {
    Full(Arc<dyn Completion>, Box<Status>),
    Panicked(ProgressError),
}

/// Gives a status to a completion object: the one place where users' code is called.
#[inline]
pub(crate) fn signal(
    comp: Option<&Arc<dyn Completion>>,
    status: Status,
) -> Result<(), SignalError> {
    let Some(comp) = comp else {
        if let Some(error) = &status.error {
            tracing::warn!(%error, "an operation without a completion object failed");
        }
        return Ok(());
    };
    let rank = status.rank;
    match guarded(|| comp.signal(status)) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(status)) => Err(SignalError::Full(comp.clone(), Box::new(status))),
        Err(panic) => Err(SignalError::Panicked(panicked(rank, panic.as_ref()))),
    }
}

/// Calls users' code. Functions that it must not call can test for this, and a panic stops here.
#[inline(always)]
pub(crate) fn guarded<R>(call: impl FnOnce() -> R) -> Result<R, Box<dyn std::any::Any + Send>> {
    let outer = IN_HANDLER.replace(true);
    let result = catch_unwind(AssertUnwindSafe(call));
    IN_HANDLER.set(outer);
    result
}

#[cold]
pub(crate) fn panicked(from: Rank, panic: &(dyn std::any::Any + Send)) -> ProgressError {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    let message = text
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into());
    tracing::error!(%from, message, "a completion handler panicked");
    ProgressError::HandlerPanicked { from, message }
}
