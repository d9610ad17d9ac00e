//! Requests from outside: a signal that asks what is pending.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether somebody has sent SIGUSR1.
pub(crate) struct DumpRequest {
    asked: Arc<AtomicBool>,
    handler: Option<signal_hook::SigId>,
}

impl DumpRequest {
    /// Listens to the signal, beside whoever listened to it before.
    pub(crate) fn listen(wanted: bool) -> Self {
        let asked = Arc::new(AtomicBool::new(false));
        let listen = || signal_hook::flag::register(signal_hook::consts::SIGUSR1, asked.clone());
        let handler = wanted.then(listen).and_then(|listening| match listening {
            Ok(handler) => Some(handler),
            Err(error) => {
                tracing::warn!(%error, "SIGUSR1 cannot be listened to");
                None
            }
        });
        Self { asked, handler }
    }

    #[inline(always)]
    pub(crate) fn is_there(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    pub(crate) fn take(&self) -> bool {
        self.asked.swap(false, Ordering::AcqRel)
    }
}

impl Drop for DumpRequest {
    fn drop(&mut self) {
        if let Some(handler) = self.handler {
            signal_hook::low_level::unregister(handler);
        }
    }
}
