//! Requests from outside: a signal that asks for the list of pending operations.

use crate::chores::{Chore, Chores};
use carrack_transports::signals::Listener;

/// Makes each SIGUSR1 a chore of the runtime, if that is wanted, until the value is dropped.
/// Handlers that were there before are still called.
pub(crate) fn dump_on_signal(wanted: bool, chores: &Chores) -> Option<Listener> {
    let listener = wanted.then(|| Listener::to_usr1(chores, Chore::Dump))?;
    listener.inspect_err(|error| tracing::warn!(%error, "SIGUSR1 cannot be listened to")).ok()
}
