//! The only place that calls users' code.

use crate::comp::{Completion, Status};
use crate::error::ProgressError;
use crate::names::Rank;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Mark in place of a rank: this thread runs no code of the user's, or for no message.
/// No rank's number is as large, that of any rank included.
const OUTSIDE: u64 = u64::MAX;
const NO_MESSAGE: u64 = u64::MAX - 1;

thread_local! {
    /// The sender of the message for which this thread runs code of the user's.
    static SENDER: Cell<u64> = const { Cell::new(OUTSIDE) };
    /// The runtime that made progress last on this thread.
    static RUNTIME: Cell<u64> = const { Cell::new(0) };
}

/// Returns `true` if this thread is inside a completion object's `signal`.
#[inline]
pub(crate) fn in_handler() -> bool {
    SENDER.get() != OUTSIDE
}

/// Returns `true` if this thread is inside the `signal` for a message of `rank` to this runtime: a
/// post to `rank` is a reply.
#[cold]
pub(crate) fn replies_to(runtime: u64, rank: Rank) -> bool {
    SENDER.get() == u64::from(rank.0) && RUNTIME.get() == runtime
}

/// Notes the sender of the next message, in a `guarded` call for several.
#[inline(always)]
pub(super) fn handles_message_of(rank: Rank) {
    SENDER.set(u64::from(rank.0));
}

/// Notes the runtime that makes progress.
pub(super) fn set_runtime(runtime: u64) {
    RUNTIME.set(runtime);
}

/// The reason why a status could not be given to its completion object.
pub(crate) enum SignalError {
    Full(Arc<dyn Completion>, Box<Status>),
    Panicked(ProgressError),
}

/// Gives the status of an operation to a completion object.
#[inline]
pub(crate) fn signal(
    comp: Option<&Arc<dyn Completion>>,
    status: Status,
) -> Result<(), SignalError> {
    give(NO_MESSAGE, comp, status)
}

/// Gives the status of a peer's message to a completion object.
#[inline]
pub(super) fn signal_message(
    comp: Option<&Arc<dyn Completion>>,
    status: Status,
) -> Result<(), SignalError> {
    give(u64::from(status.rank.0), comp, status)
}

/// Gives a status to a completion object: the one place where users' code is called.
#[inline(always)]
fn give(
    sender: u64,
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
    match guarded_for(sender, || comp.signal(status)) {
        Ok(Ok(())) => Ok(()),
        Ok(Err(status)) => Err(SignalError::Full(comp.clone(), Box::new(status))),
        Err(panic) => Err(SignalError::Panicked(panicked(rank, panic.as_ref()))),
    }
}

/// Calls users' code. Functions that it must not call can test for this, and a panic stops here.
#[inline(always)]
pub(crate) fn guarded<R>(call: impl FnOnce() -> R) -> Result<R, Box<dyn std::any::Any + Send>> {
    guarded_for(NO_MESSAGE, call)
}

#[inline(always)]
fn guarded_for<R>(
    sender: u64,
    call: impl FnOnce() -> R,
) -> Result<R, Box<dyn std::any::Any + Send>> {
    let outer = SENDER.replace(sender);
    let result = catch_unwind(AssertUnwindSafe(call));
    SENDER.set(outer);
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
