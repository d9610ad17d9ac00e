//! Requests from outside: a signal that asks for the list of pending operations.

use crate::chores::{Chore, Chores};
use carrack_transports::signals::SignalListener;

/// Makes each SIGUSR1 a chore of the runtime, if that is wanted, until the value is dropped.
/// Handlers that were there before are still called.
pub(crate) fn dump_on_signal(wanted: bool, chores: &Chores) -> Option<SignalListener> {
    let listener = wanted.then(|| SignalListener::to_usr1(chores, Chore::Dump))?;
    listener.inspect_err(|error| tracing::warn!(%error, "SIGUSR1 cannot be listened to")).ok()
}
