//! What those who send through a device and the one who polls it let each other know.

use crate::sync::Rounds;
use std::sync::atomic::{AtomicBool, Ordering};

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Signs {
    /// A link has gone, or has broken its connection off.
    news: AtomicBool,
    /// Connections in which messages wait to go together; the rounds that their number is counted in; who sleeps.
    pub(super) rounds: Rounds,
    /// Short messages of a connection that go by themselves in a round.
    pub(super) burst: u32,
}

impl Signs {
    pub(super) fn new(burst: u32) -> Self {
        Self { news: AtomicBool::new(false), rounds: Rounds::new(), burst }
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
