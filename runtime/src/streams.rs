//! What streams of the user's wait for, and how they are let go when it cannot come any more.

use crate::comp::Counted;
use crate::error::OpError;
use crate::names::Rank;
use carrack_transports::contract::DownCause;
use carrack_transports::gpu::Gpu;
use carrack_transports::gpu::words::Words;
use carrack_transports::mem::GpuUuid;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// The words of a runtime, and the counters that are made of them.
#[derive(Default)]
pub(crate) struct Streams {
    words: Mutex<Vec<(GpuUuid, Arc<Words>)>>,
    /// Looked at when a rank ends, or this one.
    counters: Mutex<Vec<Weak<Counted>>>,
}

impl Streams {
    /// Words for the streams of a GPU.
    pub(crate) fn words(&self, gpu: &Arc<dyn Gpu>) -> Arc<Words> {
        let uuid = gpu.info().uuid;
        let mut all = lock(&self.words);
        if let Some((_, words)) = all.iter().find(|(other, _)| *other == uuid) {
            return words.clone();
        }
        let words = Words::of(gpu);
        all.push((uuid, words.clone()));
        words
    }

    pub(crate) fn add(&self, counter: &Arc<Counted>) {
        let mut counters = lock(&self.counters);
        counters.retain(|other| other.strong_count() > 0);
        counters.push(Arc::downgrade(counter));
    }

    fn living(&self) -> Vec<Arc<Counted>> {
        lock(&self.counters).iter().filter_map(Weak::upgrade).collect()
    }

    /// A rank has ended: streams do not wait for it any more.
    #[cold]
    pub(crate) fn gone(&self, rank: Rank, cause: &DownCause) {
        for counter in self.living() {
            if counter.hears_of(rank) {
                counter.give_up(|| OpError::PeerDown { rank, cause: cause.clone() });
            }
        }
    }

    /// This rank ends.
    pub(crate) fn end(&self) {
        for counter in self.living() {
            counter.give_up(|| OpError::Closed);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
