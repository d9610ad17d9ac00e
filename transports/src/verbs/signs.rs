//! What those who send through a device and the one who polls it let each other know.

use crate::sync::Aside;
use std::sync::atomic::{AtomicBool, Ordering};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Signs {
    /// A link has gone, or has broken its connection off.
    news: AtomicBool,
    /// Connections in which messages wait for more; and who sleeps.
    pub(super) gathered: Aside,
}

impl Signs {
    pub(super) fn new() -> Self {
        Self { news: AtomicBool::new(false), gathered: Aside::new() }
    }

    /// There is something to look after among the connections.
    pub(super) fn tell_news(&self) {
        self.news.store(true, Ordering::Release);
    }

    /// Whether there was, since this was last asked.
    pub(super) fn take_news(&self) -> bool {
        self.news.swap(false, Ordering::AcqRel)
    }
}
