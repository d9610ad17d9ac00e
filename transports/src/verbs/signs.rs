//! Signals between the senders through a device and its poller.

use crate::sync::Aside;
use std::sync::atomic::{AtomicBool, Ordering};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Signs {
    /// Set if a link has gone, or has broken its connection off.
    news: AtomicBool,
    /// Connections in which messages wait for more, and the count of sleeping threads.
    pub(super) gathered: Aside,
}

impl Signs {
    pub(super) fn new() -> Self {
        Self { news: AtomicBool::new(false), gathered: Aside::new() }
    }

    /// Signals that a connection needs upkeep.
    pub(super) fn tell_news(&self) {
        self.news.store(true, Ordering::Release);
    }

    /// Returns `true` if that was signalled since the last call.
    pub(super) fn take_news(&self) -> bool {
        self.news.swap(false, Ordering::AcqRel)
    }
}
