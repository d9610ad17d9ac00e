//! Requests from outside: a signal that asks what is pending.

use crate::chores::Chores;

/// Listens to SIGUSR1, which sets all bits of the runtime's chores.
pub(crate) struct DumpRequest(Option<signal_hook::SigId>);

impl DumpRequest {
    /// Listens to the signal, beside whoever listened to it before.
    pub(crate) fn listen(wanted: bool, chores: &Chores) -> Self {
        let signal = signal_hook::consts::SIGUSR1;
        let listen = || signal_hook::flag::register_usize(signal, chores.word(), usize::MAX);
        Self(wanted.then(listen).and_then(|listening| match listening {
            Ok(handler) => Some(handler),
            Err(error) => {
                tracing::warn!(%error, "SIGUSR1 cannot be listened to");
                None
            }
        }))
    }
}

impl Drop for DumpRequest {
    fn drop(&mut self) {
        if let Some(handler) = self.0 {
            signal_hook::low_level::unregister(handler);
        }
    }
}
